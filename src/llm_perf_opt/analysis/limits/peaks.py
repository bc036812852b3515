"""The peaks that a stage is compared with, and its roofline time."""

from dataclasses import dataclass, replace

from llm_perf_opt.analysis.cost_model.cost import StageCost
from llm_perf_opt.analysis.limits.hardware import Hardware
from llm_perf_opt.analysis.limits.roofline import RooflineTime, compute_only_time, roofline_time
from llm_perf_opt.core.machine_records import Ceilings
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing


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
        return Missing(f"the measured peaks of {ceilings.device_name} do not include {what}")
    if isinstance(row.value, Missing):
        return Missing(f"no measured peak of {what}: {row.value.why}")
    return row.value.median


@dataclass(frozen=True)
class Peaks:
    """A pair of limits to compare with."""

    name: str
    source: str
    peak_flops_per_s: Maybe[float]
    bandwidth_bytes_per_s: Maybe[float]
    in_cache: bool = False
    """Whether the model stays in the cache, so that only computing bounds it."""

    @property
    def ridge_flops_per_byte(self) -> Maybe[float]:
        """Where computing and moving take equally long."""
        for value in (self.peak_flops_per_s, self.bandwidth_bytes_per_s):
            if isinstance(value, Missing):
                return value
        return _number(self.peak_flops_per_s) / _number(self.bandwidth_bytes_per_s)


def peaks_of(
    timings: CleanTimings, devices: int, numbers: str, datasheet: Maybe[Hardware], measured: Maybe[Ceilings]
) -> tuple[Peaks, Peaks]:
    """The datasheet's limits and the measured ones, of all devices together, for a format of numbers."""
    in_cache = _in_cache(timings, devices)
    return (
        _together(_datasheet_roof(datasheet, numbers, in_cache), devices),
        _together(_measured_roof(measured, numbers, in_cache), devices),
    )


def _together(peaks: Peaks, devices: int) -> Peaks:
    """The limits of several devices that are alike."""
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
    """Why memory bandwidth is no limit, where the model's share on a device is so small that it stays in the cache."""
    last_level_cache_bytes = timings.model.last_level_cache_bytes
    weight_bytes = timings.model.weight_bytes / devices
    if isinstance(last_level_cache_bytes, Missing) or weight_bytes > last_level_cache_bytes:
        return None
    return Missing(
        f"the weights ({weight_bytes / 2**20:.0f} MiB{' on each device' if devices > 1 else ''}) fit in the last-level cache "
        f"({last_level_cache_bytes / 2**20:.0f} MiB), so memory bandwidth does not bound them"
    )


def _datasheet_roof(hardware: Maybe[Hardware], dtype: str, in_cache: Missing | None) -> Peaks:
    if isinstance(hardware, Missing):
        return Peaks("datasheet", hardware.why, hardware, hardware)
    peak = hardware.peak(dtype)
    flops: Maybe[float] = peak if isinstance(peak, Missing) else peak.flops_per_s
    sums = f", {dtype} summed in {peak.accumulate}" if not isinstance(peak, Missing) and hardware.nvml_names else ""
    return Peaks("datasheet", f"{hardware.source}{sums}", flops, in_cache or hardware.bandwidth_bytes_per_s, in_cache is not None)


def _measured_roof(ceilings: Maybe[Ceilings], dtype: str, in_cache: Missing | None) -> Peaks:
    if isinstance(ceilings, Missing):
        return Peaks("measured", ceilings.why, ceilings, ceilings)
    source = f"{ceilings.device_name}, taken {ceilings.taken}"
    return Peaks("measured", source, peak_flops(ceilings, dtype), in_cache or bandwidth(ceilings), in_cache is not None)


def best_roofline_time(cost: StageCost, peak_sets: tuple[Peaks, ...]) -> Maybe[tuple[Peaks, RooflineTime]]:
    """The least time on the best limits known: the measured ones, else the datasheet's."""
    for peaks in reversed(peak_sets):
        least = roofline_time_at(cost, peaks)
        if not isinstance(least, Missing):
            return peaks, least
    return Missing("no peak is known to compare with")


def roofline_time_at(cost: StageCost, peaks: Peaks) -> Maybe[RooflineTime]:
    """The floor on one pair of limits."""
    if isinstance(peaks.peak_flops_per_s, Missing):
        return peaks.peak_flops_per_s
    if isinstance(peaks.bandwidth_bytes_per_s, Missing):
        return compute_only_time(cost, peaks.peak_flops_per_s) if peaks.in_cache else peaks.bandwidth_bytes_per_s
    return roofline_time(cost, peaks.peak_flops_per_s, peaks.bandwidth_bytes_per_s)


def _number(value: Maybe[float]) -> float:
    if isinstance(value, Missing):
        raise TypeError(value.why)
    return value


@dataclass(frozen=True)
class RateLimits:
    """Of one device; a limit that is not known holds nothing back."""

    flops_per_s: Maybe[float]
    """The highest peak of any format: which one a kernel computes in, its counters do not always say."""
    bytes_per_s: Maybe[float]


NO_LIMITS = RateLimits(Missing("no peak is known"), Missing("no bandwidth is known"))


def possible_flops_rate(rate: Maybe[float], limits: RateLimits) -> Maybe[float]:
    """The rate, unless it is above every peak of the device."""
    peak = limits.flops_per_s
    if isinstance(rate, Missing) or isinstance(peak, Missing) or rate <= peak:
        return rate
    return Missing(
        f"the counted FLOPs over the trace's time would be more than the device's highest peak, {peak / 1e12:,.5g} TFLOP/s; "
        "the counters or the trace are of other launches than they seem"
    )


def possible_bytes_rate(rate: Maybe[float], limits: RateLimits) -> Maybe[float]:
    """The rate, unless it is above the device's bandwidth."""
    peak = limits.bytes_per_s
    if isinstance(rate, Missing) or isinstance(peak, Missing) or rate <= peak:
        return rate
    return Missing(
        f"DRAM bytes counted under Nsight Compute over the trace's time would be more than the device's {peak / 1e9:,.5g} GB/s; "
        "in the run itself, some of them came from the cache"
    )


def possible_percentage(value: Maybe[float]) -> Maybe[float]:
    """A share of a peak as the tool gives it, unless it is above the whole."""
    if isinstance(value, Missing) or value <= 100:
        return value
    return Missing("Nsight Compute gives more than 100 %, which its replays in several passes can lead to")


def limits_of(hardware: Maybe[Hardware], peaks: Peaks | None = None) -> RateLimits:
    """Of the datasheet; of a device without one, what the user said of it (`peaks`)."""
    if not isinstance(hardware, Missing):
        return RateLimits(max(peak.flops_per_s for peak in hardware.peaks.values()), hardware.bandwidth_bytes_per_s)
    return NO_LIMITS if peaks is None else RateLimits(peaks.peak_flops_per_s, peaks.bandwidth_bytes_per_s)
