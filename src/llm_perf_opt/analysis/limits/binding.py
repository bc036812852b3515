"""What bounds a stage, with the evidence; no verdict goes beyond the measurements."""

from dataclasses import dataclass

from llm_perf_opt.analysis.limits.roofline import RooflineTime
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import duration, percentage

BUSY_ENOUGH = 0.5
"""Below this share of kernel time, a stage waits for launches, whatever bounds its kernels."""
NEAR_ROOFLINE = 2.0
"""Up to this many times its roofline time, a stage is bound by memory or compute: the roofline time is at least half of its time,
so nothing else in its budget is larger. Beyond it, look at the kernels or the host."""

UTILIZATION_MARGIN = 0.15
"""How much sampled GPU utilization may exceed the kernels' share of the time, because it includes short gaps between kernels: in
six runs on an H200 with a torch pass it was 0.06 (eager) to 0.13 (compiled) higher."""

LAUNCH, MEMORY, COMPUTE, KERNELS = "launch-bound", "memory-bound", "compute-bound", "kernel-bound"
FRAMEWORK, OPERATORS, WAITING = "framework-bound", "operator-bound", "waiting"
NEITHER = "near neither limit"
UNKNOWN = "not known"
_SHOWN = {NEITHER: "bound by no single cause"}
"""Shown instead of the verdict, which is part of JSON output."""

VERDICTS = (
    (
        LAUNCH,
        f"kernels run for less than {percentage(BUSY_ENOUGH)} of the stage's time; the device waits for the host to launch them.",
    ),
    (
        f"{MEMORY}, {COMPUTE}",
        f"the stage takes at most {NEAR_ROOFLINE:g} × its roofline time, and most of the roofline time is memory traffic "
        "(memory-bound) or computation (compute-bound). On a CPU, which is host and device in one, the roofline time alone "
        "decides.",
    ),
    (
        KERNELS,
        f"the stage takes more than {NEAR_ROOFLINE:g} × its roofline time, and the kernel time beyond the roofline is larger "
        "than both the roofline time and the waiting time: the kernels themselves are far from the device's peaks.",
    ),
    (
        f"{FRAMEWORK}, {OPERATORS}, {WAITING}",
        f"on a CPU, the stage takes more than {NEAR_ROOFLINE:g} × its roofline time, and its budget shows that framework and "
        f"Python, operators above roofline, or waiting take at least {percentage(BUSY_ENOUGH)} of it.",
    ),
    (
        NEITHER,
        f"the stage takes more than {NEAR_ROOFLINE:g} × its roofline time, and no single cause stands out: on a CPU, none takes "
        f"{percentage(BUSY_ENOUGH)} of the time, or there is no trace; on a GPU, kernels run for at least "
        f"{percentage(BUSY_ENOUGH)} of the stage's time, but the kernel time beyond the roofline is not the largest share.",
    ),
    (UNKNOWN, "no peak is known, or nothing shows whether the device was busy or waiting."),
)
"""Each verdict with its meaning."""

EVIDENCE = (
    "The kernels' share of a stage's time comes from the torch pass (kernel durations over the unprofiled time). Without a torch "
    "pass, the GPU utilization sampled during the repeats bounds the share, if the repeats last long enough: over all "
    f"repeats, the share is at most the utilization, and lower by at most {100 * UTILIZATION_MARGIN:.0f} percentage points, "
    "because utilization includes short gaps between kernels. The bounds of a single stage are wider. The share is never less "
    "than that of the roofline time."
)
HOW_TO_KNOW = "use profiling.torch.enable=true"


_FROM_TORCH = Missing("the share is from the torch pass")


def shown_verdict(word: str) -> str:
    """Return the verdict as reports show it."""
    return _SHOWN.get(word, word)


