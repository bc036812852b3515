"""Tables of Nsight Compute: recorded ones with known values, other layouts and locales, missing counters, damaged files."""

import csv
import gzip
import io
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from fuzzing import SEED, TRIES
from fuzzing_text import mutated
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.machine_records import CountedKernel, CounterReport
from llm_perf_opt.core.records import Missing
from llm_perf_opt.traces import ncu_csv, ncu_values
from llm_perf_opt.traces.ncu_csv import NO_SIZE, UNKNOWN, read_ncu, read_ncu_details

H200 = Path(__file__).parents[1] / "fixtures" / "h200"
GEMM = H200 / "ncu_gemm_copy_gemv_raw.csv"
TENSOR = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
READ = "dram__bytes_read.sum"
TIME = "gpu__time_duration.sum"
STACK = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
IDENTITY = (
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    STACK,
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
    "Device",
)


def small_table(names: tuple[str, ...] = (TENSOR, READ, TIME)) -> list[list[str]]:
    """Some columns of the recorded table of three kernels: header, units, three rows."""
    rows = list(csv.reader(io.StringIO(GEMM.read_text().split("==PROF== Disconnected from process 1086\n")[1])))
    columns = [rows[0].index(name) for name in (*IDENTITY, *names)]
    return [[row[index] for index in columns] for row in rows]


