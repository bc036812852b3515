"""Captured graphs and their replays in a trace."""

import numpy as np
import pytest

from llm_perf_opt.traces.events import Trace, WorkKind
from llm_perf_opt.traces.graph_capture import graph_captures, graph_replays, while_capturing
from llm_perf_opt.traces.projection import launching_calls
from trace_builders import Builder


def capture(made: Builder, at: int, calls: list[str], begin: str = "cudaStreamBeginCapture", first: int = 100) -> None:
    made.call(at, at + 1, begin, correlation=first)
    for number, name in enumerate(calls, 1):
        made.call(at + 2 * number, at + 2 * number + 1, name, correlation=first + number)
    made.call(at + 2 * len(calls) + 2, at + 2 * len(calls) + 3, begin.replace("Begin", "End"), correlation=first + 99)


@pytest.mark.parametrize("prefix", ["cuda", "cu", "hip"])
def test_the_captured_calls_are_the_nodes_in_order(prefix: str) -> None:
    made = Builder()
    made.call(0, 1, f"{prefix}LaunchKernel", correlation=1)
    names = [f"{prefix}LaunchKernel", f"{prefix}StreamIsCapturing", f"{prefix}MemcpyAsync", f"{prefix}MemsetAsync"]
    capture(made, 10, names, begin=f"{prefix}StreamBeginCapture_v2")
    made.call(40, 41, f"{prefix}LaunchKernel", correlation=2)
    (found,) = graph_captures(made.trace())
    assert found.nodes.tolist() == [2, 4, 5]
    assert found.kinds == bytes([WorkKind.KERNEL, WorkKind.MEMCPY, WorkKind.MEMSET])
    assert (found.start_ns, found.end_ns) == (10, 21)


def test_launches_of_every_name_are_nodes() -> None:
    made = Builder()
    capture(made, 0, ["hipLaunchKernel", "hipModuleLaunchKernel", "hipExtModuleLaunchKernel", "cuLaunchKernelEx"])
    assert len(graph_captures(made.trace())[0].nodes) == 4


def test_a_driver_call_inside_a_runtime_call_is_the_same_node() -> None:
    made = Builder()
    made.call(0, 1, "cudaStreamBeginCapture", correlation=1)
    made.call(2, 9, "cudaLaunchKernel", correlation=2)
    made.call(3, 8, "cuLaunchKernel", correlation=2)
    made.call(10, 11, "cudaLaunchKernel", correlation=3)
    made.call(12, 13, "cudaStreamEndCapture", correlation=4)
    assert graph_captures(made.trace())[0].nodes.tolist() == [1, 3]


def test_captures_follow_each_other_and_one_may_not_end() -> None:
    made = Builder()
    capture(made, 0, ["cudaLaunchKernel"])
    made.call(20, 21, "cudaStreamBeginCapture", correlation=5)
    made.call(22, 23, "cudaLaunchKernel", correlation=6)
    trace = made.trace()
    assert [(found.nodes.tolist(), found.end_ns) for found in graph_captures(trace)] == [([1], 5), ([4], 23)]
    assert while_capturing(trace).tolist() == [True, True, False, True, True]


def replayed(streams: list[int], nodes: list[int]) -> Trace:
    made = Builder()
    made.call(0, 1, "cudaGraphLaunch", correlation=9)
    for place, (stream, node) in enumerate(zip(streams, nodes, strict=True)):
        made.kernel(10 + 10 * place, 15 + 10 * place, f"k{place}", correlation=9, stream=stream, graph_node=node)
    return made.trace()


def test_the_order_of_a_replay_is_that_of_its_stream_or_of_the_nodes() -> None:
    for trace, order in ((replayed([7, 7, 7], [0, 0, 0]), [0, 1, 2]), (replayed([7, 8, 7], [5, 9, 7]), [0, 2, 1])):
        (found,) = graph_replays(trace, launching_calls(trace))
        assert found.work.tolist() == order
        assert found.kinds == bytes(3)


def test_the_order_on_several_streams_without_nodes_is_unknown() -> None:
    trace = replayed([7, 8], [0, 0])
    assert graph_replays(trace, launching_calls(trace)) == ()


def test_a_trace_without_graphs() -> None:
    made = Builder()
    made.launch(0, 10, 20)
    trace = made.trace()
    assert graph_captures(trace) == ()
    assert graph_replays(trace, launching_calls(trace)) == ()
    assert graph_replays(trace, np.array([-1])) == ()