@dataclass(frozen=True)
class KernelShare:
    """The share of a stage's time that kernels ran: from the torch pass, or bounds from the sampled utilization."""

    low: float
    high: float
    sampled: Maybe[float] = _FROM_TORCH
    """The mean sampled utilization, if the bounds come from it."""

    @property
    def words(self) -> str:
        """The share as a clause of a sentence."""
        low, high = (_share_words(end) for end in (self.low, self.high))
        if isinstance(self.sampled, Missing):
            return f"kernels fill {low} of the time"
        interval = f"{low} to {high}" if low != high else low
        seen = f"GPU utilization {percentage(self.sampled)} during the repeats"
        return f"kernels run for {interval} of the time, according to telemetry ({seen}) and the roofline times"


@dataclass(frozen=True)
class RooflineDistance:
    """A stage's distance from its roofline time, at the best known peaks."""

    times: float
    roofline: RooflineTime
    peaks: str
    level: str = ""
    """The cache level that holds the weights; empty for memory."""

    @property
    def traffic(self) -> str:
        """What the memory side of the roofline time is."""
        return f"reading the {self.level} cache" if self.level else "memory traffic"

    @property
    def words(self) -> str:
        """The distance as a clause of a sentence."""
        times = _on_its_side(self.times, NEAR_ROOFLINE, "{:,.1f}", "{:,.2f}", "{:,.3f}")
        least = duration(self.roofline.seconds * 1e9)
        cached = f", with the weights in {self.level}" if self.level else ""
        return f"it takes {times} × its roofline time of {least} at the {self.peaks} peaks{cached}"


def _share_words(share: float) -> str:
    return _on_its_side(share, BUSY_ENOUGH, "{:.0%}", "{:.1%}", "{:.2%}").replace("%", " %")


def _on_its_side(value: float, threshold: float, *formats: str) -> str:
    """Return the value with just enough digits to keep it on its side of the threshold."""
    shown = [form.format(value) for form in formats]
    for text in shown:
        rounded = float(text.rstrip("%").replace(",", "")) / (100 if text.endswith("%") else 1)
        if rounded == value or (rounded - threshold) * (value - threshold) > 0:
            return text
    return f"just {'under' if value < threshold else 'over'} {formats[0].format(threshold)}" if value != threshold else shown[0]


def sampled_share(sampled: float, own: float, others: float, own_least: float, others_least: float) -> KernelShare:
    """Return the bounds of one stage's kernel share, from the device's utilization over all repeats.

    `own` and `others` are the shares of the repeats' time that this stage and the other one take; the remainder is between
    repeats. `…_least` is a stage's roofline time as a share of its time: its kernels run at least that long. The lower bound
    assumes that the readings are too high by the full margin and that the device was busy in all other time; the upper bound
    assumes that the readings are exact and that the other stage's kernels ran for their roofline time only.
    """
    rest = max(0.0, 1 - own - others)
    low = (sampled - UTILIZATION_MARGIN - others - rest) / own
    high = (sampled - others * others_least) / own
    low, high = (min(1.0, max(own_least, end)) for end in (low, high))
    return KernelShare(low, high, sampled)


def verdict(distance: Maybe[RooflineDistance], share: Maybe[KernelShare], *, on_cpu: bool) -> tuple[str, str]:
    """Return a verdict of VERDICTS and the reason."""
    if not isinstance(share, Missing) and share.high < BUSY_ENOUGH:
        return LAUNCH, f"{share.words}; the device waits for the host to launch them"
    if isinstance(distance, Missing):
        return UNKNOWN, distance.why
    seen = "" if isinstance(share, Missing) else f"{share.words}; "
    if distance.times <= NEAR_ROOFLINE:
        if distance.roofline.bound == "compute":
            return COMPUTE, f"{seen}{distance.words}, most of which is computation"
        return MEMORY, f"{seen}{distance.words}, most of which is {distance.traffic}"
    if on_cpu:
        return NEITHER, f"{distance.words}; without a trace, slow operators and the framework's own time cannot be separated"
    if isinstance(share, Missing):
        return UNKNOWN, f"{distance.words}, and the share of kernels in it is unknown: {share.why} ({HOW_TO_KNOW})"
    return _far_from_roofline(distance, share)


