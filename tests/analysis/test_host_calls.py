"""What a step asks of the host, counted by hand on a small trace."""

import pytest

from llm_perf_opt.analysis.host_calls import ALLOCATING, host_calls
from llm_perf_opt.analysis.trace_stages import find_stages
from llm_perf_opt.events import WorkKind
from traces import Builder


def test_calls_inside_the_steps_are_counted_and_others_are_not() -> None:
    made = Builder()
    made.range(0, 2000, "decode")
    for step in range(2):
        at = step * 1000
        made.range(at, at + 900, "decode_step")
        made.launch(at + 10, at + 20, at + 30, correlation=10 * step + 1)
        made.call(at + 100, at + 140, "cudaStreamSynchronize", correlation=10 * step + 2)
        made.call(at + 200, at + 205, "cudaMalloc", correlation=10 * step + 3)
        made.call(at + 300, at + 310, "cudaMemcpyAsync", correlation=10 * step + 4)
        made.kernel(at + 320, at + 330, "Memcpy HtoD (Pageable -> Device)", 10 * step + 4, kind=WorkKind.MEMCPY, size=8)
    made.call(1950, 1990, "cudaDeviceSynchronize", correlation=99)  # after the last step
    trace = made.trace()
    found = host_calls(trace, find_stages(trace), "decode_step")
    assert (found.syncs, found.sync_ns) == (2, 80)
    assert (found.allocations, found.allocation_ns) == (2, 10)
    assert (found.to_device, found.to_host, found.copied_bytes) == (2, 0, 16)
    assert found.items == 0


@pytest.mark.parametrize(
    ("call", "asks"),
    [
        ("cudaMalloc", True),
        ("cudaFree_v3020", True),
        ("cudaHostAlloc", True),
        ("cuMemAlloc_v2", True),
        ("cudaMallocAsync", False),
        ("cudaFreeAsync_ptsz", False),
        ("cudaLaunchKernel", False),
        ("cudaMemcpyAsync", False),
    ],
)
def test_calls_that_ask_the_driver_for_memory(call: str, asks: bool) -> None:
    assert (ALLOCATING.search(call) is not None) == asks


def test_a_trace_without_the_stage_has_none_of_it() -> None:
    made = Builder()
    made.call(0, 10, "cudaDeviceSynchronize", correlation=1)
    trace = made.trace()
    assert host_calls(trace, find_stages(trace), "decode").syncs == 0
