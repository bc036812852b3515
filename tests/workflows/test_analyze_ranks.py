"""Several ranks as a user gives them: files, a folder, a pattern; read in this process or in others."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from command import llm_perf
from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.core.processes import Answer
from llm_perf_opt.workflows import analyze_ranks
from llm_perf_opt.workflows.analyze_ranks import analyze_rank_files, traces_of
from llm_perf_opt.workflows.rank_reader import check_stored
from rank_traces import Job, write_job

KEYS = {"rank", "file", "busy_ns", "idle_ns", "exposed_comm_ns", "offset_ns"}
COLLECTIVE_KEYS = {"index", "kind", "bytes", "ranks", "start_skew_ns", "last_rank", "transfer_ns"}


def as_json(*words: str | Path) -> dict[str, Any]:
    done = llm_perf("analyze", *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_folder_a_pattern_and_files_are_the_same_traces(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, collectives=4))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("x")
    found, notes = traces_of([tmp_path])
    assert found == traces_of([tmp_path / "trace_rank*.json"])[0] == traces_of(truth.files)[0] == truth.files
    assert ["config.json" in note for note in notes] == [True]
    in_any_order = [analyze_rank_files(files, "x", use_cache=False).document for files in (truth.files, truth.files[::-1])]
    assert in_any_order[0] == in_any_order[1]


def test_the_json_has_each_rank_with_the_analysis_of_its_trace(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, collectives=4))
    found = as_json(tmp_path)
    ranks, collectives = found["ranks"], found["collectives"]
    assert [line["rank"] for line in ranks] == [0, 1]
    assert set(ranks[0]) >= KEYS
    assert set(collectives[0]) >= COLLECTIVE_KEYS
    alone = as_json(truth.files[1])
    assert ranks[1]["analysis"] == alone
    assert (ranks[1]["busy_ns"], ranks[1]["idle_ns"]) == (alone["gpu"]["busy_ns"], alone["gpu"]["idle_ns"])


def test_a_folder_with_one_trace_is_that_trace(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, collectives=2))
    truth.files[1].unlink()
    assert as_json(tmp_path)["gpu"]["busy_ns"] == truth.busy_ns[0]


@pytest.mark.slow
def test_pages_are_written_in_every_format(tmp_path: Path) -> None:
    write_job(tmp_path, Job(ranks=3, collectives=6, hosts=2, drop={1: [2]}, late={2: 50_000}))
    for ending, expected in ((".html", "<table"), (".md", "| rank |"), (".json", '"collectives"')):
        page = tmp_path / "pages" / f"page{ending}"
        page.parent.mkdir(exist_ok=True)
        done = llm_perf("analyze", tmp_path, "--out", page)
        assert done.returncode == 0, done.stderr
        assert expected in page.read_text()
        assert max(map(len, done.stdout.splitlines())) <= 110
    assert llm_perf("analyze", tmp_path, "--out", tmp_path / "x.pdf").returncode == 2


def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, collectives=2))
    twice = tmp_path / "again.json"
    twice.write_bytes(truth.files[0].read_bytes())
    with pytest.raises(ConfigError, match="rank 0"):
        analyze_rank_files([*truth.files, twice], "x", use_cache=False)
    with pytest.raises(ConfigError, match="No file matches"):
        traces_of([tmp_path / "nothing*.json"])
    assert llm_perf("analyze", *truth.files, "--modules-from", truth.files[0]).returncode == 2
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert llm_perf("analyze", truth.files[0], tmp_path / "run").returncode == 2


def test_an_incomplete_trace_contributes_its_problem(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=3, collectives=6))
    content = truth.files[2].read_text()
    truth.files[2].write_text(content[: len(content) // 2])
    result = analyze_rank_files(truth.files, "x", use_cache=False)
    assert result.error is not None
    assert result.error.exit_code == 5
    assert not result.document.complete
    assert [line.busy_ns for line in result.document.ranks] == [*truth.busy_ns[:2], None]
    assert all(line.missing == [2] for line in result.document.collectives)


def test_ranks_are_numbered_by_name_or_position(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, collectives=2))
    for file in truth.files:
        file.write_text(file.read_text().replace('"rank":', '"unknown":'))
    assert [line.rank for line in analyze_rank_files(truth.files[::-1], "x", use_cache=False).document.ranks] == [0, 1]
    moved = [file.rename(tmp_path / name) for file, name in zip(truth.files, ("b.json", "a.json"), strict=True)]
    result = analyze_rank_files(moved, "x", use_cache=False)
    assert [(line.rank, Path(line.file).name) for line in result.document.ranks] == [(0, "b.json"), (1, "a.json")]
    assert any("numbered" in note for note in result.notes)


@pytest.mark.slow
def test_other_processes_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = write_job(tmp_path, Job(ranks=3, collectives=10, hosts=2, drop={1: [3]}))
    here = analyze_rank_files(truth.files, "x", with_analyses=True)
    monkeypatch.setattr(analyze_ranks, "_SMALL_BYTES", 0)
    monkeypatch.setattr(analyze_ranks, "_cores", lambda: 2)
    there = analyze_rank_files(truth.files, "x", with_analyses=True)
    assert there.document == here.document
    truth.files[1].write_text("not a trace")
    with pytest.raises(ParseError, match="trace_rank1"):
        analyze_rank_files(truth.files, "x")


def test_a_trace_without_a_rank_does_not_renumber_the_others(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=3, collectives=2))
    middle = truth.files[1].rename(tmp_path / "b.json")
    middle.write_text(middle.read_text().replace('"rank":', '"unknown":'))
    result = analyze_rank_files([truth.files[2], truth.files[0], middle], "x", use_cache=False)
    assert [Path(line.file).name for line in result.document.ranks] == ["trace_rank0.json", "b.json", "trace_rank2.json"]
    assert any("b.json as 1" in note for note in result.notes)


def test_traces_of_other_processes_are_left_out_if_all_ranks_are_there(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, collectives=2))
    server = tmp_path / "server.json"
    server.write_text(truth.files[0].read_text().replace('"distributedInfo":', '"unknown":'))
    result = analyze_rank_files([server, *truth.files], "x", use_cache=False)
    assert [Path(line.file).name for line in result.document.ranks] == ["trace_rank0.json", "trace_rank1.json"]
    assert all(line.wait_ns is not None for line in result.document.ranks)
    assert ["server.json" in note for note in result.notes] == [True]


def test_a_folder_may_have_lists_of_events_and_databases_of_others(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, collectives=2))
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps([{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]))
    with closing(sqlite3.connect(tmp_path / "mlflow.sqlite")) as database:
        database.execute("CREATE TABLE runs (id INTEGER)")
    found, notes = traces_of([tmp_path])
    assert found == [plain, *truth.files]
    assert ["mlflow.sqlite" in note for note in notes] == [True]


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match=r"exit code 1: ImportError: no such thing\."):
        check_stored(tmp_path / "rank0", "a.json", Answer(1, b"", "Traceback …\nImportError: no such thing\n"))
    with pytest.raises(ParseError, match="signal 9") as killed:
        check_stored(tmp_path / "rank0", "a.json", Answer(-9, b"", ""))
    assert "memory" in killed.value.remedy
