"""Rules on how an engine runs its steps: overlap, CUDA graphs, split prompts, sequences that wait."""

from math import ceil

from llm_perf_opt.analysis.budget import BudgetKey
from llm_perf_opt.analysis.cost_model.cost import step_cost
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.findings.finding import (
    HOST,
    Claim,
    Grounds,
    finding,
    gap_saving_of,
    place_of,
    saving_of,
    unit_time,
    wall_clock_saving,
)
from llm_perf_opt.analysis.findings.host import (
    graph_confidence,
    graph_saving,
    graph_times,
    launch_rows,
    launches_one_by_one,
    of_wall,
    profiled_gaps,
    staying_rows,
    wall_clause,
)
from llm_perf_opt.analysis.findings.remedies import WORTHWHILE, fixed_prefill_ns, products_ns, remedy_of, saving_in, to_try
from llm_perf_opt.analysis.limits.efficiency import request_cost
from llm_perf_opt.analysis.limits.peaks import best_roofline_time
from llm_perf_opt.analysis.separable import stages_unavailable
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE, PREFILL
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.remedy_records import EngineRemedy, Remedy
from llm_perf_opt.core.stages import REQUEST
from llm_perf_opt.core.units import duration, percentage

NOTEWORTHY = 0.01
"""The least share of a stage for changes that cost nothing elsewhere."""


def unoverlapped_scheduling(evidence: Evidence) -> Finding | None:
    """The engine prepares a decode step only when the previous one has ended."""
    stage, remedy = evidence.stage(DECODE), remedy_of(evidence, Remedy.OVERLAP)
    if stage is None or remedy is None:
        return None
    host, sync = stage.budget.ns(BudgetKey.HOST), stage.budget.ns(BudgetKey.SYNC)
    hidden = min(host, stage.budget.busy_ns)
    if hidden < WORTHWHILE * stage.budget.wall_ns:
        return None
    return finding(
        "unoverlapped_scheduling",
        place_of(evidence, stage),
        (
            f"The device waits {unit_time(stage, host)} per {stage.unit} ({percentage(host / stage.budget.wall_ns)}) while the "
            "engine handles the tokens of a step and schedules the next.",
            "This work can run while the kernels of a step do.",
        ),
        Grounds(
            (remedy.now, f"budget of {stage.name}: host {of_wall(stage, host)}, sync {of_wall(stage, sync)}"),
            "medium",
            "work that needs the previous tokens stays; at worst, half of the time is saved" + profiled_gaps(stage),
        ),
        gap_saving_of(stage, hidden / 2 if stage.unprofiled else 0, hidden, host + sync),
        to_try(remedy, "Schedule the next step while one runs", HOST),
    )


def eager_engine(evidence: Evidence) -> Finding | None:
    """The engine launches the kernels of decode one by one; run them in CUDA graphs."""
    remedy = remedy_of(evidence, Remedy.GRAPHS)
    return None if remedy is None else _in_graphs(evidence, "eager_engine", remedy, "Run decode in CUDA graphs")


def uncaptured_batch(evidence: Evidence) -> Finding | None:
    """No captured CUDA graph has this batch size: steps are padded to a larger one, or run without a graph."""
    remedy, stage = remedy_of(evidence, Remedy.GRAPH_SIZES), evidence.stage(DECODE)
    if remedy is None or stage is None:
        return None
    title = f"Capture a CUDA graph for batch {remedy.after:.0f}"
    if not remedy.before:
        return _in_graphs(evidence, "uncaptured_batch", remedy, title)
    times = _step_rooflines(evidence, (round(remedy.after), round(remedy.before)))
    if times is None:
        return None
    own, padded = times
    busy = stage.budget.busy_ns
    on_wall = wall_clock_saving(stage, (0, busy * (1 - own / padded), busy * (1 - remedy.after / remedy.before)))
    if on_wall.bounds[1] < NOTEWORTHY * stage.budget.wall_ns:
        return None
    because = "padding is assumed to cost its roofline time; kernels may not be faster for the smaller batch"
    return finding(
        "uncaptured_batch",
        place_of(evidence, stage),
        (f"Each step of {remedy.after:.0f} sequences is padded to {remedy.before:.0f}.", on_wall.claim),
        Grounds(
            (
                remedy.now,
                f"roofline time of a step: {duration(own, 3)} at batch {remedy.after:.0f}, {duration(padded, 3)} at batch "
                f"{remedy.before:.0f}",
            ),
            "low",
            f"{because}; {on_wall.because}" if on_wall.because else because,
        ),
        saving_of(stage, *on_wall.bounds),
        to_try(remedy, title),
    )


