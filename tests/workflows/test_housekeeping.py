"""Old runs: what would go is said first, what is in use stays, an interrupt leaves whole runs, compressed ones open as before."""

import json
import os
import shutil
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from builders import clean_timings
from command import llm_perf
from llm_perf_opt.core.errors import ConfigError, Interrupted, LlmPerfError, ParseError
from llm_perf_opt.core.records import SCHEMA, Manifest, PassRecord
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.core.user_files import read_unpacked
from llm_perf_opt.workflows import compressing, housekeeping
from llm_perf_opt.workflows.compare import Baselines
from llm_perf_opt.workflows.compressing import compress_file, compressible
from llm_perf_opt.workflows.housekeeping import Cleanup, Step, carry_out, parse_age, plan_cleanup
from llm_perf_opt.workflows.run_listing import find_runs
from llm_perf_opt.workflows.sweep_folder import PlannedPoint, Sweep, SweepFolder
from unreadable import locked
from whole_runs import whole_run
from writing import write_record

NOW = datetime(2026, 2, 1, tzinfo=timezone.utc)


def made(path: Path, day: int, **changes: Any) -> Path:
    path.mkdir(parents=True)
    folder = RunFolder(path)
    created = f"2026-01-{day:02d}T00:00:00+00:00"
    folder.write_manifest(
        Manifest(
            **{"schema": SCHEMA, "tool_version": "0", "status": "complete", "created": created, "command": ("x",), **changes}
        )
    )
    write_record(folder.clean_file, clean_timings())
    return path


def plan(folder: Path, **asked: Any) -> dict[str, Step]:
    rows, _ = find_runs(folder)
    return {Path(step.path).name: step for step in plan_cleanup(folder, rows, Cleanup(**asked), NOW)}


def actions(folder: Path, **asked: Any) -> dict[str, str]:
    return {name: step.action for name, step in plan(folder, **asked).items()}


def done(folder: Path, **asked: Any) -> list[str]:
    return [Path(step.path).name for step in carry_out(folder, list(plan(folder, **asked).values())).steps]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for day in (1, 2, 3, 10):
        made(tmp_path / "runs" / "exp" / f"model{day % 2}" / f"day{day}", day)
    return tmp_path / "runs"


@pytest.mark.parametrize(("text", "age"), [("30d", 30), ("2w", 14), ("12H", 0.5), ("0d", 0)])
def test_an_age(text: str, age: float) -> None:
    assert parse_age(text) == timedelta(days=age)


@pytest.mark.parametrize("text", ["30", "d", "-1d", "1m", "1.5d", "99999999d", ""])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(ConfigError, match="not an age"):
        parse_age(text)


def test_the_newest_stay_and_age_counts(runs: Path) -> None:
    assert actions(runs, keep=2) == {"day2": "remove", "day1": "remove"}
    assert actions(runs, older_than=timedelta(days=25)) == {"day3": "remove", "day2": "remove", "day1": "remove"}
    assert actions(runs, keep=3, older_than=timedelta(days=25)) == {"day1": "remove"}
    assert actions(runs, keep=9) == {}
    assert actions(runs, keep=0, older_than=timedelta(days=365)) == {}
    before = sorted(runs.rglob("*"))
    step = plan(runs, keep=3)["day1"]
    assert step.frees == step.bytes == sum(path.stat().st_size for path in Path(step.path).rglob("*") if path.is_file())
    assert sorted(runs.rglob("*")) == before, "a plan changes nothing"


@pytest.mark.parametrize("compress", [True, False])
def test_a_run_that_is_not_readable_stays_with_the_reason(runs: Path, monkeypatch: pytest.MonkeyPatch, compress: bool) -> None:
    locked(monkeypatch, runs / "exp" / "model1" / "day1")
    step = plan(runs, keep=0, compress=compress)["day1"]
    assert step.action == "keep"
    assert "Permission denied" in step.why


