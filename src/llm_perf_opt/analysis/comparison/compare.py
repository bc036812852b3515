"""The comparison of two sides: what changed, whether it is real, and what else differs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from llm_perf_opt.analysis.comparison.differences import (
    Difference,
    FactDifference,
    cautions,
    check_comparable,
    check_known,
    check_one_side,
    config_differences,
    environment_differences,
    fact_differences,
    few_runs,
    invalid_run,
    not_in_turn,
    order_of,
)
from llm_perf_opt.analysis.comparison.effects import Effect, Judgement, in_turn
from llm_perf_opt.analysis.comparison.facts import flatten
from llm_perf_opt.analysis.comparison.figures import (
    ALL_PROCESSES,
    DEVICE_MEMORY,
    MEMORY,
    ComparedFigure,
    FigureChange,
    OperatorChange,
    UsageChange,
    energy_changes,
    figure_changes,
    memory_changes,
    operator_changes,
    reason_once,
    stage_of,
    unseen_operators,
)
from llm_perf_opt.analysis.comparison.gates import NO_REMEDY, Gate, GateResult, check_gate
from llm_perf_opt.analysis.comparison.kernels import (
    NOT_TRACED,
    ComparedKernel,
    KernelMatch,
    TracedSteps,
    match_kernels,
    without_unequal_decode,
)
from llm_perf_opt.analysis.comparison.statistics import (
    ACCELERATOR_SPREAD,
    DEFAULT_JUDGEMENT,
    QUIET_CPU_SPREAD,
    SEVERAL,
    effect,
    paired_effect,
)
from llm_perf_opt.analysis.metrics import METRICS, stage_values, substage_values, value_of
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.separable import stages_unavailable, steps_unavailable
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.stages import Stage

T = TypeVar("T")
R = TypeVar("R")
Judged = TypeVar("Judged", "Row", UsageChange)

RERUN = Missing("Rerun the invalid run, or leave it out")
"""What a gate needs if a run is not valid."""
SEE_ABOVE = "not judged; the reason is at the top"
"""The reason of a gate; the full reason is given once, in `Comparison.unjudged`."""
NOT_JUDGED = Missing("a run is not valid")
NOT_MADE = Missing("these runs have no such data")


@dataclass(frozen=True)
class Side:
    """One or more runs of one configuration, and details of the most typical one."""

    runs: tuple[RunAnalysis, ...]
    """In the order they were made."""
    kernels: Maybe[Sequence[ComparedKernel]] = NOT_MADE
    budget: Maybe[Sequence[ComparedFigure]] = NOT_MADE
    counters: Maybe[Sequence[ComparedFigure]] = NOT_MADE
    typical: int = 0
    """Index of the run that operators, kernels, budget and counters come from."""
    budget_steps: int = 0
    """Decode steps in the trace behind the budget; 0: unknown."""
    kernel_steps: int = 0
    """Decode steps in the timeline behind kernels and counters; 0: unknown."""


@dataclass(frozen=True)
class Row:
    """One metric or stage on both sides."""

    key: str
    label: str
    unit: str
    higher_is_better: bool
    effect: Maybe[Effect]


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison shows."""

    base_runs: tuple[str, ...]
    new_runs: tuple[str, ...]
    experiment: tuple[str, ...]
    judgement: Judgement
    metrics: tuple[Row, ...]
    stages: tuple[Row, ...]
    facts: tuple[FactDifference, ...]
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    memory: tuple[UsageChange, ...]
    energy: tuple[UsageChange, ...]
    looked_into: tuple[str, str]
    """The run of each side that operators, kernels, budget and counters come from."""
    operators: Maybe[tuple[OperatorChange, ...]]
    kernels: Maybe[KernelMatch]
    budget: Maybe[tuple[FigureChange, ...]]
    counters: Maybe[tuple[FigureChange, ...]]
    cautions: tuple[str, ...]
    gates: tuple[GateResult, ...] = ()
    unseen: str = ""
    """Why a side may be missing operators that ran."""
    traced: TracedSteps = NOT_TRACED
    """Decode steps behind budget, kernels and counters."""
    unjudged: str = ""
    """Why there is no verdict, if a run is not valid."""

    def row(self, key: str) -> Row:
        """Return the metric or stage with this key."""
        return next(row for row in (*self.metrics, *self.stages) if row.key == key)


QUIET_PROCESSORS = 0.1
"""A machine is quiet if other processes use at most this many processors on average."""
_STAGES = (Stage.PREFILL, Stage.DECODE, Stage.DECODE_STEP)
_LEAST_TOKENS = 2
"""The fewest new tokens with a decode step."""


def gate_names() -> dict[str, str]:
    """Return every name that a gate may use, with or without its stage, and its row."""
    names = {metric.key: metric.key for metric in METRICS} | {stage.value: stage.value for stage in _STAGES}
    names |= {f"{metric.stage.value}.{metric.key}": metric.key for metric in METRICS if metric.stage}
    names |= {"throughput": "output_rate", "prefill.throughput": "prefill_rate", "decode.throughput": "decode_rate"}
    names |= {"decode.step": Stage.DECODE_STEP.value} | {key: key for key, *_ in MEMORY} | {"energy": "energy.counter"}
    return names


