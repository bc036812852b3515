"""`llm-perf analyze` as a user types it, on recorded traces whose truth is known."""

import gzip
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command import llm_perf
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.report.trace_document import trace_text
from llm_perf_opt.traces.trace_mark import fresh_tables, kept_for
from llm_perf_opt.workflows.analyze_trace import ANALYSIS_FILE, analyze_source
from synthetic_traces import Recipe, kinds, union_ns, write_trace

H200 = Path(__file__).parents[1] / "fixtures" / "h200"


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return llm_perf("analyze", *words)


def as_json(source: Path, *words: str) -> dict[str, Any]:
    done = analyze(source, "--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    for name in ("torch_trace.json.gz", "nsys_decode.sqlite.gz", "nsys_truncated.sqlite.gz"):
        shutil.copy(H200 / name, tmp_path)
    return tmp_path


def test_a_torch_trace_is_accounted_for_and_found_launch_bound(traces: Path) -> None:
    found = as_json(traces / "torch_trace.json.gz")
    assert found["complete"] is True
    gpu = found["gpu"]
    assert (gpu["kernels"], round(gpu["kernel_ns"] / 1e6, 3)) == (1711, 5.521)
    assert gpu["busy_ns"] + gpu["idle_ns"] == gpu["span_ns"]
    assert sum(row["ns"] for row in found["idle"]) == gpu["idle_ns"]
    assert sum(row["calls"] for row in found["kernels"]) == 1711
    assert sum(row["total_ns"] for row in found["kernels"]) == gpu["kernel_ns"]
    assert {"name", "class", "calls", "total_ns", "mean_ns", "share"} <= set(found["kernels"][0])
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert stages["decode_step"]["count"] == 8
    assert (stages["prefill"]["kernels"], stages["decode"]["kernels"]) == (183, 1528)
    assert {"count", "wall_ns", "gpu_busy_ns", "idle_ns", "kernels", "launches"} <= set(stages["prefill"])
    operators = {row["name"]: row for row in found["operators"]}
    assert sum(row["self_ns"] for row in operators.values()) == 5_538_827  # all 1,733 pieces of work; 288 ns of them overlap
    assert sum(row["kernels"] for row in operators.values()) == 1733
    assert operators["aten::linear"]["total_ns"] >= operators["aten::linear"]["self_ns"]
    first = found["findings"][0]
    assert first["id"] == "launch_bound_decode"
    assert first["try"] == "runtime.cache=static runtime.compile=reduce-overhead"
    assert first["saving_low_ns"] <= first["saving_ns"] <= first["saving_high_ns"]
    wall = stages["decode"]["wall_ns"] / 8
    assert 0.3e6 < wall - first["saving_ns"] < 0.6e6  # four layers' kernels: 0.57 ms a token, of which 0.21 ms fuse
    assert first["evidence"]


def test_an_nsys_export_has_eight_equal_steps_and_is_found_launch_bound(traces: Path) -> None:
    found = as_json(traces / "nsys_decode.sqlite.gz")
    assert (found["gpu"]["kernels"], round(found["gpu"]["kernel_ns"] / 1e6, 3)) == (1528, 4.651)
    assert [step["kernels"] for step in found["steps"]] == [191] * 8
    assert found["findings"][0]["id"] == "launch_bound_decode"
    assert "under the profiler" in found["findings"][0]["claim"]
    for budget in found["budgets"]:
        assert sum(row["ns"] for row in budget["rows"]) == budget["wall_ns"]


def test_a_truncated_report_is_refused_with_its_problems_and_no_number(traces: Path) -> None:
    done = analyze(traces / "nsys_truncated.sqlite.gz", "--json")
    assert done.returncode == 5
    found = json.loads(done.stdout)
    assert found["complete"] is False
    assert any(problem["fatal"] for problem in found["problems"])
    assert set(found["gpu"].values()) == {None}
    assert found["stages"] == found["kernels"] == found["idle"] == found["findings"] == []
    assert found["why"]
    shown = analyze(traces / "nsys_truncated.sqlite.gz")
    assert "INCOMPLETE" in shown.stdout
    assert "incomplete" in shown.stderr


def test_the_terminal_page_fits_a_hundred_columns(traces: Path) -> None:
    done = analyze(traces / "torch_trace.json.gz")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines()[1:])) <= 100  # the first is the file's path, as long as it is
    for words in ("no problems", "Where decode goes", "launch-bound", "Kernels:", "What to change first", "do not add them"):
        assert words in done.stdout


