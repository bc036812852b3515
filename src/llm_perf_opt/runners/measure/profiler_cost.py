"""What torch.profiler adds to each operator and label: the same calls with and without it, in the process that it profiles."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.core.host_records import CostRange, ProfilerCost
from llm_perf_opt.runners.measure.annotations import labeled_forward, marked

_ROUNDS = 7
_CALLS = 300
"""Calls in a round."""
_LABEL = "calibration"
_SMALLEST = "aten::add_"


def profiler_cost(settings: dict[str, Any]) -> ProfilerCost | None:
    """Return the cost of each event with these settings of `torch.profiler.profile`.

    None if Python frames are recorded: their cost does not depend on the number of operators.
    """
    if settings.get("with_stack"):
        return None
    import torch

    one, row, square, module = torch.ones(1), torch.ones(1, 64), torch.ones(64, 64), torch.nn.Identity()

    def outermost() -> None:
        one.add_(one)
        torch.mul(row, row)
        row.view(64)

    def nested() -> None:
        torch.nn.functional.linear(row, square)

    def stage() -> None:
        with marked(_LABEL):
            pass

    rounds = [
        (
            _added(outermost, outermost, settings),
            _added(nested, nested, settings),
            _added(lambda: module(None), lambda: module(None), settings, lambda: labeled_forward(module, _LABEL)),
            _added(lambda: None, stage, settings),
        )
        for _ in range(_ROUNDS)
    ]
    operators = [first.ns / first.events for first, *_ in rounds]
    inner = [
        max(linear.ns - operator, 0.0) / max(linear.events - 1, 1)
        for (_, linear, *_), operator in zip(rounds, operators, strict=True)
    ]
    return ProfilerCost(
        operator_ns=_range(operators),
        inner_ns=_range(inner),
        label_ns=_range([each.ns for _, _, each, _ in rounds]),
        stage_label_ns=_range([each.ns for *_, each in rounds]),
        smallest_operator_ns=percentile([each.smallest_ns for each, *_ in rounds], 0.5),
        rounds=_ROUNDS,
    )


def _range(values: list[float]) -> CostRange:
    return CostRange(percentile(values, 0.5), min(values), max(values))


@dataclass(frozen=True)
class _Added:
    """What the profiler added to one call of a function."""

    ns: float
    events: float
    """Recorded operators."""
    smallest_ns: float
    """Median recorded duration of the smallest operator; 0 if the function does not call it."""


def _added(
    bare: Callable[[], object],
    labeled: Callable[[], object],
    settings: dict[str, Any],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> _Added:
    """Return what the profiler adds to a call: the time of `labeled` under it minus that of `bare` without it."""
    from torch.profiler import ProfilerActivity, profile

    before = _timed(bare)
    with around(), profile(activities=[ProfilerActivity.CPU], **settings) as profiler:
        _timed(labeled)  # the profiler allocates its buffers
        during = _timed(labeled)
    events = profiler.profiler.kineto_results.events()
    smallest = [event.duration_ns() for event in events if event.name() == _SMALLEST][_CALLS:]
    unprofiled = min(before, _timed(bare))
    return _Added(
        max(during - unprofiled, 0.0) / _CALLS, len(events) / (2 * _CALLS), percentile(smallest, 0.5) if smallest else 0.0
    )


def _timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    for _ in range(_CALLS):
        action()
    return float(time.perf_counter_ns() - begun)
