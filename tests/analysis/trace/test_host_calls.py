"""Host calls of a step, counted by hand on a small trace."""

import pytest

from llm_perf_opt.analysis.trace.host_calls import ALLOCATING, host_calls
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import WorkKind
from trace_builders import PROCESS, THREAD, Builder


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


def test_a_trace_without_the_stage_has_no_host_calls() -> None:
    made = Builder()
    made.call(0, 10, "cudaDeviceSynchronize", correlation=1)
    trace = made.trace()
    assert host_calls(trace, find_stages(trace), "decode").syncs == 0


def test_only_the_thread_that_launches_is_counted() -> None:
    """A thread that copies results out also waits for the device, but delays no launch."""
    built = Builder()
    for step in range(3):
        at = 1000 * step
        built.range(at, at + 900, "decode_step")
        built.launch(at + 10, at + 20, at + 60)
        built.call(at + 100, at + 110, "cudaStreamSynchronize")
        built.call(at + 200, at + 700, "cudaEventSynchronize", thread=THREAD + 1)
        built.call(at + 200, at + 300, "cudaMalloc", thread=THREAD + 1)
        built.call(at + 200, at + 300, "cudaDeviceSynchronize", process=PROCESS + 1)
    trace = built.trace()
    counts = host_calls(trace, find_stages(trace), "decode_step")
    assert (counts.syncs, counts.sync_ns, counts.allocations) == (3, 30, 0)


def test_two_threads_with_a_device_each_count_for_themselves() -> None:
    """Labels of two threads overlap: a call inside the first is counted though the second began later and has ended."""
    built = Builder()
    built.range(0, 1000, "decode_step")
    built.range(100, 200, "decode_step", thread=THREAD + 1)
    built.launch(10, 20, 60)
    built.launch(110, 120, 160, thread=THREAD + 1, device=1)
    built.call(500, 520, "cudaStreamSynchronize")
    built.call(150, 160, "cudaStreamSynchronize", thread=THREAD + 1)
    built.call(500, 590, "cudaStreamSynchronize", thread=THREAD + 1)  # after its own step
    trace = built.trace()
    counts = host_calls(trace, find_stages(trace), "decode_step")
    assert (counts.syncs, counts.sync_ns) == (2, 30)


def test_stages_without_labels_count_on_the_threads_that_launched_them() -> None:
    built = Builder()
    names = ["nvjet_a", "flash_fwd", "elementwise", "reduce_kernel<ArgMaxOps>"]
    for step in range(6):
        for number, name in enumerate(names):
            at = 1000 * step + 100 * number
            built.launch(at, at + 20, at + 80, name)
        built.call(1000 * step + 350, 1000 * step + 360, "cudaStreamSynchronize")
        built.call(1000 * step + 350, 1000 * step + 360, "cudaStreamSynchronize", thread=THREAD + 1)
    trace = built.trace()
    stages = find_stages(trace)
    assert stages.method == "kernel sequence"
    counts = host_calls(trace, stages, "decode_step")
    assert 0 < counts.syncs <= 6
