"""A stage or sub-stage compared with one set of peaks."""

from dataclasses import dataclass

from llm_perf_opt.analysis.cost_model.cost import StageCost
from llm_perf_opt.analysis.limits.peaks import MEASURED_MARGIN, Peaks, roofline_time_at
from llm_perf_opt.analysis.limits.roofline import RooflineTime
from llm_perf_opt.core.errors import ImplausibleError
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import percentage

TOO_HIGH = Missing("above 100 %: its data was in a cache, or some of its work is missing")


@dataclass(frozen=True)
class RooflineComparison:
    """A stage compared with one set of peaks."""

    peaks: Peaks
    mfu: Maybe[float]
    mfu_full_attention: Maybe[float]
    mbu: Maybe[float]
    roofline: Maybe[RooflineTime]
    times_roofline: Maybe[float]


def compare_stage(stage: str, cost: StageCost, seconds: float, peaks: Peaks) -> RooflineComparison:
    """Return the comparison of a stage; a utilization above 100 % raises an ImplausibleError."""
    found = _compared(cost, seconds, peaks)
    limit = _highest(peaks)
    amounts = (
        ("MFU", found.mfu, cost.flops, peaks.peak_flops_per_s),
        ("MBU", found.mbu, cost.bytes, peaks.bandwidth_bytes_per_s),
    )
    for what, share, amount, peak in amounts:
        if not isinstance(share, Missing) and not isinstance(peak, Missing) and share > limit:
            raise ImplausibleError(
                f"{what} of {stage} against the {peaks.name} peak is {percentage(share, 1)}: "
                f"{amount:.4g} in {seconds:.4g} s at {peak:.4g}/s.",
                "Check that the device (hardware.peak_tflops, hardware.bandwidth_gbs) and the dtype are right and, for a "
                "measured peak, that the machine was quiet (llm-perf ceilings --refresh, then rerun). "
                "`llm-perf report RUN --peak-tflops=… --bandwidth-gbs=…` regenerates the report with other peaks.",
            )
    return found


def compare_substage(cost: StageCost, seconds: float, peaks: Peaks) -> RooflineComparison:
    """Return the comparison of a sub-stage; a utilization above 100 % is Missing, because its few weights may be in a cache."""
    found, limit = _compared(cost, seconds, peaks), _highest(peaks)
    if any(not isinstance(share, Missing) and share > limit for share in (found.mfu, found.mbu)):
        mfu, mbu = _possible(found.mfu, limit), _possible(found.mbu, limit)
        return RooflineComparison(peaks, mfu, found.mfu_full_attention, mbu, TOO_HIGH, TOO_HIGH)
    return found


def _highest(peaks: Peaks) -> float:
    """Return the highest possible utilization: a measured peak may be exceeded by its margin, that of a datasheet never."""
    return 1.0 if peaks.name == "datasheet" else MEASURED_MARGIN


def _possible(share: Maybe[float], limit: float) -> Maybe[float]:
    return share if isinstance(share, Missing) or share <= limit else TOO_HIGH


def _compared(cost: StageCost, seconds: float, peaks: Peaks) -> RooflineComparison:
    def share(amount: float, peak: Maybe[float]) -> Maybe[float]:
        return peak if isinstance(peak, Missing) else amount / (seconds * peak)

    least = roofline_time_at(cost, peaks)
    return RooflineComparison(
        peaks=peaks,
        mfu=share(cost.flops, peaks.peak_flops_per_s),
        mfu_full_attention=share(cost.flops_full_attention, peaks.peak_flops_per_s),  # includes work that no kernel needs to do
        mbu=share(cost.bytes, peaks.bandwidth_bytes_per_s),
        roofline=least,
        times_roofline=least if isinstance(least, Missing) else seconds / least.seconds,
    )
