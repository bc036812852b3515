"""The peaks that a stage is compared with, and its roofline time."""

from dataclasses import dataclass, replace

from llm_perf_opt.analysis.cost_model.cost import StageCost
from llm_perf_opt.analysis.limits.hardware import HOW_TO_GIVE, Hardware
from llm_perf_opt.analysis.limits.roofline import RooflineTime, compute_only_time, roofline_time
from llm_perf_opt.core.machine_records import Ceilings
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing

MEASURED_MARGIN = 1.03
"""A measured peak is a median with spread, so a stage may exceed it slightly without an error."""


def peak_flops(ceilings: Ceilings, dtype: str) -> Maybe[float]:
    """Return the measured peak of matrix products in a format, in FLOP/s.

    A CPU can convert a format that it emulates, or for which the library has no fast kernel, and multiply in fp32: its fp32
    peak applies if that is higher.
    """
    own = _median(ceilings, f"gemm_{dtype}", f"{dtype} matrix products")
    if isinstance(own, Missing) or not in_fp32(ceilings, dtype):
        return own
    return _median(ceilings, "gemm_fp32", "fp32 matrix products")


def in_fp32(ceilings: Ceilings, dtype: str) -> bool:
    """Return whether the device is a CPU that multiplies fp32 faster than this format."""
    own, other = (_median(ceilings, f"gemm_{name}", name) for name in (dtype, "fp32"))
    if ceilings.device_kind != "cpu" or isinstance(own, Missing) or isinstance(other, Missing):
        return False
    return own < other


def bandwidth(ceilings: Ceilings, level: int | None = None) -> Maybe[float]:
    """Return the measured read bandwidth of memory, or of a cache level of a CPU, in B/s."""
    if level is None:
        return _median(ceilings, "read", "the read bandwidth")
    return _median(ceilings, f"read_l{level}", f"the read bandwidth of L{level}")


def measured_hardware(hardware: Hardware, ceilings: Ceilings) -> Hardware:
    """Return the product with measured peaks; a format that was not measured has none, and memory keeps its size.

    The bandwidth stays that of the datasheet if it was not measured.
    """
    rates = {dtype: peak_flops(ceilings, dtype) for dtype in hardware.peaks}
    found = {
        dtype: replace(hardware.peaks[dtype], flops_per_s=rate) for dtype, rate in rates.items() if not isinstance(rate, Missing)
    }
    moved = bandwidth(ceilings)
    kept = "bandwidth and memory size" if isinstance(moved, Missing) else "memory size"
    return replace(
        hardware,
        peaks=found,
        bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s if isinstance(moved, Missing) else moved,
        source=f"measured {ceilings.taken}, {kept} of the {hardware.source.split(',')[0]}",
    )


def graph_interval_ns(ceilings: Ceilings) -> Maybe[float]:
    """Return the measured time from the start of one tiny kernel to the next in a CUDA graph."""
    return _median(ceilings, "launch_graph", "the interval between kernels in a CUDA graph")


def measured_ns(ceilings: Maybe[Ceilings], key: str) -> Maybe[float]:
    """Return a measured time."""
    return ceilings if isinstance(ceilings, Missing) else _median(ceilings, key, key)


def _median(ceilings: Ceilings, key: str, what: str) -> Maybe[float]:
    row = ceilings.row(key)
    if row is None:
        return Missing(f"the measured peaks of {ceilings.device_name} do not include {what}")
    if isinstance(row.value, Missing):
        return Missing(f"no measured peak of {what}: {row.value.why}")
    return row.value.median


