"""Runs under load: import, report, tables, list."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from command import clean_end, llm_perf
from docs_commands import commands
from llm_perf_opt.analysis.serving.knee import Knee
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.core.serving_records import LoadPoint, LoadRecords, ServerFacts
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.serving_document import serving_document
from llm_perf_opt.report.terminal import render_text
from llm_perf_opt.traces.serving.load_file import read_load
from llm_perf_opt.workflows import load_reader
from llm_perf_opt.workflows.import_load import ImportRequest, import_loads, safe_name
from llm_perf_opt.workflows.run_listing import list_runs
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.serving import analyze_serving, report_serving
from serving_loads import write_serving_run
from writing import write_record

FILES = Path(__file__).parents[1] / "fixtures" / "serving"
ALL = ("profile_export.jsonl", "vllm_bench_serve.json", "guidellm.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of three loads and a profiled one, with an objective."""
    place = tmp_path_factory.mktemp("served") / "run"
    return write_serving_run(place, [8.0, 16.0, 40.0], count=80, slo={"ttft": 200_000_000}, profiled=16.0)


@pytest.mark.parametrize("name", ALL)
def test_each_generator_can_be_imported(tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    done = llm_perf("import", FILES / name, "--out", out, "--slo", "ttft=100ms,tpot=20ms", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], len(found["points"])) == ("complete", 1)
    point = found["points"][0]
    assert (point["requests"], point["failed"]) == (12, 0)
    assert point["goodput"]["requests"] == 12
    assert {"report.html", "report.md", "stakeholder_summary.md", "run.json", "env.json"} <= {path.name for path in out.iterdir()}
    reader = RunReader.open(out)
    assert reader.manifest.kind == "serving"
    assert reader.names == ("import", "tiny")
    assert json.loads((out / "env.json").read_text())["machine"].startswith("n/a: imported")
    again = analyze_serving(reader)
    assert again.points[0].requests == 12


def test_several_files_are_several_loads(tmp_path: Path) -> None:
    folders = [write_serving_run(tmp_path / f"r{rate}", [rate], count=240) for rate in (8.0, 40.0)]
    files = tuple(folder.raw("load_00") / "profile_export.jsonl" for folder in folders)
    summary = folders[0].raw("load_00") / "profile_export_aiperf.json"
    folder = import_loads(ImportRequest((*files, summary), tmp_path / "run"), ["llm-perf", "import"])
    found = analyze_serving(RunReader(folder))
    assert [point.point.asked for point in found.curve] == [8.0, 40.0]
    assert isinstance(found.knee, Knee)
    assert (found.knee.carried, found.knee.not_carried) == (8.0, 40.0)


def test_a_file_with_several_loads_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads((FILES / "guidellm.json").read_bytes())
    content["benchmarks"] *= 5
    (tmp_path / "loads.json").write_text(json.dumps(content))
    folder = import_loads(ImportRequest((tmp_path / "loads.json",), tmp_path / "run"), [])
    read: list[Path] = []

    def counted(path: Path, *, cut_short: bool) -> list[LoadRecords]:
        read.append(path)
        return read_load(path, cut_short=cut_short)

    monkeypatch.setattr(load_reader, "read_load", counted)
    assert len(analyze_serving(RunReader(folder)).points) == 5
    assert len(read) == 1


def test_metrics_are_kept_with_their_load(tmp_path: Path) -> None:
    source = write_serving_run(tmp_path / "source", [8.0], count=60).raw("load_00")
    request = ImportRequest((source / "profile_export.jsonl",), tmp_path / "run", source / "metrics.jsonl")
    found = analyze_serving(RunReader(import_loads(request, [])))
    server = found.points[0].server
    assert not isinstance(server, Missing)
    assert server.samples > 10
    with pytest.raises(ConfigError, match="--metrics"):
        import_loads(ImportRequest((FILES / "vllm_bench_serve.json",), tmp_path / "other", source / "metrics.jsonl"), [])


def test_a_failed_import_makes_no_folder(tmp_path: Path) -> None:
    damaged = tmp_path / "x.json"
    damaged.write_text("{")
    for words in (["--slo", "ttft=fast", FILES / ALL[0]], [damaged], [tmp_path / "none.json"]):
        done = llm_perf("import", *words, "--out", tmp_path / "run")
        assert done.returncode in (2, 5)
        assert clean_end(done)
        assert not (tmp_path / "run").exists()


