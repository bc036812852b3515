"""Two sides held against each other: what changed, whether it is real, and what else differs."""

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
    not_in_turn,
    order_of,
    unbelievable,
)
from llm_perf_opt.analysis.comparison.effects import Effect, Judgement
from llm_perf_opt.analysis.comparison.facts import flatten
from llm_perf_opt.analysis.comparison.figures import (
    DEVICE_MEMORY,
    MEMORY,
    OF_EVERYONE,
    Figure,
    FigureChange,
    OperatorChange,
    UsageChange,
    energy_changes,
    figure_changes,
    memory_changes,
    operator_changes,
    stage_of,
    told_once,
    unseen_operators,
)
from llm_perf_opt.analysis.comparison.gates import NO_CURE, Gate, GateResult, hold
from llm_perf_opt.analysis.comparison.kernels import (
    NOT_TRACED,
    KernelMatch,
    MatchableKernel,
    TracedSteps,
    match_kernels,
    of_the_same_steps,
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
PassOutcome = TypeVar("PassOutcome", "Row", UsageChange)

ANEW = Missing("Make that run anew, or leave it out")
"""What would let a gate be told where a run cannot be believed."""
SEE_ABOVE = "not judged: see the top"
"""Of a gate; why nothing is judged is long, and is said once: `Comparison.unjudged`."""
NOT_JUDGED = Missing("a run cannot be believed")
NOT_MADE = Missing("the analysis of these runs does not hold it")


@dataclass(frozen=True)
class Side:
    """One or several runs of one configuration, and what else is known of the typical one of them."""

    runs: tuple[RunAnalysis, ...]
    """In the order they were made."""
    kernels: Maybe[Sequence[MatchableKernel]] = NOT_MADE
    budget: Maybe[Sequence[Figure]] = NOT_MADE
    counters: Maybe[Sequence[Figure]] = NOT_MADE
    typical: int = 0
    """Which of the runs operators, kernels, budget and counters are of."""
    budget_steps: int = 0
    """Decode steps in the trace that the budget is of; 0: not known."""
    kernel_steps: int = 0
    """In the timeline that kernels and counters are of, likewise."""


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
    """Everything a comparison shows."""

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
    """The run of each side that operators, kernels, budget and counters are of."""
    operators: Maybe[tuple[OperatorChange, ...]]
    kernels: Maybe[KernelMatch]
    budget: Maybe[tuple[FigureChange, ...]]
    counters: Maybe[tuple[FigureChange, ...]]
    cautions: tuple[str, ...]
    gates: tuple[GateResult, ...] = ()
    unseen: str = ""
    """Why operators that ran may be missing on a side."""
    traced: TracedSteps = NOT_TRACED
    """Of how many decode steps budget, kernels and counters are."""
    unjudged: str = ""
    """Why nothing is judged, where a run cannot be believed."""

    def row(self, key: str) -> Row:
        """The metric or stage with this key."""
        return next(row for row in (*self.metrics, *self.stages) if row.key == key)


QUIET_PROCESSORS = 0.1
"""Others may use so much of one processor, on average, on a machine that is called quiet."""
_STAGES = (Stage.PREFILL, Stage.DECODE, Stage.DECODE_STEP)
_LEAST_OF_DECODE = 2
"""New tokens from which on there is a decode step."""


def gate_names() -> dict[str, str]:
    """Every name a gate may use → the row it means: plain, or with its stage before it."""
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
    """Hold two sides against each other, or raise a ConfigError where they are not of a kind.

    A judgement that states no spread between processes gets the one assumed of accelerators, or of a CPU that was watched and
    quiet, where all runs were on such.
    """
    everyone = (*base.runs, *new.runs)
    check_known(everyone, allow)
    ran = [check_one_side(f"the {name} side", side.runs) for name, side in (("base", base), ("new", new))]
    timings = [_timings(side) for side in (base, new)]
    first = base.runs[0], new.runs[0]
    typical = base.runs[base.typical], new.runs[new.typical]
    settings = config_differences(*first)
    facts = fact_differences(ran[0], ran[1], settings)
    check_comparable(facts, settings, [*flatten(first[0].config), *flatten(first[1].config)], experiment, allow)
    if judgement.process_spread is None:
        judgement = _by_the_machine(judgement, everyone, [*timings[0], *timings[1]])
    judgement = replace(judgement, order=order_of(base.runs, new.runs))
    memory, energy = memory_changes(timings[0], timings[1], judgement), energy_changes(base.runs, new.runs, judgement)
    metrics, stages = _metrics(timings[0], timings[1], judgement), _stages(timings[0], timings[1], judgement)
    traced = TracedSteps(
        (base.budget_steps, new.budget_steps),
        (base.kernel_steps, new.kernel_steps),
        (timings[0][base.typical].workload.decode_steps, timings[1][new.typical].workload.decode_steps),
    )
    base, new = (_of_the_same_steps(side, traced) for side in (base, new))
    doubt = unbelievable(everyone)
    if doubt:
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
        counters=told_once(_both(base.counters, new.counters, figure_changes)),
        traced=traced,
        cautions=(
            *few_runs((len(base.runs), len(new.runs)), judgement),
            *not_in_turn((len(base.runs), len(new.runs)), judgement),
            *cautions(base.runs, new.runs, timings, settings, experiment, doubt),
        ),
        gates=tuple(
            GateResult(gate, "cannot tell", SEE_ABOVE, ANEW)
            if doubt
            else _held(gate, (*metrics, *stages), (*memory, *energy), [*timings[0], *timings[1]])
            for gate in gates
        ),
        unjudged=doubt.why if doubt else "",
    )


