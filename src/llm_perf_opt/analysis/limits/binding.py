"""What a change to a stage must address first, and on what evidence: no verdict says more than was seen."""

from dataclasses import dataclass

from llm_perf_opt.analysis.limits.floor import Floor
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import duration

BUSY_ENOUGH = 0.5
"""A stage whose kernels run for less than this share of its time waits for launches, whatever its kernels are bound by."""
NEAR_FLOOR = 2.0
"""Up to this many times its floor a stage is bound by the limit that its floor stands on: the floor is half of its time or more,
so nothing else in its budget is more. Beyond it the kernels, or the host, are what to look at."""

READ_TOO_MUCH = 0.15
"""So much more of the time than kernels run may the GPU be read to be at work, which counts what lies between kernels that follow
each other closely: in six runs on an H200 that the torch pass saw, too, it was 0.06 (eager) to 0.13 (compiled) more."""

LAUNCH, MEMORY, COMPUTE, KERNELS = "launch-bound", "memory-bound", "compute-bound", "kernel-bound"
NEITHER = "near neither limit"
UNKNOWN = "not known"

VERDICTS = (
    (LAUNCH, f"kernels run for less than {BUSY_ENOUGH:.0%} of its time; the device waits for the host to launch them."),
    (
        f"{MEMORY}, {COMPUTE}",
        f"it takes up to {NEAR_FLOOR:g} times its floor, which is then half of its time or more, and most of the floor is moving "
        "bytes, or computing. On a CPU, which is host and device in one, the floor alone decides.",
    ),
    (
        KERNELS,
        f"it takes over {NEAR_FLOOR:g} times its floor, and what its kernels take beyond the floor is more of its time than the "
        "floor, and more than it waits: the kernels themselves are far from what the device can do.",
    ),
    (
        NEITHER,
        f"it takes over {NEAR_FLOOR:g} times its floor, and no one cause stands out. On a CPU slow kernels and the framework's "
        f"own time are not told apart; on a GPU kernels run for {BUSY_ENOUGH:.0%} of its time or more, but what they take beyond "
        "the floor is not the largest part.",
    ),
    (UNKNOWN, "no limit is known to compare with, or nothing says whether the device worked or waited."),
)
"""Each word that a stage is called by, with what it means."""

EVIDENCE = (
    "For how much of a stage's time kernels run is known from the torch pass (their durations over the unprofiled time). Without "
    "it the sampler's readings of GPU utilization while the repeats ran bound it, where they last long enough: kernels run for "
    f"no more than they say, and for no less than {100 * READ_TOO_MUCH:.0f} points below it, since they count short gaps, too; "
    "and for no less than the stage's floor."
)
HOW_TO_KNOW = "profiling.torch.enable=true tells"


_BY_TORCH = Missing("it is of the torch pass")


@dataclass(frozen=True)
class KernelShare:
    """Share of a stage's time that kernels ran: a figure of the torch pass, or what the sampler's readings leave possible."""

    low: float
    high: float
    sampled: Maybe[float] = _BY_TORCH
    """The readings' mean, where they are what it stands on."""

    @property
    def words(self) -> str:
        """In words, for a sentence."""
        low, high = (_on_its_side(end, BUSY_ENOUGH, "{:.0%}", "{:.1%}", "{:.2%}") for end in (self.low, self.high))
        if isinstance(self.sampled, Missing):
            return f"kernels fill {low} of the time"
        reach = f"{low} to {high}" if low != high else low
        seen = f"GPU utilization {self.sampled:.0%} while the repeats ran"
        return f"kernels run for {reach} of the time, by the sampler's readings ({seen}) and the floors"


@dataclass(frozen=True)
class Nearest:
    """A stage's distance from its floor, on the best limits known."""

    times: float
    floor: Floor
    limits: str

    @property
    def words(self) -> str:
        """In words, for a sentence."""
        times = _on_its_side(self.times, NEAR_FLOOR, "{:,.1f}", "{:,.2f}", "{:,.3f}")
        return f"it takes {times} times its floor of {duration(self.floor.seconds * 1e9)} on the {self.limits} limits"