def piecewise_graphs(evidence: Evidence) -> Finding | None:
    """The engine runs a decode step as many small CUDA graphs, where one is possible."""
    stage, remedy = evidence.stage(DECODE), remedy_of(evidence, Remedy.FULL_GRAPHS)
    if stage is None or remedy is None or stage.time.launches < 2 * stage.units:
        return None
    gaps = stage.budget.ns(BudgetKey.LAUNCH)
    if gaps < NOTEWORTHY * stage.budget.wall_ns:
        return None
    return finding(
        "piecewise_graphs",
        place_of(evidence, stage),
        (
            f"Each {stage.unit} takes {stage.per_unit(stage.time.launches):,.0f} launches, and the device waits "
            f"{unit_time(stage, gaps)} for them.",
            "Attention runs between the graphs.",
        ),
        Grounds(
            (remedy.now, *launch_rows(stage)),
            "medium",
            "input preparation and sampling stay outside the graph; the expected saving is half of the launch gaps"
            + profiled_gaps(stage),
        ),
        gap_saving_of(stage, 0, gaps / 2, gaps),
        to_try(remedy, "Run a decode step in one CUDA graph"),
    )


def split_prefill(evidence: Evidence) -> Finding | None:
    """The engine splits the prompts over several steps, each of which reads the weights."""
    timings, remedy = evidence.facts.timings, remedy_of(evidence, Remedy.LARGER_STEP)
    if isinstance(timings, Missing) or remedy is None or not timings.iterations:
        return None
    mixed = stages_unavailable(timings)
    if mixed is not None and (timings.runtime is None or timings.runtime.held_back is not False):
        return None  # the first tokens also waited for sequences to end
    total, most = round(remedy.after), round(remedy.before)
    steps = ceil(total / most)
    split = [most] * (steps - 1) + [total - most * (steps - 1)]
    wall = percentile([iteration.prefill_ns for iteration in timings.iterations], 0.5)
    fixed = min(fixed_prefill_ns(evidence), wall)
    whole, parts = products_ns(evidence, [total]), products_ns(evidence, split)
    extra = (wall - fixed) * (1 - whole / parts) if whole and parts else 0.0
    saved = extra + fixed * (1 - 1 / steps)
    if saved < WORTHWHILE * wall:
        return None
    rows = [remedy.now, f"{duration(fixed, 3)} of it does not depend on the number of tokens"]
    if whole and parts:
        rows.append(f"roofline time of the matrix products: {duration(parts, 3)}, in one step {duration(whole, 3)}")
    because = "the time of the single step comes from the cost model, scaled to the measured time"
    bounds = (0, saved, wall * (1 - 1 / steps))
    place, saving = (PREFILL, 1), saving_in(wall, bounds, PREFILL)
    if mixed is not None:  # decode ran in the same steps: only the whole request shortens by a known time
        request = percentile([iteration.total_ns for iteration in timings.iterations], 0.5)
        place, saving = (REQUEST, 1), saving_in(request, bounds, REQUEST)
        because += f"; it is compared over the request, because {mixed.why}"
    return finding(
        "split_prefill",
        place,
        (
            f"The {total:,} tokens of the prompts are computed in {steps} steps of at most {most:,} tokens, and the first "
            f"tokens take {duration(wall, 3)}.",
            "Each step reads all weights and has its own host work.",
        ),
        Grounds(tuple(rows), "low", because),
        saving,
        to_try(remedy, "Compute the prompts in one step"),
    )


