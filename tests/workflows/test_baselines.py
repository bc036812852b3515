"""Names for runs: what may be a name, what it points to, what happens when that is gone."""

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from builders import clean_timings, manifest
from command import HANG_S
from llm_perf_opt.cli.app import app
from llm_perf_opt.core import file_lock
from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError
from llm_perf_opt.core.file_lock import locked
from llm_perf_opt.core.records import SCHEMA, Manifest
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.workflows.compare import Baselines
from writing import write_record


def made(path: Path) -> Path:
    folder = RunFolder.create(path)
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", "2026-01-02T03:04:05+00:00", ("x",)))
    return folder.path


@pytest.fixture
def kept(tmp_path: Path) -> Baselines:
    return Baselines(tmp_path / "project" / "runs")


def test_a_project_can_be_moved(kept: Baselines, tmp_path: Path) -> None:
    run = made(kept.runs_dir / "main" / "tiny" / "one")
    kept.set("main-branch", [run])
    assert json.loads(kept.file.read_text())["baselines"]["main-branch"]["runs"] == ["main/tiny/one"]
    shutil.move(tmp_path / "project", tmp_path / "elsewhere")
    moved = Baselines(tmp_path / "elsewhere" / "runs")
    assert moved.runs_of("main-branch") == [(tmp_path / "elsewhere/runs/main/tiny/one").resolve()]


def test_a_run_elsewhere_is_kept_by_its_whole_path(kept: Baselines, tmp_path: Path) -> None:
    run = made(tmp_path / "far" / "away")
    assert kept.set("far", [run]).runs == (str(run),)
    assert kept.runs_of("far") == [run]


def test_several_repeats_have_one_name(kept: Baselines) -> None:
    runs = [made(kept.runs_dir / "x" / name) for name in ("a", "b")]
    kept.set("both", runs)
    assert kept.runs_of("both") == runs
    with pytest.raises(ConfigError, match="twice"):
        kept.set("both", [runs[0], runs[0]])


def test_setting_replaces_and_removing_forgets(kept: Baselines) -> None:
    first, second = made(kept.runs_dir / "a"), made(kept.runs_dir / "b")
    kept.set("main", [first])
    kept.set("main", [second])
    kept.set("other", [first])
    assert kept.runs_of("main") == [second]
    kept.remove("main")
    assert list(kept.read()) == ["other"]
    assert second.is_dir()
    with pytest.raises(ConfigError, match="There is no baseline 'main'"):
        kept.remove("main")
    with pytest.raises(ConfigError, match="Did you mean 'other'"):
        kept.runs_of("othr")


def test_a_run_that_is_gone_is_named_as_such(kept: Baselines) -> None:
    run = made(kept.runs_dir / "a")
    kept.set("main", [run])
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match="no longer a run"):
        kept.runs_of("main")


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "a/b", "-x", "--gate", "a b", "a,b", "*", "ä", "a\n", ".hidden", "a" * 101, "a\x00b", "$(x)", "<b>"],
)
def test_hostile_names_are_refused(kept: Baselines, name: str) -> None:
    run = made(kept.runs_dir / "a")
    with pytest.raises(ConfigError, match="not a valid name for a baseline"):
        kept.set(name, [run])
    assert not kept.file.exists()


def test_only_a_run_can_have_a_name(kept: Baselines, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        kept.set("main", [tmp_path / "nowhere"])
    assert not kept.file.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"baselines": {"x": 1}}', "\xff"])
def test_a_damaged_file_is_called_that(kept: Baselines, text: str) -> None:
    kept.runs_dir.mkdir(parents=True)
    kept.file.write_text(text, encoding="latin-1")
    with pytest.raises(ParseError, match=r"baselines\.json"):
        kept.read()


def test_one_damaged_run_is_no_baseline(tmp_path: Path) -> None:
    """As several are none: what `compare` refuses is not given a name first."""
    folder = RunFolder.create(tmp_path / "runs" / "one")
    folder.write_manifest(manifest())
    write_record(folder.clean_file, clean_timings())
    words = ["baseline", "set", "main", str(folder.path), "--runs-dir", str(tmp_path / "runs")]
    assert CliRunner().invoke(app, words).exit_code == 0
    kept = json.loads(folder.clean_file.read_text())
    kept["iterations"][0]["steps_ns"].pop()
    folder.clean_file.write_text(json.dumps(kept))
    words[2] = "other"
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ParseError)
    assert "repeat 1 has 2 decode steps" in done.exception.fact
    assert list(Baselines(tmp_path / "runs").read()) == ["main"]


def test_baselines_that_several_processes_set_are_all_kept(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.write_manifest(manifest())
    runs = tmp_path / "runs"

    def set_some(writer: int) -> None:
        for number in range(25):
            Baselines(runs).set(f"b{writer}-{number}", [run.path])

    processes = [multiprocessing.get_context("fork").Process(target=set_some, args=(writer,)) for writer in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_S)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(Baselines(runs).read()) == 100


def test_a_baseline_is_not_set_while_its_file_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.write_manifest(manifest())
    Baselines(tmp_path).set("first", [run.path])
    monkeypatch.setattr(file_lock, "_PATIENCE_S", 0.0)
    with locked(tmp_path, tmp_path / ".baselines.json.lock", 0) as held:
        assert held
        child = multiprocessing.get_context("fork").Process(target=_is_refused, args=(tmp_path, run.path))
        child.start()
        child.join(HANG_S)
    assert child.exitcode == 0
    assert list(Baselines(tmp_path).read()) == ["first"]


def _is_refused(runs: Path, run: Path) -> None:
    for change in (lambda: Baselines(runs).set("second", [run]), lambda: Baselines(runs).remove("first")):
        with pytest.raises(ResourceError, match="lock"):
            change()