def compare(
    base: Side,
    new: Side,
    experiment: Sequence[str] = (),
    allow: Sequence[str] = (),
    gates: Sequence[Gate] = (),
    judgement: Judgement = DEFAULT_JUDGEMENT,
) -> Comparison:
    """Compare two sides, or raise a ConfigError if they are not comparable.

    If the judgement states no spread between processes, one is assumed, provided that all runs were on accelerators or on a CPU
    that was sampled and quiet.
    """
    runs = (*base.runs, *new.runs)
    check_known(runs, allow)
    ran = [check_one_side(f"the {name} side", side.runs) for name, side in (("base", base), ("new", new))]
    timings = [_timings(side) for side in (base, new)]
    first = base.runs[0], new.runs[0]
    typical = base.runs[base.typical], new.runs[new.typical]
    settings = config_differences(*first)
    facts = fact_differences(ran[0], ran[1], settings)
    check_comparable(facts, settings, [*flatten(first[0].config), *flatten(first[1].config)], experiment, allow)
    if judgement.process_spread is None:
        judgement = with_assumed_spread(judgement, runs, [*timings[0], *timings[1]])
    made = in_turn(*([run.manifest.created for run in side.runs] for side in (base, new)))
    judgement = replace(judgement, order=order_of(base.runs, new.runs), sequence=made)
    memory, energy = memory_changes(timings[0], timings[1], judgement), energy_changes(base.runs, new.runs, judgement)
    metrics, stages = _metrics(timings[0], timings[1], judgement), _stages(timings[0], timings[1], judgement)
    traced = TracedSteps(
        (base.budget_steps, new.budget_steps),
        (base.kernel_steps, new.kernel_steps),
        (timings[0][base.typical].workload.decode_steps, timings[1][new.typical].workload.decode_steps),
    )
    base, new = (_same_steps(side, traced) for side in (base, new))
    invalid = invalid_run(runs)
    if invalid:
        metrics, stages = _without_verdict(metrics), _without_verdict(stages)
        memory, energy = _without_verdict(memory), _without_verdict(energy)
    return Comparison(
        base_runs=tuple(run.run for run in base.runs),
        new_runs=tuple(run.run for run in new.runs),
        experiment=tuple(experiment),
        judgement=judgement,
        metrics=metrics,
        stages=stages,
        facts=facts,
        settings=settings,
        environment=environment_differences(base.runs, new.runs),
        memory=memory,
        energy=energy,
        looked_into=(typical[0].run, typical[1].run),
        operators=operator_changes(*typical),
        unseen=unseen_operators(*typical),
        kernels=_both(base.kernels, new.kernels, match_kernels),
        budget=_both(base.budget, new.budget, figure_changes),
        counters=reason_once(_both(base.counters, new.counters, figure_changes)),
        traced=traced,
        cautions=(
            *few_runs((len(base.runs), len(new.runs)), judgement),
            *not_in_turn((len(base.runs), len(new.runs)), judgement),
            *cautions(base.runs, new.runs, timings, settings, experiment, invalid),
        ),
        gates=tuple(
            GateResult(gate, "cannot tell", SEE_ABOVE, RERUN)
            if invalid
            else _gate_result(gate, (*metrics, *stages), (*memory, *energy), [*timings[0], *timings[1]])
            for gate in gates
        ),
        unjudged=invalid.why if invalid else "",
    )


def _without_verdict(rows: tuple[Judged, ...]) -> tuple[Judged, ...]:
    """Return the rows without interval and verdict."""
    return tuple(
        row
        if isinstance(row.effect, Missing)
        else replace(row, effect=replace(row.effect, interval=NOT_JUDGED, verdict="not judged"))
        for row in rows
    )


def _timings(side: Side) -> list[CleanTimings]:
    found = []
    for run in side.runs:
        if isinstance(run.timings, Missing) or not run.timings.iterations:
            why = run.timings.why if isinstance(run.timings, Missing) else "no iteration was measured"
            raise ConfigError(f"{run.run} has no times to compare: {why}", "Compare runs whose clean pass is complete.")
        found.append(run.timings)
    return found


def with_assumed_spread(judgement: Judgement, runs: Sequence[RunAnalysis], timings: Sequence[CleanTimings]) -> Judgement:
    """Return the judgement with the spread between processes that may be assumed for this hardware, if any."""
    on_cpu = [run for run, measured in zip(runs, timings, strict=True) if measured.model.device.startswith("cpu")]
    if not on_cpu:
        return replace(judgement, process_spread=ACCELERATOR_SPREAD)
    if all(_quiet(run) for run in on_cpu):
        return replace(judgement, process_spread=QUIET_CPU_SPREAD, measured_from=SEVERAL)
    return judgement


