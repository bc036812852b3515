"""A run folder is read once per command, and what is absent or damaged says why."""

import builtins
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import clean_timings
from command import llm_perf
from llm_perf_opt.analysis.findings.finding import Grounds, ToTry, finding
from llm_perf_opt.core.records import CleanTimings, Missing, PassRecord
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.report.overview import overview_text
from llm_perf_opt.traces import trace_cache
from llm_perf_opt.traces.ncu_csv import read_ncu
from llm_perf_opt.traces.open_trace import read_trace
from llm_perf_opt.workflows import advise, run_reader
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.run_reader import Damaged, RunReader, Untested
from whole_runs import whole_run
from writing import write_record

SMALL = ["hardware=cpu", "runtime.num_new_tokens=4", "runtime.prompt_tokens=8", "runtime.min_repeats=6"]
SMALL += ["runtime.max_repeats=6", "runtime.max_warmup=3"]
RECORDS = (".json", ".jsonl", ".yaml")
READ_ONCE = ("raw", "config.yaml", "env.json")


@contextmanager
def reading_once(*runs: Path, captured: bool = False) -> Iterator[None]:
    """Fails where a record of these runs is opened twice, or a trace parsed twice; and where nothing is read at all.

    The measured process of a run that is `captured` reads config.yaml, too, and here it is this process.
    """
    opened: Counter[Path] = Counter()
    parsed: Counter[Path] = Counter()

    def heard(real: Callable[..., Any]) -> Callable[..., Any]:
        def opening(path: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
            if isinstance(path, str | Path) and "r" in mode and "+" not in mode:
                opened[Path(path)] += 1
            return real(path, mode, *more, **named)

        return opening

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def parse(path: Path, *more: Any) -> Any:
            parsed[path] += 1
            return read(path, *more)

        return parse

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", heard(open))
        patch.setattr(Path, "open", heard(Path.open))
        patch.setattr(trace_cache, "read_trace", counted(read_trace))
        patch.setattr(run_reader, "read_ncu", counted(read_ncu))  # it opens the table twice, to look and to read
        yield
    for run in runs:
        inside = {path.relative_to(run): count for path, count in opened.items() if path.is_relative_to(run)}
        read_once = [name for name in READ_ONCE if not captured or name != "config.yaml"]
        records = {path: count for path, count in inside.items() if path.suffix in RECORDS and path.parts[0] in read_once}
        assert Path("raw/clean/timings.json") in records
        assert {path: count for path, count in records.items() if count > 1} == {}
    assert {path: count for path, count in parsed.items() if count > 1} == {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run with a torch trace; making it reads each file once, too."""
    path = tmp_path_factory.mktemp("reader") / "run"
    with reading_once(path, captured=True):
        done = llm_perf("run", "-q", *SMALL, "profiling.ceilings=false", f"hydra.run.dir={path}")
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.slow
def test_run_reads_each_file_once(run: Path) -> None:
    assert (run / "report.md").is_file()


@pytest.mark.parametrize("kept", [True, False])
def test_report_reads_each_file_once(tmp_path: Path, kept: bool) -> None:
    """Of every kind of file that a run holds, with the tables of its traces there already, and without."""
    folder = whole_run(tmp_path / "run")
    if kept:
        assert llm_perf("report", folder.path).returncode == 0
    with reading_once(folder.path):
        done = llm_perf("report", folder.path)
    assert done.returncode == 0, done.stderr


def test_compare_reads_each_file_once(tmp_path: Path) -> None:
    base, new = (whole_run(tmp_path / name) for name in ("base", "new"))
    timings = read_record(new.clean_file, CleanTimings)
    later = new.clean_file.read_text()
    for one in timings.iterations:  # the same work at another time: a copy of a run is refused
        later = later.replace(f'"started_ns": {one.started_ns}', f'"started_ns": {one.started_ns + 7}')
    new.clean_file.write_text(later)
    with reading_once(base.path, new.path):
        done = llm_perf("compare", base.path, new.path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_verifying_findings_reads_the_run_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grounds = Grounds(("a row",), "high", "it was measured")
    larger = ToTry(("runtime.batch_size=2",), "Use more.")
    slow = finding("some_change", ("decode", 3), ("It is slow.",), grounds, Missing("not known"), larger)
    monkeypatch.setattr(advise, "to_try", lambda *_: [slow])
    with reading_once(run, run.with_name("run-verify-some_change"), captured=True):
        done = llm_perf("advise", run, "--verify", "-q")
    assert done.returncode == 0, done.stderr
    assert "some_change" in (run / "report.md").read_text().replace("\\", "")


def test_what_is_absent_says_why(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest(whole_run(tmp_path / "whole").manifest())
    folder.update_pass(PassRecord("torch", "failed", why="It broke."))
    found = RunReader(folder)
    parts = (found.timings, found.torch, found.telemetry, found.ceilings, found.env, found.selftest, found.trace("nsys"))
    assert all(isinstance(part, Missing) and not isinstance(part, Damaged) and part.why for part in parts)
    assert found.torch == Missing("the torch pass failed: It broke.")
    assert found.settings == {}
    assert found.damage is not None, "the pass is complete, and its times are gone"


@pytest.mark.parametrize(
    ("passes", "why"),
    [
        ({"torch": ("skipped", "The run ended before this pass.")}, "the torch pass was skipped: The run ended before this pass"),
        ({"torch": ("complete", "")}, "the torch pass left no trace"),
        ({"torch": ("failed", "It broke."), "nsys": ("skipped", "No nsys.")}, "It broke; the nsys pass was skipped: No nsys"),
        ({}, "the run was made without a pass that leaves a trace (torch or nsys)"),
    ],
)
def test_the_reason_for_no_trace_is_that_of_its_pass(tmp_path: Path, passes: dict[str, Any], why: str) -> None:
    folder = whole_run(tmp_path / "run", traces=False)
    manifest = folder.manifest()
    kept = [entry for entry in manifest.passes if entry.name not in ("torch", "nsys")]
    made = [PassRecord(name, status, why=reason) for name, (status, reason) in passes.items()]
    write_record(folder.manifest_file, replace(manifest, passes=(*kept, *made)))
    folder.ceilings_file.unlink()
    write_record(folder.clean_file, clean_timings())  # on a CPU without known peaks
    found = analyze(RunReader(folder))
    assert isinstance(found.trace, Missing)
    assert found.trace.why.endswith(why)
    assert f"Where the time goes: n/a: {found.trace.why}"[:70] in overview_text(found)


def test_what_is_damaged_costs_itself_only(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", traces=False)
    for file in (folder.clean_file, folder.telemetry_file, folder.ceilings_file, folder.env_file, folder.verify_file):
        file.write_text("{")
    found = RunReader(folder)
    for part in (found.timings, found.ceilings, found.env, found.verified):
        assert isinstance(part, Damaged)
    assert isinstance(found.telemetry, Missing)
    assert found.damage is not None
    assert not isinstance(found.torch, Missing)
    assert not isinstance(found.selftest, Missing)


def test_counters_without_a_verdict_are_a_kind_of_missing(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", traces=False)
    folder.selftest_file.unlink()
    assert isinstance(RunReader(folder).counters("ncu_decode"), Untested)


def test_a_stage_that_was_not_counted_is_told_from_a_run_without_counters(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", traces=False)
    manifest = folder.manifest()
    reasons = []
    for kept in ("ncu_decode", "none"):
        passes = tuple(entry for entry in manifest.passes if entry.name == kept or not entry.name.startswith("ncu"))
        write_record(folder.manifest_file, replace(manifest, passes=passes))
        found = RunReader(folder).counters("ncu_prefill")
        assert isinstance(found, Missing)
        reasons.append(found.why)
    assert reasons == ["Nsight Compute did not run in this stage", "the run was made without Nsight Compute"]


def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", traces=False)
    assert not isinstance(RunReader(folder).timings, Missing)
    folder.clean_file.write_text("{")
    assert isinstance(RunReader(folder).timings, Damaged)
