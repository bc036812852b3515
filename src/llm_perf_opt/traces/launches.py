"""Which calls of the CUDA runtime and driver put kernels on the device."""

import re
from collections.abc import Callable

import numpy as np

from llm_perf_opt.traces.events import Int64, Trace, different_pairs
from llm_perf_opt.traces.projection import Bool

# `cudaLaunchKernel_v7000`, `cuLaunchKernelEx`, `cudaLaunchCooperativeKernel_ptsz`; `cudaLaunchHostFunc` runs on the host.
_KERNEL = re.compile(r"(cu|cuda|hip)(Ext|Module)?Launch(?!HostFunc)\w*")
_GRAPH = re.compile(r"(cu|cuda|hip)GraphLaunch(_\w+)?")


def is_kernel_launch(call: str) -> bool:
    """Whether a call of this name launches one kernel."""
    return _KERNEL.fullmatch(call) is not None


def is_graph_launch(call: str) -> bool:
    """Whether a call of this name launches a CUDA graph."""
    return _GRAPH.fullmatch(call) is not None


_CAPTURE_BEGINS = re.compile(r"cu(da)?StreamBeginCapture\w*")
_CAPTURE_ENDS = re.compile(r"cu(da)?StreamEndCapture\w*")


def kernel_launches(trace: Trace) -> Bool:
    """Per call: whether it launches one kernel."""
    return _named(trace, is_kernel_launch)


def graph_launches(trace: Trace) -> Bool:
    """Per call: whether it launches a CUDA graph."""
    return _named(trace, is_graph_launch)


def while_capturing(trace: Trace) -> Bool:
    """Per call: whether its thread was recording a CUDA graph, when launches are noted down and run nothing."""
    begins, ends = _named(trace, _CAPTURE_BEGINS.fullmatch), _named(trace, _CAPTURE_ENDS.fullmatch)
    inside = np.zeros(len(trace.calls), np.bool_)
    if not begins.any():
        return inside
    for process, thread in zip(*different_pairs(trace.calls.process[begins], trace.calls.thread[begins]), strict=True):
        mine = np.flatnonzero((trace.calls.process == process) & (trace.calls.thread == thread))
        steps: Int64 = np.cumsum(begins[mine].astype(np.int64) - ends[mine])
        floor = np.minimum(np.minimum.accumulate(steps), 0)  # an end whose begin was before the recording
        inside[mine] = steps > floor
    return inside


def _named(trace: Trace, test: Callable[[str], object]) -> Bool:
    matches = np.array([bool(test(name)) for name in trace.names] + [False], np.bool_)  # last: NO_NAME
    chosen: Bool = matches[trace.calls.name]
    return chosen
