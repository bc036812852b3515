"""The metrics of the unprofiled pass, each defined once: definition, unit and what it needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llm_perf_opt.analysis.separable import stages_unavailable, steps_unavailable
from llm_perf_opt.analysis.stats import (
    PERCENTILE_METHOD,
    drift,
    least_values,
    percentile,
    rate_over,
    summarize,
    supported_percentile,
)
from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.records import (
    CleanTimings,
    Distribution,
    Drift,
    Iteration,
    Maybe,
    Metric,
    Missing,
    StageTiming,
    SubstageSpan,
    TorchPass,
    Workload,
)
from llm_perf_opt.core.stages import PARENT, Stage

NO_DECODE = "the only new token comes from prefill; a decode step needs runtime.num_new_tokens=2 or more"
Needs = Literal["request", "stages", "steps"]
"""The whole request; separate times of prefill and decode; times of single decode steps."""


@dataclass(frozen=True)
class MetricDefinition:
    """A metric as a function of one iteration: a time, or a rate (tokens over a time)."""

    key: str
    label: str
    unit: str
    definition: str
    time: Callable[[Iteration], Maybe[float]]
    """The time, or the denominator of a rate."""
    tokens: Callable[[Workload], int] | None = None
    """The numerator of a rate; None for a time."""
    needs: Needs = "request"
    """What must have been timed."""
    stage: Stage | None = None
    """The stage it belongs to; a gate may name it before the key."""
    least_tokens: int = 1
    """The fewest new tokens for which it is defined."""
    headline: bool = False
    """Whether the first screen of a report and the terminal show it."""

    @property
    def higher_is_better(self) -> bool:
        """Whether it is a rate."""
        return self.tokens is not None

    def unavailable(self, timings: CleanTimings) -> Missing | None:
        """Return why these timings cannot give the metric; None if they can."""
        if self.needs == "steps":
            return steps_unavailable(timings)
        return stages_unavailable(timings) if self.needs == "stages" else None

    def of(self, iteration: Iteration, workload: Workload) -> Maybe[float]:
        """Return the metric of one iteration."""
        time = self.time(iteration)
        return time if isinstance(time, Missing) or self.tokens is None else self.tokens(workload) * 1e9 / time

    def over(self, times: Sequence[float], workload: Workload) -> Distribution:
        """Return the distribution over iterations. A rate is computed from the median of its time and that median's interval."""
        if self.tokens is None:
            return summarize(times)
        return rate_over(self.tokens(workload), times)


def _tpot(iteration: Iteration) -> Maybe[float]:
    return iteration.decode_ns / len(iteration.steps_ns) if iteration.steps_ns else Missing(NO_DECODE)


def _gap(share: float) -> Callable[[Iteration], Maybe[float]]:
    def of(iteration: Iteration) -> Maybe[float]:
        if not iteration.steps_ns:
            return Missing(NO_DECODE)
        if share == 0.5:
            return percentile(iteration.steps_ns, share)
        return supported_percentile(iteration.steps_ns, share)

    return of


READY = "ready on the device"

METRICS = [
    MetricDefinition(
        "ttft", "Time to first token (TTFT)", "ns",
        f"From the start of the request until the first token of every sequence is {READY}: prefill and its sampling.",
        lambda iteration: iteration.prefill_ns,
        stage=Stage.PREFILL, headline=True,
    ),
    MetricDefinition(
        "tpot", "Time per output token (TPOT)", "ns",
        "(end-to-end − TTFT) / (new tokens − 1), per sequence.",
        _tpot,
        needs="stages", stage=Stage.DECODE, least_tokens=2, headline=True,
    ),
    MetricDefinition(
        "e2e", "End to end", "ns",
        f"From the start of the request until the last token of every sequence is {READY}.",
        lambda iteration: iteration.total_ns,
        headline=True,
    ),
    MetricDefinition(
        "itl_p50", "Inter-token latency, median gap", "ns",
        "Median of the gaps between tokens inside one request; gaps of different requests are never pooled.",
        _gap(0.5),
        needs="steps", stage=Stage.DECODE, least_tokens=2,
    ),
    MetricDefinition(
        "itl_p90", "Inter-token latency, p90 gap", "ns",
        f"90th percentile of the gaps inside one request, computed by {PERCENTILE_METHOD}.",
        _gap(0.9),
        needs="steps", stage=Stage.DECODE, least_tokens=1 + least_values(0.9),
    ),
    MetricDefinition(
        "itl_p99", "Inter-token latency, p99 gap", "ns",
        f"99th percentile of the gaps inside one request, computed by {PERCENTILE_METHOD}.",
        _gap(0.99),
        needs="steps", stage=Stage.DECODE, least_tokens=1 + least_values(0.99),
    ),
    MetricDefinition(
        "prefill_rate", "Prefill throughput", "tokens/s",
        "Prompt tokens of the batch (padding not counted) / TTFT.",
        lambda iteration: iteration.prefill_ns,
        lambda workload: sum(workload.prompt_tokens),
        needs="stages", stage=Stage.PREFILL,
    ),
    MetricDefinition(
        "decode_rate", "Decode throughput", "tokens/s",
        "Batch size / TPOT: decode alone, prefill not counted.",
        _tpot,
        lambda workload: workload.batch_size,
        needs="stages", stage=Stage.DECODE, least_tokens=2, headline=True,
    ),
    MetricDefinition(
        "output_rate", "Output throughput", "tokens/s",
        "Batch size × new tokens / end-to-end: the whole request, prefill included.",
        lambda iteration: iteration.total_ns,
        lambda workload: workload.batch_size * workload.new_tokens,
    ),
]  # fmt: skip
"""Every metric of the unprofiled pass. Tables, JSON, comparisons, gates and docs/metrics.md follow from it."""


