"""Rules on the host: launch gaps, host work between steps, synchronization, allocations and copies."""

from dataclasses import dataclass

from llm_perf_opt.analysis.budget import BudgetKey
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.findings.finding import (
    Bounds,
    Confidence,
    Grounds,
    Saving,
    ToTry,
    finding,
    gap_saving_of,
    place_of,
    saving_of,
    unit_time,
)
from llm_perf_opt.analysis.limits.peaks import graph_interval_ns
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE, PREFILL
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.stages import MIXED_STEP, STEP
from llm_perf_opt.core.units import duration, percentage

WAITING = 0.25
"""A stage is launch-bound if launch gaps and host work take at least this share of its wall time."""
ONE_BY_ONE = 0.5
"""From this many launches per kernel on, kernels are launched one by one, not as CUDA graphs."""
_GRAPHS = ("runtime.cache=static", "runtime.compile=reduce-overhead")
_USE_GRAPHS = (
    'Keep the cache in preallocated tensors (transformers: cache_implementation="static") and compile the decode step with '
    'torch.compile(model.forward, mode="reduce-overhead"), or capture it in a CUDA graph.'
)
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
_BROKEN_GRAPHS = (
    "CUDA graphs are already enabled, but kernels are still launched one by one: look for what breaks the graph "
    "(TORCH_LOGS=graph_breaks,recompiles,perf_hints)."
)


def launch_bound_decode(evidence: Evidence) -> Finding | None:
    """Decode waits for launches; use a static cache and CUDA graphs.

    The prediction adds three terms: kernels that stay (products, attention, copies) at their traced times; fused kernels, from
    `fusion`; and gaps between the kernels of a graph, between zero and the measured interval of empty kernels in a graph, which
    includes their run time. At worst, the host's own work and its waiting stay as they are. The lower bound of the saving uses
    the lower end of the wall time's interval. The upper bound uses the wall time itself.
    """
    stage = evidence.stage(DECODE)
    if stage is None or not is_launch_bound(stage) or stage.fusion.kept_kernels + stage.fusion.fusable_kernels == 0:
        return None
    times = graph_times(evidence, stage)
    low, middle, high = times.bounds
    saving = graph_saving(stage, times.bounds)
    if saving.expected_ns <= 0:
        return None
    has_graphs = _has_graphs(evidence)
    return finding(
        "launch_bound_decode",
        place_of(evidence, stage),
        (
            f"Decode is launch-bound: {wall_clause(stage)}.",
            f"With a static cache and CUDA graphs, about {unit_time(stage, middle)} per {stage.unit} is expected "
            f"({unit_time(stage, low)} to {unit_time(stage, high)}).",
        ),
        Grounds(
            (
                *launch_rows(stage),
                *staying_rows(stage),
                *times.rows,
            ),
            *graph_confidence(stage),
        ),
        saving,
        ToTry((), _BROKEN_GRAPHS, "Find what breaks the CUDA graphs")
        if has_graphs
        else ToTry(_GRAPHS, _USE_GRAPHS, "Run decode in CUDA graphs"),
    )


_STAYING = (BudgetKey.SYNC, BudgetKey.HOST, BudgetKey.UNCHANGED)
"""Idle time that CUDA graphs may leave as it is."""


@dataclass(frozen=True)
class GraphTimes:
    """The predicted time of decode in CUDA graphs, over all its units."""

    bounds: Bounds
    """Least, expected and most. At most, the host's own work and its waiting stay as they are."""
    rows: tuple[str, ...]
    """The terms of the prediction."""