def test_what_was_planned_is_removed_and_nothing_else(runs: Path) -> None:
    outside = runs.parent / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (runs / "exp" / "model1" / "day1" / "raw" / "link").symlink_to(outside)
    (runs / "linked").symlink_to(outside)
    (runs / "notes.txt").write_text("mine")
    assert done(runs, keep=1) == ["day3", "day2", "day1"]
    assert [row.path for row in find_runs(runs)[0]] == [str(runs / "exp" / "model0" / "day10")]
    assert not (runs / "exp" / "model1").exists(), "empty folders go too"
    assert (outside / "precious").exists()
    assert (runs / "notes.txt").exists()
    assert done(runs, keep=0) == ["day10"]
    assert runs.is_dir(), "the folder itself stays"


def test_baselines_stay_and_say_so(runs: Path) -> None:
    Baselines(runs).set("release", [runs / "exp" / "model1" / "day1"])
    for folder in (runs, runs / "exp", runs.parent):
        step = plan(folder, keep=0)["day1"]
        assert (step.action, step.why) == ("keep", "the baseline release")
    (runs / "baselines.json").write_text("{{")
    with pytest.raises(ParseError, match="baselines"):
        plan(runs, keep=0)


def test_running_runs_stay(runs: Path) -> None:
    running = RunFolder(runs / "exp" / "model1" / "day1")
    running.hold()
    for asked in ({"keep": 0}, {"compress": True}):
        step = plan(runs, **asked)["day1"]
        assert (step.action, step.why) == ("keep", "it is running")
    planned = [Step("remove", "run", str(running.path), "", "")]
    assert "running" in carry_out(runs, planned).failed[0], "it may have started after the plan was made"
    del running
    assert plan(runs, keep=0)["day1"].action == "remove"


def test_what_stays_anyway_does_not_count_among_the_newest(runs: Path) -> None:
    sweep(runs / "exp" / "sweeps" / "one")
    Baselines(runs).set("release", [runs / "exp" / "model0" / "day10"])
    running = RunFolder(runs / "exp" / "model1" / "day3")
    running.hold()
    assert actions(runs, keep=1) == {"day1": "remove"}
    assert actions(runs, keep=1, sweeps=True) == {"day3": "keep", "day2": "remove", "day1": "remove"}
    assert set(plan(runs, keep=3, compress=True)) == {"day1"}, "only the running one stays anyway"


@pytest.mark.parametrize("content", ['{"schema": 99}', '{"schema": 99, "passes": "in another form"}'])
def test_a_run_of_a_newer_version_stays(tmp_path: Path, content: str) -> None:
    made(tmp_path / "a", 1)
    RunFolder(tmp_path / "a").manifest_file.write_text(content)
    place = sweep(tmp_path / "one")
    os.utime(tmp_path / "a" / "run.json", (1, 1))
    (place / "sweep.json").write_text(content)
    for asked in ({"keep": 0, "sweeps": True}, {"compress": True}):
        assert "newer version" in plan(tmp_path, **asked)["a"].why
    assert "newer version" in plan(tmp_path, keep=0, sweeps=True)["one"].why


def test_a_damaged_run_may_be_one_that_is_being_written(tmp_path: Path) -> None:
    path = made(tmp_path / "a", 1)
    (path / "run.json").write_text("{")
    assert "another machine" in plan(tmp_path, keep=0)["a"].why
    for file in path.rglob("*"):
        os.utime(file, (1, 1))
    assert plan(tmp_path, keep=0)["a"] == replace(plan(tmp_path, keep=0)["a"], action="remove", why="damaged")


def test_a_run_that_contains_another_stays(runs: Path) -> None:
    outer = runs / "exp" / "model1" / "day1"
    inner = made(outer / "raw" / "mine" / "inner", 1)
    assert plan(runs, keep=0)["day1"].why == f"another run is inside it: {inner}"
    Baselines(runs).set("release", [inner])
    (inner / "run.json").unlink()
    assert plan(runs, keep=0)["day1"].why == "the baseline release"
    place = sweep(runs / "exp" / "sweeps" / "one")
    assert plan(runs, keep=0, sweeps=True)["one"].action == "remove", "its points belong to it"
    made(place / "001" / "inner", 1)
    assert "another run" in plan(runs, keep=0, sweeps=True)["one"].why


