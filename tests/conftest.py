"""Shared by all tests."""

import os
from pathlib import Path

import pytest

# Each worker gets one thread: two workers with two threads each would fight over two processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
