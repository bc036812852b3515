"""A run's own tables: written with its report, asked with SQL, left out where DuckDB is not installed."""

import json
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import duckdb
import pytest

from command import llm_perf
from llm_perf_opt.analysis.verification import Trial, Verification
from llm_perf_opt.config.passes import trace_files
from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.records import SCHEMA, Manifest, Missing, PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.warnings import WarningId
from llm_perf_opt.traces.nsys_sqlite import read_nsys
from llm_perf_opt.workflows.analyze_run import report_run
from llm_perf_opt.workflows.analyze_trace import analyze_source
from llm_perf_opt.workflows.queries import RUN_TABLES, Queries
from llm_perf_opt.workflows.run_reader import RunReader
from nsys_databases import altered
from writing import write_record

H200 = Path(__file__).parents[1] / "fixtures" / "h200"
MS = 1_000_000


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
    analysis = report_run(RunReader.open(run.path))
    assert WarningId.TABLES_NOT_WRITTEN not in {warning.id for warning in analysis.warnings}
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


@pytest.mark.slow
def test_components_of_a_folder_of_an_earlier_version_can_be_asked(run: RunFolder) -> None:
    report_run(RunReader.open(run.path))
    earlier = run.derived_tables / "parts.parquet"
    (run.derived_tables / "components.parquet").unlink()
    duckdb.sql(f"COPY (SELECT 'decode' AS stage, 'mlp' AS part, 3 AS pieces, 7 AS time_ns) TO '{earlier}' (FORMAT parquet)")
    assert Queries(run.path).ask("select stage, component, pieces, time_ns from components").rows == [("decode", "mlp", 3, 7)]
    report_run(RunReader.open(run.path))
    assert not earlier.exists()
    assert Queries(run.path).ask("select count(component) from components").rows == [(0,)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["br[1]", "b?1", "wall_ns=5", "dur_ns=5"])
def test_a_run_is_asked_by_its_own_tables_whatever_its_folder_is_called(run: RunFolder, tmp_path: Path, name: str) -> None:
    report_run(RunReader.open(run.path))
    sql = "select sum(dur_ns), count(distinct dur_ns), (select sum(wall_ns) from budget) from kernels"
    ((spent, different, budget),) = Queries(run.path).ask(sql).rows
    assert different > 1
    shutil.copytree(run.path, tmp_path / name / "run")
    shutil.copytree(run.path, tmp_path / "br1" / "run")  # where the name leads, taken for a pattern: of everything one row
    for file in (tmp_path / "br1").rglob("*.parquet"):
        duckdb.sql(f"COPY (SELECT * FROM '{file}' LIMIT 1) TO '{file}.new' (FORMAT parquet)")
        Path(f"{file}.new").replace(file)
    assert Queries(tmp_path / name / "run").ask(sql).rows == [(spent, different, budget)]


def test_a_table_that_unpacks_to_gigabytes_is_refused(run: RunFolder) -> None:
    """Its file has less than a megabyte, and the other tables can still be queried."""
    report_run(RunReader.open(run.path))
    file = run.derived_tables / "stages.parquet"
    columns = ", ".join(f"1::bigint as {name}" for name in "abcdefghij")
    duckdb.execute(f"copy (select {columns} from range(12000000)) to '{file}' (format parquet, compression zstd)")
    assert file.stat().st_size < 1e6
    with pytest.raises(ParseError, match=r"The tables of this run need more than 700 MB of memory, with stages\.parquet"):
        Queries(run.path).ask("select count(*) from stages")
    assert Queries(run.path).ask("select count(*) from kernels").rows[0][0] > 1000
    file.unlink()
    setting = "select current_setting('temp_directory'), current_setting('memory_limit')"
    assert Queries(run.path).ask(setting).rows == [("", "1.8 GiB")], (
        "a query has a limit of its own, and leaves nothing on the disk"
    )


def test_a_damaged_table_is_refused(run: RunFolder) -> None:
    report_run(RunReader.open(run.path))
    file = run.derived_tables / "stages.parquet"
    content = bytearray(file.read_bytes())
    content[4:200] = bytes(196)
    file.write_bytes(content)
    for ask in (lambda: Queries(run.path).ask("select * from stages"), lambda: Queries(run.path).tables()):
        with pytest.raises(ParseError, match=r"stages\.parquet cannot be read"):
            ask()


def test_findings_are_kept_for_other_programs(run: RunFolder) -> None:
    report_run(RunReader.open(run.path))
    assert '"launch_bound_decode"' in run.findings_file.read_text()
    assert "What to change first" in run.report_file.read_text()