def test_an_import_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llm_perf_opt.workflows.import_load.copy", full)
    with pytest.raises(LlmPerfError, match="No space left"):
        import_loads(ImportRequest((FILES / ALL[0],), tmp_path / "run"), [])
    assert list(tmp_path.iterdir()) == []


def test_different_models_are_not_one_run(tmp_path: Path) -> None:
    content = json.loads((FILES / ALL[1]).read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content | {"model_id": "../other\x1b<b>"}))
    with pytest.raises(ConfigError, match="different models"):
        import_loads(ImportRequest((FILES / ALL[1], other), tmp_path / "run"), [])
    folder = import_loads(ImportRequest((other,), tmp_path / "run"), [])
    assert (folder.path / "raw" / "load_00" / "other.json").is_file()
    assert safe_name("../other\x1b<b>") == "other__b_"
    assert safe_name("…") == "server"


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_bytes((FILES / ALL[1]).read_bytes())
    names = ("profile_export.jsonl", "profile_export_aiperf.json")
    for name in names:
        (tmp_path / name).write_bytes((FILES / name).read_bytes())
    for number, (side, rate) in enumerate((side, rate) for side in ("main", "change") for rate in (4.0, 8.0)):
        source = write_serving_run(tmp_path / f"source{number}", [rate], count=40, seed=number + 1).raw("load_00")
        place = tmp_path / side / f"rate{rate:g}"
        place.mkdir(parents=True)
        for name in names:
            (place / name).write_bytes((source / name).read_bytes())
    found = commands("serving.md")
    assert [words[0] for words in found] == ["import"] * 4 + ["report", "sql", "compare"] + ["serve"] * 3
    for words in found[:-3]:  # those of serve need an engine: tests/profiling/serving/test_engine.py
        done = llm_perf(*words, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


# --- the report -----------------------------------------------------------------------------------------------------------


def test_all_renderers_show_the_knee(run: RunFolder) -> None:
    document = serving_document(analyze_serving(RunReader(run)))
    pages = render_markdown(document), render_html(document), render_text(document)
    for page in pages:
        assert "The batch is full: 8 requests run, and the server allows 8" in page
        assert "decode: between steps" in page
        assert "16 requests/s" in page
    assert [section.id for section in document.sections][:3] == ["overview", "curve", "knee"]
    assert {table.id for table in document.tables} >= {
        "throughput",
        "latency-ttft",
        "server-metrics",
        "generator-checks",
        "verdicts",
    }


def test_hostile_names_cannot_become_markup(tmp_path: Path) -> None:
    folder = write_serving_run(tmp_path / "run", [8.0, 40.0], count=30)
    write_record(folder.server_file, ServerFacts("http://x", "<script>alert(1)</script>\x1b[31m", ("a", "</script>")))
    file = folder.raw("load_00") / "profile_export.jsonl"
    lines = file.read_text().splitlines()
    failed = json.loads(lines[0]) | {"metrics": {}, "error": {"message": "<img src=x onerror=alert(1)>"}}
    file.write_text("\n".join([json.dumps(failed), *lines[1:]]) + "\n")
    document = serving_document(analyze_serving(RunReader(folder)))
    page = render_html(document)
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "\x1b" not in render_text(document)


@pytest.mark.slow
def test_the_verbs_of_a_run_under_load(run: RunFolder, tmp_path: Path) -> None:
    done = llm_perf("report", run.path)
    assert done.returncode == 0, done.stderr
    assert "report:" in done.stdout
    done = llm_perf("sql", run.path, "select count(*) as n, sum(good::int) as good from requests where load = 0", "--json")
    assert json.loads(done.stdout) == [{"n": 80, "good": 80}]
    done = llm_perf("sql", run.path, "--json")
    assert [table["table"] for table in json.loads(done.stdout)] == ["requests", "load_points", "server_samples"]
    done = llm_perf("report", run.path, "--slo", "ttft=1ms", "--json")
    points = json.loads(done.stdout)["points"]
    assert {point["goodput"]["good"] for point in points if not point["point"]["profiled"]} == {0}
    for words in (
        ["advise", run.path],
        ["analyze", run.path],
        ["report", run.path, "--peak-tflops", "1", "--bandwidth-gbs", "1"],
    ):
        done = llm_perf(*words)
        assert done.returncode == 2
        assert clean_end(done)
    (row,) = list_runs(run.path.parent).rows
    assert (row.workload, row.model, row.ttft_ns) == ("3 loads, 8 – 40 requests/s", "tiny", None)


def test_tables_that_cannot_be_written_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ResourceError("DuckDB is not installed.", "pip install duckdb")

    monkeypatch.setattr("llm_perf_opt.workflows.serving.write_rows", refuse)
    found = report_serving(RunReader(write_serving_run(tmp_path / "run", [8.0], count=20)))
    assert len(found.problems) == 1
    assert "DuckDB is not installed" in (tmp_path / "run" / "report.md").read_text()


def test_a_run_without_tables_says_how_to_write_them(tmp_path: Path) -> None:
    folder = write_serving_run(tmp_path / "run", [8.0], count=20)
    done = llm_perf("sql", folder.path, "select 1")
    assert done.returncode == 5
    assert "llm-perf report" in done.stderr


# --- damage ---------------------------------------------------------------------------------------------------------------


def test_a_partial_load_keeps_what_it_has(tmp_path: Path) -> None:
    folder = write_serving_run(tmp_path / "run", [8.0, 16.0], count=40)
    place = folder.raw("load_01")
    file = place / "profile_export.jsonl"
    file.write_bytes(file.read_bytes()[:-100])
    damaged = analyze_serving(RunReader(folder))
    assert damaged.points[1].unusable is not None
    point = read_record(place / "point.json", LoadPoint)
    write_record(place / "point.json", replace(point, status="partial", why="the server died"))
    assert analyze_serving(RunReader(folder)).points[1].requests == 39


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = write_serving_run(tmp_path / "run", [8.0], count=20)
    point = read_record(folder.raw("load_00") / "point.json", LoadPoint)
    for name in ("../load_00/profile_export.jsonl", "/etc/passwd", ".."):
        write_record(folder.raw("load_00") / "point.json", replace(point, file=name, metrics=name, spans=name, trace=name))
        found = analyze_serving(RunReader(folder)).points[0]
        assert found.unusable is not None
        assert "not a file of its folder" in found.unusable.why or "cannot be read" in found.unusable.why


def test_damaged_files_of_a_run_are_reported(tmp_path: Path) -> None:
    folder = write_serving_run(tmp_path / "run", [8.0, 40.0], count=20, profiled=8.0)
    for name in ("metrics.jsonl", "spans.jsonl", "server.trace.json.gz"):
        (folder.raw("load_02") / name).write_bytes(b"\x00{")
    folder.server_file.write_text("{")
    done = llm_perf("report", folder.path)
    assert done.returncode == 0, done.stderr
    assert clean_end(done)
    page = folder.report_file.read_text()
    assert page.count("**Problem at 8 requests/s, profiled:** the server's") == 3
    (folder.raw("load_00") / "point.json").write_text("{")
    done = llm_perf("report", folder.path)
    assert done.returncode == 5
    (row,) = list_runs(tmp_path).rows
    assert row.status == "damaged"
    with pytest.raises(LlmPerfError):
        analyze_serving(RunReader.open(folder.path))


@pytest.mark.slow
@pytest.mark.parametrize("value", [0, -1, 1e308, 10**30, "x", None])
def test_impossible_numbers_are_no_traceback(tmp_path: Path, value: object) -> None:
    folder = write_serving_run(tmp_path / "run", [8.0, 16.0], count=20, profiled=8.0)
    text = "null" if value is None else json.dumps(value)
    for name, key in (("point.json", "asked"), ("metrics.jsonl", "at_ns"), ("profile_export.jsonl", "request_end_ns")):
        file = folder.raw("load_00") / name
        before = file.read_text()
        file.write_text(re.sub(rf'"{key}": ?[0-9.]+', f'"{key}": {text}', before, count=1))
        done = llm_perf("report", folder.path)
        assert clean_end(done), done.stderr
        file.write_text(before)
