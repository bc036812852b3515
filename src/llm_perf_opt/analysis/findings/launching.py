"""Rules on launches: a device that waits for the host to hand it the next kernel."""

from dataclasses import dataclass

from llm_perf_opt.analysis.budget import BudgetKey
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.findings.finding import Bounds, Grounds, Place, ToTry, finding, gap_saving_of, milliseconds, saving_of
from llm_perf_opt.analysis.limits.peaks import graph_interval_ns
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE, PREFILL
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.stages import MIXED_STEP, STEP

HOST_BOUND = 0.5
"""Below this share of busy time a faster kernel only lengthens a gap."""
DEVICE_BOUND = 0.9
"""From this share of busy time on, less kernel time is less wall time. Between the two, as much of it as lies between them."""
INFLATED = 3.0
"""A profiler that makes a stage this many times slower: the proportions of its gaps say little of the real ones."""


@dataclass(frozen=True)
class WallClockSaving:
    """A saving of kernel time as the wall clock shows it."""

    bounds: Bounds
    claim: str = ""
    """What is to be said behind the claim."""
    because: str = ""
    """What is to be said of the confidence; empty where the rule's own word stands."""
    certain: bool = False
    """Whether it is certain that nothing is saved."""


def wall_clock_saving(stage: StageEvidence, bounds: Bounds) -> WallClockSaving:
    """Kernel time is counted in so far as the device is what the stage waits for, and kernels do not run side by side."""
    low, expected, high = bounds
    share = min(max((stage.busy_share - HOST_BOUND) / (DEVICE_BOUND - HOST_BOUND), 0.0), 1.0)
    idle = f"the device is idle for {1 - stage.busy_share:.0%} of {stage.name}"
    if share == 0 and stage.busy_share * (1.0 if stage.unprofiled else INFLATED) < HOST_BOUND:
        why = "kernels that end sooner only lengthen the gaps; first see to what the device waits for"
        return WallClockSaving((0, 0, 0), f"It saves nothing now: {idle}.", why, certain=True)
    if share == 0:
        why = "below the profiler kernels that end sooner only lengthen the gaps; without it the gaps are shorter"
        return WallClockSaving((0, 0, high), f"Below the profiler it saves nothing: {idle}.", why)
    alone = stage.overlap
    if share == 1 and alone == 1:
        return WallClockSaving(bounds)
    reasons = []
    if share < 1:
        reasons.append(f"{idle}, so {share:.0%} of the kernels' time is counted")
    if alone < 1:
        reasons.append(f"kernels run side by side: {alone:.1%} of their summed time is felt")
    worst = low * alone if share == 1 else 0.0
    return WallClockSaving((worst, expected * share * alone, high), because="; ".join(reasons))


WAITING = 0.25
"""Share of the wall time lost to launch gaps and the host from which on a stage is called launch-bound."""
ONE_BY_ONE = 0.5
"""Launches per kernel from which on kernels are launched one by one, not as graphs."""
_GRAPHS = ("runtime.cache=static", "runtime.compile=reduce-overhead")
_USE_GRAPHS = (
    'Keep the cache in tensors that stay in place (transformers: cache_implementation="static") and compile the decode step with '
    'torch.compile(model.forward, mode="reduce-overhead"), or capture it in a CUDA graph.'
)
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
_BROKEN_GRAPHS = (
    "CUDA graphs are asked for already and kernels are still launched one by one: look for what breaks the graph "
    "(TORCH_LOGS=graph_breaks,recompiles,perf_hints)."
)


