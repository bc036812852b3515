"""The search: on a fake runtime whose levers have known effects, it finds the optimum within its limits."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders import MS, default_config, iteration, manifest
from llm_perf_opt.analysis.metrics import metrics
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.tuning.calibration import CalibrationPoint
from llm_perf_opt.analysis.tuning.goals import GOALS, parse_budget
from llm_perf_opt.analysis.tuning.outcomes import distance_of
from llm_perf_opt.analysis.tuning.records import TuneResult, tune_json
from llm_perf_opt.analysis.tuning.tokens import Tried
from llm_perf_opt.cli.progress import QuietProgress
from llm_perf_opt.config.composition import compose, config_to_yaml
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.inside import OutsideError
from llm_perf_opt.core.records import Missing, PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.units import duration
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.report.tune import _cards, final_command
from llm_perf_opt.workflows.calibration import add_calibration, read_calibration
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.tune import CapturedRuns, begin, measure_base, resume, tune
from llm_perf_opt.workflows.tune_folder import MadeRun, TuneFolder, TuneOptions
from llm_perf_opt.workflows.tune_options import check_for_base
from llm_perf_opt.workflows.tune_runs import Recorder, configuration
from tuning_builders import FakeRuns, fake_base, fake_finding, names
from whole_runs import whole_run

pytestmark = pytest.mark.usefixtures("fake_engine")


Base = tuple[Path, dict[str, Any]]
Searched = tuple[TuneResult, LlmPerfError | None, FakeRuns, TuneFolder]


@pytest.fixture
def base(tmp_path: Path, values: dict[str, Any]) -> Base:
    return tmp_path / "run", fake_base(tmp_path / "run", values)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> Searched:
    """A search with the defaults, to its end."""
    path = tmp_path_factory.mktemp("whole") / "run"
    return searched((path, fake_base(path, values)))


def searched(base: Base, options: TuneOptions | None = None, **fake: Any) -> Searched:
    folder = begin(base[0], options or TuneOptions(), ["llm-perf", "tune"])
    runs = FakeRuns(folder.path, base[1], **fake)
    try:
        found, error = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    finally:
        folder.close()
    return found, error, runs, folder


def steps(found: TuneResult, kept: bool) -> list[str]:
    return [" ".join(step.change) for step in found.steps if step.kept is kept]


def test_it_finds_the_optimum(whole: Searched) -> None:
    """fast=2, then helper=1 and memory=1 on top of it: 10 × 0.6 × 0.9 × 0.7 = 3.78 ms."""
    found, error, runs, folder = whole
    assert error is None
    assert found.ending == "nothing left"
    assert {*found.overrides} == {"runtime.engine.fast=2", "runtime.engine.helper=1", "runtime.engine.memory=1"}
    assert found.confirmed is True
    decision = found.confirmation
    assert decision is not None
    assert decision.after == pytest.approx(3.78 * MS, rel=0.01)
    assert decision.before == pytest.approx(10 * MS, rel=0.01)
    assert folder.path.name == "run-tune"
    assert Path(found.base) == folder.path.with_name("run")
    assert Path(found.best).parent == folder.path
    tried = [overrides for name, overrides, _ in runs.made if name.endswith("-1") and not name.startswith("confirm")]
    assert len(tried) == len({frozenset(one) for one in tried}), "no configuration is tried twice"


FAST = fake_finding("fast_path", "runtime.engine.fast=2", 3.5)
HELPER = fake_finding("helper", "runtime.engine.helper=1", 0.5)


def found_in(engine: Mapping[str, Any]) -> list[Finding]:
    """The helper helps only on the fast path, and only there it is found; the slow path is a wrong prediction."""
    slow = fake_finding("slow_path", "runtime.engine.slow=1", 6.0, confidence="low")
    prefill = fake_finding("prefill", "runtime.engine.other=1", 40.0, stage="prefill")
    words = fake_finding("words", "runtime.engine.words=1", 9.0, overrides=[])
    return [prefill, words, HELPER] if engine.get("fast") else [prefill, words, slow, FAST]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_findings_come_first_by_saving_and_confidence_and_those_of_the_new_run_next(base: Base, cache: Path) -> None:
    """3.5 ms × high is more than 6 ms × low; the helper is found only in the profiled run of the kept change."""
    found, _, runs, folder = searched(base, TuneOptions(max_steps=3), findings=found_in)
    assert [(step.source, step.kept) for step in found.steps] == [("fast_path", True), ("helper", True), ("fast path", False)]
    first, second, _ = found.steps
    assert first.predicted is not None
    assert [first.predicted.expected_ns, first.predicted.low_ns, first.predicted.high_ns] == pytest.approx(
        [6.5 * MS, 6 * MS, 7 * MS], rel=0.01
    )
    assert first.measured_ns == pytest.approx(6 * MS, rel=0.01)
    assert second.predicted is not None
    assert second.predicted.expected_ns == pytest.approx(5.5 * MS, rel=0.01)
    assert [name for name, _, profiled in runs.made if profiled] == ["01-2-profile", "02-1-profile"]
    assert first.run.endswith("01-2-profile")
    told = tune_json(found)["steps"][0]
    assert told["predicted_ns"] == first.predicted.expected_ns
    kept, _ = read_calibration("a fake")
    assert [point.finding for point in kept] == ["fast_path", "helper"]
    assert [point.ratio for point in kept] == pytest.approx([4 / 3.5, 0.6 / 0.5], rel=0.1)
    assert found.calibration == kept
    page = folder.report_file.read_text()
    assert "fewer than 9 trials" in page


def test_a_trial_is_learned_from_all_of_its_runs(base: Base, cache: Path) -> None:
    """Of three runs per side, the first before the change is slow and the first after it is fast: the medians are not."""

    def change(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        factor = {"base": 1.5, "01-2-1": 0.5}.get(Path(tried.path).name, 1.0)
        return at_speed(tried, factor)

    searched(base, TuneOptions(max_steps=1, runs=3), findings=found_in, change=change)
    ((point,), _) = read_calibration("a fake")
    assert [point.before_ns, point.measured_ns] == pytest.approx([10 * MS, 6 * MS], rel=0.01)


@pytest.mark.parametrize("spoiled", ["01-2-before-2", "01-2-2"])
def test_nothing_is_learned_from_a_busy_machine_or_an_invalid_run(base: Base, cache: Path, spoiled: str) -> None:
    busy = RunWarning(WarningId.CONTENDED_PROCESSORS, "Threads waited for a processor.")

    def noisy(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        return at_speed(tried, 1.0, busy) if Path(tried.path).name == spoiled else tried

    def failed(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        cut_off = manifest(passes=(PassRecord("clean", "failed", ("python",), 1, 1.0),), created=tried.analysis.manifest.created)
        return replace(tried, analysis=replace(tried.analysis, manifest=cut_off)) if Path(tried.path).name == spoiled else tried

    for change in (noisy, failed):
        found, *_ = searched(base, TuneOptions(max_steps=1), findings=found_in, change=change)
        assert found.steps[0].source == "fast_path"
        assert len(found.steps[0].runs) == 2
        assert (found.calibration, read_calibration("a fake")[0]) == ((), ())


def test_earlier_trials_give_order_and_interval(base: Base, cache: Path) -> None:
    """Nine trials of the slow path saved nothing, nine of the fast path 0.9 to 1.1 of what was predicted."""
    at = {"device": "a fake", "model": "tiny", "made": "2026"}
    points = [
        CalibrationPoint(id, run=f"{id}-{number}", before_ns=10_000, predicted_ns=6_000, measured_ns=measured, **at)
        for number in range(9)
        for id, measured in (("slow_path", 10_000), ("fast_path", 10_000 - round(4_000 * (0.9 + 0.025 * number))))
    ]
    add_calibration(points)
    options = TuneOptions(max_steps=1)
    folder = begin(base[0], options, [])
    folder.write_state(replace(folder.read(), calibration=read_calibration("a fake")[0]))
    runs = FakeRuns(folder.path, base[1], findings=found_in)
    found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    predicted = found.steps[0].predicted
    assert found.steps[0].source == "fast_path"
    assert predicted is not None
    assert predicted.trials == 9
    assert [predicted.low_ns, predicted.high_ns] == pytest.approx([(10 - 3.5 * 1.1) * MS, (10 - 3.5 * 0.9) * MS], rel=0.01)
    assert "9 trials" in folder.report_file.read_text()


def at_speed(tried: Tried, factor: float, *warnings: RunWarning) -> Tried:
    """The same run with other times and with these warnings."""
    timings = tried.timings
    assert not isinstance(timings, Missing)
    changed = [replace(one, steps_ns=tuple(round(ns * factor) for ns in one.steps_ns)) for one in timings.iterations]
    timings = replace(timings, iterations=tuple(changed))
    return replace(tried, analysis=replace(tried.analysis, timings=timings, metrics=metrics(timings), warnings=warnings))


def slow_then(tried: Tried, engine: Mapping[str, Any]) -> Tried:
    """The given run was three times slower than the runs of the search, and has a warning of its own."""
    name = Path(tried.path).name
    if name == "run":
        tried = at_speed(tried, 3.0, RunWarning(WarningId.THROTTLED, "The clock was low then."))
        return replace(tried, analysis=replace(tried.analysis, efficiency=efficiency_of(6.0)))
    return at_speed(tried, 1.0, RunWarning(WarningId.BUSY_PROCESSORS, "The machine is busy now.")) if name == "base" else tried


def efficiency_of(times: float) -> Any:
    """A decode that takes so many times its roofline time, which is 0.5 s."""
    distance = SimpleNamespace(times=times, roofline=SimpleNamespace(seconds=0.5))
    return SimpleNamespace(stages=(SimpleNamespace(stage="decode", distance=distance),))


def test_a_base_that_was_measured_again_is_shown_with_its_new_time_and_warnings(base: Base) -> None:
    found, _, _, folder = searched(base, TuneOptions(max_steps=1), change=slow_then)
    assert found.base_value == pytest.approx(10 * MS, rel=0.01)
    assert found.recorded_value == pytest.approx(30 * MS, rel=0.01)
    assert found.base_distance is not None
    assert found.base_distance.times == pytest.approx(2.0, rel=0.01)
    assert "The machine is busy now." in found.notes
    assert "The clock was low then." not in found.notes
    (card, *_) = _cards(found).cards
    assert (card.name, card.detail) == ("Base, measured again", f"tpot; the run recorded {duration(found.recorded_value or 0)}")
    told = json.loads(folder.result_file.read_text())
    assert (told["base_value"], told["recorded_value"]) == (found.base_value, found.recorded_value)


def test_the_value_of_the_base_is_that_of_the_runs_that_the_claim_compares(base: Base) -> None:
    """The base takes 10 ms, 10.5 ms next to the change, and 12 ms in the two fresh runs."""

    def change(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        name = Path(tried.path).name
        return at_speed(tried, 1.2 if "confirm-base" in name else 1.05 if "before" in name else 1.0)

    found, *_ = searched(base, TuneOptions(max_steps=1), change=change)
    assert found.confirmed is True
    assert found.base_value == pytest.approx(12 * MS, rel=0.005)
    assert found.confirmation is not None
    assert found.base_value == found.confirmation.before


def test_a_base_that_was_measured_for_the_search_is_called_base(base: Base) -> None:
    folder = begin(base[0], TuneOptions(max_steps=1), [], fresh=True)
    runs = FakeRuns(folder.path, base[1], change=slow_then)
    found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    (card, *_) = _cards(found).cards
    assert (card.name, card.detail, found.recorded_value) == ("Base", "tpot", None)
    assert "The clock was low then." in found.notes


def test_all_runs_of_a_search_are_compared_with_the_peaks_of_its_base(tmp_path: Path) -> None:
    """Unprofiled runs measure none: without those of the base, the datasheet's would make a faster step look further away."""
    base, trial = (whole_run(tmp_path / name, traces=False) for name in ("base", "trial"))
    runs = CapturedRuns(tmp_path, RunReader(base), QuietProgress())
    with_peaks = distance_of(runs.read(trial.path, profiled=False), GOALS["tpot"])
    trial.ceilings_file.unlink()
    passes = tuple(one for one in trial.manifest().passes if one.name != "ceilings")
    trial.write_manifest(replace(trial.manifest(), passes=passes))
    assert with_peaks is not None
    assert distance_of(runs.read(trial.path, profiled=False), GOALS["tpot"]) == with_peaks
    for run, threads in ((base, 1), (trial, 2)):  # a processor's peaks depend on the threads
        config = default_config()
        run.config_file.write_text(config_to_yaml(replace(config, hardware=replace(config.hardware, threads=threads))))
    other = CapturedRuns(tmp_path, RunReader(base), QuietProgress())
    assert distance_of(other.read(trial.path, profiled=False), GOALS["tpot"]) != with_peaks
    trial.config_file.write_bytes(base.config_file.read_bytes())
    assert distance_of(other.read(trial.path, profiled=False), GOALS["tpot"]) == with_peaks
    base.ceilings_file.unlink()
    own = CapturedRuns(tmp_path, RunReader(base), QuietProgress())
    assert distance_of(own.read(trial.path, profiled=False), GOALS["tpot"]) != with_peaks


