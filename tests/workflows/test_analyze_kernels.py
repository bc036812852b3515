"""Kernels and counters of a run, read from what the tools left: real output of an H200."""

import gzip
import shutil
from pathlib import Path

import pytest

from llm_perf_opt.analysis.kernels.selection import Selection
from llm_perf_opt.core.records import SCHEMA, Manifest, Missing, PassRecord, PassStatus
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.profiling.vendor.ncu import NcuRequest, build_ncu_cmd
from llm_perf_opt.report.kernel_tables import kernel_blocks, kernels_document
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.workflows import analyze_kernels as kernel_analysis
from llm_perf_opt.workflows.analyze_kernels import analyze_kernels, analyze_regions
from llm_perf_opt.workflows.run_reader import RunReader
from nsys_databases import altered
from rendered import markdown_of
from writing import write_record

H200 = Path(__file__).parents[1] / "fixtures" / "h200"
NO_TIMES = Missing("no iteration was measured")


def run_folder(tmp_path: Path, **passes: PassStatus) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run")
    entries = tuple(PassRecord(name, status, why="It broke." if status == "failed" else "") for name, status in passes.items())
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", "now", ("llm-perf",), entries))
    for name in passes:
        folder.raw(name).mkdir(parents=True)
    return folder


def with_timeline(folder: RunFolder, fixture: str, name: str = "nsys") -> None:
    folder.timeline_file(name).write_bytes(gzip.decompress((H200 / fixture).read_bytes()))


PASSED = '{"passed": true, "rows": [], "why": "every count is right"}'


def with_counters(folder: RunFolder, verdict: str | None = PASSED) -> None:
    if verdict is not None:
        folder.update_pass(PassRecord("ncu_selftest", "complete"))
        folder.selftest_file.parent.mkdir(exist_ok=True)
        folder.selftest_file.write_text(verdict)
    folder.counters_file("ncu_decode").write_bytes(gzip.decompress((H200 / "ncu_decode_step_raw.csv.gz").read_bytes()))