def value_of(definition: MetricDefinition, iteration: Iteration, timings: CleanTimings) -> Maybe[float]:
    """Return the metric of one iteration; Missing if these timings cannot give it."""
    return definition.unavailable(timings) or definition.of(iteration, timings.workload)


def metric_named(key: str) -> MetricDefinition:
    """Return the metric with this key."""
    return next(metric for metric in METRICS if metric.key == key)


# --- metrics and stages of a run --------------------------------------------------------------------------------------


def metrics(timings: CleanTimings) -> tuple[Metric, ...]:
    """Return every metric over the repeats: one value per iteration, then the distribution."""
    found = []
    for definition in METRICS:
        unavailable = definition.unavailable(timings)
        times = [unavailable or definition.time(iteration) for iteration in timings.iterations]
        missing = next((time for time in times if isinstance(time, Missing)), None)
        present = [time for time in times if not isinstance(time, Missing)]
        absent = missing or Missing("no iteration was measured")
        value = definition.over(present, timings.workload) if present and not missing else absent
        found.append(Metric(definition.key, definition.label, definition.unit, _definition(definition, timings), value))
    return tuple(found)


def _definition(metric: MetricDefinition, timings: CleanTimings) -> str:
    """Return the definition, adapted to engines, which return tokens on the host."""
    on_host = timings.runtime is not None and timings.runtime.type != PYTORCH
    return metric.definition.replace(READY, "returned to the caller on the host") if on_host else metric.definition


def stage_timings(timings: CleanTimings, torch: Maybe[TorchPass]) -> tuple[StageTiming, ...]:
    """Return the table of stages, each followed by its sub-stages. Parents include children."""
    iterations = timings.iterations
    if not iterations:
        return ()
    whole = percentile([iteration.total_ns for iteration in iterations], 0.5)
    rows = []
    shown = [stage for stage in Stage if stage is not Stage.DECODE_STEP or steps_unavailable(timings) is None]
    for stage in shown if stages_unavailable(timings) is None else (Stage.PROFILE,):
        per_iteration, values = stage_values(stage, iterations)
        if not per_iteration:
            continue
        profiled = _profiled(torch, stage)
        time = summarize(values)
        inflation = _inflation(profiled, _same_length(stage, timings, torch))
        parent = PARENT[stage]
        share = _share(stage, iterations)
        above = parent.value if parent else ""
        rows.append(StageTiming(stage.value, above, per_iteration, time, share, profiled, inflation, _depth(stage)))
        rows.extend(_substages(stage, iterations, whole))
    return tuple(rows)


def _share(stage: Stage, iterations: Sequence[Iteration]) -> float:
    """Return the share of the time of all repeats. Every step counts, so children sum to their parents."""
    whole = sum(iteration.total_ns for iteration in iterations) or 1
    if stage is Stage.PROFILE:
        return 1.0
    parts = [iteration.prefill_ns if stage is Stage.PREFILL else iteration.decode_ns for iteration in iterations]
    return sum(parts) / whole


def stage_values(stage: Stage, iterations: Sequence[Iteration]) -> tuple[int, list[float]]:
    """Return how often a stage runs in an iteration, and one value per iteration: for a step, its median in that iteration."""
    steps = len(iterations[0].steps_ns)
    if stage is Stage.PROFILE:
        return 1, [iteration.total_ns for iteration in iterations]
    if stage is Stage.PREFILL:
        return 1, [iteration.prefill_ns for iteration in iterations]
    if not steps:
        return 0, []
    if stage is Stage.DECODE:
        return 1, [iteration.decode_ns for iteration in iterations]
    return steps, [percentile(iteration.steps_ns, 0.5) for iteration in iterations]