def test_a_new_configuration_is_expected_to_compile_as_long_as_the_current_one_and_later_for_a_part_of_that(base: Base) -> None:
    def compiling(tried: Tried, _engine: Mapping[str, Any]) -> Tried:
        assert not isinstance(tried.analysis.timings, Missing)
        return replace(tried, analysis=replace(tried.analysis, timings=replace(tried.analysis.timings, warmup=(slow,))))

    path, values = base
    folder = begin(path, TuneOptions(), [])
    runs = FakeRuns(folder.path, values, seconds=60.0, change=compiling)
    slow = iteration(50 * MS, [10_000 * MS] * 4)
    recorder, wanted = Recorder(folder, runs, runs.clock), configuration(values, ())
    first = recorder.run(wanted, "first")
    folder.close()
    assert not isinstance(first, Missing)
    recorder.expect(wanted, 70.0, 5.0, first.timings)  # as its run before the search took; the shorter one counts
    assert recorder.expected_s(wanted) == pytest.approx(60 - 0.7 * 40, rel=0.02)
    other = configuration(values, ("runtime.engine.fast=1",))
    assert recorder.expected_s(other) == recorder.expected_s(wanted)
    assert recorder.compiling_s(wanted) == 0.0
    assert recorder.compiling_s(other) == pytest.approx(0.7 * 40, rel=0.02)
    recorder.expect(other, 70.0, 5.0, first.timings)
    assert recorder.expected_s(other) == pytest.approx(70 - 0.7 * 40, rel=0.02)


