"""Changes that are tried together: independent findings if the budget is short, and pairs that did not help alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import MS
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.tuning.candidates import Change, Lossy, Prediction, finding_changes
from llm_perf_opt.analysis.tuning.combinations import (
    compatible,
    independent,
    independent_changes,
    joined,
    joint_prediction,
    pairs,
)
from llm_perf_opt.analysis.tuning.goals import GOALS
from llm_perf_opt.analysis.tuning.records import TuneResult
from llm_perf_opt.analysis.tuning.tokens import Tried
from llm_perf_opt.cli.progress import QuietProgress
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.workflows.tune import begin, resume, tune
from llm_perf_opt.workflows.tune_folder import TuneOptions
from tuning_builders import FakeClock, FakeRuns, fake_base, fake_finding, names

Engine = Mapping[str, Any]
Speed = Callable[[Engine], float]


pytestmark = pytest.mark.usefixtures("fake_engine")


@pytest.fixture
def base(tmp_path: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake_base(tmp_path / "run", values)
    return tmp_path / "run"


def attention_and_products(engine: Engine) -> list[Finding]:
    """Two findings on different components, until they are applied."""
    found = [
        fake_finding("slow_products", "runtime.engine.a=1", 2.0, concerns=["products"]),
        fake_finding("slow_attention", "runtime.engine.b=1", 1.0, concerns=["attention"]),
    ]
    return [one for one in found if one.overrides[0].partition(".engine.")[2].partition("=")[0] not in engine]


def both_gain(engine: Engine) -> float:
    return 10.0 * (0.8 if engine.get("a") else 1.0) * (0.9 if engine.get("b") else 1.0)


def they_conflict(engine: Engine) -> float:
    return 11.0 if engine.get("a") and engine.get("b") else 10.0 * (0.8 if engine.get("a") else 0.9 if engine.get("b") else 1.0)


def searched(base: Path, values: Mapping[str, Any], speed: Speed, budget_s: float, **more: Any) -> tuple[TuneResult, FakeRuns]:
    options = TuneOptions(budget_s=budget_s, max_steps=more.pop("max_steps", 3), levers=more.pop("levers", ()))
    folder = begin(base, options, ["llm-perf", "tune"])
    runs = FakeRuns(folder.path, values, speed=speed, **more)
    try:
        found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    finally:
        folder.close()
    return found, runs


def tried(found: TuneResult) -> list[tuple[str, bool]]:
    return [(step.source, step.kept) for step in found.steps]


SHORT, LONG = 130.0, 1000.0
"""Seconds; a run takes ten. A step has four runs and a profiled one, and four runs confirm the result."""


def test_independent_findings_are_one_step_if_the_budget_is_short(base: Path, values: dict[str, Any]) -> None:
    found, _ = searched(base, values, both_gain, SHORT, findings=attention_and_products)
    assert tried(found)[0] == ("slow_products + slow_attention", True)
    step = found.steps[0]
    assert step.change == ("runtime.engine.a=1", "runtime.engine.b=1")
    assert step.predicted is not None
    assert step.predicted.expected_ns == pytest.approx(7 * MS, rel=0.01), "their savings add up"
    assert [step.predicted.low_ns, step.predicted.high_ns] == pytest.approx([6 * MS, 8 * MS], rel=0.01)
    assert step.measured_ns == pytest.approx(7.2 * MS, rel=0.01)
    assert found.confirmed is True
    assert found.spent_s <= SHORT


def test_with_time_for_each_they_are_tried_one_by_one(base: Path, values: dict[str, Any]) -> None:
    found, _ = searched(base, values, both_gain, LONG, findings=attention_and_products, max_steps=2)
    assert tried(found) == [("slow_products", True), ("slow_attention", True)]


def test_if_a_combination_does_not_hold_each_is_tried_alone(base: Path, values: dict[str, Any]) -> None:
    found, runs = searched(base, values, they_conflict, SHORT, findings=attention_and_products, max_steps=2)
    assert tried(found) == [("slow_products + slow_attention", False), ("slow_products", True)]
    assert found.overrides == ("runtime.engine.a=1",)
    assert len([name for name, overrides, _ in runs.made if len(overrides) > 1]) == 1, "its first run is enough"


def test_two_changes_that_conflict_are_not_both_kept(base: Path, values: dict[str, Any]) -> None:
    """Each gains alone; both together are slower than neither. The search ends at the better one."""
    found, runs = searched(base, values, they_conflict, LONG, findings=attention_and_products, max_steps=3)
    assert found.overrides == ("runtime.engine.a=1",)
    assert found.confirmed is True
    begun = [frozenset(overrides) for name, overrides, _ in runs.made if name.endswith("-1") and not name.startswith("confirm")]
    assert len(begun) == len({*begun}), "no configuration is tried twice"


def test_a_part_that_breaks_tokens_does_not_take_the_other_with_it(base: Path, values: dict[str, Any]) -> None:
    """wrong=1 alone changes the tokens."""

    def findings(engine: Engine) -> list[Finding]:
        made = attention_and_products(engine)
        return [replace_override(one, "runtime.engine.wrong=1") if one.id == "slow_products" else one for one in made]

    found, _ = searched(base, values, both_gain, SHORT, findings=findings, max_steps=3)
    assert tried(found) == [("slow_products + slow_attention", False), ("slow_products", False), ("slow_attention", True)]
    assert "tokens" in found.steps[0].why
    assert found.overrides == ("runtime.engine.b=1",)


def replace_override(finding: Finding, override: str) -> Finding:
    return fake_finding(finding.id, override, 2.0, concerns=finding.concerns)


class KilledError(BaseException):
    """What SIGKILL is to the process: nothing after it runs."""


@pytest.mark.parametrize("after", [2, 4])
def test_killed_at_any_run_a_resumed_search_decides_the_same(base: Path, values: dict[str, Any], after: int) -> None:
    """Killed within the combination; then there is time for single steps, but what was begun is finished."""
    folder = begin(base, TuneOptions(budget_s=SHORT, max_steps=1), ["llm-perf", "tune"])
    runs = FakeRuns(folder.path, values, speed=both_gain, findings=attention_and_products)
    plain = runs.measure

    def measure(*given: Any, **more: Any) -> Any:
        if len(runs.made) == after:
            raise KilledError
        return plain(*given, **more)

    runs.measure = measure  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    again = resume(base, LONG)
    more = FakeRuns(again.path, values, clock=FakeClock(2000.0), speed=both_gain, findings=attention_and_products)
    found, _ = tune(again, QuietProgress(), runs=more, clock=more.clock)
    again.close()
    assert tried(found) == [("slow_products + slow_attention", True)]
    assert not {*names(runs.made)} & {*names(more.made)}
    assert {*found.overrides} == {"runtime.engine.a=1", "runtime.engine.b=1"}


@pytest.mark.parametrize("noisy", [True, False])
def test_on_a_noisy_machine_a_finding_gets_a_second_run(base: Path, values: dict[str, Any], noisy: bool) -> None:
    """The first run of a=1 is slowed by another program; without a warning, nothing says so."""
    warning = RunWarning(WarningId.BUSY_PROCESSORS, "another program ran")

    def change(tried: Tried, engine: Engine) -> Tried:
        return replace(tried, analysis=replace(tried.analysis, warnings=(warning,) if noisy and engine.get("a") else ()))

    folder = begin(base, TuneOptions(budget_s=LONG, max_steps=1), ["llm-perf", "tune"])
    runs = FakeRuns(folder.path, values, findings=attention_and_products, change=change)
    runs.speed = lambda engine: 12.0 if names(runs.made)[-1:] == ["01-1-1"] else both_gain(engine)
    runs.noise = 0.0005
    found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    assert len(found.steps[0].runs) == (2 if noisy else 1)
    assert ("not better in its first run" in found.steps[0].why) is not noisy


# --- levers without a prediction ----------------------------------------------------------------------------------------------


def only_together(engine: Engine) -> float:
    others = 1.3 ** sum(key not in ("a", "b") for key in engine)
    return 10.0 * others * (0.6 if engine.get("a") and engine.get("b") else 1.05 if engine.get("a") or engine.get("b") else 1.0)


def test_two_levers_that_only_gain_together_are_found(base: Path, values: dict[str, Any]) -> None:
    """Each alone is 5 % slower, all others 30 %. After the nine single settings, the pair with the least loss comes first."""
    levers = ("runtime.engine.a=1", "runtime.engine.b=1")
    found, runs = searched(base, values, only_together, LONG, levers=levers, max_steps=10)
    assert {*found.overrides} == {*levers}
    (kept,) = found.kept
    assert kept.source == "runtime.engine.a + runtime.engine.b"
    assert (kept.predicted, found.confirmed) == (None, True)
    begun = [frozenset(overrides) for name, overrides, _ in runs.made if name.endswith("-1") and not name.startswith("confirm")]
    assert len(begun) == len({*begun})
    assert len(found.steps) == 10


def test_pairs_stay_within_the_budget(base: Path, values: dict[str, Any]) -> None:
    levers = ("runtime.engine.a=1", "runtime.engine.b=1")
    found, _ = searched(base, values, only_together, 150.0, levers=levers, max_steps=None)
    assert (found.kept, found.ending) == ([], "budget")
    assert found.spent_s <= 150


# --- what is independent ------------------------------------------------------------------------------------------------------


def change(*overrides: str, **more: Any) -> Change:
    given = {name: more.pop(name) for name in ("concerns", "stage") if name in more}
    return Change(overrides, overrides[0], finding=fake_finding(overrides[0], overrides[0], 1.0, **given), **more)


def test_different_stages_or_components_are_independent() -> None:
    one = change("a=1", concerns=["products"])
    assert independent(one, change("b=1", concerns=["attention"]))
    assert independent(one, change("b=1", stage="prefill"))
    assert not independent(one, change("b=1", concerns=["attention", "products"]))
    assert not independent(one, change("b=1")), "it may change any of the stage"
    assert not independent(one, change("a=2", concerns=["attention"])), "both set a"
    assert not independent(one, change("b=1", concerns=["attention"], lossy=True))
    assert not independent(one, change("b=1", stage="prefill", other_work=True))
    assert not independent(one, Change(("b=1",), "lever"))


def test_a_combination_starts_with_the_most_promising_change() -> None:
    changes = [
        change("a=1", concerns=["products"]),
        change("b=1"),
        change("c=1", concerns=["cache"]),
        change("d=1", stage="prefill"),
    ]
    together = independent_changes(changes)
    assert together is not None
    assert (together.overrides, together.source) == (("a=1", "c=1", "d=1"), "a=1 + c=1 + d=1")
    assert independent_changes(changes[:2]) is None
    assert independent_changes([]) is None


def test_pairs_are_ordered_by_what_they_gained_alone() -> None:
    alone = {
        one.key: (one, gain)
        for one, gain in ((Change(("a=1",), "a"), -0.2), (Change(("a=2",), "a2"), 0.0), (Change(("b=1",), "b"), -0.1))
    }
    assert [pair.overrides for pair in pairs(alone)] == [("a=2", "b=1"), ("a=1", "b=1")]
    both = Change(("a=2", "b=1"), "both")
    assert ("a=2", "b=1") not in [pair.overrides for pair in pairs({**alone, both.key: (both, 0.0)})][2:]
    lossy = replace(both, overrides=("c=1",), lossy=True)
    assert len(pairs({**alone, lossy.key: (lossy, 0.0)})) == 2


def test_findings_that_change_the_precision_come_last() -> None:
    findings = [
        fake_finding("four_bits", "runtime.quantization=int4", 5.0),
        fake_finding("small", "runtime.engine.a=1", 0.5),
        fake_finding("large", "runtime.engine.b=1", 1.0),
    ]
    ordered = finding_changes(findings, GOALS["tpot"], Lossy(), {})
    assert [(change.source, change.lossy) for change in ordered] == [("large", False), ("small", False), ("four_bits", True)]


def test_shared_settings_are_joined() -> None:
    one, other = Change(("cache=static", "compile=default"), "compile"), Change(("cache=static", "tuning=true"), "tuning")
    assert compatible(one, other)
    assert not compatible(one, Change(("compile=none",), "off"))
    assert joined([one, other]).overrides == ("cache=static", "compile=default", "tuning=true")


def test_joint_predictions() -> None:
    parts = [Prediction(8, 7, 9, 9), Prediction(9, 8, 10, 12)]
    assert joint_prediction(parts, 10.0) == Prediction(7, 5, 9, 9)
    assert joint_prediction([*parts, None], 10.0) is None
    assert joint_prediction([Prediction(1, 1, 2), Prediction(1, 1, 2)], 10.0) == Prediction(1, 1, 1), "no time is negative"


def test_a_search_with_a_pair_of_findings_is_resumed_as_it_was(base: Path, values: dict[str, Any]) -> None:
    """The findings fail one by one, then gain as a pair: that is no combination for a short budget."""
    found, _ = searched(base, values, only_together, 5000.0, findings=attention_and_products, max_steps=12)
    (pair,) = [step for step in found.steps if step.source == "slow_products + slow_attention"]
    assert (pair.kept, pair.predicted) == (True, None), "both predictions were wrong alone"
    again = resume(base, 5000.0)
    more = FakeRuns(again.path, values, clock=FakeClock(9000.0), speed=only_together, findings=attention_and_products)
    repeated, _ = tune(again, QuietProgress(), runs=more, clock=more.clock)
    again.close()
    assert tried(repeated) == tried(found)


@pytest.mark.parametrize("gains", [True, False])
def test_fresh_runs_that_the_budget_ends_may_speak_against_the_only_step(base: Path, values: dict[str, Any], gains: bool) -> None:
    """One of two pairs is made, and a run of the base. If the pair shows no gain, nothing is claimed."""
    folder = begin(base, TuneOptions(budget_s=120.0, max_steps=1), ["llm-perf", "tune"])
    runs = FakeRuns(folder.path, values, speed=both_gain, findings=attention_and_products)
    plain = runs.measure

    def measure(overrides: tuple[str, ...], name: str, **more: Any) -> Any:
        runs.clock.now += 25 if name.startswith("confirm-base") else 0
        if name.startswith("confirm") and not gains:
            runs.speed = lambda engine: 10.5 if engine else 10.0
        return plain(overrides, name, **more)

    runs.measure = measure  # type: ignore[method-assign]
    found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    assert [name for name in names(runs.made) if name.startswith("confirm")][1:] == ["confirm-best-1", "confirm-base-2"]
    assert "the budget ended after 3 of 4 fresh runs" in found.confirmed_why
    assert found.confirmed is (True if gains else None)
    assert found.confirmation == (found.steps[0].decision if gains else None)
    assert ("in those that were made, tpot went from" in found.confirmed_why) is not gains