def _same_length(stage: Stage, timings: CleanTimings, torch: Maybe[TorchPass]) -> Maybe[float]:
    """Return the unprofiled median over as many steps as the torch pass ran."""
    whole = timings.workload.decode_steps
    steps = whole if isinstance(torch, Missing) else torch.decode_steps
    unavailable = steps_unavailable(timings) if stage is not Stage.PREFILL and steps < whole else None
    if unavailable is not None:
        return unavailable
    cut = [replace(iteration, steps_ns=iteration.steps_ns[:steps]) for iteration in timings.iterations]
    return percentile(stage_values(stage, cut)[1], 0.5)


def _inflation(profiled: Maybe[int], unprofiled: Maybe[float]) -> Maybe[float]:
    if isinstance(profiled, Missing):
        return profiled
    return unprofiled if isinstance(unprofiled, Missing) else profiled / unprofiled


def _profiled(torch: Maybe[TorchPass], stage: Stage) -> Maybe[int]:
    if isinstance(torch, Missing):
        return torch
    return torch.stage_wall_ns.get(stage.value, Missing("the torch pass did not record this stage"))


def _substages(stage: Stage, iterations: Sequence[Iteration], whole: float) -> list[StageTiming]:
    """Return the sub-stages of `stage`, each followed by its own. A value is the mean over the forwards of one iteration."""
    parents = substage_parents([span for span in iterations[0].substages if span.stage == stage.value])
    found: list[StageTiming] = []

    def add(parent: str | None, depth: int) -> None:
        for name in [name for name, above in parents.items() if above == parent]:
            found.append(_substage(name, stage.value if parent is None else parent, stage, iterations, whole, depth))
            add(name, depth + 1)

    add(None, _depth(stage) + 1)
    return found


def substage_parents(spans: Sequence[SubstageSpan]) -> dict[str, str | None]:
    """Return for each sub-stage the innermost one that contains all its forwards, or None.

    Spans are in the order in which they ended, so of two equal spans the later one is the outer.
    """
    around: dict[str, set[str | None]] = {}
    for place, span in enumerate(spans):
        outer = [
            (other.duration_ns, number, other.name)
            for number, other in enumerate(spans)
            if other.name != span.name and number > place and other.step == span.step and _encloses(other, span)
        ]
        around.setdefault(span.name, set()).add(min(outer)[2] if outer else None)
    return {name: next(iter(names)) if len(names) == 1 else None for name, names in around.items()}


def _encloses(outer: SubstageSpan, inner: SubstageSpan) -> bool:
    return outer.start_ns <= inner.start_ns and inner.start_ns + inner.duration_ns <= outer.start_ns + outer.duration_ns


def _substage(name: str, parent: str, stage: Stage, iterations: Sequence[Iteration], whole: float, depth: int) -> StageTiming:
    per_iteration, values = substage_values(name, stage, iterations)
    time = summarize(values)
    unprofiled = Missing("sub-stages are timed in the unprofiled pass only")
    return StageTiming(name, parent, per_iteration, time, time.median * per_iteration / whole, unprofiled, unprofiled, depth)


def _depth(stage: Stage) -> int:
    parent = PARENT[stage]
    return 0 if parent is None else _depth(parent) + 1


def substage_values(name: str, stage: Stage, iterations: Sequence[Iteration]) -> tuple[int, list[float]]:
    """Return how often a sub-stage runs in the first iteration, and the mean of its forwards in each iteration with any."""
    spans = [
        [span for span in iteration.substages if span.name == name and span.stage == stage.value] for iteration in iterations
    ]
    return len(spans[0]), [sum(span.duration_ns for span in group) / len(group) for group in spans if group]


def context_drift(timings: CleanTimings) -> Maybe[Drift]:
    """Return how the time of a decode step grows with the context."""
    unavailable = steps_unavailable(timings)
    if unavailable is not None:
        return unavailable
    return drift([iteration.steps_ns for iteration in timings.iterations], timings.workload.padded_tokens + 1)


def compile_seconds(timings: CleanTimings) -> Maybe[float]:
    """Return how much longer the warm-up requests took than measured ones: compilation, allocation, autotuning."""
    if not timings.warmup or not timings.iterations:
        return Missing("no warm-up was measured")
    settled = percentile([iteration.wall_ns for iteration in timings.iterations], 0.5)
    extra = sum(max(0.0, iteration.wall_ns - settled) for iteration in timings.warmup)
    return extra / 1e9
