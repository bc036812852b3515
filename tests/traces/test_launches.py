"""Which calls launch kernels."""

import pytest

from llm_perf_opt.traces.graph_capture import while_capturing
from llm_perf_opt.traces.projection import graph_launches, is_kernel_launch, kernel_launches
from trace_builders import Builder


@pytest.mark.parametrize(
    ("call", "launches"),
    [
        ("cudaLaunchKernel_v7000", True),
        ("cudaLaunchKernelExC_v11060", True),
        ("cuLaunchKernel", True),
        ("cuLaunchKernelEx_ptsz", True),
        ("cudaLaunchCooperativeKernel_ptsz", True),
        ("hipModuleLaunchKernel", True),
        ("hipExtLaunchKernel", True),
        ("cudaLaunchHostFunc_v10000", False),
        ("cudaGraphLaunch_v10000", False),
        ("cuKernelGetName", False),
        ("cudaMemcpyAsync", False),
        ("my cudaLaunchKernel", False),
    ],
)
def test_kernel_launches_are_known_by_name(call: str, launches: bool) -> None:
    assert is_kernel_launch(call) is launches


def test_columns_follow_the_names() -> None:
    made = Builder()
    made.call(0, 1, "cudaLaunchKernel")
    made.call(2, 3, "cudaGraphLaunch_v10000")
    made.call(4, 5, "cudaGraphInstantiate")
    made.calls.append((6, 7, -1, 7, 70, 0))  # a call without a name
    trace = made.trace()
    assert kernel_launches(trace).tolist() == [True, False, False, False]
    assert graph_launches(trace).tolist() == [False, True, False, False]


def test_only_the_capturing_thread_is_capturing() -> None:
    made = Builder()
    made.call(0, 1, "cudaStreamBeginCapture_v10000", thread=1)
    made.call(2, 3, "cudaLaunchKernel", thread=1)
    made.call(4, 5, "cudaLaunchKernel", thread=2)
    made.call(6, 7, "cudaStreamEndCapture_v10000", thread=1)
    made.call(8, 9, "cudaLaunchKernel", thread=1)
    assert while_capturing(made.trace()).tolist() == [True, True, False, False, False]
