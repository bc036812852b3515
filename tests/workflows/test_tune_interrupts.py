"""Searches and trials that are stopped: what they leave, and how they continue."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import MS, clean_timings, in_a_row, manifest, run_analysis
from llm_perf_opt.analysis.tuning.tokens import Tried
from llm_perf_opt.cli.progress import QuietProgress
from llm_perf_opt.config.composition import Composed, config_to_yaml
from llm_perf_opt.core.errors import Interrupted, LlmPerfError
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.workflows import advise
from llm_perf_opt.workflows.analyze_run import is_reported
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.tune import CapturedRuns, begin, measure_base, resume, tune
from llm_perf_opt.workflows.tune_folder import TuneFolder, TuneOptions
from tuning_builders import FakeRuns, fake_base, fake_finding, names
from writing import write_record

pytestmark = pytest.mark.usefixtures("fake_engine")


@pytest.fixture
def search(tmp_path: Path, values: dict[str, Any]) -> Iterator[TuneFolder]:
    """A search of one change, of a run whose path has to be quoted."""
    base = tmp_path / "my run; new"
    fake_base(base, values)
    folder = begin(base, TuneOptions(max_steps=1), [])
    yield folder
    folder.close()


def stopped(folder: TuneFolder, runs: FakeRuns) -> LlmPerfError:
    """Return the error of a search that is stopped, however it is passed on."""
    try:
        error = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)[1]
    except Interrupted as raised:
        error = raised
    assert isinstance(error, Interrupted)
    return error


@pytest.mark.parametrize("stop_at", ["base", "01-1-1"])
def test_the_command_that_continues_a_search_can_be_pasted(search: TuneFolder, values: dict[str, Any], stop_at: str) -> None:
    error = stopped(search, FakeRuns(search.path, values, stop_at=stop_at))
    assert shlex.split(error.remedy.split("`")[1]) == ["llm-perf", "tune", search.read().base, "--resume"]


@pytest.mark.parametrize("name", ["base", "01-1-1", "confirm-best-1"])
def test_a_run_whose_report_was_interrupted_is_used_by_the_resumed_search(
    search: TuneFolder, values: dict[str, Any], name: str
) -> None:
    runs = FakeRuns(search.path, values)
    plain = runs.measure

    def measure(*given: Any, **more: Any) -> tuple[Path | None, LlmPerfError | None]:
        path, error = plain(*given, **more)
        if given[1] != name or path is None:
            return path, error
        RunFolder(path).write_manifest(manifest(status="partial"))  # telemetry failed, but the times are complete
        return path, Interrupted("Interrupted while the report was written.")

    runs.measure = measure  # type: ignore[method-assign]
    stopped(search, runs)
    assert search.read().runs[-1].run == name
    assert search.page_file.exists() == (name != "base")
    search.close()
    again = resume(Path(search.read().base), None)
    more = FakeRuns(again.path, values, clock=runs.clock)
    found, error = tune(again, QuietProgress(), runs=more, clock=more.clock)
    again.close()
    assert error is None
    assert found.confirmed is True
    assert name not in names(more.made)


def test_a_run_that_was_cut_off_is_made_again(search: TuneFolder, values: dict[str, Any]) -> None:
    runs = FakeRuns(search.path, values)

    def measure(overrides: tuple[str, ...], name: str, **_: Any) -> tuple[Path | None, LlmPerfError | None]:
        RunFolder(search.path / name).write_manifest(manifest(status="partial", passes=(PassRecord("clean", "failed"),)))
        return search.path / name, Interrupted("Interrupted.")

    runs.measure = measure  # type: ignore[method-assign]
    stopped(search, runs)
    assert search.read().runs == ()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), KeyboardInterrupt("Ended by SIGTERM."), Interrupted("Interrupted.")])
@pytest.mark.parametrize("name", ["my run; new", "01-1-2", "confirm-base-1"])
def test_an_interrupt_while_runs_are_read_stops_the_search_in_order(
    search: TuneFolder, values: dict[str, Any], name: str, error: BaseException
) -> None:
    def change(tried: Tried, engine: Any) -> Tried:
        if Path(tried.path).name == name:
            raise error
        return tried

    runs = FakeRuns(search.path, values, change=change)
    found = stopped(search, runs)
    assert found.fact == (str(error) or "Interrupted.")
    assert "--resume` continues" in found.remedy
    if name == "my run; new":
        assert not search.page_file.exists(), "nothing was tried"
        return
    result = json.loads(search.result_file.read_text())
    assert result["ending"] == "interrupted"
    assert len(result["steps"]) == (name == "confirm-base-1")
    assert f"were spent. {found.fact}\n" in search.report_file.read_text()
    assert search.page_file.exists()
    assert search.read().runs[-1].run == name, "it was recorded before it was read"


# --- runs that are really captured -------------------------------------------------------------------------------------


def complete(composed: Composed, *_: Any) -> tuple[RunFolder, LlmPerfError | None]:
    """A capture that completes; decode takes 10 ms per token."""
    run = RunFolder.create(composed.run_dir)
    run.config_file.write_text(config_to_yaml(composed.config))
    write_record(run.clean_file, clean_timings(in_a_row(10, 50 * MS, [10 * MS] * 3)))
    run.write_manifest(manifest(status="complete"))
    return run, None


def pressed(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures complete, and their reports are interrupted."""
    monkeypatch.setattr(advise, "capture", complete)
    monkeypatch.setattr(advise, "report_run", pressed)


@pytest.mark.usefixtures("unreported")
def test_an_interrupted_report_of_a_trial_is_returned_and_written_when_the_run_is_read(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    fake_base(tmp_path / "run", values)
    runs = CapturedRuns(tmp_path, RunReader(RunFolder(tmp_path / "run")), QuietProgress())
    path, error = runs.measure((), "01-1-1", profiled=False, limit_s=60.0)
    assert path == tmp_path / "01-1-1"
    assert isinstance(error, Interrupted)
    assert error.fact == "Interrupted while the report was written."
    assert not is_reported(RunFolder(path))
    assert runs.read(path, profiled=False).path == str(path)
    assert is_reported(RunFolder(path))


@pytest.mark.usefixtures("unreported")
def test_an_interrupted_report_of_the_base_says_how_to_search_from_it(tmp_path: Path) -> None:
    place = tmp_path / "base"
    with pytest.raises(Interrupted, match="while the report was written") as caught:
        measure_base([f"hydra.run.dir={place}"], None, ["llm-perf", "run"], QuietProgress(), TuneOptions())
    assert caught.value.remedy == f"`llm-perf tune {place}` searches from this run."


@pytest.mark.usefixtures("unreported")
def test_a_trial_whose_report_was_interrupted_counts_and_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(advise, "require_same_device", lambda *_: None)
    monkeypatch.setattr(advise, "_other_machine", lambda *_: "")
    folder = RunFolder(tmp_path / "run")
    fake_base(folder.path, values)
    base = replace(run_analysis(), timings=clean_timings(in_a_row(10, 50 * MS, [20 * MS] * 3)))
    findings = [fake_finding(name, f"runtime.engine.{name}=1", 5.0) for name in ("first", "second")]
    found, error = advise.verify(RunReader(folder), base, findings, ["llm-perf", "advise"], QuietProgress())
    assert isinstance(error, Interrupted)
    assert [(trial.id, trial.before_ns, trial.after_ns) for trial in found.trials] == [("first", 20 * MS, 10 * MS)]
    assert folder.verify_file.exists()
