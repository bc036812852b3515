"""What the server's metrics say during a load: requests that run and wait, the KV cache, preemptions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import MetricsSample

RUNNING = ("num_requests_running", "num_running_reqs", "requests_processing")
WAITING = ("num_requests_waiting", "num_queue_reqs", "requests_deferred")
KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage", "kv_cache_usage_ratio")
PREEMPTIONS = ("num_preemptions_total", "num_preemptions")
GENERATED = ("generation_tokens_total", "tokens_predicted_total")
"""Names of the same metric in several engines, without the engine's prefix (`ENGINE:`)."""
_NO_SAMPLES = Missing("the server's metrics were not sampled during this load")


@dataclass(frozen=True)
class ServerState:
    """The server at one moment. Replicas are added; of their cache usage, the highest counts."""

    at_ns: int
    running: Maybe[float]
    waiting: Maybe[float]
    kv_usage: Maybe[float]
    """Share of the KV cache in use."""
    preemptions: Maybe[float]
    """Since the server started."""
    generated: Maybe[float]
    """Output tokens since the server started."""


@dataclass(frozen=True)
class ServerLoad:
    """The server during one load."""

    samples: int
    running_mean: Maybe[float]
    running_max: Maybe[float]
    running_min_waiting: Maybe[float]
    """The fewest requests that ran while others waited."""
    waiting_mean: Maybe[float]
    waiting_max: Maybe[float]
    waiting_last: Maybe[float]
    """Mean of the last third of the samples in which requests ran."""
    waiting_first: Maybe[float]
    kv_usage_max: Maybe[float]
    preemptions: Maybe[float]
    """During the load."""


def state_of(sample: MetricsSample) -> ServerState:
    """Return the state that a scrape describes."""
    return ServerState(
        sample.at_ns,
        _reading(sample, RUNNING, sum),
        _reading(sample, WAITING, sum),
        _reading(sample, KV_USAGE, max),
        _reading(sample, PREEMPTIONS, sum),
        _reading(sample, GENERATED, sum),
    )


def _reading(sample: MetricsSample, names: Sequence[str], combine: Callable[[list[float]], float]) -> Maybe[float]:
    for name in names:
        values = [value for series, value in sample.series.items() if series.partition("{")[0].rpartition(":")[2] == name]
        if values:
            return combine(values)
    return Missing(f"the server reports no {names[0]}")


def server_load(states: Sequence[ServerState], start_ns: int, end_ns: int) -> Maybe[ServerLoad]:
    """Return what the samples between two times say."""
    inside = [state for state in states if start_ns <= state.at_ns <= end_ns]
    if not inside:
        return _NO_SAMPLES
    running, waiting, kv_usage = (_known(inside, name) for name in ("running", "waiting", "kv_usage"))
    busy = [state.running for state in inside if _above_zero(state.waiting) and not isinstance(state.running, Missing)]
    third = max(1, len(inside) // 3)
    return ServerLoad(
        samples=len(inside),
        running_mean=_of(running, _mean),
        running_max=_of(running, max),
        running_min_waiting=min(busy) if busy else Missing("no sample saw a waiting request"),
        waiting_mean=_of(waiting, _mean),
        waiting_max=_of(waiting, max),
        waiting_last=_of(_known(inside[-third:], "waiting"), _mean),
        waiting_first=_of(_known(inside[:third], "waiting"), _mean),
        kv_usage_max=_of(kv_usage, max),
        preemptions=_counted(states, start_ns, end_ns),
    )


def _known(states: Sequence[ServerState], name: str) -> Maybe[list[float]]:
    values = [getattr(state, name) for state in states]
    missing = next((value for value in values if isinstance(value, Missing)), None)
    return missing or values


def _of(values: Maybe[list[float]], combine: Callable[[list[float]], float]) -> Maybe[float]:
    return values if isinstance(values, Missing) else combine(values)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _above_zero(value: Maybe[float]) -> bool:
    return not isinstance(value, Missing) and value > 0


def _counted(states: Sequence[ServerState], start_ns: int, end_ns: int) -> Maybe[float]:
    """Return how far the counter of preemptions rose: from the last sample before the load to the first after it."""
    before = [state for state in states if state.at_ns <= start_ns][-1:]
    after = [state for state in states if state.at_ns >= end_ns][:1]
    inside = [state for state in states if start_ns <= state.at_ns <= end_ns]
    found = _known([*before, *inside, *after], "preemptions")
    if isinstance(found, Missing):
        return found
    return found[-1] - found[0] if found[-1] >= found[0] else Missing("the server was restarted during the load")
