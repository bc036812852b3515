"""Shared by all tests."""

import atexit
import functools
import gc
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

# Examples are the same on every machine and have no time limit. `make explore` draws new ones, prints its seed and saves
# what failed. Settings that are not stated are inherited, and where CI is set, Hypothesis derandomizes and saves nothing.
_SAVED = DirectoryBasedExampleDatabase(".hypothesis/examples")
settings.register_profile("fixed", derandomize=True, database=None, deadline=None, print_blob=True, max_examples=25)
settings.register_profile("explore", derandomize=False, database=_SAVED, deadline=None, print_blob=True, max_examples=50)
settings.load_profile("explore" if os.environ.get("LLM_PERF_EXPLORE") else "fixed")

if TYPE_CHECKING:
    from chromium import Chromium

# Importing and collecting make objects that stay. Looking for garbage among them would take a quarter of the time.
gc.disable()
# Each worker gets one thread: two workers with two threads each would fight over two processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No browser is started for the images of every run; the test that draws them says so.
os.environ["LLM_PERF_CHROMIUM"] = "none"
# Nothing is read from the user's caches or left there. Workers inherit the folder.
_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _WORKER:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="llm-perf-tests-")

# Started in the background by a script or below nohup, this process ignores SIGINT or SIGHUP, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

LONG_FIXTURES = {
    "real_nsys",
    "real_ncu",
    "chromium",
    "vllm_python",
    "aiperf_python",
    "engine_python",
    "slurm_programs",
    "ray_python",
    "mlflow_python",
}
"""Tests that use one of these run a real tool for seconds: `make test` leaves them to `make test-all`."""


_MARKED = {"slow or fuzz": ("slow", "fuzz", *LONG_FIXTURES), "hypothesis or fuzz": ("hypothesis", "fuzz")}
"""What `make test-long` and `make explore` select → words; a file with such a test contains at least one of them."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files without a selected test: importing them takes longer than many of the tests."""
    words = _MARKED.get(config.option.markexpr)
    if words is None or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    return None if any(word in text for word in words) else True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests that need a real tool as slow, before the marks decide what is run; then order the files.

    The longest are first, then those with the most tests. A seed shuffles the order.
    """
    for item in items:
        if LONG_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    yield
    tests = Counter(item.path for item in items)
    place = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.name, len(place)), -tests[item.path]))
    if order := os.environ.get("LLM_PERF_TEST_ORDER"):
        random.Random(order).shuffle(items)


def pytest_configure(config: pytest.Config) -> None:
    """The process that distributes the tests collects none."""
    if not _WORKER and config.getoption("numprocesses", None):
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what imports and collection made out of every later garbage collection.

    At exit, DuckDB would report what is still frozen as leaked.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


_LONGEST = (
    "test_vllm_engine.py",
    "test_app.py",
    "test_nsight_run.py",
    "test_from_the_guides.py",
    "test_engine.py",
    "test_statistics.py",
    "test_ranks.py",
    "test_openvino_genai_runner.py",
    "test_engine_killed.py",
    "test_onnxruntime_genai_runner.py",
    "test_vision_language.py",
    "test_real_slurm.py",
    "test_llamacpp_runner.py",
    "test_in_chromium.py",
    "test_real_ray.py",
    "test_fuzz.py",
    "test_pytorch_runner.py",
)
"""These files are started first, in this order, so that no worker still has a long one when the others have finished.

The first file that starts vLLM leaves what vLLM finds out about the model's class in the cache. With up to four workers, the
next one starts minutes later and uses it.
"""


def pytest_unconfigure() -> None:
    """Remove the cache folder when all workers have ended."""
    if not _WORKER:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _no_full_collections() -> Iterator[None]:
    """The meter collects garbage before it measures, and afterwards unfreezes what `pytest_collection_finish` has frozen.

    With PyTorch imported, that takes 0.3 s each time, in hundreds of tests.
    """
    from llm_perf_opt.runners.measure import meter

    with patch.object(meter, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)):
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_command() -> Iterator[None]:
    """`CliRunner` would make the command of all verbs again at each call."""
    from typer import main, testing

    with patch.object(testing, "_get_command", functools.cache(main.get_command), create=True):
        yield


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
    return _interpreter("vllm", "VLLM", "vllm-venv")


@pytest.fixture(scope="session")
def aiperf_python() -> Path:
    """An interpreter that has the real AIPerf: `make aiperf-venv` makes one."""
    return _interpreter("aiperf", "AIPERF", "aiperf-venv")


@pytest.fixture(scope="session")
def ray_python() -> Path:
    """An interpreter that has Ray and this package: `make ray-venv` makes one."""
    return _interpreter("ray", "RAY", "ray-venv")


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    """Slurm's own programs, and submitit."""
    from importlib.util import find_spec

    from slurm_cluster import missing_programs

    missing = [*missing_programs(), *(["submitit"] if find_spec("submitit") is None else [])]
    if missing:
        message = f"not on this machine: {', '.join(missing)} (apt-get install slurm-wlm)"
        if os.environ.get("LLM_PERF_REQUIRE_SLURM"):  # set where it was installed on purpose
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="session")
def mlflow_python() -> Path:
    """An interpreter that has the real MLflow and this package: `make mlflow-venv` makes one."""
    return _interpreter("mlflow", "MLFLOW", "mlflow-venv")


def _interpreter(name: str, required: str, target: str) -> Path:
    """The interpreter of an environment such as .venv-vllm; without it the test is skipped, or fails where it is required."""
    named = os.environ.get(f"LLM_PERF_{name.upper()}_PYTHON")
    found = Path(named) if named else Path(__file__).parent.parent / f".venv-{name.replace('_', '-')}" / "bin" / "python"
    if not found.exists():
        message = f"there is no {name}: {found} does not exist (make {target})"
        if os.environ.get(f"LLM_PERF_REQUIRE_{required}"):  # set where it was installed on purpose
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="session")
def engine_python() -> Callable[[str], Path]:
    """Returns an interpreter that has the named engine and this package: `make engine-venvs` makes them."""
    return lambda name: _interpreter(name, "ENGINES", "engine-venvs")