def graph_times(evidence: Evidence, stage: StageEvidence) -> GraphTimes:
    """Predict the time of a stage in CUDA graphs: kernels that stay, fused ones, and the gaps inside a graph."""
    fusion = stage.fusion
    # Collectives are among the kernels that stay, and copies within the device are fused.
    exposed = max(stage.budget.ns(BudgetKey.EXPOSED) - stage.collective_ns - stage.inner_copy_ns, 0)
    gap, source = _graph_gap(evidence, stage)
    stays = sum(stage.budget.ns(key) for key in _STAYING)  # at worst: graphs only speed up launches
    least, estimate, most = (
        (fusion.kept_ns + fused) * stage.overlap + exposed for fused in (fusion.least_ns, fusion.fused_ns, fusion.most_ns)
    )
    high = most + gap * (fusion.kept_kernels + fusion.sizes) + stays
    rows = (
        f"unchanged: {stage.per_unit(fusion.kept_kernels):,.0f} kernels, {unit_time(stage, fusion.kept_ns)} per {stage.unit}",
        f"fused: {stage.per_unit(fusion.fusable_kernels):,.0f} kernels, {unit_time(stage, fusion.fusable_ns)}, into "
        f"{stage.per_unit(fusion.runs):,.0f} to {stage.per_unit(fusion.sizes):,.0f} kernels, "
        f"{unit_time(stage, fusion.least_ns)} to {unit_time(stage, fusion.most_ns)}",
        source,
    )
    return GraphTimes((least, estimate + gap / 2 * fusion.kernels, high), rows)


def graph_saving(stage: StageEvidence, after: Bounds) -> Saving:
    """Return the saving of a stage that takes this long in CUDA graphs."""
    low, middle, high = after
    wall = stage.budget.wall_ns
    least_saved = stage.least_wall_ns - high if stage.unprofiled else 0
    return saving_of(stage, least_saved, wall - middle, wall - low, after=after)


def graph_confidence(stage: StageEvidence) -> tuple[Confidence, str]:
    """Return the confidence in such a saving, and its reason."""
    if stage.unprofiled:
        return "high", "the wall time is unprofiled, and the kernel times come from the trace"
    return (
        "medium",
        "the expected time is reliable, but the saving is taken from the time under the profiler, which lengthens gaps: "
        "without the profiler it is smaller by an unknown amount",
    )


def launch_bound_prefill(evidence: Evidence) -> Finding | None:
    """Prefill waits for launches: there is too little work per launch."""
    stage = evidence.stage(PREFILL)
    if stage is None or not is_launch_bound(stage):
        return None
    gaps = stage.budget.ns(BudgetKey.LAUNCH)
    return finding(
        "launch_bound_prefill",
        place_of(evidence, stage),
        (
            f"Prefill is launch-bound: {wall_clause(stage)}.",
            "A prompt several times as long, or several prompts in a batch, would take hardly any longer.",
        ),
        Grounds(
            launch_rows(stage),
            "low",
            "how much of the gaps disappears depends on the shapes that prefill is compiled for; the expected saving is "
            "half of them",
        ),
        gap_saving_of(stage, 0, gaps / 2, gaps),
        _compile_prefill(evidence),
    )


def _compile_prefill(evidence: Evidence) -> ToTry:
    setting = evidence.facts.setting
    words = (
        "Compile prefill for a few padded lengths (torch.compile, one CUDA graph per length), or put more prompts into one "
        "prefill (runtime.batch_size)."
    )
    if setting("runtime.compile_prefill"):
        return ToTry(change=f"Prefill is compiled already. {words}", title="Put more prompts into one prefill")
    missing = () if evidence.facts.compiled else _GRAPHS
    return ToTry((*missing, "runtime.compile_prefill=true"), words, "Compile prefill, or batch prompts")


def host_between_steps(evidence: Evidence) -> Finding | None:
    """The host works between decode steps while the device is idle."""
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
            f"Decode waits {unit_time(stage, host)} per {stage.unit}{wall_scope(stage)} "
            f"({percentage(host / stage.budget.wall_ns)}) for the host before, between and after the kernels of its steps.",
        ),
        Grounds(
            (f"budget of decode: host {of_wall(stage, host)}",),
            "low",
            f"each step may need some of this work; the expected saving is half of it{profiled_gaps(stage)}",
        ),
        gap_saving_of(stage, 0, host / 2, host),
        ToTry(
            change="Prepare a step's inputs while the previous step runs, keep positions and tokens on the device, and check for "
            "the end of a sequence one step later.",
            title="Overlap host work with the decode steps",
        ),
    )


def is_launch_bound(stage: StageEvidence) -> bool:
    """Return whether the stage launches kernels one by one and loses much of its time to that, rather than to host work."""
    gaps, host = stage.budget.ns(BudgetKey.LAUNCH), stage.budget.ns(BudgetKey.HOST)
    return launches_one_by_one(stage) and gaps >= host and gaps + host >= WAITING * stage.budget.wall_ns