def _on_its_side(value: float, threshold: float, *formats: str) -> str:
    """In as few digits as leave it on its side of the threshold: what rounds to 50 % must not read as if it were."""
    shown = [form.format(value) for form in formats]
    for text in shown:
        rounded = float(text.rstrip("%").replace(",", "")) / (100 if text.endswith("%") else 1)
        if rounded == value or (rounded - threshold) * (value - threshold) > 0:
            return text
    return f"just {'under' if value < threshold else 'over'} {formats[0].format(threshold)}" if value != threshold else shown[0]


def sampled_share(sampled: float, own: float, others: float, own_least: float, others_least: float) -> KernelShare:
    """What the device's utilization over all repeats leaves possible for one stage.

    `own` and `others` are the shares of the repeats' time that this stage and the other one take; what remains lies between
    repeats. The stage's kernels run least where the readings overstate most and everything else kept the device busy throughout,
    and most where the readings are exact and the other stage's ran no longer than its floor. A floor is the least that a stage's
    kernels run, as a share of its time in `…_least`.
    """
    rest = max(0.0, 1 - own - others)
    low = (sampled - READ_TOO_MUCH - others - rest) / own
    high = (sampled - others * others_least) / own
    low, high = (min(1.0, max(own_least, end)) for end in (low, high))
    return KernelShare(low, high, sampled)


def verdict(nearest: Maybe[Nearest], share: Maybe[KernelShare], *, on_cpu: bool) -> tuple[str, str]:
    """A word of VERDICTS, and why it is that one."""
    if not isinstance(share, Missing) and share.high < BUSY_ENOUGH:
        return LAUNCH, f"{share.words}; the device waits for the host to launch them"
    if isinstance(nearest, Missing):
        return UNKNOWN, nearest.why
    seen = "" if isinstance(share, Missing) else f"{share.words}; "
    if nearest.times <= NEAR_FLOOR:
        mostly = "computing" if nearest.floor.bound == "compute" else "moving bytes"
        word = COMPUTE if nearest.floor.bound == "compute" else MEMORY
        return word, f"{seen}{nearest.words}, and the floor is mostly {mostly}"
    if on_cpu:
        return NEITHER, f"{nearest.words}; slow kernels and the framework's own time are not told apart on a CPU"
    if isinstance(share, Missing):
        return UNKNOWN, f"{nearest.words}, and nothing says for how much of that kernels ran: {share.why} ({HOW_TO_KNOW})"
    return _far_from_the_floor(nearest, share)


def _far_from_the_floor(nearest: Nearest, share: KernelShare) -> tuple[str, str]:
    """Of a GPU: what takes most of the time beyond the floor, wherever in its reach the kernels' share is."""
    floor = 1 / nearest.times
    if max(share.low, floor) < BUSY_ENOUGH:
        return UNKNOWN, f"{nearest.words}, and {share.words}: that leaves open whether the device waits ({HOW_TO_KNOW})"
    slow = [_kernels_take_most(busy, floor) for busy in (share.low, share.high)]
    if all(slow):
        return KERNELS, f"{share.words}; {nearest.words}: the kernels are far from what the device can do"
    if any(slow):
        open_words = "that leaves open whether its kernels or its waiting take most"
        return UNKNOWN, f"{nearest.words}, and {share.words}: {open_words} ({HOW_TO_KNOW})"
    return NEITHER, f"{share.words}; {nearest.words}, and {_parts_words(share, floor)}: no one of them stands out"


def _kernels_take_most(busy: float, floor: float) -> bool:
    """Whether what kernels take beyond the floor is the largest of the three parts of the time."""
    return busy - floor > max(floor, 1 - busy)


def _parts_words(share: KernelShare, floor: float) -> str:
    """The three parts of the time; of a share that is known within ends, in its middle."""
    busy = (share.low + share.high) / 2
    about = "" if share.low == share.high else "about "
    return f"{about}{floor:.0%} is the floor, {max(busy - floor, 0.0):.0%} kernels beyond it, {1 - busy:.0%} waiting"