def _far_from_roofline(distance: RooflineDistance, share: KernelShare) -> tuple[str, str]:
    """Return what takes most of the time beyond the roofline on a GPU, if it is the same at both bounds of the kernels' share."""
    roofline = 1 / distance.times
    if max(share.low, roofline) < BUSY_ENOUGH:
        return UNKNOWN, f"{distance.words}, and {share.words}, so it is unclear whether the device waits ({HOW_TO_KNOW})"
    slow = [busy - roofline > max(roofline, 1 - busy) for busy in (share.low, share.high)]
    if all(slow):
        return KERNELS, f"{share.words}; {distance.words}: the kernels are far from the device's peaks"
    if any(slow):
        unclear = "so it is unclear whether kernels or waiting take most of it"
        return UNKNOWN, f"{distance.words}, and {share.words}, {unclear} ({HOW_TO_KNOW})"
    return NEITHER, f"{share.words}; {distance.words}, and {_shares_words(share, roofline)}: none of them stands out"


def _shares_words(share: KernelShare, roofline: float) -> str:
    """Return the three shares of the time; for bounds, at their midpoint."""
    busy = (share.low + share.high) / 2
    about = "" if share.low == share.high else "about "
    beyond, waiting = percentage(max(busy - roofline, 0.0)), percentage(1 - busy)
    return f"{about}{percentage(roofline)} is roofline time, {beyond} is kernel time beyond it, and {waiting} is waiting"


# --- efficiency metrics -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EfficiencyMetric:
    """The definition of one metric."""

    label: str
    unit: str
    formula: str
    definition: str


EFFICIENCY_METRICS = (
    EfficiencyMetric(
        "Model FLOPs", "FLOP", "Σ components (matrix products, a multiply-add counts as 2)",
        "What the model requires: causal attention, logits for the last token in prefill. Kernels may execute more.",
    ),
    EfficiencyMetric(
        "Minimum bytes", "byte", "weights used once + cache read + cache written + gathered embedding rows + logits",
        "What must cross the memory interface. For a mixture of experts, the weights of the expected number of distinct experts.",
    ),
    EfficiencyMetric(
        "MFU (causal)", "%", "model FLOPs / (unprofiled time × peak FLOP/s of the run's dtype)",
        "Model FLOPs utilization with causal attention: a token attends only to earlier tokens.",
    ),
    EfficiencyMetric(
        "MFU (full attention)", "%",
        "model FLOPs with the full attention matrix / (unprofiled time × peak FLOP/s)",
        "The same with the full attention matrix, as many publications count it. Use it only to compare with published "
        "figures.",
    ),
    EfficiencyMetric(
        "HFU", "%", "executed FLOPs / (unprofiled time × peak FLOP/s)",
        "Hardware FLOPs utilization from counters: FLOPs of the tensor cores, plus single and double precision outside them. "
        "Packed half precision is excluded, because its instructions also move constants. HFU is n/a without counters.",
    ),
    EfficiencyMetric(
        "MBU", "%", "minimum bytes / (unprofiled time × memory bandwidth)",
        "Memory bandwidth utilization. For a model that fits in a cache of a CPU, the measured bandwidth of that cache level "
        "is used instead; MBU is n/a if that bandwidth is unknown.",
    ),
    EfficiencyMetric(
        "Arithmetic intensity", "FLOP/byte", "model FLOPs / minimum bytes",
        "Below the ridge, memory bounds a stage; above it, compute does.",
    ),
    EfficiencyMetric(
        "Ridge", "FLOP/byte", "peak FLOP/s / memory bandwidth",
        "The intensity at which compute and memory take equally long.",
    ),
    EfficiencyMetric(
        "Roofline time", "ms", "Σ components max(FLOPs / peak, bytes / bandwidth)",
        "The least time the stage can take at these peaks. Components run one after the other, so their times add up.",
    ),
    EfficiencyMetric(
        "× roofline", "×", "unprofiled time / roofline time",
        "The largest possible speedup of the stage.",
    ),
    EfficiencyMetric(
        "Kernels' share of the time", "%", "Σ kernel durations (torch pass) / unprofiled time of as many steps",
        "The share of the stage's time during which kernels run. Below 50 %, a GPU stage is launch-bound.",
    ),
)  # fmt: skip