def launches_one_by_one(stage: StageEvidence) -> bool:
    """Return whether removing a kernel removes a launch. A CUDA graph is one launch, however many kernels it contains."""
    return stage.time.kernels > 0 and stage.time.launches >= ONE_BY_ONE * stage.time.kernels


def profiled_gaps(stage: StageEvidence) -> str:
    """Return a reason to append if the saving is taken from gaps that the profiler lengthened."""
    return "" if stage.unprofiled else "; the gaps are those under the profiler: without it there is less to save"


def wall_clause(stage: StageEvidence) -> str:
    """Return the stage's wall time with its interval and scope, and how long the device was busy in it."""
    per = f" per {stage.unit}" if stage.name == DECODE else ""
    interval = ""
    if stage.unprofiled and stage.wall_ends_ns is not None:
        low, high = (unit_time(stage, end) for end in stage.wall_ends_ns)
        interval = "" if low == high else f" ({low} to {high})"
    return (
        f"{duration(stage.wall_ns, 3)}{per}{interval}{wall_scope(stage)}; the device is busy for "
        f"{unit_time(stage, stage.budget.busy_ns)} of it ({percentage(stage.busy_share)})"
    )


def wall_scope(stage: StageEvidence) -> str:
    """Return words to append to a wall time if it is the profiler's, or covers only the first steps of a request."""
    if not stage.unprofiled:
        return " under the profiler"
    return f" over the first {stage.units} of {stage.request_units} steps" if stage.units < stage.request_units else ""


def _has_graphs(evidence: Evidence) -> bool:
    """Return whether the run's configuration enables CUDA graphs."""
    setting = evidence.facts.setting
    return setting("runtime.cache") == "static" and setting("runtime.compile") in _WITH_GRAPHS


def staying_rows(stage: StageEvidence) -> tuple[str, ...]:
    """Return a row on the idle time that graphs may leave unchanged."""
    found = [(key, stage.budget.ns(key)) for key in _STAYING if stage.budget.ns(key)]
    words = ", ".join(f"{key.label} {unit_time(stage, ns)}" for key, ns in found)
    return (f"in the worst case also unchanged, per {stage.unit}: {words}",) if words else ()


def _graph_gap(evidence: Evidence, stage: StageEvidence) -> tuple[float, str]:
    """Return the longest gap to expect between two kernels of a graph, and its source."""
    ceilings = evidence.facts.ceilings
    measured = ceilings if isinstance(ceilings, Missing) else graph_interval_ns(ceilings)
    if not isinstance(measured, Missing):
        return measured, f"between kernels of a CUDA graph: at most {duration(measured, 3)}, measured on this device"
    gap = stage.queued_gap_ns
    if not isinstance(gap, Missing):
        return gap, f"between kernels of a CUDA graph: at most {duration(gap, 3)}, the median gap of queued kernels in the trace"
    return 0.0, f"gaps inside a CUDA graph are not included: {gap.why}"


def launch_rows(stage: StageEvidence) -> tuple[str, ...]:
    """Return the launch gaps and the number of launches as text."""
    launches, kernels = stage.per_unit(stage.time.launches), stage.per_unit(stage.time.kernels)
    gaps, host = stage.budget.ns(BudgetKey.LAUNCH), stage.budget.ns(BudgetKey.HOST)
    return (
        f"budget of {stage.name}, {duration(stage.budget.wall_ns, 3)} ({stage.budget.wall_source}): launch gaps "
        f"{duration(gaps, 3)}, host {duration(host, 3)}",
        f"{launches:,.0f} launches of {kernels:,.0f} kernels per {stage.unit}",
    )


def of_wall(stage: StageEvidence, ns: float) -> str:
    """Return a time of the stage next to all of it."""
    return f"{duration(ns, 3)} of {duration(stage.budget.wall_ns, 3)}"


# --- calls of the host in every step ----------------------------------------------------------------------------------


