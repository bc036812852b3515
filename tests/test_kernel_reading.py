"""Kernels and counters of a run, read from what the tools left: real output of an H200."""

import gzip
import shutil
from pathlib import Path

import pytest

from llm_perf_opt import kernel_reading
from llm_perf_opt.kernel_reading import read_kernels
from llm_perf_opt.records import SCHEMA, Manifest, Missing, PassRecord, PassStatus
from llm_perf_opt.region_reading import read_regions
from llm_perf_opt.report.kernel_evidence import kernels_md, kernels_section
from llm_perf_opt.run_folder import RunFolder
from llm_perf_opt.stages import Stage

H200 = Path(__file__).parent / "fixtures" / "h200"
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


def with_counters(folder: RunFolder) -> None:
    folder.counters_file("ncu_decode").write_bytes(gzip.decompress((H200 / "ncu_decode_step_raw.csv.gz").read_bytes()))


def test_counters_join_the_kernels_of_the_timeline(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    found = read_kernels(folder, None, NO_TIMES)
    assert not isinstance(found, Missing)
    (decode,) = found.stages
    assert (decode.stage, decode.calls, decode.total_ns) == ("decode", 1528, 4_651_439)
    assert found.decode_steps == 8
    assert found.devices == {"decode": 1}
    assert found.on_others("decode") is None
    assert not isinstance(decode.counters, Missing)
    assert decode.counters > 0.8, "counters for most of the kernel time"
    assert "Nsight Systems" in found.sources["decode"]
    page = kernels_md(found)
    assert "1,528 kernel launches" in page
    assert "## Top kernels" in kernels_section(found)


def test_a_truncated_timeline_is_not_summed_and_the_torch_trace_stands_in(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", torch="complete")
    with_timeline(folder, "nsys_truncated.sqlite.gz")
    found = read_kernels(folder, None, NO_TIMES)
    assert isinstance(found, Missing)
    assert "is not used" in found.why
    shutil.copy(H200 / "torch_trace.json.gz", folder.torch_trace_file)
    found = read_kernels(folder, None, NO_TIMES)
    assert not isinstance(found, Missing)
    assert found.sources == {"prefill": "torch.profiler", "decode": "torch.profiler"}
    assert sum(stage.calls for stage in found.stages) == 1711
    assert sum(stage.total_ns for stage in found.stages) == 5_521_227
    assert any("is not used" in note for note in found.notes)


def test_kernels_outside_the_stages_are_counted_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path, torch="complete")
    shutil.copy(H200 / "torch_trace.json.gz", folder.torch_trace_file)
    whole = read_kernels(folder, None, NO_TIMES)
    assert not isinstance(whole, Missing)
    assert not any("outside" in note for note in whole.notes)
    monkeypatch.setattr(kernel_reading, "STAGES", {"prefill": Stage.PREFILL})
    found = read_kernels(folder, None, NO_TIMES)
    assert not isinstance(found, Missing)
    assert any("1,528 of 1,711 kernels of torch.profiler were launched outside" in note for note in found.notes)


def test_a_failed_pass_gives_its_reason(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="failed", ncu_decode="failed")
    found = read_kernels(folder, None, NO_TIMES)
    assert isinstance(found, Missing)
    assert "nsys is failed: It broke." in found.why
    assert "It broke." in kernels_md(found)


def test_counters_are_not_believed_after_a_failed_self_test(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_selftest="failed", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    folder.selftest_file.write_text('{"passed": false, "rows": [], "why": "GEMM: 1 FLOP counted, 2 run"}')
    found = read_kernels(folder, None, NO_TIMES)
    assert not isinstance(found, Missing)
    (decode,) = found.stages
    assert isinstance(decode.counters, Missing)
    assert "self-test failed" in decode.counters.why


def test_a_damaged_counter_table_costs_the_counters_only(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    folder.counters_file("ncu_decode").write_bytes(b"\x00\xff not a table")
    found = read_kernels(folder, None, NO_TIMES)
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
    found = read_regions(folder, {})
    assert not isinstance(found, Missing)
    assert found.groups[0].check.trace_kernel_ns == 4_651_439
    assert not any(region.counters for group in found.groups for region in group.regions)


def test_regions_show_every_counter_of_a_section(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    argv = ("ncu", "--metrics", "gpu__time_duration.sum", "--section", "SpeedOfLight", "-o", "x")
    folder.update_pass(PassRecord("ncu_decode", "complete", argv))
    found = read_regions(folder, {})
    assert not isinstance(found, Missing)
    assert len({value.counter for region in found.groups[0].regions for value in region.counters}) > 1


def test_regions_show_the_counters_that_were_asked_for(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, nsys="complete", ncu_decode="complete")
    with_timeline(folder, "nsys_decode.sqlite.gz")
    with_counters(folder)
    argv = ("ncu", "--metrics", "dram__bytes_read.sum,gpu__time_duration.sum", "-o", "x")
    folder.update_pass(PassRecord("ncu_decode", "complete", argv))
    found = read_regions(folder, {})
    assert not isinstance(found, Missing)
    (group,) = found.groups
    assert {value.counter for region in group.regions for value in region.counters} <= {
        "dram__bytes_read.sum", "gpu__time_duration.sum",
    }  # fmt: skip
    filtered = {"profiling": {"regions": {"include": [], "exclude": ["decode_step"], "kernels_include": [],
                                          "kernels_exclude": ["*gemv*"], "aggregate": True}}}  # fmt: skip
    found = read_regions(folder, filtered)
    assert not isinstance(found, Missing)
    assert found.aggregate


@pytest.mark.parametrize("status", ["skipped", "pending"])
def test_a_run_without_timeline_has_no_regions(tmp_path: Path, status: PassStatus) -> None:
    assert isinstance(read_regions(run_folder(tmp_path, nsys=status), {}), Missing)