def test_without_duckdb_the_report_is_made_all_the_same(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    analysis = report_run(RunReader.open(run.path))
    assert any("duckdb is not installed" in warning.text for warning in analysis.warnings)
    assert "tables/ was not written" in run.report_file.read_text()
    assert '"launch_bound_decode"' in run.findings_file.read_text()
    assert not list(run.derived_tables.glob("*.parquet"))


def test_advise_as_a_user_types_it(run: RunFolder) -> None:
    def advise(*words: str) -> subprocess.CompletedProcess[str]:
        return llm_perf("advise", run.path, *words)

    shown = advise()
    assert shown.returncode == 0, shown.stderr
    assert "1. Run decode in CUDA graphs [launch_bound_decode]" in shown.stdout
    assert json.loads(advise("--json").stdout)["findings"][0]["try"] == "runtime.cache=static runtime.compile=reduce-overhead"
    trial = Trial("launch_bound_decode", ("runtime.compile=x",), "token", "trial", "", MS, MS, MS, 9 * MS, 2 * MS, 1000)
    write_record(run.verify_file, Verification("run", "", (trial,)))
    row = next(line for line in advise().stdout.splitlines() if line.startswith("launch_bound_decode"))
    assert row.split()[1:9] == ["9.000", "ms", "8.000", "ms", "2.000", "ms", "7.000", "ms"]
    (tried,) = json.loads(advise("--json").stdout)["verification"]["trials"]
    assert (tried["id"], tried["saving_ns"]) == ("launch_bound_decode", 7 * MS)
    assert advise("--remeasure").returncode == 2
    unrepeatable = advise("--verify", "--quiet")
    assert unrepeatable.returncode == 5
    assert "config.yaml" in unrepeatable.stderr


def test_a_run_that_cannot_be_written_to_is_shown_all_the_same(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RunFolder, path: Path, content: bytes) -> None:
        raise ResourceError(f"{path} cannot be written: Read-only file system.", "Check the folder's permissions.")

    monkeypatch.setattr(RunFolder, "write", refuse)
    found = analyze_source(run.path)
    assert found.document.gpu.kernels == 1711
    assert any("were not regenerated" in note and "Read-only" in note for note in found.notes)
    with pytest.raises(ResourceError):
        report_run(RunReader.open(run.path))  # whoever asks for the reports themselves is told that there are none


def test_metrics_that_nsys_sampled_stand_beside_the_torch_trace(run: RunFolder) -> None:
    """The figures are from the torch trace, which samples nothing; the samples (made by hand) from the nsys pass."""
    first = 93793329  # the first kernel of that report
    file = trace_files(run)["nsys"]
    file.parent.mkdir(parents=True)
    altered(
        file,
        [
            "CREATE TABLE GPU_METRICS (timestamp INTEGER, typeId INTEGER, metricId INTEGER, value INTEGER)",
            "CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INTEGER, sourceId INTEGER, typeName TEXT, metricId INTEGER, "
            "metricName TEXT)",
            "INSERT INTO TARGET_INFO_GPU_METRICS VALUES (0, 0, 'x', 1, 'SMs Active')",
            f"INSERT INTO GPU_METRICS VALUES ({first}, 0, 1, 40), ({first + 1}, 0, 1, 20)",
        ],
    )
    passes = (PassRecord("torch", "complete"), PassRecord("nsys", "complete", ("nsys", "profile", "--gpu-metrics-devices=all")))
    began = datetime.fromtimestamp(int(read_nsys(file).facts["started_utc_ns"]) / 1e9, timezone.utc)
    run.write_manifest(Manifest(SCHEMA, "0", "complete", began.isoformat(timespec="seconds"), ("llm-perf", "run"), passes))
    analysis = report_run(RunReader.open(run.path))
    assert not isinstance(analysis.trace, Missing)
    assert analysis.trace.profiler == "torch"
    assert WarningId.NO_GPU_METRICS not in {warning.id for warning in analysis.warnings}
    rows = Queries(run.path).ask("select stage, metric, samples, mean from stage_metrics order by 1").rows
    assert rows == [(stage, "SMs Active", 2, 30.0) for stage in ("", "decode", "decode_step")]
    assert "GPU metrics, sampled" in run.report_file.read_text()
    assert Queries(run.path).ask("select device, busy_ns + idle_ns = span_ns from devices").rows == [(0, True)]


def test_samples_that_were_asked_for_and_did_not_come_are_missed(run: RunFolder) -> None:
    passes = (PassRecord("torch", "complete"), PassRecord("nsys", "complete", ("nsys", "profile", "--gpu-metrics-devices=all")))
    run.write_manifest(Manifest(SCHEMA, "0", "complete", "2026-01-01T00:00:00+00:00", ("llm-perf", "run"), passes))
    analysis = report_run(RunReader.open(run.path))
    assert WarningId.NO_GPU_METRICS in {warning.id for warning in analysis.warnings}
