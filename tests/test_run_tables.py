"""A run's own tables: written with its report, asked with SQL, left out where DuckDB is not installed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llm_perf_opt.analyse import reanalyse
from llm_perf_opt.queries import Queries
from llm_perf_opt.records import SCHEMA, Manifest, PassRecord
from llm_perf_opt.run_folder import RunFolder
from llm_perf_opt.run_tables import RUN_TABLES

H200 = Path(__file__).parent / "fixtures" / "h200"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose torch pass left the recorded trace, and nothing else."""
    folder = RunFolder.create(tmp_path / "run")
    passes = (PassRecord("torch", "complete"),)
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", "2026-01-01T00:00:00+00:00", ("llm-perf", "run"), passes))
    folder.raw("torch").mkdir(parents=True)
    shutil.copy(H200 / "torch_trace.json.gz", folder.torch_trace_file)
    return folder


def test_stages_and_steps_can_be_asked(run: RunFolder) -> None:
    _, analysis = reanalyse(run.path)
    assert not any("tables" in warning for warning in analysis.warnings)
    queries = Queries(run.path)
    assert {table.name for table in queries.tables()} >= {*RUN_TABLES, "kernels", "operators"}
    rows = queries.ask("select stage, count(*), sum(dur_ns) from kernels where kind = 'kernel' group by all order by 1").rows
    assert [(stage, calls) for stage, calls, _ in rows] == [("decode_step", 1528), ("prefill", 183)]
    steps = queries.ask("select step, count(*) from kernels where kind = 'kernel' and step is not null group by all order by 1")
    assert steps.rows == [(number, 191) for number in range(8)]
    assert queries.ask("select distinct class from kernels where name like 'nvjet%'").rows == [("GEMM",)]
    assert queries.ask("select name, count from stages where name = 'decode_step'").rows == [("decode_step", 8)]
    assert queries.ask("select count(*) from steps").rows == [(8,)]
    budget = queries.ask("select stage, sum(ns) = max(wall_ns) from budget group by all order by 1").rows
    assert budget == [("decode", True), ("prefill", True)]
    assert queries.ask("select count(*) from samples").rows == [(0,)]


def test_findings_are_kept_for_other_programs(run: RunFolder) -> None:
    reanalyse(run.path)
    assert '"launch_bound_decode"' in run.findings_file.read_text()
    assert "What to change first" in run.report_file.read_text()


def test_without_duckdb_the_report_is_made_all_the_same(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    _, analysis = reanalyse(run.path)
    assert any("duckdb is not installed" in warning for warning in analysis.warnings)
    assert "tables/ was not written" in run.report_file.read_text()
    assert '"launch_bound_decode"' in run.findings_file.read_text()
    assert not list(run.derived_tables.glob("*.parquet"))


def test_advise_as_a_user_types_it(run: RunFolder) -> None:
    def advise(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm_perf_opt", "advise", str(run.path), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    shown = advise()
    assert shown.returncode == 0, shown.stderr
    assert "1. [launch_bound_decode]" in shown.stdout
    assert json.loads(advise("--json").stdout)["findings"][0]["try"] == "runtime.cache=static runtime.compile=reduce-overhead"
    assert advise("--remeasure").returncode == 2
    unrepeatable = advise("--verify", "--quiet")
    assert unrepeatable.returncode == 5
    assert "config.yaml" in unrepeatable.stderr