def _without_verdict(rows: tuple[PassOutcome, ...]) -> tuple[PassOutcome, ...]:
    """The figures as they are, with nothing said of them."""
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


def _by_the_machine(judgement: Judgement, runs: Sequence[RunAnalysis], timings: Sequence[CleanTimings]) -> Judgement:
    """With how much processes may be taken to differ, where something may be assumed of what they ran on."""
    on_cpu = [run for run, measured in zip(runs, timings, strict=True) if measured.model.device.startswith("cpu")]
    if not on_cpu:
        return replace(judgement, process_spread=ACCELERATOR_SPREAD)
    if all(_quiet(run) for run in on_cpu):
        return replace(judgement, process_spread=QUIET_CPU_SPREAD, measured_from=SEVERAL)
    return judgement


def _quiet(run: RunAnalysis) -> bool:
    """Whether the sampler watched, and saw nothing else use the processors."""
    others = Missing("not watched") if isinstance(run.telemetry, Missing) else run.telemetry.others
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
    """Steps are paired where the same step stands at the same context on both sides."""
    lacking = steps_unavailable if stage is Stage.DECODE_STEP else stages_unavailable
    mixed = next((why for run in (*base, *new) if (why := lacking(run)) is not None), None)
    if mixed is not None:
        return mixed
    if stage is Stage.DECODE_STEP and base[0].workload.padded_tokens == new[0].workload.padded_tokens:
        steps = [[[repeat.steps_ns for repeat in run.iterations] for run in side] for side in (base, new)]
        return paired_effect(steps[0], steps[1], judgement)
    series = [[stage_values(stage, run.iterations)[1] for run in side] for side in (base, new)]
    if not all(values for side in series for values in side):
        return Missing("there is no decode step on one side")
    return effect(series[0], series[1], judgement=judgement)


def _substage_names(stage: Stage, base: Sequence[CleanTimings], new: Sequence[CleanTimings]) -> list[str]:
    spans = [span for side in (base, new) for span in side[0].iterations[0].substages]
    return list(dict.fromkeys(span.name for span in spans if span.stage == stage.value))


def _of_the_same_steps(side: Side, traced: TracedSteps) -> Side:
    """A side, without decode of budget, kernels and counters where the traces of the two hold different numbers of its steps."""
    return replace(
        side,
        kernels=of_the_same_steps(side.kernels, traced.kernels, lambda kernel: kernel.stage),
        budget=of_the_same_steps(side.budget, traced.budget, stage_of),
        counters=of_the_same_steps(side.counters, traced.kernels, stage_of),
    )


def _both(base: Maybe[Sequence[T]], new: Maybe[Sequence[T]], made: Callable[[Sequence[T], Sequence[T]], R]) -> Maybe[R]:
    if isinstance(base, Missing):
        return Missing(f"base: {base.why}")
    if isinstance(new, Missing):
        return Missing(f"new: {new.why}")
    return made(base, new)


def _held(gate: Gate, rows: Sequence[Row], figures: Sequence[UsageChange], timings: Sequence[CleanTimings]) -> GateResult:
    for row in rows:
        if row.key == gate.metric:
            return hold(gate, row.effect, row.higher_is_better, _cure(row.key, timings))
    figure = next(figure for figure in figures if figure.key == gate.metric)
    result = hold(gate, figure.effect, False, unit=figure.unit)
    return replace(result, why=f"{result.why} ({OF_EVERYONE})") if figure.key == DEVICE_MEMORY else result


def _cure(key: str, timings: Sequence[CleanTimings]) -> Maybe[str]:
    """What would make a figure that is missing: more new tokens, where decode was too short for it."""
    metric = next((one for one in METRICS if one.key == key), None)
    needed = metric.least_tokens if metric else _LEAST_OF_DECODE
    of_decode = metric.stage is Stage.DECODE if metric else key in (Stage.DECODE.value, Stage.DECODE_STEP.value)
    if (
        not of_decode
        or any(steps_unavailable(run) for run in timings)
        or all(run.workload.new_tokens >= needed for run in timings)
    ):
        return NO_CURE
    return f"at least {needed} new tokens (runtime.num_new_tokens={needed})"
