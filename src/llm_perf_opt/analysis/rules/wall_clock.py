"""What less kernel time saves on the wall clock. Where the device waits for the host, a faster kernel only lengthens a gap."""

from dataclasses import dataclass

from llm_perf_opt.analysis.evidence import StageEvidence
from llm_perf_opt.analysis.finding import Bounds

HOST_BOUND = 0.5
"""Below this share of busy time a faster kernel only lengthens a gap."""
DEVICE_BOUND = 0.9
"""From this share of busy time on, less kernel time is less wall time. Between the two, as much of it as lies between them."""
INFLATED = 3.0
"""A profiler that makes a stage this many times slower: the proportions of its gaps say little of the real ones."""


@dataclass(frozen=True)
class Felt:
    """A saving of kernel time as the wall clock shows it."""

    bounds: Bounds
    claim: str = ""
    """What is to be said behind the claim."""
    because: str = ""
    """What is to be said of the confidence; empty where the rule's own word stands."""
    certain: bool = False
    """Whether it is certain that nothing is saved."""


def felt(stage: StageEvidence, bounds: Bounds) -> Felt:
    """Kernel time is counted in so far as the device is what the stage waits for, and kernels do not run side by side."""
    low, expected, high = bounds
    share = min(max((stage.busy_share - HOST_BOUND) / (DEVICE_BOUND - HOST_BOUND), 0.0), 1.0)
    idle = f"the device is idle for {1 - stage.busy_share:.0%} of {stage.name}"
    if share == 0 and stage.busy_share * (1.0 if stage.unprofiled else INFLATED) < HOST_BOUND:
        why = "kernels that end sooner only lengthen the gaps; first see to what the device waits for"
        return Felt((0, 0, 0), f" It saves nothing now: {idle}.", why, certain=True)
    if share == 0:
        why = "below the profiler kernels that end sooner only lengthen the gaps; without it the gaps are shorter"
        return Felt((0, 0, high), f" Below the profiler it saves nothing: {idle}.", why)
    alone = stage.overlap
    if share == 1 and alone == 1:
        return Felt(bounds)
    reasons = []
    if share < 1:
        reasons.append(f"{idle}, so {share:.0%} of the kernels' time is counted")
    if alone < 1:
        reasons.append(f"kernels run side by side: {alone:.1%} of their summed time is felt")
    worst = low * alone if share == 1 else 0.0
    return Felt((worst, expected * share * alone, high), because="; ".join(reasons))