@dataclass(frozen=True)
class Peaks:
    """Peak compute rate and bandwidth, from the datasheet or measured."""

    name: str
    source: str
    peak_flops_per_s: Maybe[float]
    bandwidth_bytes_per_s: Maybe[float]
    in_cache: bool = False
    """Whether the model fits in a cache whose bandwidth is unknown, so that only compute bounds it."""
    level: str = ""
    """The cache level that holds the model and that the bandwidth is of, for example L3; empty for memory."""

    @property
    def ridge_flops_per_byte(self) -> Maybe[float]:
        """The arithmetic intensity at which compute and memory take equally long."""
        if isinstance(self.peak_flops_per_s, Missing):
            return self.peak_flops_per_s
        if isinstance(self.bandwidth_bytes_per_s, Missing):
            return self.bandwidth_bytes_per_s
        return self.peak_flops_per_s / self.bandwidth_bytes_per_s


def peaks_of(
    timings: CleanTimings,
    devices: int,
    numbers: str,
    datasheet: Maybe[Hardware],
    measured: Maybe[Ceilings],
    reached_bytes_per_s: float = 0.0,
) -> tuple[Peaks, Peaks]:
    """Return the datasheet peaks and the measured peaks of all devices together, for a number format.

    `reached_bytes_per_s` is the highest rate of any stage, at which data that is in several cache levels arrived.
    """
    in_cache = _in_cache(timings, devices)
    level = (
        None
        if isinstance(measured, Missing)
        else _cache_level(measured, timings.model.weight_bytes / devices, reached_bytes_per_s / devices)
    )
    return (
        _together(_datasheet_peaks(datasheet, numbers, in_cache), devices),
        _together(_measured_peaks(measured, numbers, in_cache, level), devices),
    )


def _cache_level(ceilings: Ceilings, weight_bytes: float, reached_bytes_per_s: float) -> int | None:
    """Return the smallest cache level that holds the weights, or a faster one if they arrived faster than it delivers.

    Weights slightly larger than a level come partly from it. None: they come from memory, or bandwidths are unknown.
    """
    holding = next((cache.level for cache in ceilings.caches if cache.bytes >= weight_bytes), None)
    known = {}
    for cache in ceilings.caches:
        rate = bandwidth(ceilings, cache.level)
        if holding is not None and cache.level <= holding and not isinstance(rate, Missing):
            known[cache.level] = rate
    if holding not in known:
        return None
    enough = [level for level, rate in known.items() if rate * MEASURED_MARGIN >= reached_bytes_per_s]
    return max(enough, default=holding)


def _together(peaks: Peaks, devices: int) -> Peaks:
    """Return the peaks of several identical devices together."""
    if devices == 1:
        return peaks
    peak, moved = (
        value if isinstance(value, Missing) else value * devices
        for value in (peaks.peak_flops_per_s, peaks.bandwidth_bytes_per_s)
    )
    return replace(
        peaks, source=f"{devices} devices together, each: {peaks.source}", peak_flops_per_s=peak, bandwidth_bytes_per_s=moved
    )


def _in_cache(timings: CleanTimings, devices: int) -> Missing | None:
    """Return why bandwidth does not bound the model if its share on a device fits in the cache, otherwise None."""
    last_level_cache_bytes = timings.model.last_level_cache_bytes
    weight_bytes = timings.model.weight_bytes / devices
    if isinstance(last_level_cache_bytes, Missing) or weight_bytes > last_level_cache_bytes:
        return None
    return Missing(
        f"the weights ({weight_bytes / 2**20:.0f} MiB{' on each device' if devices > 1 else ''}) fit in the last-level cache "
        f"({last_level_cache_bytes / 2**20:.0f} MiB), so memory bandwidth does not bound them"
    )


def _datasheet_peaks(hardware: Maybe[Hardware], dtype: str, in_cache: Missing | None) -> Peaks:
    if isinstance(hardware, Missing):
        return Peaks("datasheet", hardware.why, hardware, hardware)
    peak = hardware.peak(dtype)
    flops: Maybe[float] = Missing(f"{peak.why}. {HOW_TO_GIVE}") if isinstance(peak, Missing) else peak.flops_per_s
    sums = f", {dtype} summed in {peak.accumulate}" if not isinstance(peak, Missing) and hardware.nvml_names else ""
    return Peaks("datasheet", f"{hardware.source}{sums}", flops, in_cache or hardware.bandwidth_bytes_per_s, in_cache is not None)


