"""Shared by all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no fault of the code: no example has a time limit, in any test.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

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
