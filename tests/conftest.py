"""Shared by all tests."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# A busy machine is no fault of the code: no example has a time limit, in any test.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

if TYPE_CHECKING:
    from chromium import Chromium

# Each worker gets one thread: two workers with two threads each would fight over two processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing is kept in the cache of whoever runs the tests, nor taken from it; workers share that of the process that starts them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="llm-perf-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# No browser is started for the images of every run; the test that draws them says so.
os.environ["LLM_PERF_CHROMIUM"] = "none"


def _real_tool(name: str) -> Path:
    from llm_perf_opt.profiling.vendor.probe import find_tool

    found = find_tool(name)
    if found is None:
        message = f"the real {name} is not on this machine"
        if os.environ.get("LLM_PERF_REQUIRE_NSIGHT"):  # set where the tools were installed on purpose
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="session")
def real_nsys() -> Path:
    """NVIDIA's own nsys."""
    return _real_tool("nsys")


@pytest.fixture(scope="session")
def real_ncu() -> Path:
    """NVIDIA's own ncu."""
    return _real_tool("ncu")


@pytest.fixture(scope="session")
def chromium() -> Iterator["Chromium"]:
    """A real browser without a window."""
    from chromium import Chromium, find_chromium

    program = find_chromium()
    if program is None:
        message = "no Chromium is on this machine"
        if os.environ.get("LLM_PERF_REQUIRE_CHROMIUM"):  # set where it was installed on purpose
            pytest.fail(message)
        pytest.skip(message)
    with Chromium(program) as browser:
        yield browser


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """An interpreter that has the real vLLM and this package: `make vllm-venv` makes one."""
    named = os.environ.get("LLM_PERF_VLLM_PYTHON")
    found = Path(named) if named else Path(__file__).parent.parent / ".venv-vllm" / "bin" / "python"
    if not found.exists():
        message = f"there is no vLLM: {found} does not exist (make vllm-venv)"
        if os.environ.get("LLM_PERF_REQUIRE_VLLM"):  # set where it was installed on purpose
            pytest.fail(message)
        pytest.skip(message)
    return found
