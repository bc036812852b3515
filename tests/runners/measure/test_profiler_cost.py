"""What torch.profiler adds per event, and the labels that it is measured with."""

from contextlib import suppress
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_perf_opt.core.host_records import CostRange, ProfilerCost
from llm_perf_opt.core.stages import PART_LABEL
from llm_perf_opt.runners.measure import profiler_cost as measured
from llm_perf_opt.runners.measure.annotations import labeled_forward
from llm_perf_opt.runners.measure.profiler_cost import _Added, profiler_cost
from llm_perf_opt.traces.torch_json.trace import read_torch_trace


def ranges(cost: ProfilerCost) -> list[CostRange]:
    return [value for field in fields(cost) if isinstance(value := getattr(cost, field.name), CostRange)]


@pytest.mark.slow
def test_a_real_profile_has_a_cost_per_event() -> None:
    cost = profiler_cost({"record_shapes": True})
    assert cost is not None
    assert len(ranges(cost)) == 4
    for each in ranges(cost):
        assert 0 <= each.low_ns <= each.ns <= each.high_ns
    assert cost.operator_ns.ns > 0
    assert 0 < cost.smallest_operator_ns < 1e6
    assert cost.rounds == measured._ROUNDS


def test_python_frames_have_no_cost_per_operator() -> None:
    assert profiler_cost({"with_stack": True}) is None


def test_costs_are_divided_by_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per round: three outer operators, a linear layer of one outer and two inner ones, a component label, a stage label."""
    number = count()

    def added(*_: Any) -> _Added:
        position = next(number)
        noise = 3.0 * (position // 4)  # rounds differ
        values = [_Added(300 + noise, 3, 40 + noise), _Added(500 + noise / 3, 3, 0), _Added(70, 0, 0), _Added(900, 1, 0)]
        return values[position % 4]

    monkeypatch.setattr(measured, "_added", added)
    monkeypatch.setattr(measured, "_ROUNDS", 3)
    assert profiler_cost({}) == ProfilerCost(
        operator_ns=CostRange(101, 100, 102),
        inner_ns=CostRange(200, 200, 200),
        label_ns=CostRange(70, 70, 70),
        stage_label_ns=CostRange(900, 900, 900),
        smallest_operator_ns=43,
        rounds=3,
    )


def test_a_profiler_that_seems_to_save_time_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([900.0, 0.0, 300.0, 600.0])  # without, warm-up, with, without
    monkeypatch.setattr(measured, "_timed", lambda action: next(times))
    found = measured._added(lambda: None, lambda: None, {})
    assert (found.ns, found.smallest_ns) == (0.0, 0.0)


def test_the_fastest_of_two_bare_rounds_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([900.0, 0.0, 1200.0, 600.0])
    monkeypatch.setattr(measured, "_timed", lambda action: next(times))
    assert measured._added(lambda: None, lambda: None, {}).ns == 600 / measured._CALLS


class _Doubled(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + value


@pytest.mark.parametrize("own", [False, True])
def test_a_labeled_module_gets_its_forward_back(own: bool) -> None:
    module, value = _Doubled(), torch.ones(2)
    if own:
        module.forward = lambda value: value * 3  # type: ignore[method-assign]
    before = module.__dict__.get("forward")
    with labeled_forward(module, "part:mlp"):
        assert module.__dict__["forward"] is not before
        assert module(value).tolist() == ([3, 3] if own else [2, 2])
    assert module.__dict__.get("forward") is before
    with suppress(KeyError), labeled_forward(module, "part:mlp"):
        raise KeyError
    assert module.__dict__.get("forward") is before


def test_labels_are_read_as_ranges_around_their_operators(tmp_path: Path) -> None:
    module, value, label = _Doubled(), torch.ones(2), f"{PART_LABEL}mlp"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with labeled_forward(module, label):
            module(value)
            module(value)
        module(value)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_torch_trace(tmp_path / "trace.json")
    operators = [trace.names[name] for name in trace.operators.name]
    assert label not in operators
    assert operators.count("aten::add") == 3
    mine = [row for row, name in enumerate(trace.ranges.name) if trace.names[name] == label]
    assert len(mine) == 2
    adds = [row for row, name in enumerate(operators) if name == "aten::add"]
    for label_row, add in zip(mine, adds, strict=False):
        assert trace.ranges.start_ns[label_row] <= trace.operators.start_ns[add]
        assert trace.operators.end_ns[add] <= trace.ranges.end_ns[label_row]
