"""The search decides by logits: ties within rounding pass, changes of precision are limited, and nothing drifts."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.analysis.tuning.logits import LogitCheck
from llm_perf_opt.analysis.tuning.records import TuneResult, tune_json
from llm_perf_opt.analysis.tuning.tokens import Tried
from llm_perf_opt.cli.progress import QuietProgress
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.tune import CapturedRuns, begin, resume, tune
from llm_perf_opt.workflows.tune_folder import TuneFolder, TuneOptions
from tuning_builders import FakeRuns, fake_base, fake_logits

pytestmark = pytest.mark.usefixtures("fake_engine")


WRONG = TuneOptions(levers=("runtime.engine.wrong=1",), max_steps=1)


def recording(**logits: Any) -> Callable[[Tried, Mapping[str, Any]], Tried]:
    return lambda tried, engine: replace(tried, logits=fake_logits(engine, **logits))


def searched(
    path: Path, values: dict[str, Any], options: TuneOptions, change: Any, speed: Any = None
) -> tuple[TuneResult, TuneFolder]:
    fake_base(path, values)
    folder = begin(path, options, ["llm-perf", "tune"])
    runs = FakeRuns(folder.path, values, change=change)
    if speed is not None:
        runs.speed = speed
    try:
        return tune(folder, QuietProgress(), runs=runs, clock=runs.clock)[0], folder
    finally:
        folder.close()


def wrong_only(engine: Mapping[str, Any]) -> float:
    return 5.0 if engine.get("wrong") else 10.0


def step_of(found: TuneResult, change: str) -> Any:
    (step,) = [step for step in found.steps if step.change == (change,)]
    return step


def test_a_tie_is_kept_and_shown(tmp_path: Path, values: dict[str, Any]) -> None:
    found, folder = searched(tmp_path / "run", values, WRONG, recording(), wrong_only)
    step = step_of(found, "runtime.engine.wrong=1")
    assert (step.kept, step.same_tokens, step.ties) == (True, False, True)
    assert (
        "8 of 10 tokens are equal, 2 are ties within the rounding of bf16 (error against fp32 0.0100, before 0.0100)" in step.why
    )
    assert found.confirmed is True
    told = next(one for one in tune_json(found)["steps"] if one["change"] == "runtime.engine.wrong=1")
    assert (told["ties"], told["logits_why"]) == (True, "")
    record = json.loads(folder.result_file.read_text())["steps"]
    stored = next(one for one in record if one["change"] == "runtime.engine.wrong=1")["logits"]
    assert (stored["compared"], stored["equal"]) == (10, 8)
    assert stored["largest_margin"] == pytest.approx(0.005, rel=1e-3)
    page = folder.report_file.read_text()
    assert "Tokens and logits" in page
    assert "8 of 10 equal, 2 ties" in page


@pytest.mark.parametrize(
    ("options", "logits", "said"),
    [
        (replace(WRONG, tokens="exact"), {}, "within rounding (--tokens same)"),
        (WRONG, {"margin": 0.02}, "margin is 0.0200, more than the rounding error of the base"),
        (WRONG, {"error": 0.02}, "root mean square error"),
    ],
)
def test_what_is_more_than_a_tie_is_rejected(
    tmp_path: Path, values: dict[str, Any], options: TuneOptions, logits: dict[str, float], said: str
) -> None:
    found, _ = searched(tmp_path / "run", values, options, recording(**logits), wrong_only)
    step = step_of(found, "runtime.engine.wrong=1")
    assert (step.kept, len(step.runs)) == (False, 1)
    assert said in step.why


def test_a_lossy_change_is_limited_by_its_logits(tmp_path: Path, values: dict[str, Any]) -> None:
    """Every logit of the trial is 0.02 from that of the base."""
    first = TuneOptions(levers=("runtime.engine.bits=4",), max_steps=1)
    free, _ = searched(tmp_path / "free", values, replace(first, allow_lossy=True), recording())
    step = step_of(free, "runtime.engine.bits=4")
    assert (step.kept, step.lossy) == (True, True)
    assert isinstance(step.logits, LogitCheck)
    assert [step.logits.max_difference, step.logits.rms_difference] == pytest.approx([0.02, 0.02], rel=1e-3)
    assert step.logits.equal_to_base == 8
    within, _ = searched(tmp_path / "within", values, replace(first, max_logit_diff=0.021), recording())
    assert step_of(within, "runtime.engine.bits=4").kept, "the limit is the permission"
    beyond, _ = searched(tmp_path / "beyond", values, replace(first, max_logit_diff=0.019), recording())
    refused = step_of(beyond, "runtime.engine.bits=4")
    assert (refused.kept, len(refused.runs)) == (False, 1)
    assert "logits differ by up to 0.0200, more than --max-logit-diff 0.0190" in refused.why
    unknown, folder = searched(tmp_path / "unknown", values, replace(first, max_logit_diff=1.0), lambda tried, engine: tried)
    assert "--max-logit-diff cannot be checked" in step_of(unknown, "runtime.engine.bits=4").why
    assert "the run did not record logits" in folder.report_file.read_text()


def test_ties_do_not_add_up(tmp_path: Path, values: dict[str, Any]) -> None:
    """Each kept change adds an error of 20 % of the base's: the second one is within 1.25 × of the first, but not of the base."""

    def drifting(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        changes = len([key for key in engine if engine[key]])
        return replace(tried, logits=fake_logits(engine, error=0.01 * 1.2**changes))

    speeds = {"wrong": 0.5, "helper": 0.8}
    options = TuneOptions(levers=("runtime.engine.wrong=1", "runtime.engine.helper=1"), max_steps=2)
    found, _ = searched(
        tmp_path / "run", values, options, drifting,
        lambda engine: 10.0 * speeds["wrong"] ** bool(engine.get("wrong")) * speeds["helper"] ** bool(engine.get("helper")),
    )  # fmt: skip
    assert [(step.change, step.kept) for step in found.steps] == [
        (("runtime.engine.wrong=1",), True), (("runtime.engine.helper=1",), False),
    ]  # fmt: skip
    assert "root mean square error against fp32 is 0.0144, more than 1.25 × the 0.0100 before" in found.steps[1].why


def test_fresh_runs_pass_by_the_same_rule(tmp_path: Path, values: dict[str, Any]) -> None:
    def change(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        worse = Path(tried.path).name.startswith("confirm-best")
        return replace(tried, logits=fake_logits(engine, error=0.03 if worse else 0.01))

    found, _ = searched(tmp_path / "run", values, WRONG, change, wrong_only)
    assert len(found.kept) == 1
    assert (found.confirmed, found.best) == (False, found.base)
    assert "a fresh run of the best: the tokens differ" in found.confirmed_why


def test_a_search_of_an_earlier_version_goes_on_without_logits(tmp_path: Path, values: dict[str, Any]) -> None:
    """Its tune.json knows no limit, and its runs have no logits: other tokens are rejected as they were."""
    fake_base(tmp_path / "run", values)
    folder = begin(tmp_path / "run", WRONG, [])
    told = json.loads(folder.state_file.read_text())
    del told["options"]["max_logit_diff"]
    folder.state_file.write_text(json.dumps(told))
    folder.close()
    again = resume(tmp_path / "run", None)
    runs = FakeRuns(again.path, values, speed=wrong_only)
    found, _ = tune(again, QuietProgress(), runs=runs, clock=runs.clock)
    again.close()
    assert "the base has no logits: the run did not record logits" in step_of(found, "runtime.engine.wrong=1").why


def test_trials_are_fed_the_tokens_of_the_base(tmp_path: Path, values: dict[str, Any]) -> None:
    fake_base(tmp_path / "run", values)
    runs = CapturedRuns(tmp_path, RunReader(RunFolder(tmp_path / "run")), QuietProgress())
    assert runs._config((), False, 60.0).profiling.logits is False
    runs.logits = True
    first = runs._config((), False, 60.0).profiling
    assert (first.logits, first.logits_reference) == (True, None)
    runs.reference = "/somewhere/base"
    for profiled in (False, True):
        later = runs._config(("runtime.engine.fast=1",), profiled, 60.0).profiling
        assert (later.logits, later.logits_reference) == (True, "/somewhere/base")
    assert [TuneOptions(tokens=rule).logits for rule in ("same", "exact", "any")] == [True, False, False]
    assert TuneOptions(tokens="any", max_logit_diff=0.0).logits


@pytest.mark.parametrize("most", [-0.1, float("nan"), float("inf")])
def test_a_limit_is_a_number(tmp_path: Path, values: dict[str, Any], most: float) -> None:
    fake_base(tmp_path / "run", values)
    with pytest.raises(ConfigError, match="is not a limit"):
        begin(tmp_path / "run", TuneOptions(max_logit_diff=most), [])


def test_a_run_without_a_recording_says_so(tmp_path: Path, values: dict[str, Any]) -> None:
    from llm_perf_opt.traces.logit_file import write_no_logits

    fake_base(tmp_path / "run", values)
    run = RunReader(RunFolder(tmp_path / "run"))
    assert run.logits == Missing("the run has no logits.json")
    write_no_logits(tmp_path / "run/raw/clean", "an engine")
    assert RunReader(RunFolder(tmp_path / "run")).logits == Missing("an engine")