def test_counters_join_the_kernels_of_the_timeline(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    found = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert not isinstance(found, Missing)
    (decode,) = found.stages
    assert (decode.stage, decode.calls, decode.total_ns) == ("decode", 1528, 4_651_439)
    assert found.decode_steps == 8
    assert found.devices == {"decode": 1}
    assert found.device_mismatch("decode") is None
    assert not isinstance(decode.counters, Missing)
    assert decode.counters > 0.8, "counters for most of the kernel time"
    assert "Nsight Systems" in found.sources["decode"]
    page = render_markdown(kernels_document(found))
    assert "1,528 kernel launches" in page
    assert "**Kernels, from the timeline**" in markdown_of(kernel_blocks(found.stages))


def test_a_truncated_timeline_is_not_summed_and_the_torch_trace_stands_in(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", torch="complete")
    with_timeline(folder, "nsys_truncated.sqlite.gz")
    found = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert isinstance(found, Missing)
    assert "is not used" in found.why
    shutil.copy(H200 / "torch_trace.json.gz", folder.torch_trace_file)
    found = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert not isinstance(found, Missing)
    assert found.sources == {"prefill": "torch.profiler", "decode": "torch.profiler"}
    assert sum(stage.calls for stage in found.stages) == 1711
    assert sum(stage.total_ns for stage in found.stages) == 5_521_227
    assert any("is not used" in note for note in found.notes)
    assert found.warnings[0].id is WarningId.TRACE_NOT_USED
    assert found.warnings[0].text.startswith("The trace of Nsight Systems (nsys) is not used: ")


def test_passes_that_did_not_launch_the_same_are_a_warning(tmp_path: Path) -> None:
    """Both are of the same model on the same card: 191 kernels per step, unless one of them lost some."""
    folder = run_folder(tmp_path, nsys="complete", torch="complete")
    shutil.copy(H200 / "torch_trace.json.gz", folder.torch_trace_file)
    with_timeline(folder, "nsys_decode.sqlite.gz")
    found = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert not isinstance(found, Missing)
    assert found.sources["decode"] == "Nsight Systems (nsys)"
    assert found.warnings == ()
    shutil.rmtree(folder.tables("nsys"), ignore_errors=True)
    fifth = "SELECT correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE correlationId % 5 = 0"
    tables = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL")
    altered(folder.timeline_file("nsys"), [f"DELETE FROM {table} WHERE correlationId IN ({fifth})" for table in tables])
    found = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert not isinstance(found, Missing)
    (warning,) = found.warnings
    assert warning.id is WarningId.PASSES_DISAGREE
    assert "Nsight Systems (nsys) has 15" in warning.text
    assert "torch.profiler 191.0" in warning.text


def test_a_prefill_without_work_is_not_taken_from_a_run_of_ours(tmp_path: Path) -> None:
    """It must not come from the other pass in silence."""
    folder = run_folder(tmp_path, nsys="complete")
    row = "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) SELECT start - 2000, start - 1000, "
    row += "eventType, 'prefill', globalTid, domainId FROM NVTX_EVENTS WHERE eventType = 59 ORDER BY start LIMIT 1"
    altered(folder.timeline_file("nsys"), [row])
    assert not isinstance(analyze_kernels(RunReader(folder), None, NO_TIMES), Missing), (
        "a program of the user's may label what it likes"
    )
    folder.config_file.write_text("runtime: {type: pytorch, num_new_tokens: 8}")
    found = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert isinstance(found, Missing)
    assert "1 of 1 prefill contain no kernel" in found.why


def test_kernels_outside_the_stages_are_counted_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path, torch="complete")
    shutil.copy(H200 / "torch_trace.json.gz", folder.torch_trace_file)
    whole = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert not isinstance(whole, Missing)
    assert not any("outside" in note for note in whole.notes)
    monkeypatch.setattr(kernel_analysis, "STAGES", {"prefill": Stage.PREFILL})
    found = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert not isinstance(found, Missing)
    assert any("1,528 of 1,711 kernels of torch.profiler were launched outside" in note for note in found.notes)


def test_a_failed_pass_gives_its_reason(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="failed", ncu_decode="failed")
    found = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert isinstance(found, Missing)
    assert "nsys failed: It broke." in found.why
    assert "It broke." in render_markdown(kernels_document(found))


def test_counters_are_not_believed_after_a_failed_self_test(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_selftest="failed", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    folder.selftest_file.write_text('{"passed": false, "rows": [], "why": "GEMM: 1 FLOP counted, 2 run"}')
    found = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert not isinstance(found, Missing)
    (decode,) = found.stages
    assert isinstance(decode.counters, Missing)
    assert "self-test failed" in decode.counters.why


@pytest.mark.parametrize(
    ("verdict", "why"),
    [(None, "no self-test was run"), ("", "cannot be read"), ("{}", "cannot be read"), ("gone", "left no result")],
)
def test_without_a_verdict_counters_are_not_believed(tmp_path: Path, verdict: str | None, why: str) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder, verdict)
    if verdict == "gone":
        folder.selftest_file.unlink()
    found, regions = analyze_kernels(RunReader(folder), None, NO_TIMES), analyze_regions(RunReader(folder), {})
    assert not isinstance(found, Missing)
    counters = found.stages[0].counters
    assert isinstance(counters, Missing)
    assert why in counters.why
    assert "Repeat the run" in counters.why
    untested = RunWarning(WarningId.COUNTERS_UNTESTED, f"T{counters.why[1:]}.")
    assert found.warnings == (untested,), "told before anything else, for the counters were read"
    assert not isinstance(regions, Missing)
    assert not any(region.counters for region in regions.groups[0].regions)
    assert regions.notes == (f"Counters of decode: {counters}.",)


def test_a_pass_that_counted_less_than_planned_is_a_warning(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    for launches, warned in ((200, False), (400, True)):
        plan = Selection("decode_step", "nsys", 2, (), 0.99, 0, launches, 3, 9, 1.0)
        write_record(folder.selection_file("ncu_decode"), plan)
        found = analyze_kernels(RunReader(folder), None, NO_TIMES)
        assert not isinstance(found, Missing)
        assert any("Counted: 200 launches, joined to 100.0 %" in note for note in found.notes)
        assert [warning.id for warning in found.warnings] == ([WarningId.COUNTERS_FALL_SHORT] if warned else [])
        assert all("early end" in warning.text for warning in found.warnings)


def test_a_damaged_counter_table_costs_the_counters_only(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    folder.counters_file("ncu_decode").write_bytes(b"\x00\xff not a table")
    found = analyze_kernels(RunReader(folder), None, NO_TIMES)
    assert not isinstance(found, Missing)
    assert found.stages[0].total_ns == 4_651_439
    assert isinstance(found.stages[0].counters, Missing)


@pytest.mark.parametrize("damage", ["table", "self-test"])
def test_regions_go_without_counters_that_cannot_be_believed(tmp_path: Path, damage: str) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_selftest="failed", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    if damage == "table":
        folder.counters_file("ncu_decode").write_bytes(b"\x00\xff not a table")
    else:
        folder.selftest_file.write_text('{"passed": false, "rows": [], "why": "GEMM: 1 FLOP counted, 2 run"}')
    found = analyze_regions(RunReader(folder), {})
    assert not isinstance(found, Missing)
    assert found.groups[0].check.trace_kernel_ns == 4_651_439
    assert not any(region.counters for group in found.groups for region in group.regions)


def asked(folder: RunFolder, program: list[str], **collect: list[str]) -> None:
    argv = build_ncu_cmd(Path("ncu"), Path("x"), program, NcuRequest(**collect))  # type: ignore[arg-type]
    folder.update_pass(PassRecord("ncu_decode", "complete", tuple(argv)))


def shown(folder: RunFolder) -> set[str]:
    found = analyze_regions(RunReader(folder), {})
    assert not isinstance(found, Missing)
    return {value.counter for region in found.groups[0].regions for value in region.counters}


def test_counters_of_another_stage_are_refused_by_their_own_ranges(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    folder.counters_file("ncu_decode").write_bytes(gzip.decompress((H200 / "ncu_prefill_aborted_raw.csv.gz").read_bytes()))
    found, regions = analyze_kernels(RunReader(folder), None, NO_TIMES), analyze_regions(RunReader(folder), {})
    assert not isinstance(found, Missing)
    assert found.stages[0].counters == Missing(
        "251 of 251 launches in ncu_decode were not counted in decode_step: the counters belong to other work"
    )
    assert not isinstance(regions, Missing)
    assert not any(region.counters for region in regions.groups[0].regions)


def test_single_launches_of_another_stage_are_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, ncu_decode="complete")
    with_counters(folder)
    whole = RunReader(folder).counters("ncu_decode")
    assert not isinstance(whole, Missing)
    *rows, last = folder.counters_file("ncu_decode").read_text().splitlines()
    folder.counters_file("ncu_decode").write_text("\n".join([*rows, last.replace("decode_step", "other_step")]))
    found = RunReader(folder).counters("ncu_decode")
    assert not isinstance(found, Missing)
    assert found.kernels == whole.kernels[:-1]
    assert found.problems[-1].what == f"1 of {len(whole.kernels)} launches in ncu_decode were not counted in decode_step"
    assert found.complete


def test_regions_show_every_counter_of_a_section(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    asked(folder, ["x"], metrics=["gpu__time_duration.sum"], sections=["SpeedOfLight"])
    assert len(shown(folder)) > 1
    asked(folder, ["x", "--section", "one", "--metrics", "lts__t_bytes.sum"], metrics=["gpu__time_duration.sum"])
    assert shown(folder) == {"gpu__time_duration.sum"}, "a program's own arguments are not the tool's"


def test_a_stage_has_the_same_coverage_and_work_on_both_pages(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, torch="complete", ncu_prefill="complete", ncu_decode="complete")
    shutil.copy(H200 / "torch_trace.json.gz", folder.torch_trace_file)
    with_counters(folder)
    folder.counters_file("ncu_prefill").write_bytes(gzip.decompress((H200 / "ncu_prefill_aborted_raw.csv.gz").read_bytes()))
    kernels, found = analyze_kernels(RunReader(folder), None, NO_TIMES), analyze_regions(RunReader(folder), {})
    assert not isinstance(kernels, Missing)
    assert not isinstance(found, Missing)
    regions = {region.path[-1].rpartition("@")[2]: region for region in found.groups[0].regions}
    for stage, name in zip(kernels.stages, ("prefill", "decode_step"), strict=True):
        values = {value.counter: value for value in regions[name].counters}
        read, written = values["dram__bytes_read.sum"], values["dram__bytes_write.sum"]
        assert read.covered_ns / regions[name].kernel_ns == pytest.approx(stage.counters)
        assert read.by_name_ns / regions[name].kernel_ns == pytest.approx(stage.by_name)
        assert not isinstance(read.value, Missing)
        assert not isinstance(written.value, Missing)
        assert read.value + written.value == pytest.approx(stage.dram_bytes)


def test_regions_show_the_counters_that_were_asked_for(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    asked(folder, ["x"], metrics=["dram__bytes_read.sum", "gpu__time_duration.sum", "lost__by_the_tool.sum"])
    found = analyze_regions(RunReader(folder), {})
    assert not isinstance(found, Missing)
    values = {value.counter: value for value in found.groups[0].regions[0].counters}
    assert set(values) == {"dram__bytes_read.sum", "gpu__time_duration.sum", "lost__by_the_tool.sum"}
    assert isinstance(values["lost__by_the_tool.sum"].value, Missing), "asked for and not had: said, not left out"
    assert values["dram__bytes_read.sum"].unit == "byte"
    filtered = {"profiling": {"regions": {"include": [], "exclude": ["decode_step"], "kernels_include": [],
                                          "kernels_exclude": ["*gemv*"], "aggregate": True}}}  # fmt: skip
    found = analyze_regions(RunReader(folder), filtered)
    assert not isinstance(found, Missing)
    assert found.aggregate


@pytest.mark.parametrize("status", ["skipped", "pending"])
def test_a_run_without_timeline_has_no_regions(tmp_path: Path, status: PassStatus) -> None:
    assert isinstance(analyze_regions(RunReader(run_folder(tmp_path, nsys=status)), {}), Missing)
