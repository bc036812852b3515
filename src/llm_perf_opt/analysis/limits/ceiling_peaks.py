"""Measured ceilings as the denominators that rates are compared with."""

from llm_perf_opt.records import Ceilings, Maybe, Missing


def peak_flops(ceilings: Ceilings, dtype: str) -> Maybe[float]:
    """The measured rate of matrix products in a format, FLOP/s."""
    return _median(ceilings, f"gemm_{dtype}", f"{dtype} matrix products")


def bandwidth(ceilings: Ceilings) -> Maybe[float]:
    """The measured read bandwidth, B/s."""
    return _median(ceilings, "read", "the read bandwidth")


def launch_interval_ns(ceilings: Ceilings) -> Maybe[float]:
    """The measured time from one tiny kernel to the next when each is launched by itself."""
    return _median(ceilings, "launch_eager", "the launch interval")


def graph_interval_ns(ceilings: Ceilings) -> Maybe[float]:
    """The measured time from one tiny kernel to the next inside a CUDA graph, its own running included."""
    return _median(ceilings, "launch_graph", "the interval of kernels in a graph")


def _median(ceilings: Ceilings, key: str, what: str) -> Maybe[float]:
    row = ceilings.row(key)
    if row is None:
        return Missing(f"the ceilings of {ceilings.device_name} do not have {what}")
    if isinstance(row.value, Missing):
        return Missing(f"no measured ceiling of {what}: {row.value.why}")
    return row.value.median