EVERY_STEP = 0.5
"""From this many calls per step on, a call counts as made in every step."""
NOTEWORTHY = 0.01
"""The least share of the stage's time that makes such calls a finding."""
_LOOPS = (DECODE, STEP, MIXED_STEP)


def syncs_per_step(evidence: Evidence) -> Finding | None:
    """The host waits for the device in every step."""
    stage = _loop(evidence)
    if stage is None or stage.calls.syncs < EVERY_STEP * stage.units:
        return None
    calls, lost = stage.calls, stage.budget.ns(BudgetKey.SYNC)
    if lost < NOTEWORTHY * stage.budget.wall_ns:
        return None  # the device had enough queued, or other work to do
    items = f", {calls.items / stage.units:,.2g} of them to read a value (.item())" if calls.items else ""
    return finding(
        "syncs_per_step",
        place_of(evidence, stage),
        (
            f"The host waits for the device {_times(calls.syncs / stage.units)} per {stage.unit}{items}; the device then has "
            f"nothing queued for {unit_time(stage, lost)}.",
        ),
        Grounds(
            (
                f"{calls.syncs:,} synchronizing calls, {duration(calls.sync_ns, 3)} under the profiler",
                f"budget of {stage.name}: sync {of_wall(stage, lost)}",
            ),
            "medium",
            "without the wait, the host still has to launch kernels; the expected saving is half of the wait",
        ),
        gap_saving_of(stage, 0, lost / 2, lost),
        ToTry(
            change="Keep sampled tokens on the device, check for the end of a sequence every few steps, and avoid .item(), "
            ".cpu() and printing tensors inside the loop.",
            title=f"Do not wait for the device in every {stage.unit}",
        ),
    )


def allocations_in_the_loop(evidence: Evidence) -> Finding | None:
    """The driver allocates or frees memory during decode."""
    stage = _loop(evidence)
    if stage is None or stage.calls.allocations < EVERY_STEP * stage.units:
        return None
    calls = stage.calls
    idle_ns = max(stage.budget.idle_ns, 0)  # a host that is held up while the device works costs nothing
    scale = min(idle_ns / stage.time.idle_ns, 1.0) if stage.time.idle_ns else 0.0
    most = min(calls.allocation_ns * scale, idle_ns)
    if most < NOTEWORTHY * stage.budget.wall_ns:
        return None
    return finding(
        "allocations_in_the_loop",
        place_of(evidence, stage),
        (
            f"The driver allocates or frees memory {_times(calls.allocations / stage.units)} per {stage.unit}, "
            f"{unit_time(stage, calls.allocation_ns)} under the profiler: the framework's caching allocator is too "
            "small or disabled.",
        ),
        Grounds(
            (f"{calls.allocations:,} calls such as cudaMalloc and cudaFree, {duration(calls.allocation_ns, 3)}",),
            "medium",
            "the calls were timed under the profiler and scaled like the idle time; the expected saving is half of that",
        ),
        gap_saving_of(stage, 0, most / 2, most),
        ToTry(
            ("runtime.cache=static",) if evidence.facts.setting("runtime.cache") == "dynamic" else (),
            "Allocate before the loop; with a growing cache, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
            "Allocate memory before the loop",
        ),
    )


def copies_from_the_host(evidence: Evidence) -> Finding | None:
    """Every step copies data from the host to the device."""
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
            f"Each {stage.unit} copies data from the host {_times(calls.to_device / stage.units)}{size}; copies that no kernel "
            f"hides take {unit_time(stage, lost)}.",
        ),
        Grounds(
            (
                f"{calls.to_device:,} copies to the device, {calls.to_host:,} back",
                f"budget of {stage.name}: exposed copies {of_wall(stage, lost)}",
            ),
            "medium",
            "some of these copies may be needed; the expected saving is half of their time",
        ),
        saving_of(stage, 0, lost / 2, lost),
        ToTry(
            change="Keep token ids, positions and masks on the device. Copy everything else from pinned memory "
            "with non_blocking=True, one step ahead.",
            title="Keep the inputs of each step on the device",
        ),
    )


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:,.2g} times"


def _loop(evidence: Evidence) -> StageEvidence | None:
    """Return the stage that repeats in steps."""
    return next((stage for name in _LOOPS if (stage := evidence.stage(name)) is not None), None)