def _quiet(run: RunAnalysis) -> bool:
    """Return whether the sampler ran and saw hardly any other use of the processors."""
    others = Missing("not sampled") if isinstance(run.telemetry, Missing) else run.telemetry.others
    return not isinstance(others, Missing) and others <= QUIET_PROCESSORS


def _metrics(base: Sequence[CleanTimings], new: Sequence[CleanTimings], judgement: Judgement) -> tuple[Row, ...]:
    rows = []
    for definition in METRICS:
        higher = definition.higher_is_better
        sides = []
        missing: Missing | None = None
        for side in (base, new):
            values = [[value_of(definition, repeat, run) for repeat in run.iterations] for run in side]
            missing = missing or next((value for run in values for value in run if isinstance(value, Missing)), None)
            sides.append([[value for value in run if not isinstance(value, Missing)] for run in values])
        found = missing or effect(sides[0], sides[1], higher, judgement)
        rows.append(Row(definition.key, definition.label, definition.unit, higher, found))
    return tuple(rows)


def _stages(base: Sequence[CleanTimings], new: Sequence[CleanTimings], judgement: Judgement) -> tuple[Row, ...]:
    rows = []
    for stage in _STAGES:
        rows.append(Row(stage.value, stage.value, "ns", False, _stage_effect(stage, base, new, judgement)))
        for name in _substage_names(stage, base, new):
            series = [[substage_values(name, stage, run.iterations)[1] for run in side] for side in (base, new)]
            rows.append(
                Row(
                    f"{stage.value}/{name}",
                    f"{stage.value}/{name}",
                    "ns",
                    False,
                    effect(series[0], series[1], judgement=judgement),
                )
            )
    return tuple(rows)


def _stage_effect(stage: Stage, base: Sequence[CleanTimings], new: Sequence[CleanTimings], judgement: Judgement) -> Maybe[Effect]:
    """Compare a stage. Decode steps are paired if both sides have the same context at the same step."""
    unavailable = steps_unavailable if stage is Stage.DECODE_STEP else stages_unavailable
    missing = next((why for run in (*base, *new) if (why := unavailable(run)) is not None), None)
    if missing is not None:
        return missing
    if stage is Stage.DECODE_STEP and base[0].workload.padded_tokens == new[0].workload.padded_tokens:
        steps = [[[repeat.steps_ns for repeat in run.iterations] for run in side] for side in (base, new)]
        return paired_effect(steps[0], steps[1], judgement)
    series = [[stage_values(stage, run.iterations)[1] for run in side] for side in (base, new)]
    if not all(values for side in series for values in side):
        return Missing("one side has no decode step")
    return effect(series[0], series[1], judgement=judgement)


def _substage_names(stage: Stage, base: Sequence[CleanTimings], new: Sequence[CleanTimings]) -> list[str]:
    spans = [span for side in (base, new) for span in side[0].iterations[0].substages]
    return list(dict.fromkeys(span.name for span in spans if span.stage == stage.value))


def _same_steps(side: Side, traced: TracedSteps) -> Side:
    """Return the side without decode in budget, kernels and counters if the traces contain different numbers of steps."""
    return replace(
        side,
        kernels=without_unequal_decode(side.kernels, traced.kernels, lambda kernel: kernel.stage),
        budget=without_unequal_decode(side.budget, traced.budget, stage_of),
        counters=without_unequal_decode(side.counters, traced.kernels, stage_of),
    )


def _both(base: Maybe[Sequence[T]], new: Maybe[Sequence[T]], made: Callable[[Sequence[T], Sequence[T]], R]) -> Maybe[R]:
    if isinstance(base, Missing):
        return Missing(f"base: {base.why}")
    if isinstance(new, Missing):
        return Missing(f"new: {new.why}")
    return made(base, new)


def _gate_result(gate: Gate, rows: Sequence[Row], figures: Sequence[UsageChange], timings: Sequence[CleanTimings]) -> GateResult:
    for row in rows:
        if row.key == gate.metric:
            return check_gate(gate, row.effect, row.higher_is_better, _remedy(row.key, timings))
    figure = next(figure for figure in figures if figure.key == gate.metric)
    result = check_gate(gate, figure.effect, False, unit=figure.unit)
    return replace(result, why=f"{result.why} ({ALL_PROCESSES})") if figure.key == DEVICE_MEMORY else result


def _remedy(key: str, timings: Sequence[CleanTimings]) -> Maybe[str]:
    """Return what a missing metric needs: more new tokens, if decode was too short for it."""
    metric = next((metric for metric in METRICS if metric.key == key), None)
    needed = metric.least_tokens if metric else _LEAST_TOKENS
    of_decode = metric.stage is Stage.DECODE if metric else key in (Stage.DECODE.value, Stage.DECODE_STEP.value)
    if (
        not of_decode
        or any(steps_unavailable(run) for run in timings)
        or all(run.workload.new_tokens >= needed for run in timings)
    ):
        return NO_REMEDY
    return f"at least {needed} new tokens (runtime.num_new_tokens={needed})"
