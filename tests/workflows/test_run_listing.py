"""The list of runs: newest first, filters, sweeps as one row, damaged folders as rows with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from builders import clean_timings, manifest
from llm_perf_opt.cli.app import app
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import SCHEMA, Manifest, Missing, PassRecord, RunStatus
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.user_files import read_text
from llm_perf_opt.workflows import run_reader
from llm_perf_opt.workflows.run_listing import list_runs
from llm_perf_opt.workflows.sweep_folder import PlannedPoint, Sweep, SweepFolder
from unreadable import locked
from writing import write_record


def made(path: Path, created: str, model: str = "tiny", experiment: str = "one", status: RunStatus = "complete") -> RunFolder:
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_manifest(Manifest(SCHEMA, "0", status, created, ("x",), why="" if status == "complete" else "It broke."))
    folder.config_file.write_text(
        f"experiment: {experiment}\nmodel:\n  name: {model}\n  architecture:\n    name: no\ndataset:\n  name: d\n"
    )
    return folder


def measured(path: Path, created: str) -> RunFolder:
    """A run with times."""
    folder = made(path, created)
    folder.update_pass(PassRecord("clean", "complete"))
    write_record(folder.clean_file, clean_timings())
    return folder


def day(number: int) -> str:
    return f"2026-01-{number:02d}T00:00:00+00:00"


def test_newest_first_whatever_the_folders_are_called(tmp_path: Path) -> None:
    for number, name in ((1, "z"), (3, "a"), (2, "deep/er/still")):
        made(tmp_path / name, day(number))
    assert [row.created for row in list_runs(tmp_path).rows] == [day(3), day(2), day(1)]


def test_filters_and_limit(tmp_path: Path) -> None:
    made(tmp_path / "1", day(1), model="a", experiment="x")
    made(tmp_path / "2", day(2), model="b", experiment="x", status="failed")
    made(tmp_path / "3", day(3), model="a", experiment="y")

    def days(**filters: Any) -> list[str]:
        return [row.created[8:10] for row in list_runs(tmp_path, **filters).rows]

    assert days(model="a") == ["03", "01"]
    assert days(experiment="x") == ["02", "01"]
    assert days(model="a", experiment="x") == ["01"]
    assert days(status="failed") == ["02"]
    assert days(limit=1) == ["03"]
    assert days(limit=0) == ["03", "02", "01"]
    assert days(model="none") == []
    listing = list_runs(tmp_path, model="a", limit=1)
    assert (len(listing.rows), listing.matching, listing.found) == (1, 2, 3)
    with pytest.raises(ConfigError, match="unknown status"):
        list_runs(tmp_path, status="done")
    with pytest.raises(ConfigError, match="is not a folder"):
        list_runs(tmp_path / "nowhere")


def test_a_row_says_what_ran_and_how_fast(tmp_path: Path) -> None:
    measured(tmp_path / "1", day(1))
    (row,) = list_runs(tmp_path).rows
    assert (row.model, row.experiment, row.workload, row.device) == ("tiny", "one", "2 × 10 + 4", "a processor")
    assert (row.ttft_ns, row.tpot_ns) == (100e6, 20e6)


def test_a_row_says_whether_the_weights_are_random(tmp_path: Path) -> None:
    for number, source in enumerate(("random", "pretrained", None)):
        folder = made(tmp_path / str(number), day(number + 1))
        text = folder.config_file.read_text()
        folder.config_file.write_text(text.replace("  arch", f"  source: {source}\n  arch") if source else text)
    assert [row.weights for row in list_runs(tmp_path).rows] == ["", "real", "random"]
    said = CliRunner().invoke(app, ["runs", str(tmp_path)], catch_exceptions=False).stdout
    assert "real" in said
    assert "random" in said


def test_a_run_without_times_says_so(tmp_path: Path) -> None:
    made(tmp_path / "1", day(1), status="failed")
    (row,) = list_runs(tmp_path).rows
    assert row.why == "It broke."
    assert isinstance(row.tpot_ns, Missing)


def test_a_complete_run_without_times_is_listed_with_the_reason(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "1")
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", day(1), ("llm-perf", "exec"), ()))
    said = CliRunner().invoke(app, ["runs", str(tmp_path)], catch_exceptions=False).stdout
    assert "n/a: the run has no times" in said


def test_a_sweep_over_models_is_found_by_each_of_them(tmp_path: Path) -> None:
    for number, model in enumerate(("a", "b", "a")):
        made(tmp_path / "sweep" / f"{number:03d}", day(2), model=model)
    points = [PlannedPoint((), (f"model={model}",)) for model in ("a", "b", "a")]
    SweepFolder(tmp_path / "sweep").write_plan(Sweep(SCHEMA, "0", day(2), ("llm-perf", "run"), None, tuple(points)))
    for model in ("a", "b"):
        (row,) = list_runs(tmp_path, model=model).rows
        assert (row.kind, row.model) == ("sweep", "a, b")
    assert list_runs(tmp_path, model="a, b").rows == ()
    assert list_runs(tmp_path, model="c").rows == ()


def test_a_long_reason_is_cut_to_a_line_that_says_where_it_is_whole(tmp_path: Path) -> None:
    for name, why in (("1", "word " * 100), ("2", "It broke.")):
        made(tmp_path / name, day(1)).write_manifest(Manifest(SCHEMA, "0", "failed", day(1), ("x",), why=why))
    done = CliRunner().invoke(app, ["runs", str(tmp_path)], catch_exceptions=False)
    reasons = [line.partition("word")[1:] for line in done.stdout.splitlines()]
    assert max(len("".join(reason)) for reason in reasons) == 100
    assert sum(line.endswith("…") for line in done.stdout.splitlines()) == 1
    assert "--json" in done.stderr
    whole = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"], catch_exceptions=False).stdout
    assert "word " * 99 in whole


@pytest.mark.parametrize("text", ["", "{", '{"schema": 999}', "[]"])
def test_a_damaged_run_is_a_row_with_its_reason(tmp_path: Path, text: str) -> None:
    made(tmp_path / "1", day(1))
    (tmp_path / "2").mkdir()
    RunFolder(tmp_path / "2").manifest_file.write_text(text)
    rows = {Path(row.path).name: row for row in list_runs(tmp_path).rows}
    assert rows["2"].status == "damaged"
    assert "run.json" in rows["2"].why
    assert [Path(row.path).name for row in list_runs(tmp_path, status="damaged").rows] == ["2"]


def test_damaged_times_are_a_damaged_run_with_the_reason(tmp_path: Path) -> None:
    for name in ("1", "2"):
        measured(tmp_path / name, day(int(name)))
    times = RunFolder(tmp_path / "2").clean_file
    kept = json.loads(times.read_text())
    kept["iterations"][0]["steps_ns"].pop()
    times.write_text(json.dumps(kept))
    damaged, sound = list_runs(tmp_path).rows
    assert (damaged.status, sound.status) == ("damaged", "complete")
    assert "repeat 1 has 2 decode steps, but the request has 3" in damaged.why
    assert isinstance(damaged.tpot_ns, Missing)
    assert [Path(row.path).name for row in list_runs(tmp_path, status="damaged").rows] == ["2"]
    assert [Path(row.path).name for row in list_runs(tmp_path, status="complete", model="tiny").rows] == ["1"]
    said = CliRunner().invoke(app, ["runs", str(tmp_path)], catch_exceptions=False).stdout
    assert "the run has no times" not in said


def test_times_that_a_complete_pass_left_and_that_are_gone_are_damage(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "1").write_manifest(manifest())
    (row,) = list_runs(tmp_path).rows
    assert (row.status, "timings.json is missing" in row.why) == ("damaged", True)


def test_a_sweep_with_a_damaged_point_is_not_complete(tmp_path: Path) -> None:
    sweep = SweepFolder.create(tmp_path / "sweep")
    for number in range(2):
        folder = RunFolder.create(sweep.point_folder(number))
        folder.write_manifest(manifest())
        write_record(folder.clean_file, clean_timings())
    points = tuple(PlannedPoint((), (f"runtime.batch_size={number}",)) for number in range(2))
    sweep.write_plan(Sweep(SCHEMA, "0", day(2), ("llm-perf", "run"), None, points))
    assert list_runs(tmp_path).rows[0].status == "complete"
    RunFolder(sweep.point_folder(1)).clean_file.write_text("{")
    (row,) = list_runs(tmp_path).rows
    assert row.status == "partial"
    assert row.why.startswith("1 point is complete, 1 damaged: ")
    assert list_runs(tmp_path, status="complete").rows == ()


@pytest.mark.parametrize("text", ["", "{", "model: 3\n", "model: [\n", "experiment: [1]\nmodel:\n  name: {a: 1}\n", "\xff"])
def test_a_damaged_configuration_hides_no_run(tmp_path: Path, text: str) -> None:
    folder = made(tmp_path / "1", day(1))
    folder.config_file.write_text(text, encoding="latin-1")
    assert len(list_runs(tmp_path).rows) == 1


@pytest.mark.parametrize("name", ["tiny", "007", "1e5", "null", "qwen2.5_1-5b"])
def test_names_are_read_as_the_configuration_has_them(tmp_path: Path, name: str) -> None:
    made(tmp_path / "1", day(1)).config_file.write_text(
        yaml.safe_dump(
            {"experiment": name, "model": {"architecture": {"name": "no"}, "name": name}, "x": {"name": "no"}}, sort_keys=False
        )
    )
    (row,) = list_runs(tmp_path, model=name, experiment=name).rows
    assert (row.experiment, row.model) == (name, name)


def test_a_sweep_is_one_row_and_its_runs_are_listed_inside_it(tmp_path: Path) -> None:
    sweep = tmp_path / "x" / "sweeps" / "s"
    made(sweep / "000", day(1))
    made(sweep / "001", day(2), status="failed")
    points = (
        PlannedPoint(("runtime.batch_size=1",), ("runtime.batch_size=1",)),
        PlannedPoint(("runtime.batch_size=2",), ("runtime.batch_size=2",)),
    )
    SweepFolder(sweep).write_plan(Sweep(SCHEMA, "0", day(3), ("x",), None, points))
    (row,) = list_runs(tmp_path).rows
    assert (row.kind, row.status, row.model) == ("sweep", "partial", "tiny")
    assert (row.why, row.workload) == ("1 of 2 points are complete", "2 points over runtime.batch_size")
    assert len(list_runs(tmp_path, model="tiny").rows) == 1
    assert [one.kind for one in list_runs(sweep).rows] == ["run", "run"]
    SweepFolder(sweep).sweep_file.write_text("{")
    assert list_runs(tmp_path).rows[0].status == "damaged"


def planned(path: Path, *swept: str) -> None:
    """A sweep none of whose points has started."""
    path.mkdir(parents=True)
    points = tuple(PlannedPoint((text,), (text,)) for text in swept) or (PlannedPoint((), ()),)
    SweepFolder(path).write_plan(Sweep(SCHEMA, "0", day(1), ("llm-perf", "run"), None, points))


def test_a_sweep_that_was_only_planned_has_not_failed(tmp_path: Path) -> None:
    planned(tmp_path / "two", "runtime.batch_size=1", "runtime.batch_size=2")
    planned(tmp_path / "one")
    one, two = sorted(list_runs(tmp_path).rows, key=lambda row: row.workload)
    assert (two.status, two.why, two.workload) == ("planned", "no point has started", "2 points over runtime.batch_size")
    assert (one.status, one.workload) == ("planned", "1 point")
    assert len(list_runs(tmp_path, status="planned").rows) == 2
    assert list_runs(tmp_path, status="failed").rows == ()


def test_the_times_of_a_clean_pass_that_was_ended_are_shown(tmp_path: Path) -> None:
    folder = measured(tmp_path / "1", day(1))
    folder.write_manifest(Manifest(SCHEMA, "0", "partial", day(1), ("x",), why="Interrupted."))
    folder.update_pass(PassRecord("clean", "failed", why="Interrupted."))
    (row,) = list_runs(tmp_path).rows
    assert (row.status, row.why, row.ttft_ns, row.tpot_ns) == ("partial", "Interrupted.", 100e6, 20e6)


@pytest.mark.parametrize("place", ["bad", "bad/raw", "bad/run.json", "bad/raw/clean/timings.json"])
def test_a_run_that_is_not_readable_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    measured(tmp_path / "good", day(2))
    measured(tmp_path / "bad", day(1))
    locked(monkeypatch, tmp_path / place)
    rows = {Path(row.path).name: row for row in list_runs(tmp_path).rows}
    assert rows["good"].status == "complete"
    assert rows["bad"].status == "not readable"
    assert "Permission denied" in rows["bad"].why
    assert [row.path for row in list_runs(tmp_path, status="not readable").rows] == [str(tmp_path / "bad")]
    named = {"good"} if place == "bad" else {"good", "bad"}
    assert {Path(row.path).name for row in list_runs(tmp_path, model="tiny").rows} == named, "a locked folder hides its model too"


def test_a_sweep_with_a_point_that_is_not_readable_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(tmp_path / "sweep", "runtime.batch_size=1", "runtime.batch_size=2")
    for name in ("000", "001"):
        measured(tmp_path / "sweep" / name, day(1))
    with monkeypatch.context() as during:
        locked(during, tmp_path / "sweep" / "001")
        (row,) = list_runs(tmp_path).rows
    assert (row.kind, row.model, row.status, row.why) == ("sweep", "tiny", "partial", "1 of 2 points are complete")
    with monkeypatch.context() as during:
        locked(during, tmp_path / "sweep" / "001" / "run.json")
        points = SweepFolder(tmp_path / "sweep").points()
    assert [point.status for point in points] == ["complete", "not readable"]
    for place in ("raw", "raw/clean/timings.json"):
        with monkeypatch.context() as during:
            locked(during, tmp_path / "sweep" / "001" / place)
            (row,) = list_runs(tmp_path).rows
        assert (row.kind, row.model, row.status) == ("sweep", "tiny", "not readable")
        assert "001" in row.why


def test_of_thousands_only_those_shown_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        made(tmp_path / f"{number:04d}", f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}+00:00")
    read: list[Path] = []

    def counted(path: Path) -> str:
        read.append(path)
        return read_text(path)

    monkeypatch.setattr(run_reader, "read_text", counted)
    assert len(list_runs(tmp_path, limit=5).rows) == 5
    assert len(read) == 5


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    made(tmp_path / "1", day(1))
    (tmp_path / "again").symlink_to(tmp_path)
    assert len(list_runs(tmp_path).rows) == 1


def test_the_command_needs_no_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(tmp_path / "runs" / "one", day(1))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["runs"])
    assert done.exit_code == 0, done.output
    assert "one" in done.output