def launch_bound_decode(evidence: Evidence) -> Finding | None:
    """Decode waits for launches: static cache and CUDA graphs.

    Predicted: what stays (products, attention, copies) at its traced time, what fuses by `fusion`, and between two kernels of a
    graph something between nothing and the measured interval of empty kernels in one, which includes their running. At worst the
    host's own work and its waiting stay as they are. The saving is no surer than the time it is taken from: at worst that is
    the lower end of its interval. At best it is the time shown: more than that less what stays cannot be saved of it.
    """
    stage = evidence.stage(DECODE)
    if stage is None or not is_launch_bound(stage) or stage.fusion.kept_kernels + stage.fusion.fusable_kernels == 0:
        return None
    fusion = stage.fusion
    # Collectives are among the kernels that stay, and copies within the device among what fuses.
    exposed = max(stage.budget.ns(BudgetKey.EXPOSED) - stage.collective_ns - stage.inner_copy_ns, 0)
    gap, source = _graph_gap(evidence, stage)
    stays = stage.budget.ns(BudgetKey.SYNC) + stage.budget.ns(BudgetKey.HOST)  # at worst: graphs launch faster, no more
    least, estimate, most = (
        (fusion.kept_ns + fused) * stage.overlap + exposed for fused in (fusion.least_ns, fusion.fused_ns, fusion.most_ns)
    )
    low = least
    high = most + gap * (fusion.kept_kernels + fusion.sizes) + stays
    middle = estimate + gap / 2 * fusion.kernels
    wall = stage.budget.wall_ns
    least_saved = stage.least_wall_ns - high if stage.unprofiled else 0
    saving = saving_of(stage, least_saved, wall - middle, wall - low, after=(low, middle, high))
    if saving.expected_ns <= 0:
        return None
    return finding(
        "launch_bound_decode",
        place_of(evidence, stage),
        (
            f"Decode is launch-bound: {milliseconds(stage.wall_ns)} per {stage.unit}{known_within(stage)}{below(stage)}, of "
            f"which the device works {milliseconds(stage.per_unit(stage.budget.busy_ns))} ({stage.busy_share:.0%}).",
            f"With a static cache and CUDA graphs about {milliseconds(stage.per_unit(middle))} per {stage.unit} is expected "
            f"({milliseconds(stage.per_unit(low))} to {milliseconds(stage.per_unit(high))}).",
        ),
        Grounds(
            (
                *_launch_rows(stage),
                *_staying_rows(stage),
                f"stays: {stage.per_unit(fusion.kept_kernels):,.0f} kernels, {milliseconds(stage.per_unit(fusion.kept_ns))} per "
                f"{stage.unit}",
                f"fuses: {stage.per_unit(fusion.fusable_kernels):,.0f} kernels, "
                f"{milliseconds(stage.per_unit(fusion.fusable_ns))}, into "
                f"{stage.per_unit(fusion.runs):,.0f} to {stage.per_unit(fusion.sizes):,.0f} kernels, "
                f"{milliseconds(stage.per_unit(fusion.least_ns))} to {milliseconds(stage.per_unit(fusion.most_ns))}",
                source,
            ),
            "high" if stage.unprofiled else "medium",
            "the wall time is unprofiled and the kernels' times are the trace's"
            if stage.unprofiled
            else "the expected time stands; the saving is of the time below the profiler, which lengthens gaps: unprofiled it is "
            "smaller by an unknown amount",
        ),
        saving,
        ToTry(
            () if _asked_for_graphs(evidence) else _GRAPHS,
            _BROKEN_GRAPHS if _asked_for_graphs(evidence) else _USE_GRAPHS,
        ),
    )


def launch_bound_prefill(evidence: Evidence) -> Finding | None:
    """Prefill waits for launches: too little work per launch."""
    stage = evidence.stage(PREFILL)
    if stage is None or not is_launch_bound(stage):
        return None
    gaps = stage.budget.ns(BudgetKey.LAUNCH)
    return finding(
        "launch_bound_prefill",
        place_of(evidence, stage),
        (
            f"Prefill is launch-bound: {milliseconds(stage.wall_ns)}{known_within(stage)}{below(stage)}, of which the device "
            f"works {milliseconds(stage.per_unit(stage.budget.busy_ns))} ({stage.busy_share:.0%}).",
            "A prompt several times as long, or several prompts in a batch, would take hardly longer.",
        ),
        Grounds(
            _launch_rows(stage),
            "low",
            "how much of the gaps goes away depends on the shapes that a compiled prefill is made for; the middle is shown",
        ),
        gap_saving_of(stage, 0, gaps / 2, gaps),
        ToTry(
            change="Compile the prefill for a few padded lengths (torch.compile, one CUDA graph per length), or put more prompts "
            "into one prefill: runtime.batch_size. No setting of this tool compiles prefill."
        ),
    )


def host_between_steps(evidence: Evidence) -> Finding | None:
    """The host works between decode steps while the device has nothing to do."""
    stage = evidence.stage(DECODE)
    if stage is None:
        return None
    host = stage.budget.ns(BudgetKey.HOST)
    if host < 0.05 * stage.budget.wall_ns:
        return None
    return finding(
        "host_between_steps",
        place_of(evidence, stage),
        (
            f"Before, between and after the kernels of its steps, decode waits for the host for "
            f"{milliseconds(stage.per_unit(host))} per {stage.unit}{below(stage)} ({host / stage.budget.wall_ns:.0%}).",
        ),
        Grounds(
            (f"budget of decode: host {milliseconds(host)} of {milliseconds(stage.budget.wall_ns)}",),
            "low",
            f"part of it may be work that each step needs; the middle is shown{lengthened(stage)}",
        ),
        gap_saving_of(stage, 0, host / 2, host),
        ToTry(
            change="Prepare a step's inputs while the last one runs, keep positions and tokens on the device, and decide about "
            "stopping a step late."
        ),
    )