def written(rows: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return out.getvalue()


def read(tmp_path: Path, text: str | bytes) -> CounterReport:
    file = tmp_path / "raw.csv"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_ncu(file)


def ids(report: CounterReport) -> list[tuple[str, bool]]:
    return [(problem.id, problem.fatal) for problem in report.problems]


# --- real files -------------------------------------------------------------------------------------------------------


def test_three_kernels_of_known_size() -> None:
    report = read_ncu(GEMM)
    gemm, copy, gemv = report.kernels
    assert report.complete
    assert report.problems == ()
    assert gemm.counters[TENSOR] == 2 * 4096**3 == 137_438_953_472
    assert gemm.ranges == ("gemm",)
    assert (gemm.grid, gemm.block, gemm.process, gemm.device, gemm.stream) == ((2, 66, 1), (384, 1, 1), 1086, 0, 7)
    assert copy.counters[READ] == 1_073_785_344
    assert copy.counters["dram__bytes_write.sum"] == 1_049_286_912
    assert gemv.counters["sm__throughput.avg.pct_of_peak_sustained_elapsed"] == 20.70
    assert report.units[TIME] == "ns"
    assert report.units[READ] == "byte"
    assert report.facts["device_name"] == "NVIDIA H200"
    assert report.facts["compute_capability"] == "9.0"


@pytest.mark.parametrize(
    ("name", "kernels", "ranges"),
    [
        ("ncu_decode_step_raw.csv.gz", 200, ("LLM@profile", "LLM@decode", "LLM@decode_step")),
        ("ncu_prefill_aborted_raw.csv.gz", 251, ("LLM@profile", "LLM@prefill")),
    ],
)
def test_a_stage_of_a_model(name: str, kernels: int, ranges: tuple[str, ...]) -> None:
    report = read_ncu(H200 / name)
    assert report.complete
    assert len(report.kernels) == kernels
    assert {kernel.ranges for kernel in report.kernels} == {ranges}
    for kernel in report.kernels:
        duration = kernel.counters[TIME]
        assert isinstance(duration, float)
        assert 500 < duration < 1_000_000
        assert not any(name.startswith("device__attribute") for name in kernel.counters)


def test_the_details_page_says_the_same_but_rounded() -> None:
    report = read_ncu_details(H200 / "ncu_decode_details_three_kernels.csv.gz")
    assert report.complete
    first = report.kernels[0]
    assert len(report.kernels) == 3
    assert first.ranges == ("LLM@decode", "LLM@decode_step")
    assert first.counters[READ] == pytest.approx(7680)  # printed as 7.68 Kbyte
    assert report.units[READ] == "byte"
    assert first.counters[TIME] == pytest.approx(3100)  # printed as 3.10 us
    assert first.counters["SM Frequency"] == pytest.approx(1.95e9)
    assert first.counters["% Occupancy Per Register Count"] == 8956  # its single values are not taken for digits


def test_each_page_is_told_from_the_other() -> None:
    with pytest.raises(ParseError, match="details page"):
        read_ncu(H200 / "ncu_decode_details_three_kernels.csv.gz")
    with pytest.raises(ParseError, match="not the details page"):
        read_ncu_details(GEMM)


# --- layouts, units, locales ------------------------------------------------------------------------------------------


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    rows = small_table()
    turned = [row[::-1] for row in rows]
    assert read(tmp_path, written(turned)).kernels == read(tmp_path, written(rows)).kernels


def test_an_older_layout_gives_launch_sizes_as_counters(tmp_path: Path) -> None:
    dims = tuple(f"launch__{kind}_dim_{axis}" for kind in ("grid", "block") for axis in "xyz")
    rows = small_table((TENSOR, TIME, *dims))
    gone = [IDENTITY.index(name) for name in ("Block Size", "Grid Size", "Device", STACK)]
    older = [[cell for index, cell in enumerate(row) if index not in gone] for row in rows]
    for kernel, same in zip(read(tmp_path, written(older)).kernels, read_ncu(GEMM).kernels, strict=True):
        assert (kernel.grid, kernel.block) == (same.grid, same.block)
        assert (kernel.device, kernel.ranges) == (UNKNOWN, ())
    without = [row[: -len(dims)] for row in older]
    assert {kernel.grid for kernel in read(tmp_path, written(without)).kernels} == {NO_SIZE}


def test_scaled_units_are_brought_to_base_units(tmp_path: Path) -> None:
    rows = small_table()
    rows[1][-2:] = ["Mbyte", "us"]
    rows[2][-2:] = ["148.15", "178.21"]
    gemm = read(tmp_path, written(rows)).kernels[0]
    assert gemm.counters[READ] == pytest.approx(148_150_000)
    assert gemm.counters[TIME] == pytest.approx(178_210)


@pytest.mark.parametrize(
    ("cells", "value"),
    [
        (["1.049.286.912", "20,55"], 1_049_286_912),
        (["117.344", "20,55"], 117_344),
        (["1 049 286,5", "20,55"], 1_049_286.5),
        (["1\u202f049\u202f286", "20,55"], 1_049_286),
        (["1'049'286", "20.55"], 1_049_286),
        (["12,34,567", "20.55"], 1_234_567),
        (["1,234", "20.55"], 1_234),
        (["1.5e+10", "20.55"], 1.5e10),
    ],
)
def test_other_locales(tmp_path: Path, cells: list[str], value: float) -> None:
    rows = small_table()[:3]
    rows[2][-3:] = ["0", *cells]
    report = read(tmp_path, written(rows))
    assert report.kernels[0].counters[READ] == value


def test_a_number_that_two_locales_read_differently_is_not_guessed(tmp_path: Path) -> None:
    rows = small_table()[:3]
    rows[2][-3:] = ["0", "117.344", "5"]
    report = read(tmp_path, written(rows))
    assert isinstance(report.kernels[0].counters[READ], Missing)
    assert ("locale", True) in ids(report)


def test_names_of_ranges_may_hold_colons_and_quotes(tmp_path: Path) -> None:
    rows = small_table()
    column = rows[0].index(STACK)
    rows[2][column] = (
        '7  "D:layer: 1 "x":none:none:RGB:0xff:REGISTERED:layer: 1 "x""  "<default domain>:b:none:none:none:none:none:none" '
    )
    assert read(tmp_path, written(rows)).kernels[0].ranges == ('D@layer: 1 "x"', "b")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_and_line_ends(tmp_path: Path, encoding: str) -> None:
    text = written(small_table())
    plain = read(tmp_path, text)
    assert read(tmp_path, text.replace("\n", "\r\n").encode(encoding)) == plain
    assert read(tmp_path, gzip.compress(text.encode(encoding))) == plain


# --- loss that the tool does not report -------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["n/a", "(!) n/a", "nan", ""])
def test_counters_that_are_all_lost_spoil_the_report(tmp_path: Path, cell: str) -> None:
    rows = small_table()
    for row in rows[2:]:
        row[-3:] = [cell] * 3
    report = read(tmp_path, written(rows))
    assert ids(report) == [("counters_missing", True)]
    assert all(name in report.problems[0].what for name in (TENSOR, READ, TIME))
    assert not report.complete
    assert all(isinstance(value, Missing) for value in report.kernels[0].counters.values())


def test_one_lost_counter_is_named_and_the_others_kept(tmp_path: Path) -> None:
    rows = small_table()
    for row in rows[2:]:
        row[-2] = "(!) n/a"
    rows[2][-1] = "n/a"
    report = read(tmp_path, written(rows))
    assert ids(report) == [("counters_missing", False), ("counters_partly_missing", False)]
    assert report.problems[0].what.endswith(f": {READ}.")
    assert f"{TIME} (1 of 3 kernels)" in report.problems[1].what
    assert report.kernels[0].counters[TENSOR] == 2 * 4096**3


def test_no_kernels(tmp_path: Path) -> None:
    assert ids(read(tmp_path, written(small_table()[:2]))) == [("no_kernels", True)]
    assert ids(read(tmp_path, written(small_table()[:1]))) == [("no_kernels", True)]
    said = "==PROF== Connected to process 1 (x)\n==WARNING== No kernels were profiled.\n"
    report = read(tmp_path, said)
    assert ids(report) == [("no_kernels", True)]
    assert "NVTX filter" in report.problems[0].remedy
    assert ids(read(tmp_path, "==PROF== Disconnected\n")) == [("no_kernels", True)]


def test_the_tools_own_words(tmp_path: Path) -> None:
    table = written(small_table())
    refused = read(tmp_path, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters\n" + table)
    assert ids(refused) == [("no_permission", True)]
    assert "NVreg_RestrictProfilingToAdminUsers=0" in refused.problems[0].remedy
    cut = read(
        tmp_path, "==PROF== Trying to shutdown target application\n==ERROR== An error occurred while trying to profile.\n" + table
    )
    assert ids(cut) == [("aborted", False), ("tool_error", False)]
    header, rest = table.split("\n", 1)
    assert ids(read(tmp_path, f"training…\n{header}\n==WARNING== Something\n{rest}")) == [("tool_warning", False)]


def test_a_table_cut_short_is_called_so(tmp_path: Path) -> None:
    text = written(small_table())
    report = read(tmp_path, text[: text.rindex('","')])
    assert len(report.kernels) == 2
    assert ids(report) == [("damaged_rows", False)]


def test_without_units_no_figure_is_believed(tmp_path: Path) -> None:
    rows = small_table()
    report = read(tmp_path, written([rows[0], *rows[2:]]))
    assert ids(report) == [("no_units", True)]
    assert len(report.kernels) == 3


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no table"),
        (b"a,b\n1,2\n", "no table"),
        (b'"ID","Kernel Name"\n"\xff', "UTF-8"),
        (b"\x1f\x8b\x08\x00junk", "cannot be read"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-12], "cannot be read"),
        (b'"ID","Kernel Name"\n"' + b"x" * 200_000, "not CSV"),
    ],
)
def test_a_file_of_another_kind(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(ParseError, match=why):
        read(tmp_path, content)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="cannot be read"):
        read_ncu(tmp_path / "none.csv")


