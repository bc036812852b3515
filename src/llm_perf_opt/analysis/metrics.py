"""The figures of the unprofiled pass, each defined once: what it is, its unit, what it needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.analysis.separable import inseparable, unstepped
from llm_perf_opt.analysis.stats import (
    PERCENTILE_METHOD,
    carried_percentile,
    least_values,
    percentile,
    rate_over,
    summarize,
)
from llm_perf_opt.core.records import CleanTimings, Distribution, Iteration, Maybe, Missing, Workload
from llm_perf_opt.core.stages import Stage

NO_DECODE = "one new token comes from prefill alone; runtime.num_new_tokens=2 is the least with a decode step"
Needs = Literal["request", "stages", "steps"]
"""The whole request; prefill and decode told apart; single decode steps, which several tokens handed over at once do not have."""


@dataclass(frozen=True)
class MetricDefinition:
    """What a figure is, in words and as a function of one iteration: a time, or a rate, which is tokens over a time."""

    key: str
    label: str
    unit: str
    definition: str
    time: Callable[[Iteration], Maybe[float]]
    """Of a rate that which it divides by."""
    tokens: Callable[[Workload], int] | None = None
    """Of a rate that which it counts."""
    needs: Needs = "request"
    """What must have been timed."""
    stage: Stage | None = None
    """The stage that it is of; a gate may name it before the key."""
    least_tokens: int = 1
    """New tokens from which on it can be had."""
    headline: bool = False
    """Whether a run ends with it in the terminal."""

    @property
    def higher_is_better(self) -> bool:
        """Whether it is a rate."""
        return self.tokens is not None

    def unavailable(self, timings: CleanTimings) -> Missing | None:
        """Why the figure cannot be had of these times, where it needs stages or steps that cannot be told apart."""
        if self.needs == "steps":
            return unstepped(timings)
        return inseparable(timings) if self.needs == "stages" else None

    def of(self, iteration: Iteration, workload: Workload) -> Maybe[float]:
        """The figure of one iteration."""
        time = self.time(iteration)
        return time if isinstance(time, Missing) or self.tokens is None else self.tokens(workload) * 1e9 / time

    def over(self, times: Sequence[float], workload: Workload) -> Distribution:
        """The figure over several, from the time of each. A rate is what its formula makes of the median time and its ends."""
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
        return carried_percentile(iteration.steps_ns, share)

    return of


READY = "ready on the device"

METRICS = [
    MetricDefinition(
        "ttft", "Time to first token (TTFT)", "ns",
        f"From the request's start to the first token of every sequence being {READY}: prefill and its sampling.",
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
        f"From the request's start to the last token of every sequence being {READY}.",
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
        f"90th percentile of the gaps inside one request, by {PERCENTILE_METHOD}.",
        _gap(0.9),
        needs="steps", stage=Stage.DECODE, least_tokens=1 + least_values(0.9),
    ),
    MetricDefinition(
        "itl_p99", "Inter-token latency, p99 gap", "ns",
        f"99th percentile of the gaps inside one request, by {PERCENTILE_METHOD}.",
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
"""Every figure of the unprofiled pass. Tables, JSON, comparisons, gates and docs/metrics.md follow from it."""


def value_of(definition: MetricDefinition, iteration: Iteration, timings: CleanTimings) -> Maybe[float]:
    """A figure of one iteration; missing where it needs stages or steps that cannot be told apart."""
    return definition.unavailable(timings) or definition.of(iteration, timings.workload)


def metric_named(key: str) -> MetricDefinition:
    """The figure with this key."""
    return next(metric for metric in METRICS if metric.key == key)