def test_a_run_that_cannot_be_read_does_not_stop_the_plan_or_the_others(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(run: RunFolder) -> Any:
        if run.path.name == "day2":
            raise PermissionError(13, "Permission denied", str(run.path))
        return compressible(run)

    held = RunFolder(runs / "exp" / "model0" / "day2")
    with monkeypatch.context() as patched:
        patched.setattr(housekeeping, "compressible", denied)
        assert "Permission denied" in plan(runs, compress=True)["day2"].why
        step = Step("compress", "run", str(held.path), "", "")
        found = carry_out(runs, [step, replace(step, path=str(runs / "exp" / "model1" / "day1"))])
        assert (len(found.steps), "Permission denied" in found.failed[0]) == (1, True)
        held.hold()
        assert plan(runs, compress=True)["day2"].why == "it is running", "its files are not read"
    del held
    monkeypatch.setattr(housekeeping, "_why_not_alone", lambda path: denied(RunFolder(path)) and "")
    assert "Permission denied" in plan(runs, keep=0)["day2"].why
    assert plan(runs, keep=0)["day1"].action == "remove"


def test_a_new_run_is_running_until_its_folder_is_let_go(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "a")
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", "2026-01-01T00:00:00+00:00", ("x",)))
    assert actions(tmp_path / "runs", keep=0) == {"a": "keep"}
    del folder
    assert actions(tmp_path / "runs", keep=0) == {"a": "remove"}


def test_a_run_that_has_not_ended_and_changed_lately_may_be_running_elsewhere(tmp_path: Path) -> None:
    path = made(tmp_path / "a", 1, status="partial", passes=(PassRecord("clean", "started"),))
    assert "another machine" in plan(tmp_path, keep=0)["a"].why
    ahead = datetime.now(timezone.utc).timestamp() + 900
    os.utime(path / "run.json", (ahead, ahead))
    assert "changed 0 minutes ago" in plan(tmp_path, keep=0)["a"].why, "the clock of another machine is ahead"
    for file in path.rglob("*"):
        os.utime(file, (1, 1))
    assert actions(tmp_path, keep=0) == {"a": "remove"}


def sweep(path: Path) -> Path:
    points = tuple(PlannedPoint((), (f"a={number}",)) for number in range(2))
    for number in range(2):
        made(path / f"00{number}", 5)
    SweepFolder(path).write_plan(Sweep(SCHEMA, "0", "2026-01-05T00:00:00+00:00", ("x",), None, points))
    return path


def test_sweeps_are_removed_whole_and_only_when_asked(runs: Path) -> None:
    place = sweep(runs / "exp" / "sweeps" / "one")
    step = plan(runs, keep=0)["one"]
    assert (step.action, step.kind, "--sweeps" in step.why) == ("keep", "sweep", True)
    inside = plan(place, keep=0, sweeps=True)
    assert {name: (step.action, "a point of the sweep" in step.why) for name, step in inside.items()} == {
        "000": ("keep", True),
        "001": ("keep", True),
    }
    Baselines(runs).set("b", [place / "001"])
    assert plan(runs, keep=0, sweeps=True)["one"].why == "the baseline b"
    Baselines(runs).remove("b")
    held = RunFolder(place / "001")
    held.hold()
    assert plan(runs, keep=0, sweeps=True)["one"].why == "it is running"
    del held
    assert "one" in done(runs, keep=0, sweeps=True)
    assert not place.exists()


def test_the_given_folder_is_never_removed(runs: Path) -> None:
    run = runs / "exp" / "model1" / "day1"
    assert plan(run, keep=0)["day1"].action == "keep"
    for path in (runs, runs.parent / "runs" / ".." / "runs", runs / ".." / ".."):
        failed = carry_out(runs, [Step("remove", "run", str(path), "", "")]).failed
        assert len(failed) == 1
    assert run.exists()


def test_an_interrupt_leaves_whole_runs_and_the_rest_is_removed_next_time(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.rmtree

    def stopped(path: Path, **_: Any) -> None:
        real(Path(path) / "raw")
        raise KeyboardInterrupt

    steps = list(plan(runs, keep=1).values())
    monkeypatch.setattr(shutil, "rmtree", stopped)
    with pytest.raises(Interrupted, match="Interrupted"):
        carry_out(runs, steps)
    monkeypatch.undo()
    assert len(find_runs(runs)[0]) == 3, "the one that is half removed is not listed as damaged"
    left = list(plan(runs, keep=3).values())
    assert [(step.kind, step.why) for step in left] == [("leftover", "left by an interrupted removal")]
    carry_out(runs, left)
    assert list(runs.rglob(".*")) == []


def test_a_run_that_cannot_be_removed_does_not_stop_the_others(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.replace

    def denied(self: Path, target: Path) -> Path:
        if self.name == "day2":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", denied)
    found = carry_out(runs, list(plan(runs, keep=0).values()))
    assert len(found.steps) == 3
    assert "Permission denied" in found.failed[0]


# --- compressing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of tests are small."""
    monkeypatch.setattr(compressing, "LEAST_BYTES", 200)


def figures(run: Path) -> Any:
    """What `report --json` and `sql` say about a run, without sizes of logs."""
    done = llm_perf("report", run, "--json")
    assert done.returncode == 0, done.stderr
    asked = llm_perf("sql", run, "select count(*) as n, sum(dur_ns) as ns from kernels", "--json")
    assert asked.returncode == 0, asked.stderr
    return json.loads(done.stdout), json.loads(asked.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("small_files")
def test_a_compressed_run_opens_as_before(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "runs" / "a").path
    (run / "raw" / "nsys" / "log.txt").write_text("a line of the log\n" * 100)
    before = figures(run)
    (step,) = plan(tmp_path / "runs", compress=True).values()
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    (finished,) = carry_out(tmp_path / "runs", [step]).steps
    after = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    assert finished.frees == size - after > 0
    assert finished.frees == pytest.approx(step.frees, rel=0.5)
    packed = {path.name for path in (run / "raw").rglob("*.gz")}
    assert {
        "run.sqlite.gz",
        "timings.json.gz",
        "operators.json.gz",
        "samples.jsonl.gz",
        "counters.csv.gz",
        "log.txt.gz",
    } <= packed
    assert not (run / "raw" / "nsys" / "run.sqlite").exists()
    assert figures(run) == before
    analyzed = llm_perf("analyze", run, "--json")
    assert analyzed.returncode == 0, analyzed.stderr
    assert plan(tmp_path / "runs", compress=True)["a"].frees <= sum(
        path.stat().st_size for path in (run / "tables").rglob("*") if path.is_file()
    ), "what is left are tables that were written again"


@pytest.mark.usefixtures("small_files")
def test_compressed_runs_are_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = whole_run(tmp_path / name, traces=False).path
        timings = json.loads((run / "raw/clean/timings.json").read_text())
        for number, repeat in enumerate(timings["iterations"]):
            repeat["started_ns"] += number + ord(name)
        (run / "raw/clean/timings.json").write_text(json.dumps(timings))
    before = llm_perf("compare", tmp_path / "a", tmp_path / "b", "--json")
    done(tmp_path, compress=True)
    assert (tmp_path / "a/raw/clean/timings.json.gz").exists()
    after = llm_perf("compare", tmp_path / "a", tmp_path / "b", "--json")
    assert (before.returncode, json.loads(before.stdout)) == (after.returncode, json.loads(after.stdout))


def test_a_file_is_compressed_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "operators.json"
    path.write_text(json.dumps(list(range(50_000))))
    path.chmod(0o640)
    content, time_ns = path.read_bytes(), path.stat().st_mtime_ns

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(compressing, "_contents", stopped)
        with pytest.raises(KeyboardInterrupt):
            compress_file(RunFolder(tmp_path), path)
    assert [file.name for file in tmp_path.iterdir()] == ["operators.json"]
    with monkeypatch.context() as patched:
        patched.setattr(compressing, "_contents", lambda _: (0, 0))
        with pytest.raises(LlmPerfError, match="changed while"):
            compress_file(RunFolder(tmp_path), path)
    freed = compress_file(RunFolder(tmp_path), path)
    packed = tmp_path / "operators.json.gz"
    assert [file.name for file in tmp_path.iterdir()] == [packed.name]
    assert freed == len(content) - packed.stat().st_size
    assert packed.stat().st_mode & 0o777 == 0o640
    assert (read_unpacked(packed, 1 << 30), packed.stat().st_mtime_ns) == (content, time_ns)
    path.write_bytes(content)  # killed between the two last steps: both are there
    assert compress_file(RunFolder(tmp_path), path) == freed
    assert not path.exists()


def test_a_file_that_readers_would_take_for_a_bomb_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    path.write_bytes(b"\0" * (20 << 20))
    assert compress_file(RunFolder(tmp_path), path) == 0
    assert path.stat().st_size == 20 << 20
    path.write_bytes(os.urandom(100_000))
    assert compress_file(RunFolder(tmp_path), path) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["run.sqlite"]


@pytest.mark.usefixtures("small_files")
def test_what_an_interrupted_attempt_left_is_cleared_and_foreign_files_stay(tmp_path: Path) -> None:
    run = RunFolder(made(tmp_path / "a", 1))
    for name in (".timings.json.gz.part", "my-own.json", "trace.json.gz"):
        (run.raw("clean") / name).write_text("x" * 5000)
    (run.raw("clean") / "operators.json").symlink_to(run.raw("clean") / "my-own.json")
    found = compressible(run)
    assert [path.name for path in found.files] == ["timings.json"]
    assert [path.name for path in found.partial] == [".timings.json.gz.part"]
    assert done(tmp_path, compress=True) == ["a"]
    assert sorted(path.name for path in run.raw("clean").iterdir()) == [
        "my-own.json",
        "operators.json",
        "timings.json.gz",
        "trace.json.gz",
    ]
    assert actions(tmp_path, compress=True) == {"a": "keep"}


@pytest.mark.parametrize("damage", [b"", b"\x1f\x8b", b"no gzip", b"bomb"])
def test_a_damaged_compressed_record_is_an_error_of_ours(tmp_path: Path, damage: bytes) -> None:
    import gzip

    path = tmp_path / "timings.json.gz"
    path.write_bytes(gzip.compress(b" " * (20 << 20)) if damage == b"bomb" else damage)
    with pytest.raises(ParseError):
        read_record(path, dict)


# --- the verb ---------------------------------------------------------------------------------------------------------


def test_the_verb_shows_first_and_does_it_when_told(runs: Path) -> None:
    shown = llm_perf("runs", runs, "--keep", "2")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("would remove") == 2
    assert "Nothing was changed" in shown.stdout
    assert len(find_runs(runs)[0]) == 4
    told = json.loads(llm_perf("runs", runs, "--keep", "2", "--json").stdout)
    assert (told["dry_run"], [step["action"] for step in told["steps"]]) == (True, ["remove", "remove"])
    carried = llm_perf("runs", runs, "--keep", "2", "--yes")
    assert carried.returncode == 0, carried.stderr
    assert "2 processed" in carried.stdout
    assert len(find_runs(runs)[0]) == 2
    told = json.loads(llm_perf("runs", runs, "--older-than", "1d", "--yes", "--json").stdout)
    assert (told["dry_run"], len(told["steps"]), told["failed"]) == (False, 2, [])
    assert find_runs(runs)[0] == []


@pytest.mark.parametrize(
    "words",
    [
        ["--yes"],
        ["--sweeps"],
        ["--older-than", "1x"],
        ["--keep", "-1"],
        ["--keep", "x"],
        ["--keep", "0", "--limit", "1", "--yes"],
        ["--compress", "--sweeps"],
    ],
)
def test_a_request_that_means_nothing_is_refused(runs: Path, words: list[str]) -> None:
    assert llm_perf("runs", runs, *words).returncode == 2
    assert len(find_runs(runs)[0]) == 4
