"""`llm-perf sql` as a user types it."""

import csv
import gzip
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from builders import manifest
from command import llm_perf
from llm_perf_opt.config.passes import trace_files
from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.run_folder import RunFolder
from synthetic_traces import Recipe, write_trace

REAL = Path(__file__).parents[1] / "fixtures" / "h200" / "torch_trace.json.gz"
TOP = "select name, count(*) as calls, sum(dur_ns) as ns from kernels group by all order by ns desc"


def sql(*words: str) -> subprocess.CompletedProcess[str]:
    return llm_perf("sql", *words)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(shutil.copy(REAL, tmp_path_factory.mktemp("verb") / "trace.json.gz"))


def test_a_table_in_the_terminal(trace: str) -> None:
    done = sql(trace, TOP, "--limit", "2")
    assert done.returncode == 0, done.stderr
    header, first, second = done.stdout.splitlines()
    assert header.split() == ["name", "calls", "ns"]
    assert first.split() == ["nvjet_sm90_tst_384x8_64x4_2x1_v_bz_TNT", "9", "966271"]
    assert "--limit 0" in done.stderr
    assert second


def test_without_duckdb_a_query_says_what_to_install(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    done = sql(trace, TOP)
    assert (done.returncode, "pip install duckdb" in done.stderr) == (ResourceError.exit_code, True)


def test_data_for_programs_is_whole(trace: str) -> None:
    as_json = json.loads(sql(trace, TOP, "--json").stdout)
    as_csv = list(csv.DictReader(io.StringIO(sql(trace, TOP, "--csv").stdout)))
    assert sum(row["calls"] for row in as_json) == 1711 + 22
    assert [row["ns"] for row in as_csv] == [str(row["ns"]) for row in as_json]


def test_without_a_query_the_tables_are_listed(trace: str) -> None:
    shown = sql(trace).stdout
    assert "kernels  1,733 rows" in shown
    assert "dur_ns" in shown
    listed = json.loads(sql(trace, "--json").stdout)
    assert [table["table"] for table in listed] == ["kernels", "calls", "ranges", "operators", "collectives", "gpu_metrics"]
    assert listed[0]["columns"]["dur_ns"] == "BIGINT"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["select nope from kernels"], 2),
        (["drop table kernels"], 2),
        (["select * from read_text('/etc/passwd')"], 2),
        (["select 1", "--json", "--csv"], 2),
    ],
)
def test_mistakes_end_in_one_line_and_a_remedy(trace: str, words: list[str], code: int) -> None:
    done = sql(trace, *words)
    assert done.returncode == code
    assert done.stdout == ""
    error, remedy = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert remedy.startswith("  → ")


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    done = sql(str(tmp_path / "x.json"), "select 1")
    assert done.returncode == 5
    assert "not a torch trace" in done.stderr


def test_remarks_are_told_once_and_what_makes_numbers_wrong_each_time(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", Recipe(steps=2, kernels_per_step=3))
    label = '{"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 1, "ts": 1, "dur": 1},'
    text = (tmp_path / "trace.json").read_text().replace('"Input Dims"', '"Dims"')
    (tmp_path / "trace.json").write_text(text.replace('"traceEvents": [', f'"traceEvents": [{label}', 1))
    query = "select count(*) as n from kernels"
    first, second = (llm_perf("sql", tmp_path / "trace.json", query) for _ in range(2))
    assert first.stderr.count("warning: ") == 1
    assert "shapes" in first.stderr
    assert second.stderr == ""
    assert first.stdout == second.stdout
    cut = tmp_path / "cut.json"
    cut.write_bytes((tmp_path / "trace.json").read_bytes()[:-200])
    assert all("warning: " in llm_perf("sql", cut, query).stderr for _ in range(2))


def test_what_a_run_was_told_to_record_is_no_warning(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.write_manifest(manifest())
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    run.torch_trace_file.parent.mkdir(parents=True)
    run.torch_trace_file.write_bytes(gzip.compress(json.dumps({"traceEvents": [event]}).encode()))
    for _ in range(2):
        done = llm_perf("sql", run.path, "select name from operators")
        assert (done.stdout.split(), done.stderr) == (["name", "aten::mm"], "")


def test_times_of_a_time_zone_need_no_further_package(trace: str) -> None:
    query = "select now() as t, [now()] as l, {'a': now()} as s, count(*) as n, 1 as n from kernels -- all"
    done = llm_perf("sql", trace, query, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["n"] == 1733
    assert row["n_1"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?[+-]\d\d(:\d\d)?", row["t"])
    assert row["t"] in row["l"]
    assert row["t"] in row["s"]


def test_a_limit_beyond_all_rows(trace: str) -> None:
    assert llm_perf("sql", trace, "select 1 as x", "--limit", 2**70).stdout.split() == ["x", "1"]


def test_values_that_json_lacks(trace: str) -> None:
    big = str(2**127 - 1)
    query = f"select {big}::hugeint as big, 1.5::decimal(4,2) as d, date '2026-01-02' as t, [1, null] as l, 'nan'::double as n"
    (row,) = json.loads(sql(trace, query, "--json").stdout)
    assert row == {"big": big, "d": 1.5, "t": "2026-01-02", "l": [1, None], "n": None}


def test_problems_of_the_trace_are_told(tmp_path: Path) -> None:
    (tmp_path / "cut.json.gz").write_bytes(REAL.read_bytes()[:100_000])
    done = sql(str(tmp_path / "cut.json.gz"), "select count(*) from kernels")
    assert done.returncode == 0
    assert "warning: the file ends in the middle of its events" in done.stderr


def test_a_run_folder_keeps_its_raw_files_as_they_are(tmp_path: Path) -> None:
    from builders import manifest

    run = RunFolder(tmp_path / "run")
    raw = trace_files(run)["torch"]
    raw.parent.mkdir(parents=True)
    shutil.copy(REAL, raw)
    run.write_manifest(manifest())
    done = sql(str(run.path), "select count(*) as n from kernels", "--json")
    assert json.loads(done.stdout) == [{"n": 1733}], done.stderr
    assert list(raw.parent.iterdir()) == [raw]
    assert (run.tables("torch") / "kernels.parquet").exists()
