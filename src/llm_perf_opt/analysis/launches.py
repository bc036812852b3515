"""Which calls of the CUDA runtime and driver put kernels on the device."""

import re

import numpy as np

from llm_perf_opt.analysis.projection import Bool
from llm_perf_opt.events import Int64, Trace

# `cudaLaunchKernel_v7000`, `cuLaunchKernelEx`, `cudaLaunchCooperativeKernel_ptsz`; `cudaLaunchHostFunc` runs on the host.
_KERNEL_LAUNCH = re.compile(r"(cu|cuda|hip)(Ext|Module)?Launch(?!HostFunc)\w*")
_GRAPH_LAUNCH = re.compile(r"(cu|cuda|hip)GraphLaunch(_\w+)?")
_CAPTURE_BEGINS = re.compile(r"cu(da)?StreamBeginCapture\w*")
_CAPTURE_ENDS = re.compile(r"cu(da)?StreamEndCapture\w*")


def is_kernel_launch(call: str) -> bool:
    """Whether a call of this name launches one kernel."""
    return _KERNEL_LAUNCH.fullmatch(call) is not None


def kernel_launches(trace: Trace) -> Bool:
    """Per call: whether it launches one kernel."""
    return _named(trace, _KERNEL_LAUNCH)


def graph_launches(trace: Trace) -> Bool:
    """Per call: whether it launches a CUDA graph."""
    return _named(trace, _GRAPH_LAUNCH)


def while_capturing(trace: Trace) -> Bool:
    """Per call: whether its thread was recording a CUDA graph, when launches are noted down and run nothing."""
    begins, ends = _named(trace, _CAPTURE_BEGINS), _named(trace, _CAPTURE_ENDS)
    inside = np.zeros(len(trace.calls), np.bool_)
    if not begins.any():
        return inside
    threads = np.unique(np.stack([trace.calls.process[begins], trace.calls.thread[begins]]), axis=1)
    for process, thread in threads.T.tolist():
        mine = np.flatnonzero((trace.calls.process == process) & (trace.calls.thread == thread))
        steps: Int64 = np.cumsum(begins[mine].astype(np.int64) - ends[mine])
        floor = np.minimum(np.minimum.accumulate(steps), 0)  # an end whose begin was before the recording
        inside[mine] = steps > floor
    return inside


def _named(trace: Trace, pattern: re.Pattern[str]) -> Bool:
    matches = np.array([pattern.fullmatch(name) is not None for name in trace.names] + [False], np.bool_)  # last: NO_NAME
    chosen: Bool = matches[trace.calls.name]
    return chosen