def _measured_peaks(ceilings: Maybe[Ceilings], dtype: str, in_cache: Missing | None, level: int | None) -> Peaks:
    if isinstance(ceilings, Missing):
        return Peaks("measured", ceilings.why, ceilings, ceilings)
    source = f"{ceilings.device_name}, taken {ceilings.taken}"
    if in_fp32(ceilings, dtype):
        source += f", products in fp32, because it is faster there than {dtype}"
    peak = peak_flops(ceilings, dtype)
    if level is not None:
        return Peaks("measured", f"{source}, weights in L{level}", peak, bandwidth(ceilings, level), level=f"L{level}")
    return Peaks("measured", source, peak, in_cache or bandwidth(ceilings), in_cache is not None)


def best_roofline_time(cost: StageCost, peak_sets: tuple[Peaks, ...]) -> Maybe[tuple[Peaks, RooflineTime]]:
    """Return the best known peaks (measured, otherwise datasheet) and the roofline time on them."""
    for peaks in reversed(peak_sets):
        least = roofline_time_at(cost, peaks)
        if not isinstance(least, Missing):
            return peaks, least
    return Missing("no peak is known to compare with")


def roofline_time_at(cost: StageCost, peaks: Peaks) -> Maybe[RooflineTime]:
    """Return the roofline time at these peaks."""
    if isinstance(peaks.peak_flops_per_s, Missing):
        return peaks.peak_flops_per_s
    if isinstance(peaks.bandwidth_bytes_per_s, Missing):
        return compute_only_time(cost, peaks.peak_flops_per_s) if peaks.in_cache else peaks.bandwidth_bytes_per_s
    return roofline_time(cost, peaks.peak_flops_per_s, peaks.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class RateLimits:
    """The highest rates one device can reach; an unknown one allows every rate."""

    flops_per_s: Maybe[float]
    """The highest peak of any format, because counters do not always show which one a kernel uses."""
    bytes_per_s: Maybe[float]


NO_LIMITS = RateLimits(Missing("no peak is known"), Missing("no bandwidth is known"))


def possible_flops_rate(rate: Maybe[float], limits: RateLimits) -> Maybe[float]:
    """Return the rate, or why it is missing if it exceeds every peak of the device."""
    peak = limits.flops_per_s
    if isinstance(rate, Missing) or isinstance(peak, Missing) or rate <= peak:
        return rate
    return Missing(
        f"the counted FLOPs divided by the trace's time exceed the device's highest peak, {peak / 1e12:,.5g} TFLOP/s; "
        "the counters and the trace probably come from different launches"
    )


def possible_bytes_rate(rate: Maybe[float], limits: RateLimits) -> Maybe[float]:
    """Return the rate, or why it is missing if it exceeds the device's bandwidth."""
    peak = limits.bytes_per_s
    if isinstance(rate, Missing) or isinstance(peak, Missing) or rate <= peak:
        return rate
    return Missing(
        f"the DRAM bytes counted under Nsight Compute divided by the trace's time exceed the device's {peak / 1e9:,.5g} GB/s; "
        "without Nsight Compute, some of them came from the cache"
    )


def possible_percentage(value: Maybe[float]) -> Maybe[float]:
    """Return the tool's percentage of a peak, or why it is missing if it exceeds 100."""
    if isinstance(value, Missing) or value <= 100:
        return value
    return Missing("Nsight Compute reports more than 100 %, which can result from its replay in several passes")


def limits_of(hardware: Maybe[Hardware], peaks: Peaks | None = None) -> RateLimits:
    """Return the datasheet's limits; for a device without one, those that the user configured (`peaks`)."""
    if not isinstance(hardware, Missing):
        return RateLimits(max(peak.flops_per_s for peak in hardware.peaks.values()), hardware.bandwidth_bytes_per_s)
    return NO_LIMITS if peaks is None else RateLimits(peaks.peak_flops_per_s, peaks.bandwidth_bytes_per_s)
