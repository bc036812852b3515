"""Names of the CUDA and HIP calls that put work on the device: what a parser and an analysis must agree on."""

import re

# `cudaLaunchKernel_v7000`, `cuLaunchKernelEx`, `cudaLaunchCooperativeKernel_ptsz`; `cudaLaunchHostFunc` runs on the host.
_KERNEL = re.compile(r"(cu|cuda|hip)(Ext|Module)?Launch(?!HostFunc)\w*")
_GRAPH = re.compile(r"(cu|cuda|hip)GraphLaunch(_\w+)?")


def is_kernel_launch(call: str) -> bool:
    """Whether a call of this name launches one kernel."""
    return _KERNEL.fullmatch(call) is not None


def is_graph_launch(call: str) -> bool:
    """Whether a call of this name launches a CUDA graph."""
    return _GRAPH.fullmatch(call) is not None
