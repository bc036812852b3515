"""The pages on a user's own program, from what the tools left on an H200."""

import gzip
from pathlib import Path

from llm_perf_opt.analysis.kernel_selection import SelectedKernel, Selection
from llm_perf_opt.exec_report import analyse_program, program_page, write_program_report
from llm_perf_opt.records import SCHEMA, Manifest, Missing, PassRecord
from llm_perf_opt.run_folder import RunFolder, write_record

H200 = Path(__file__).parent / "fixtures" / "h200"


def test_kernels_have_their_counters_and_say_what_stands_behind_them(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    entries = (PassRecord("nsys", "complete"), PassRecord("ncu", "complete"))
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", "now", ("llm-perf", "exec", "--", "x|y"), entries))
    for name in ("nsys", "ncu"):
        folder.raw(name).mkdir(parents=True)
    folder.timeline_file("nsys").write_bytes(gzip.decompress((H200 / "nsys_decode.sqlite.gz").read_bytes()))
    folder.counters_file("ncu").write_bytes(gzip.decompress((H200 / "ncu_decode_step_raw.csv.gz").read_bytes()))
    kernel = SelectedKernel("gemv", 1, 1, 0.9)
    notes = ("Not collected: section Nvlink (nvlink): it is not there.",)
    write_record(folder.selection_file("ncu"), Selection("program", "nsys", 0, (kernel,), 0.9, 0, 1, 1, 9, 1.0, notes))
    found = analyse_program(folder)
    assert not isinstance(found.kernels, Missing)
    (program,) = found.kernels
    assert program.total_ns == 4_651_439
    assert not isinstance(program.counters, Missing)
    assert program.counters > 0.8
    write_program_report(folder, found)
    kernels = folder.kernels_file.read_text()
    assert "nothing to test" not in kernels, "counters were read, and it must not be said that none were"
    for page in (kernels, program_page(found)):
        assert "section Nvlink" in page