def is_launch_bound(stage: StageEvidence) -> bool:
    """Whether the stage launches kernels one by one and loses much of its time to that, and not to other work of the host."""
    gaps, host = stage.budget.ns(BudgetKey.LAUNCH), stage.budget.ns(BudgetKey.HOST)
    return launches_one_by_one(stage) and gaps >= host and gaps + host >= WAITING * stage.budget.wall_ns


def launches_one_by_one(stage: StageEvidence) -> bool:
    """Whether a kernel less is a launch less: a step of a CUDA graph is one launch, whatever it holds."""
    return stage.time.kernels > 0 and stage.time.launches >= ONE_BY_ONE * stage.time.kernels


def below(stage: StageEvidence) -> str:
    """Words to put behind a wall time that is the profiler's, or of the first steps of a request only."""
    if not stage.unprofiled:
        return " below the profiler"
    return f" over the first {stage.units} of {stage.request_units} steps" if stage.units < stage.request_units else ""


def known_within(stage: StageEvidence) -> str:
    """Words to put behind an unprofiled wall time: the interval of its median."""
    if not stage.unprofiled or stage.wall_ends_ns is None:
        return ""
    low, high = (milliseconds(stage.per_unit(end)) for end in stage.wall_ends_ns)
    return "" if low == high else f" ({low} to {high})"


def lengthened(stage: StageEvidence) -> str:
    """Words to put behind a reason where the saving is of gaps that the profiler made longer."""
    return "" if stage.unprofiled else "; it is of the time below the profiler, unprofiled there is less to save"


def place_of(evidence: Evidence, stage: StageEvidence) -> Place:
    """The stage, and how often its unit occurs in a request; where no request is known, in the trace."""
    timings = evidence.facts.timings
    if isinstance(timings, Missing):
        return stage.name, stage.units
    return stage.name, timings.workload.decode_steps if stage.by_token else 1


def _asked_for_graphs(evidence: Evidence) -> bool:
    """Whether the run's settings have CUDA graphs in them."""
    setting = evidence.facts.setting
    return setting("runtime.cache") == "static" and setting("runtime.compile") in _WITH_GRAPHS


def _staying_rows(stage: StageEvidence) -> tuple[str, ...]:
    """What graphs may leave as it is."""
    found = [(key, stage.budget.ns(key)) for key in (BudgetKey.SYNC, BudgetKey.HOST) if stage.budget.ns(key)]
    words = ", ".join(f"{key.label} {milliseconds(stage.per_unit(ns))}" for key, ns in found)
    return (f"at worst stays too, per {stage.unit}: {words}",) if words else ()


def _graph_gap(evidence: Evidence, stage: StageEvidence) -> tuple[float, str]:
    """The most that lies between two kernels of a graph, and where that comes from."""
    ceilings = evidence.facts.ceilings
    measured = ceilings if isinstance(ceilings, Missing) else graph_interval_ns(ceilings)
    if not isinstance(measured, Missing):
        return (
            measured,
            f"from kernel to kernel inside a CUDA graph: at most {milliseconds(measured)}, as measured on this device",
        )
    if not isinstance(stage.queued_gap_ns, Missing):
        gap = stage.queued_gap_ns
        return (
            gap,
            f"inside a CUDA graph, from kernel to kernel: at most the trace's median gap of queued ones, {milliseconds(gap)}",
        )
    return 0.0, f"gaps inside a CUDA graph are left out: {stage.queued_gap_ns.why}"


def _launch_rows(stage: StageEvidence) -> tuple[str, ...]:
    launches, kernels = stage.per_unit(stage.time.launches), stage.per_unit(stage.time.kernels)
    return (
        f"budget of {stage.name}: launch gaps {milliseconds(stage.budget.ns(BudgetKey.LAUNCH))}, host "
        f"{milliseconds(stage.budget.ns(BudgetKey.HOST))}, of {milliseconds(stage.budget.wall_ns)} ({stage.budget.wall_source})",
        f"{launches:,.0f} launches of {kernels:,.0f} kernels per {stage.unit}",
    )


# --- host -------------------------------------------------------------------------------------------------------------


EVERY_STEP = 0.5
"""Calls per step from which on something happens in every step, not now and then."""
NOTEWORTHY = 0.01
"""Share of the stage's time from which on what a call costs is worth a claim."""
_LOOPS = (DECODE, STEP, MIXED_STEP)


