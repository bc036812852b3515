"""What a device can do at most: a rate above it was not achieved, so it is not shown as a number."""

from dataclasses import dataclass

from llm_perf_opt.analysis.limits.hardware import Hardware
from llm_perf_opt.analysis.limits.roofs import Roof
from llm_perf_opt.records import Maybe, Missing


@dataclass(frozen=True)
class RateLimits:
    """Of one device; a limit that is not known holds nothing back."""

    flops_per_s: Maybe[float]
    """The highest peak of any format: which one a kernel computes in, its counters do not always say."""
    bytes_per_s: Maybe[float]


NO_LIMITS = RateLimits(Missing("no peak is known"), Missing("no bandwidth is known"))


def limits_of(hardware: Maybe[Hardware], roof: Roof | None = None) -> RateLimits:
    """Of the datasheet; of a device without one, what the user said of it (`roof`)."""
    if not isinstance(hardware, Missing):
        return RateLimits(max(peak.flops_per_s for peak in hardware.peaks.values()), hardware.bandwidth_bytes_per_s)
    return NO_LIMITS if roof is None else RateLimits(roof.peak_flops_per_s, roof.bandwidth_bytes_per_s)


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
