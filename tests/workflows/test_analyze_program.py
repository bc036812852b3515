"""The pages on a user's own program, from what the tools left on an H200."""

import gzip
from pathlib import Path

from llm_perf_opt.analysis.kernels.selection import SelectedKernel, Selection
from llm_perf_opt.core.records import SCHEMA, Manifest, Missing, PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.report.markdown import escape, render_markdown
from llm_perf_opt.workflows.analyze_program import ProgramAnalysis, analyze_program, program_document, write_program_report
from llm_perf_opt.workflows.run_reader import RunReader
from writing import write_record

H200 = Path(__file__).parents[1] / "fixtures" / "h200"


def program_markdown(found: ProgramAnalysis) -> str:
    return render_markdown(program_document(found))


def test_kernels_have_their_counters_and_say_what_stands_behind_them(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    entries = tuple(PassRecord(name, "complete") for name in ("nsys", "ncu", "ncu_selftest"))
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", "now", ("llm-perf", "exec", "--", "x", "a b", "$HOME|y"), entries))
    for name in ("nsys", "ncu", "ncu_selftest"):
        folder.raw(name).mkdir(parents=True)
    folder.timeline_file("nsys").write_bytes(gzip.decompress((H200 / "nsys_decode.sqlite.gz").read_bytes()))
    folder.counters_file("ncu").write_bytes(gzip.decompress((H200 / "ncu_decode_step_raw.csv.gz").read_bytes()))
    folder.selftest_file.write_text('{"passed": true, "rows": [], "why": "every count is right"}')
    kernel = SelectedKernel("gemv", 1, 1, 0.9)
    notes = ("Not collected: section Nvlink (nvlink): it is not there.",)
    write_record(folder.selection_file("ncu"), Selection("program", "nsys", 0, (kernel,), 0.9, 0, 1, 1, 9, 1.0, notes))
    found = analyze_program(RunReader(folder))
    assert not isinstance(found.kernels, Missing)
    (program,) = found.kernels
    assert program.total_ns == 4_651_439
    assert not isinstance(program.counters, Missing)
    assert program.counters > 0.8
    write_program_report(folder, found)
    kernels = folder.kernels_file.read_text()
    title = escape("llm-perf exec -- x 'a b' '$HOME|y'")
    assert program_markdown(found).startswith(f"# {title}\n"), "as it can be typed again"
    assert "†" in program_markdown(found), "durations under the two tools differ, in the report too"
    for page in (kernels, program_markdown(found)):
        assert "section Nvlink" in page
    assert found.warnings == ()
    folder.selftest_file.unlink()
    untested = analyze_program(RunReader(folder))
    assert not isinstance(untested.kernels, Missing)
    assert isinstance(untested.kernels[0].counters, Missing)
    assert "Warning: The counters are not used because no self-test checked them" in program_markdown(untested)


def test_what_a_program_printed_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", "now", (), (PassRecord("program", "complete"),), kind="exec"))
    folder.log_file("program").parent.mkdir(parents=True)
    folder.log_file("program").write_bytes("a\x1b[31mb\u202ec\td\u3000e\n".encode())
    output = analyze_program(RunReader(folder)).output
    assert not isinstance(output, Missing)
    assert output.lines == (r"a\x1b[31mb\u202ec d e",)


def test_messages_of_the_profiler_are_not_the_output_of_the_program(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", "now", (), (PassRecord("torch", "complete"),), kind="exec"))
    folder.log_file("torch").parent.mkdir(parents=True)
    mine = "ERROR:2026-01-01 my own message"
    stamp = "2026-11-19 21:39:47 25010:25010"
    folder.log_file("torch").write_text(
        f"USDT:{stamp} SyncActivityProfilerHandler.cpp:52] profiler_start\n{mine}\n"
        f"ERROR:{stamp} DeviceProperties.cpp:50] gpuGetDeviceCount failed with code 35\n"
    )
    output = analyze_program(RunReader(folder)).output
    assert not isinstance(output, Missing)
    assert output.lines == (mine,)