def held_back_sequences(evidence: Evidence) -> Finding | None:
    """Sequences of the batch waited or were preempted: the engine does not run all of them at once."""
    timings, remedy = evidence.facts.timings, remedy_of(evidence, Remedy.MORE_SEQUENCES)
    if isinstance(timings, Missing) or remedy is None or timings.runtime is None or not timings.iterations:
        return None
    if not timings.runtime.inseparable or timings.runtime.held_back is False:
        return None  # the arrival times show that no sequence waited
    wall = percentile([iteration.total_ns for iteration in timings.iterations], 0.5)
    most = wall * (1 - remedy.before / remedy.after)
    return finding(
        "held_back_sequences",
        (REQUEST, 1),
        (f"The engine runs about {remedy.before:.0f} of the {remedy.after:.0f} sequences at once; the others wait.",),
        Grounds(
            (remedy.now, timings.runtime.inseparable),
            "low",
            "a step with more sequences takes longer by an unknown amount; the expected saving is half of the waiting",
        ),
        saving_in(wall, (0, most / 2, most), REQUEST),
        to_try(remedy, "Run all sequences at once"),
    )


def _step_rooflines(evidence: Evidence, batches: tuple[int, int]) -> tuple[float, float] | None:
    """Return the roofline time in ns of a decode step at two batch sizes; None if it is unknown."""
    timings, efficiency = evidence.facts.timings, evidence.facts.efficiency
    request = timings if isinstance(timings, Missing) else request_cost(timings)
    if isinstance(timings, Missing) or isinstance(request, Missing) or isinstance(efficiency, Missing):
        return None
    steps = (Step(batch, 1, timings.workload.padded_tokens) for batch in batches)
    costs = [step_cost(request.architecture, step, request.formats) for step in steps]
    first, second = (best_roofline_time(cost, efficiency.peak_sets) for cost in costs)
    if isinstance(first, Missing) or isinstance(second, Missing):
        return None
    return first[1].seconds * 1e9, second[1].seconds * 1e9


def _in_graphs(evidence: Evidence, id: str, remedy: EngineRemedy, title: str) -> Finding | None:
    """Return the finding that decode is faster in CUDA graphs, if its kernels are launched one by one."""
    stage = evidence.stage(DECODE)
    if stage is None or not launches_one_by_one(stage) or stage.fusion.kept_kernels + stage.fusion.fusable_kernels == 0:
        return None
    times = graph_times(evidence, stage)
    low, middle, high = times.bounds
    after = (low, min(middle + _exposed_host(evidence, stage), high), high)
    saving = graph_saving(stage, after)
    if saving.expected_ns < WORTHWHILE * stage.wall_ns:
        return None
    claim: Claim = (
        f"The engine launches decode kernel by kernel: {wall_clause(stage)}.",
        f"In CUDA graphs, about {unit_time(stage, after[1])} per {stage.unit} is expected ({unit_time(stage, low)} to "
        f"{unit_time(stage, high)}).",
    )
    grounds = Grounds((remedy.now, *launch_rows(stage), *staying_rows(stage), *times.rows), *graph_confidence(stage))
    return finding(id, place_of(evidence, stage), claim, grounds, saving, to_try(remedy, title))


def _exposed_host(evidence: Evidence, stage: StageEvidence) -> int:
    """Return the idle time that remains: host work between steps, unless the engine overlaps it, and what no trace shows."""
    host = stage.budget.ns(BudgetKey.HOST) if remedy_of(evidence, Remedy.OVERLAP) else 0
    return host + stage.budget.ns(BudgetKey.UNCHANGED)