def test_ranges_end_at_a_quote_before_a_space() -> None:
    assert ncu_values.ranges('691  "A:x"y:x"  "B:z\n" ""\n"C:last"') == ('A@x"y', "B@z\n", "", "C@last")
    assert ncu_values.ranges('"A:x" "open') == ("A@x",)
    assert ncu_values.number("1.5  (1; 2)", ".") == 1.5


@pytest.mark.parametrize("unit", ['"a', '" ', "(", " (", "() ", " "], ids=repr)
def test_hostile_cells_are_read_in_linear_time(unit: str) -> None:
    """Patterns that search the rest of the cell from each quote or space would take days for some of these."""
    cell = "x" + unit * 2_000_000 + "x"
    assert len(ncu_values.ranges(cell)) in (0, 1_000_000)
    assert ncu_values.number(cell, ".") is None
    assert isinstance(ncu_values.number(f"1{unit * 2_000_000}1", "."), Missing | None)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu_values, "MOST_BYTES", 8 << 20)
    with pytest.raises(ParseError, match="more than 8 MiB"):
        read(tmp_path, gzip.compress((b"x" * 99_999 + b"\n") * 84))
    with pytest.raises(ParseError, match="more than 100,000 lines and no table"):
        read(tmp_path, gzip.compress(b"x\n" * 1_000_000))
    monkeypatch.setattr(ncu_values, "MOST_LINES", 1000)
    with pytest.raises(ParseError, match="more than 1,000 lines\\."):
        read(tmp_path, gzip.compress(written(small_table()).encode() + b"\n" * 1_000_000))


def test_a_bomb_of_one_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu_values, "LONGEST_LINE", 1 << 16)
    tracemalloc.start()
    try:
        with pytest.raises(ParseError, match="a line of more than"):
            read(tmp_path, gzip.compress(b"x" * (64 << 20)))
        assert tracemalloc.get_traced_memory()[1] < 2 * (64 << 20)  # the input this test itself makes, and no second one
    finally:
        tracemalloc.stop()


def test_too_many_values_or_columns_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(small_table())
    monkeypatch.setattr(ncu_csv, "MOST_VALUES", 8)
    with pytest.raises(ParseError, match="more than 8 values"):
        read(tmp_path, text)
    monkeypatch.setattr(ncu_csv, "MOST_COLUMNS", 5)
    with pytest.raises(ParseError, match="14 columns"):
        read(tmp_path, text)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(4))
def test_damaged_tables_end_in_a_report_or_a_parse_error(tmp_path: Path, seed: int) -> None:
    source = random.Random(SEED + seed)
    wide = GEMM.read_text().split('"ID"')[0].encode() + written(small_table()).encode()
    long = b"\n".join(gzip.decompress((H200 / "ncu_decode_details_three_kernels.csv.gz").read_bytes()).split(b"\n")[:16])
    file = tmp_path / "damaged.csv"
    ends: Counter[str] = Counter()
    for number in range(TRIES // 4):
        base, reader = (long, read_ncu_details) if number % 4 == 3 else (wide, read_ncu)
        file.write_bytes(mutated(source, base))
        try:
            report = reader(file)
        except ParseError:
            ends["refused"] += 1
        else:
            assert all(_sound(kernel) for kernel in report.kernels)
            assert report.kernels or not report.complete
            ends["read"] += 1
    if SEED == 0:  # other choices may be one-sided by chance
        assert min(ends["read"], ends["refused"]) > TRIES / 80  # the damage is neither harmless nor total


def _sound(kernel: CountedKernel) -> bool:
    sizes = (*kernel.grid, *kernel.block)
    return bool(kernel.name) and len(sizes) == 6 and all(isinstance(value, float | Missing) for value in kernel.counters.values())