def test_each_step_is_compared_with_the_configuration_before_it(whole: Searched) -> None:
    found = whole[0]
    kept = found.kept
    for before, after in pairwise(kept):
        assert after.before_ns == pytest.approx(before.measured_ns, rel=0.01)
    assert kept[0].before_ns == pytest.approx(10 * MS, rel=0.01)
    shares = [step.decision.change for step in kept if step.decision and step.decision.change is not None]
    gain = found.confirmation.change if found.confirmation and found.confirmation.change else 0.0
    product = 1.0
    for share in shares:
        product *= 1 + share
    assert product - 1 == pytest.approx(gain, abs=0.01)


def test_a_lever_that_breaks_tokens_is_rejected(whole: Searched, base: Base) -> None:
    found = whole[0]
    (wrong,) = [step for step in found.steps if step.change == ("runtime.engine.wrong=1",)]
    assert (wrong.kept, wrong.same_tokens) == (False, False)
    assert "8 of 10 tokens" in wrong.why
    assert len(wrong.runs) == 1, "it is not run again"
    allowed, *_ = searched(base, TuneOptions(tokens="any", max_steps=4))
    assert "runtime.engine.wrong=1" in steps(allowed, kept=True)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda timings: replace(timings, tokens_sha256=""), "did not record a checksum"),
        (lambda timings: replace(timings, tokens_repeat=False), "repeats of the trial produced different tokens"),
        (lambda timings: replace(timings, workload=replace(timings.workload, batch_size=5)), "different requests"),
    ],
)
def test_tokens_that_cannot_be_compared_do_not_pass(base: Base, spoil: Any, why: str) -> None:
    def change(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        return replace(tried, analysis=replace(tried.analysis, timings=spoil(tried.timings))) if engine.get("fast") else tried

    found, *_ = searched(base, TuneOptions(max_steps=1), change=change)
    assert (found.steps[0].kept, why in found.steps[0].why) == (False, True)
    assert found.best == found.base


def test_lossy_changes_need_permission_and_report_their_tokens(whole: Searched, base: Base) -> None:
    found = whole[0]
    assert [(one.change, "--allow-lossy" in one.why) for one in found.not_tried] == [(("runtime.engine.bits=4",), True)]
    lossy, *_ = searched(base, TuneOptions(allow_lossy=True, max_steps=8))
    (bits,) = [step for step in lossy.steps if step.source == "precision"]
    assert (bits.kept, bits.lossy, bits.same_tokens) == (True, True, False)
    assert bits.agreement is not None
    assert (bits.agreement.equal, bits.agreement.compared, bits.agreement.first_difference) == (8, 10, 4)
    assert "runtime.engine.wrong=1" not in lossy.overrides


def test_a_change_that_fails_is_recorded_and_undone(whole: Searched) -> None:
    found = whole[0]
    (broken,) = [step for step in found.steps if step.source == "broken"]
    assert (broken.kept, broken.why, broken.measured_ns) == (False, "it failed: the engine does not start", None)
    slow = [step for step in found.steps if step.source == "slow path"]
    assert all("not better in its first run" in step.why for step in slow)
    assert len(slow) == 2, "once more, on top of what was kept"


def test_constraints_are_respected(base: Base) -> None:
    found, *_ = searched(base, TuneOptions(constraints=("memory<15GB", "ttft<60ms"), max_steps=7))
    assert "runtime.engine.memory=1" not in found.overrides
    (memory,) = [step for step in found.steps if step.source == "greedy for memory"]
    assert "breaks the constraint memory<15GB: memory is 20.00 GB" in memory.why
    assert [(line.text, line.met) for line in found.constraints] == [("memory<15GB", True), ("ttft<60ms", True)]


def test_a_constraint_that_the_base_breaks_comes_first(base: Base) -> None:
    """tpot < 7 ms is reached with fast=2; the objective, ttft, never changes."""
    found, *_ = searched(base, TuneOptions(objective="ttft", constraints=("tpot<7ms",), max_steps=3))
    assert [step.goal for step in found.kept] == ["tpot"] * len(found.kept)
    assert "runtime.engine.fast=2" in found.overrides
    assert found.constraints_met
    assert found.confirmed is True
    unmet, *_ = searched(base, TuneOptions(constraints=("tpot<1ms",), max_steps=1))
    assert not unmet.constraints_met


def test_the_budget_is_kept_and_leaves_time_to_confirm(base: Base) -> None:
    found, _, runs, _ = searched(base, TuneOptions(budget_s=130.0))
    assert found.ending == "budget"
    assert found.spent_s <= 130
    assert found.confirmed is True, "four runs were reserved for it"
    assert steps(found, kept=True) == ["runtime.engine.fast=1", "runtime.engine.fast=2"]
    assert [name for name in names(runs.made) if name.startswith("confirm")] == [
        "confirm-base-1", "confirm-best-1", "confirm-base-2", "confirm-best-2",
    ]  # fmt: skip


def test_one_change_in_a_short_budget_is_judged_by_its_own_runs(base: Base) -> None:
    """Base and one step take 50 s, a confirmation 40 s more. With one change tried, nothing was chosen."""
    found, _, runs, folder = searched(base, TuneOptions(budget_s=65.0))
    assert (found.confirmed, found.ending) == (True, "budget")
    assert found.confirmation == found.steps[0].decision
    assert "only one change was tried" in found.confirmed_why
    assert not [name for name in names(runs.made) if name.startswith("confirm")]
    assert "the budget does not suffice for the 4 fresh runs; `llm-perf tune" in found.confirmed_why
    assert "budget ended" not in found.confirmed_why, "15 s are left"
    page = folder.report_file.read_text()
    assert "Best, in the runs of its step" in page
    (sentence,) = [line for line in page.splitlines() if "only one change was tried, so" in line]
    assert sentence.count("claim") == 1
    assert found.spent_s <= 65


def cut_off(runs: FakeRuns, which: Callable[[str], bool]) -> None:
    """Make the runs with these names take longer than the budget allows."""
    plain = runs.measure

    def measure(overrides: tuple[str, ...], name: str, *, profiled: bool, limit_s: float) -> Any:
        if which(name):
            runs.clock.now += limit_s + 1.0
            return None, CaptureError("the pass took too long")
        return plain(overrides, name, profiled=profiled, limit_s=limit_s)

    runs.measure = measure  # type: ignore[method-assign]


@pytest.mark.parametrize("made", [1, 3])
def test_one_change_stays_the_claim_if_the_budget_ends_during_the_fresh_runs(base: Base, made: int) -> None:
    """One of the fresh runs takes longer than the budget allows. The rest of them is made by the command that is shown."""
    folder = begin(base[0], TuneOptions(budget_s=100.0, max_steps=1), [])
    runs = FakeRuns(folder.path, base[1])
    cut_off(runs, lambda _: sum(one.startswith("confirm") for one in names(runs.made)) == made)
    found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    assert found.confirmed is True
    assert found.confirmation == found.steps[0].decision
    assert json.loads(folder.result_file.read_text())["confirmed"] is True
    assert f"the budget ended after {made} of 4 fresh runs" in found.confirmed_why
    page = folder.report_file.read_text()
    assert "Best, in the runs of its step" in page
    assert f"{made} of 4 fresh runs" in page
    assert "is not confirmed" not in page
    words = found.confirmed_why.split("`")[1].split()
    assert words[:5] == ["llm-perf", "tune", str(base[0]), "--resume", "--budget"]
    again = resume(base[0], parse_budget(words[5]))
    more = FakeRuns(again.path, base[1], clock=runs.clock)
    later, _ = tune(again, QuietProgress(), runs=more, clock=more.clock)
    again.close()
    assert len(more.made) == 4 - made
    assert later.confirmed is True
    assert later.confirmation != later.steps[0].decision
    assert "fresh runs;" not in later.confirmed_why


def test_several_changes_without_all_fresh_runs_are_not_confirmed(base: Base) -> None:
    folder = begin(base[0], TuneOptions(budget_s=160.0, max_steps=2), [])
    runs = FakeRuns(folder.path, base[1])
    cut_off(runs, lambda name: name == "confirm-best-2")
    found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    assert (len(found.kept), found.confirmed, found.confirmation) == (2, None, None)
    assert "The gain is not confirmed by fresh runs: the budget ended after 3 of 4 fresh runs; " in folder.report_file.read_text()


def test_the_page_begins_with_the_result_in_words(whole: Searched, base: Base) -> None:
    page = whole[3].report_file.read_text()
    assert "tpot went from" in page
    assert "with 3 changes: runtime.engine.fast=1" not in page, "only what was kept, in its order"
    nothing, _, _, folder = searched(base, TuneOptions(budget_s=25.0))
    assert (nothing.steps, nothing.ending) == ((), "budget")
    page = folder.report_file.read_text()
    assert "No change was tried: no further change fits into the budget (--budget). A comparison needs 2 runs" in page
    assert "No change was kept." in page
    assert "Nothing was tried." in page


def costly(runs: FakeRuns, seconds: Mapping[str, float]) -> None:
    """Make runs of some changes take longer; one that takes longer than it may is ended, as a pass is."""
    plain = runs.measure

    def measure(
        overrides: tuple[str, ...], name: str, *, profiled: bool, limit_s: float
    ) -> tuple[Path | None, LlmPerfError | None]:
        more = sum(cost for change, cost in seconds.items() if change in overrides)
        if runs.seconds + more > limit_s:
            runs.clock.now += limit_s + 1.0
            return None, CaptureError("the pass took too long")
        runs.clock.now += more
        return plain(overrides, name, profiled=profiled, limit_s=limit_s)

    runs.measure = measure  # type: ignore[method-assign]


def test_a_change_that_does_not_fit_does_not_end_the_search(base: Base) -> None:
    """A run of fast=1 takes 100 s: it cannot be judged in the budget, fast=2 can."""
    folder = begin(base[0], TuneOptions(budget_s=200.0), [])
    runs = FakeRuns(folder.path, base[1])
    costly(runs, {"runtime.engine.fast=1": 90.0})
    found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    assert [(step.change[0], step.kept) for step in found.steps[:2]] == [
        ("runtime.engine.fast=1", False), ("runtime.engine.fast=2", True),
    ]  # fmt: skip
    assert "the budget ended before the change could be judged" in found.steps[0].why
    assert (found.ending, found.confirmed) == ("budget", True)
    assert found.spent_s <= 200
    assert {one.change for one in found.not_tried if "--budget" in one.why} >= {("runtime.engine.memory=1",)}


def test_a_run_that_the_budget_ended_is_made_again_with_a_larger_one(base: Base) -> None:
    folder = begin(base[0], TuneOptions(budget_s=100.0, max_steps=1), [])
    runs = FakeRuns(folder.path, base[1])
    costly(runs, {"runtime.engine.fast=1": 200.0})
    found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    assert found.kept == []
    assert "runtime.engine.fast=1" in [one.change[0] for one in found.not_tried]
    assert not any(made.why for made in folder.read().runs), "it did not fail"
    folder.close()
    again = resume(base[0], 1000.0)
    more = FakeRuns(again.path, base[1], clock=runs.clock)
    later, _ = tune(again, QuietProgress(), runs=more, clock=more.clock)
    again.close()
    assert [(step.change[0], step.kept) for step in later.steps] == [("runtime.engine.fast=1", True)]


def test_runs_of_a_confirmation_decide_no_step_of_a_resumed_search(base: Base) -> None:
    """With more budget the search goes on, and another best is confirmed by runs of its own."""
    first, _, runs, _ = searched(base, TuneOptions(budget_s=110.0))
    assert (first.ending, first.confirmed) == ("budget", True)
    again = resume(base[0], 1000.0)
    more = FakeRuns(again.path, base[1], clock=runs.clock)
    later, _ = tune(again, QuietProgress(), runs=more, clock=more.clock)
    again.close()
    used = [Path(run).name for step in later.steps for run in (*step.runs, *step.against)]
    assert later.overrides != first.overrides
    assert not [name for name in used if name.startswith("confirm")]
    assert [name for name in names(more.made) if name.startswith("confirm")] == [
        "confirm-base-1", "confirm-best-1", "confirm-base-2", "confirm-best-2",
    ]  # fmt: skip


def test_fresh_runs_with_other_tokens_confirm_nothing(base: Base) -> None:
    def change(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        if not Path(tried.path).name.startswith("confirm-best") or isinstance(tried.timings, Missing):
            return tried
        return replace(tried, analysis=replace(tried.analysis, timings=replace(tried.timings, tokens_sha256="9" * 64)))

    found, *_ = searched(base, TuneOptions(max_steps=1), change=change)
    assert len(found.kept) == 1
    assert (found.confirmed, found.best) == (False, found.base)
    assert "a fresh run of the best: the tokens differ" in found.confirmed_why


def test_a_constraint_may_cost_some_of_the_objective(base: Base) -> None:
    """slow=1 needs half of the memory, which the base has too much of; helper=1 wins back a part of the time that it costs."""

    def change(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        timings = tried.timings
        assert not isinstance(timings, Missing)
        memory = replace(timings.memory, reserved_bytes=(5 if engine.get("slow") else 10) * 10**9)
        return replace(tried, analysis=replace(tried.analysis, timings=replace(timings, memory=memory)))

    found, _, _, folder = searched(
        base, TuneOptions(constraints=("memory<8GB",), max_steps=5), change=change,
        speed=lambda engine: 10.0 * (1.3 if engine.get("slow") else 1.0) * (0.9 if engine.get("helper") else 1.0),
    )  # fmt: skip
    assert [(step.change[0], step.goal) for step in found.kept] == [
        ("runtime.engine.slow=1", "memory"), ("runtime.engine.helper=1", "tpot"),
    ]  # fmt: skip
    assert (found.confirmed, found.constraints_met) == (True, True)
    assert found.confirmation is not None
    assert found.confirmation.goal == "memory"
    assert "memory; base 10.00 GB" in folder.report_file.read_text()


def test_levers_of_the_user_that_change_the_precision_need_permission(base: Base) -> None:
    keys = ("runtime.engine.kv_cache_dtype", "runtime.engine.quantization", "model.dtype")
    found, *_ = searched(base, TuneOptions(levers=tuple(f"{key}=fp16" for key in keys), max_steps=1))
    refused = {one.change for one in found.not_tried if "--allow-lossy" in one.why}
    assert refused >= {(f"{key}=fp16",) for key in keys}


def test_a_search_with_a_link_that_leads_out_of_it_is_not_resumed(base: Base, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "run"
    fake_base(elsewhere, base[1])
    folder = begin(base[0], TuneOptions(), [])
    folder.close()
    (folder.path / "000").symlink_to(elsewhere)
    for named in (base[0], folder.path):
        with pytest.raises(OutsideError):
            resume(named, None)
    (folder.path / "000").unlink()
    folder.path.rename(tmp_path / "elsewhere" / "search")
    folder.path.symlink_to(tmp_path / "elsewhere" / "search")
    with pytest.raises(ConfigError, match="no search"):
        resume(base[0], None)


def test_a_run_outside_the_search_is_not_read(base: Base) -> None:
    folder = begin(base[0], TuneOptions(), [])
    folder.write_state(replace(folder.read(), runs=(MadeRun("key", "..", 1.0),)))
    folder.close()
    with pytest.raises(ParseError, match="names a run outside the search"):
        resume(base[0], None).read()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["llm-perf", "run", "model=tiny", "a.b=1"], ["llm-perf", "run", "a.b=2", "model=tiny"]),
        (["llm-perf", "run", "-m", "model=tiny,small"], []),
        (["llm-perf", "run", "--point", "sw", "0"], []),
        (["python", "-m", "mine"], []),
    ],
)
def test_no_command_is_invented(command: list[str], expected: list[str]) -> None:
    assert final_command(command, ["a.b=2"]) == expected
    assert final_command(command, []) == (command if expected else [])


def test_runs_of_a_decision_alternate(base: Base) -> None:
    _, _, runs, _ = searched(base, TuneOptions(max_steps=1, runs=3))
    assert names(runs.made)[:6] == ["base", "01-1-1", "01-1-before-2", "01-1-2", "01-1-before-3", "01-1-3"]


def test_a_gain_that_fresh_runs_do_not_show_is_not_claimed(base: Base) -> None:
    """The machine is faster only while the steps are decided."""

    def change(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        return tried

    folder = begin(base[0], TuneOptions(max_steps=1), ["llm-perf", "tune"])
    runs = FakeRuns(folder.path, base[1], change=change)
    real = runs.speed
    runs.speed = lambda engine: 10.0 if any(name.startswith("confirm") for name in names(runs.made)) else real(engine)
    found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    assert (found.confirmed, found.best, found.overrides) == (False, found.base, ())
    assert len(found.kept) == 1


def test_a_drift_is_no_gain(base: Base) -> None:
    """Every repeat is faster than the one before, whatever the setting: what `compare` would not call faster is not kept."""
    folder = begin(base[0], TuneOptions(max_steps=1, runs=1), ["llm-perf", "tune"])
    runs = FakeRuns(folder.path, base[1], speed=lambda engine: 10.0)

    def drifting(tried: Tried, engine: Mapping[str, Any]) -> Tried:
        timings = tried.timings
        assert not isinstance(timings, Missing)
        begun = timings.iterations[0].started_ns / 1e9
        faster = [
            replace(one, steps_ns=tuple(round(ns * (1 - 0.06 * (begun - 1010) / 10 - 0.006 * number)) for ns in one.steps_ns))
            for number, one in enumerate(timings.iterations)
        ]
        changed = replace(timings, iterations=tuple(faster))
        return replace(tried, analysis=replace(tried.analysis, timings=changed, metrics=metrics(changed)))

    runs.change = drifting
    found, _ = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()
    assert found.steps[0].kept is False
    assert "not distinguishable" in found.steps[0].why


def test_interrupted_it_keeps_the_best_so_far_and_resumes(whole: Searched, base: Base) -> None:
    found, error, runs, _ = searched(base, stop_at="03-1-1")
    assert isinstance(error, Interrupted)
    assert "--resume" in error.remedy
    assert found.ending == "interrupted"
    assert found.kept
    assert found.best != found.base
    assert found.confirmed is None
    made = len(runs.made)
    again = resume(base[0], None)
    more = FakeRuns(again.path, base[1], clock=runs.clock)
    later, _ = tune(again, QuietProgress(), runs=more, clock=more.clock)
    again.close()
    plain, _, every, _ = whole
    assert later.overrides == plain.overrides
    assert [step.change for step in later.steps] == [step.change for step in plain.steps]
    assert made + len(more.made) == len(every.made) + 1, "nothing is measured twice, but the machine may have changed since then"
    assert names(more.made)[:2] == ["03-1-before-1", "03-1-1"]
    assert Path(later.steps[2].against[0]).name == "03-1-before-1"
    assert later.spent_s == pytest.approx(10.0 * (len(every.made) + 1))


def test_a_budget_that_was_already_spent_is_refused(base: Base) -> None:
    found, *_ = searched(base, TuneOptions(max_steps=1))
    for budget_s in (5.0, found.spent_s):
        with pytest.raises(ConfigError, match=f"more than {duration(found.spent_s * 1e9)} is needed"):
            resume(base[0], budget_s)
    again = resume(base[0], found.spent_s + 1)
    assert again.read().options.budget_s == found.spent_s + 1
    again.close()


@pytest.mark.parametrize(("seconds", "budget_s"), [(None, 1.0), (12.3, 1.0), (12.3, 12.0)])
def test_a_budget_that_is_too_short_for_the_base_is_refused_before_the_search_has_a_folder(
    base: Base, seconds: float | None, budget_s: float
) -> None:
    RunFolder(base[0]).write_manifest(manifest(passes=(PassRecord("clean", "complete", ("python",), 0, seconds),)))
    with pytest.raises(ConfigError, match="is too short to measure the base"):
        begin(base[0], TuneOptions(budget_s=budget_s), [])
    assert [path.name for path in base[0].parent.iterdir()] == ["run"]
    begin(base[0], TuneOptions(budget_s=budget_s), [], fresh=True).close()


def test_only_one_process_continues_a_search(base: Base) -> None:
    folder = begin(base[0], TuneOptions(), ["llm-perf", "tune"])
    with pytest.raises(ResourceError, match="in use by another process"):
        resume(base[0], None)
    folder.close()


def test_the_json_and_the_pages(base: Base) -> None:
    found, _, _, folder = searched(base, TuneOptions(constraints=("memory<30GB",), max_steps=7))
    told = json.loads(folder.result_file.read_text())
    assert [*told][:4] == ["base", "best", "objective", "steps"]
    assert [*told["steps"][0]][:5] == ["change", "predicted_ns", "measured_ns", "kept", "why"]
    assert [*tune_json(found)] == [*told]
    page = folder.report_file.read_text()
    for text in ("runtime.engine.fast=2", "the engine does not start", "98 % interval", "staircase.svg"):
        assert text in page
    assert "<svg" in folder.image_file.read_text()
    assert "memory&lt;30GB" in folder.page_file.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"objective": "speed"}, "unknown objective"),
        ({"constraints": ("ttft<50",)}, "ttft needs a unit"),
        ({"constraints": ("ttft>50ms",)}, "from the wrong side"),
        ({"constraints": ("throughput<50",)}, "from the wrong side"),
        ({"constraints": ("size<50GB",)}, "no metric is called 'size'"),
        ({"constraints": ("ttft=50ms",)}, "is not METRIC<LIMIT"),
        ({"tokens": "some"}, "--tokens some"),
        ({"levers": ("runtime.batch_size",)}, "--lever needs KEY=VALUE,VALUE"),
        ({"levers": ("runtime.batch_size=",)}, "--lever needs KEY=VALUE,VALUE"),
        ({"levers": ("runtime.batchsize=1,2",)}, "no key 'runtime.batchsize'.*Did you mean 'batch_size'"),
        ({"levers": ("runtime.batch_size=1,0",)}, "runtime.batch_size=0 is out of range"),
        ({"levers": ("runtime.batch_size=many",)}, "runtime.batch_size=many"),
        ({"levers": ("hardware=cpu",)}, "is a group of settings"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(base: Base, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        begin(base[0], TuneOptions(**options), [])
    assert not base[0].with_name("run-tune").exists()


def test_a_lever_that_needs_another_one_is_not_refused(tmp_path: Path) -> None:
    """Compiled prefill needs a compiled decode, which a lever of pytorch sets; an engine's argument has no effect there."""
    values = asdict(default_config())
    check_for_base(TuneOptions(levers=("runtime.compile_prefill=true",)), values)
    check_for_base(TuneOptions(levers=("+runtime.batch_size=1,2",)), values)
    with pytest.raises(ConfigError, match="has no effect on runtime=pytorch"):
        check_for_base(TuneOptions(levers=("runtime.engine.pages=2",)), values)


@pytest.mark.parametrize("options", [TuneOptions("energy"), TuneOptions(constraints=("energy<5J",))])
def test_energy_is_refused_on_a_cpu_before_anything_runs(values: dict[str, Any], options: TuneOptions) -> None:
    for device in ("cpu", "cuda"):
        settings = {**values, "hardware": {**values["hardware"], "device": device}}
        with pytest.raises(ConfigError, match="on a CPU: energy comes from the GPU's counter"):
            check_for_base(options, settings, "cpu" if device == "cuda" else "")
    check_for_base(options, sampled_on_gpu(values))


@pytest.mark.parametrize("options", [TuneOptions("energy"), TuneOptions(constraints=("energy<5J",))])
@pytest.mark.parametrize("profiling", [["none"], ["roofline-only"], ["full", "profiling.nvml.enable=false"]])
def test_energy_is_refused_without_telemetry_before_anything_runs(
    tmp_path: Path, options: TuneOptions, profiling: list[str]
) -> None:
    option, *more = profiling
    words = ["runtime=fake", "hardware.device=cuda", f"hydra.run.dir={tmp_path / 'new'}", f"profiling={option}", *more]
    with pytest.raises(ConfigError, match="energy is not sampled") as caught:
        measure_base(words, None, [], QuietProgress(), options)
    assert caught.value.remedy == "Add profiling.nvml.enable=true."
    fake_base(tmp_path / "run", asdict(compose(words).config))
    with pytest.raises(ConfigError, match="energy is not sampled") as caught:
        begin(tmp_path / "run", options, [])
    assert caught.value.remedy == "Make the run again with profiling.nvml.enable=true."
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    check_for_base(options, asdict(compose([*words, "profiling.nvml.enable=true"]).config))


def sampled_on_gpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings on a GPU, with telemetry."""
    profiling = {**values["profiling"], "nvml": {**values["profiling"]["nvml"], "enable": True}}
    return {**values, "hardware": {**values["hardware"], "device": "cuda"}, "profiling": profiling}


def test_an_objective_that_cannot_be_measured_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    base = tmp_path / "run", fake_base(tmp_path / "run", sampled_on_gpu(values))
    folder = begin(base[0], TuneOptions(objective="energy"), [])
    runs = FakeRuns(folder.path, base[1])
    with pytest.raises(ConfigError, match="energy cannot be measured here: not sampled"):
        tune(folder, QuietProgress(), runs=runs, clock=runs.clock)
    folder.close()


TRUST = "model.trust_remote_code=true"


def trusting(base: Base) -> Path:
    """Let the configuration of a base allow the code of its model."""
    file = base[0] / "config.yaml"
    text = file.read_text()
    assert "trust_remote_code: false" in text
    file.write_text(text.replace("trust_remote_code: false", "trust_remote_code: true"))
    return file


def test_the_code_of_a_base_is_not_allowed_by_its_own_configuration(base: Base) -> None:
    file = trusting(base)
    with pytest.raises(ConfigError) as caught:
        begin(base[0], TuneOptions(), ["llm-perf", "tune"])
    assert f"{file} sets {TRUST}" in caught.value.fact
    assert f"`llm-perf tune {base[0]} {TRUST}`" in caught.value.remedy
    begin(base[0], TuneOptions(), ["llm-perf", "tune"], code=[TRUST]).close()
    again = resume(base[0], None)
    with pytest.raises(ConfigError) as caught:
        tune(again, QuietProgress())
    assert f"`llm-perf tune {base[0]} --resume {TRUST}`" in caught.value.remedy
    again.close()


def test_nor_are_levers_that_the_folder_of_a_search_has(base: Base) -> None:
    lever = "runtime.engine.quantization=evil.plugin,fp16"
    begin(base[0], TuneOptions(levers=(lever,)), ["llm-perf", "tune"]).close()  # typed here
    again = resume(base[0], None)
    with pytest.raises(ConfigError) as caught:
        tune(again, QuietProgress())
    assert "tune.json sets runtime.engine.quantization=evil.plugin" in caught.value.fact
    again.close()


def test_a_search_that_starts_from_a_run_elsewhere_is_not_resumed(base: Base, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "run"
    fake_base(elsewhere, base[1])
    folder = begin(base[0], TuneOptions(), [])
    folder.write_state(replace(folder.read(), base=str(elsewhere)))
    folder.close()
    with pytest.raises(ParseError, match="elsewhere"):
        resume(folder.path, None)