def syncs_per_step(evidence: Evidence) -> Finding | None:
    """The host waits for the device in every step."""
    stage = _loop(evidence)
    if stage is None or stage.calls.syncs < EVERY_STEP * stage.units:
        return None
    calls, lost = stage.calls, stage.budget.ns(BudgetKey.SYNC)
    if lost < NOTEWORTHY * stage.budget.wall_ns:
        return None  # the device had enough queued, or other work to do
    per_step = calls.syncs / stage.units
    items = f", {calls.items / stage.units:,.2g} of them to read a value (.item())" if calls.items else ""
    return finding(
        "syncs_per_step",
        place_of(evidence, stage),
        (
            f"The host waits for the device {per_step:,.2g} times per {stage.unit}{items}; the device then has nothing queued "
            f"for {milliseconds(stage.per_unit(lost))}.",
        ),
        Grounds(
            (
                f"{calls.syncs:,} synchronizing calls, {milliseconds(calls.sync_ns)} below the profiler",
                f"budget of {stage.name}: sync {milliseconds(lost)} of {milliseconds(stage.budget.wall_ns)}",
            ),
            "medium",
            "without the wait the host still has to launch; the middle is shown",
        ),
        gap_saving_of(stage, 0, lost / 2, lost),
        ToTry(
            change="Keep sampled tokens on the device, test for the end of a sequence every few steps, and avoid .item(), "
            ".cpu() and printing tensors inside the loop."
        ),
    )


def allocations_in_the_loop(evidence: Evidence) -> Finding | None:
    """The driver is asked for memory while decoding."""
    stage = _loop(evidence)
    if stage is None or stage.calls.allocations < EVERY_STEP * stage.units:
        return None
    calls = stage.calls
    idle_ns = max(stage.budget.idle_ns, 0)  # a host that is held up while the device works loses nothing
    scale = min(idle_ns / stage.time.idle_ns, 1.0) if stage.time.idle_ns else 0.0
    most = min(calls.allocation_ns * scale, idle_ns)
    if most < NOTEWORTHY * stage.budget.wall_ns:
        return None
    return finding(
        "allocations_in_the_loop",
        place_of(evidence, stage),
        (
            f"The driver allocates or frees memory {calls.allocations / stage.units:,.2g} times per {stage.unit}, "
            f"{milliseconds(stage.per_unit(calls.allocation_ns))} below the profiler: the framework's cache of memory is too "
            "small or off.",
        ),
        Grounds(
            (f"{calls.allocations:,} calls such as cudaMalloc and cudaFree, {milliseconds(calls.allocation_ns)}",),
            "medium",
            "the calls' time is the profiler's, scaled as the idle time is; the middle is shown",
        ),
        gap_saving_of(stage, 0, most / 2, most),
        ToTry(
            ("runtime.cache=static",) if evidence.facts.setting("runtime.cache") == "dynamic" else (),
            "Allocate before the loop; with a growing cache set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        ),
    )


def copies_from_the_host(evidence: Evidence) -> Finding | None:
    """Every step copies something to the device."""
    stage = _loop(evidence)
    if stage is None or stage.calls.to_device < EVERY_STEP * stage.units:
        return None
    calls, lost = stage.calls, max(stage.budget.ns(BudgetKey.EXPOSED) - stage.collective_ns, 0)
    if lost < NOTEWORTHY * stage.budget.wall_ns:
        return None
    size = f", {calls.copied_bytes / stage.units:,.4g} bytes" if calls.copied_bytes else ""
    return finding(
        "copies_from_the_host",
        place_of(evidence, stage),
        (
            f"Each {stage.unit} copies from the host {calls.to_device / stage.units:,.2g} times{size}; copies that no kernel "
            "hides take "
            f"{milliseconds(stage.per_unit(lost))}.",
        ),
        Grounds(
            (
                f"{calls.to_device:,} copies to the device, {calls.to_host:,} back",
                f"budget of {stage.name}: exposed copies {milliseconds(lost)} of {milliseconds(stage.budget.wall_ns)}",
            ),
            "medium",
            "a part of it may be copies that are needed; the middle is shown",
        ),
        saving_of(stage, 0, lost / 2, lost),
        ToTry(
            change="Keep token ids, positions and masks on the device; copy what must come from the host from pinned memory "
            "with non_blocking=True, a step ahead."
        ),
    )


def _loop(evidence: Evidence) -> StageEvidence | None:
    return next((found for name in _LOOPS if (found := evidence.stage(name)) is not None), None)