def test_stages_whose_work_another_thread_launched_have_no_figures(tmp_path: Path) -> None:
    rows = [
        {"ph": "X", "cat": "user_annotation", "name": "decode", "pid": 1, "tid": 1, "ts": 0, "dur": 100, "args": {}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2, "ts": 5, "dur": 2,
         "args": {"correlation": 1}},
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10, "dur": 20,
         "args": {"device": 0, "stream": 7, "correlation": 1}},
    ]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": rows}))
    found = analyze_source(tmp_path / "trace.json", use_cache=False).document
    assert found.complete
    assert any(problem.id == "launched_elsewhere" for problem in found.problems)
    (decode,) = found.stages
    assert (decode.gpu_busy_ns, decode.kernels, decode.launches) == (None, None, None)


@pytest.mark.parametrize("recipe", list(kinds(3)))
def test_every_synthetic_kind_is_told_exactly(recipe: Recipe, tmp_path: Path) -> None:
    truth = write_trace(tmp_path / "trace.json", recipe)
    found = analyze_source(tmp_path / "trace.json", use_cache=False).document
    gpu = found.gpu
    assert (gpu.kernels, gpu.kernel_ns, gpu.busy_ns, gpu.idle_ns) == (
        truth.kernels,
        truth.kernel_ns,
        truth.busy_ns,
        truth.idle_ns,
    )
    for budget in found.budgets:
        assert sum(row.ns for row in budget.rows) == budget.wall_ns
    few = recipe.kernels_per_step < 5  # then the host's own work between the steps is what the device waits for
    assert any(one.id == "launch_bound_decode" for one in found.findings) == (not recipe.graph and not few)
    (decode,) = [budget for budget in found.budgets if budget.stage == "decode"]
    host_ns = sum(row.ns for row in decode.rows if row.key == "host")
    assert any(one.id == "host_between_steps" for one in found.findings) == (host_ns >= 0.05 * decode.wall_ns)
    assert host_ns > 0 or recipe.graph, "one launch by one, the host works between the steps"
    assert [device.device for device in found.devices] == sorted(truth.on_device)
    for device in found.devices:
        work = truth.on_device[device.device]
        span = max(end for _, end in work) - min(start for start, _ in work)
        assert (device.busy_ns, device.span_ns, device.busy_ns + device.idle_ns) == (union_ns(work), span, span)
    assert found.device == ("NVIDIA H200" if recipe.devices == 1 else f"{recipe.devices} × NVIDIA H200")


def test_what_is_kept_says_the_same_and_is_not_believed_when_damaged(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    write_trace(source, Recipe())
    time.sleep(0.15)  # a file so young is fingerprinted anew each time
    first = analyze_source(source)
    tables = fresh_tables(source)
    assert tables is not None
    assert analyze_source(source).document == first.document
    kept = tables / ANALYSIS_FILE
    kept.write_bytes(kept.read_bytes().replace(b'"kernels":180', b'"kernels":181'))
    assert analyze_source(source).document.gpu.kernels == 181  # it is the kept one that is shown
    kept.write_bytes(b"{")
    assert analyze_source(source).document == first.document
    kept.write_bytes(kept.read_bytes().replace(b'"version":"', b'"version":"0'))
    assert analyze_source(source).document == first.document


def test_nothing_is_put_beside_a_trace_and_without_a_cache_nothing_is_kept(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, before = traces / "torch_trace.json.gz", sorted(traces.iterdir())
    assert llm_perf("analyze", source, "--no-cache").returncode == 0
    assert sorted(traces.iterdir()) == before
    assert llm_perf("analyze", source).returncode == 0
    assert [path for path in sorted(traces.iterdir()) if path.name != "cache"] == before
    assert list((tmp_path / "cache" / "llm-perf-opt" / "traces").iterdir()) == [kept_for(source)]


def test_kernels_have_the_short_names_of_the_page_in_the_terminal_and_their_own_as_data(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    truth = write_trace(source, Recipe())
    assert any("…" in short_name(name, 52) for name in truth.by_name)
    found = analyze_source(source, use_cache=False).document
    assert {row.name for row in found.kernels} == set(truth.by_name)
    shown = trace_text(found)
    table = shown.partition("Kernels: ")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split("  ")[0] for line in table] == [short_name(row.name, 52) for row in found.kernels[: len(table)]]
    evidence = [row for finding in found.findings for row in finding.evidence if " calls, " in row]
    assert evidence
    assert not any("void at::native" in row for row in evidence), "no return type, no namespace"
    assert any(short_name(name, 90) in row for row in evidence for name in truth.by_name)


def test_the_export_of_a_report_is_kept_in_the_cache(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for nsys that writes what nsys would: here is asked where it is put, and when it is made again."""
    report = traces / "mine.nsys-rep"
    report.write_bytes(b"not really")
    made: list[Path] = []

    def export(nsys: Path, report: Path, sqlite: Path, *, log: Path) -> tuple[()]:
        made.append(sqlite)
        sqlite.write_bytes(gzip.decompress((H200 / "nsys_decode.sqlite.gz").read_bytes()))
        log.touch()
        return ()

    monkeypatch.setattr("llm_perf_opt.profiling.vendor.probe.find_tool", lambda name: Path("/bin/true"))
    monkeypatch.setattr("llm_perf_opt.profiling.vendor.tool_pass.export_nsys", export)
    before = sorted(traces.iterdir())
    os.utime(report, (1, 1))
    time.sleep(0.15)  # a file so young is not known again
    for _ in range(2):
        found = analyze_source(report)
        assert (found.document.gpu.kernels, found.notes) == (1528, ())
    assert sorted(traces.iterdir()) == before
    assert [path.parent for path in made] == [kept_for(report)], "it was exported once"
    report.write_bytes(b"another one")
    time.sleep(0.15)
    analyze_source(report)
    assert len(made) == 2
    assert not made[0].exists(), "what is of no use any more is removed"
    analyze_source(report, use_cache=False)
    assert len(made) == 3
    assert kept_for(report) != made[2].parent


def test_an_nsys_report_needs_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"not really")
    monkeypatch.setattr("llm_perf_opt.profiling.vendor.probe.find_tool", lambda name: None)
    with pytest.raises(ResourceError, match="nsys is not installed"):
        analyze_source(report)


def test_an_export_beside_the_report_is_read(traces: Path) -> None:
    report = traces / "run.nsys-rep"
    report.write_bytes(b"not really")
    (traces / "run.sqlite").write_bytes(gzip.decompress((H200 / "nsys_decode.sqlite.gz").read_bytes()))
    found = analyze_source(report, use_cache=False)
    assert found.document.gpu.kernels == 1528
    assert found.document.source == str(report)


def test_what_is_not_there_or_no_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        analyze_source(tmp_path / "nothing.json")
    (tmp_path / "x.json").write_text("[]")
    assert analyze(tmp_path / "x.json").returncode == 5
    assert analyze(tmp_path).returncode == 5


def test_a_trace_of_the_cpu_alone_has_budgets_but_no_device_figures(tmp_path: Path) -> None:
    events = [("user_annotation", "decode", 0, 9), ("user_annotation", "decode_step", 1, 4), ("cpu_op", "aten::mm", 2, 3),
              ("user_annotation", "decode_step", 5, 8), ("cpu_op", "aten::mm", 6, 8)]  # fmt: skip
    rows = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start, "args": {}}
        for cat, name, start, end in events
    ]
    source = tmp_path / "trace.json"
    source.write_text(json.dumps({"schemaVersion": 1, "traceEvents": rows}))
    found = analyze_source(source, use_cache=False)
    assert found.error is None
    document = found.document
    assert (document.why, document.devices, document.device) == ("", [], "CPU")
    (budget,) = document.budgets
    assert (budget.stage, budget.unit, budget.units, budget.wall_ns) == ("decode", "token", 2, 9000)
    assert {row.key: row.ns for row in budget.rows if row.ns} == {"matmul": 3000, "python": 6000}
    assert [(finding.id, finding.before_ns) for finding in document.findings] == [("framework_bound_decode", 4500)]
    assert set(msgspec.to_builtins(document.gpu).values()) == {None}
    assert [(stage.name, stage.wall_ns) for stage in document.stages] == [("decode", 9000), ("decode_step", 6000)]
    for stage in document.stages:
        figures = (stage.gpu_busy_ns, stage.idle_ns, stage.kernels, stage.launches, stage.kernel_ns, stage.span_ns)
        assert set(figures) == {None}
    assert [(step.wall_ns, step.gpu_busy_ns) for step in document.steps] == [(3000, None), (3000, None)]
    assert document.host is not None
    assert [(line.name, line.operator_ns, line.outside_ns) for line in document.host.stages] == [
        ("decode", 3000, 6000),
        ("decode_step", 3000, 3000),
    ]
    shown = trace_text(document)
    assert "GPU busy" not in shown
    assert "aten::mm" in shown
    assert "Compile the decode step" in shown


def test_devices_and_spans_are_in_the_json(traces: Path) -> None:
    found = as_json(traces / "torch_trace.json.gz")
    (device,) = found["devices"]
    assert (device["device"], device["name"], device["busy_ns"]) == (0, "NVIDIA H200", found["gpu"]["busy_ns"])
    for one in (device, *found["stages"]):
        assert one.get("busy_ns", one.get("gpu_busy_ns")) + one["idle_ns"] == one["span_ns"]
    assert found["device"] == "NVIDIA H200"


def test_modules_of_an_eager_trace_that_labels_none_are_refused(traces: Path) -> None:
    done = analyze(traces / "nsys_decode.sqlite.gz", "--modules-from", traces / "torch_trace.json.gz")
    assert done.returncode == 5
    assert "no module labels" in done.stderr
    done = analyze(traces / "torch_trace.json.gz", "--modules-from", traces / "nsys_truncated.sqlite.gz")
    assert done.returncode == 5
    assert "is incomplete" in done.stderr


ENGINES = Path(__file__).parents[1] / "fixtures" / "engines"


@pytest.mark.parametrize(
    ("name", "kernels", "kernel_ns", "nodes"),
    [("vllm_graph_capture", 7, 19_633, 421), ("sglang_graph_capture_bs32", 2, 11_015, 544)],
)
def test_the_capture_of_a_graph_is_recognized_and_not_refused(name: str, kernels: int, kernel_ns: int, nodes: int) -> None:
    found = as_json(ENGINES / f"{name}.json.gz", "--no-cache")
    assert found["complete"] is True
    assert (found["gpu"]["kernels"], found["gpu"]["kernel_ns"]) == (kernels, kernel_ns)
    assert [problem["id"] for problem in found["problems"]] == ["graph_capture"]
    assert found["captures"]["captures"][0]["nodes"] == sum(found["captures"]["operators"].values()) == nodes
    assert found["findings"] == []
    assert found["budgets"] == []
    assert "capture" in found["why"]


def test_a_full_graph_decode_has_components_and_with_its_capture_operators() -> None:
    replay, capture = (ENGINES / f"{name}.json.gz" for name in ("vllm_decode_full_graph", "vllm_graph_capture"))
    found = as_json(replay, "--no-cache", "--modules-from", str(capture))
    assert found["components"]["coverage"]["decode_step"] > 0.99
    assert sum(row["kernel_ns"] for row in found["components"]["rows"]) == found["gpu"]["kernel_ns"]
    assert sum(row["self_ns"] for row in found["borrowed"]["operators"]) == found["gpu"]["kernel_ns"]
    shown = analyze(replay, "--no-cache", "--modules-from", capture).stdout
    assert "Components of decode_step" in shown
    assert "vllm::moe_forward" in shown
