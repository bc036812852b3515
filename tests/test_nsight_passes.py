"""What is said of a pass that counted less than it was asked for."""

import gzip
from pathlib import Path

import pytest

from llm_perf_opt.nsight_capture import counting_limit
from llm_perf_opt.nsight_passes import went_without
from llm_perf_opt.parsers.ncu_csv import read_ncu
from llm_perf_opt.records import SCHEMA, Manifest, PassRecord
from llm_perf_opt.run_folder import RunFolder

COUNTED = Path(__file__).parent / "fixtures" / "h200" / "ncu_decode_step_raw.csv.gz"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "counters.csv"
    file.write_bytes(gzip.decompress(COUNTED.read_bytes()))
    return file


def test_a_whole_table_goes_without_nothing(table: Path) -> None:
    found = read_ncu(table)
    assert list(went_without(found, len(found.kernels))) == []


def test_fewer_launches_than_asked_for_are_told(table: Path) -> None:
    counted = len(read_ncu(table).kernels)
    (said,) = went_without(read_ncu(table), counted + 3)
    assert said.startswith(f"Of {counted + 3} launches asked for, {counted} were counted")


def test_a_counter_without_a_value_is_told(table: Path) -> None:
    lines = table.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if "dram__bytes_read.sum" in line)
    place = [cell.strip('"') for cell in lines[start].split('","')].index("dram__bytes_read.sum")
    for number in range(start + 2, len(lines)):
        cells = lines[number].split('","')
        cells[place] = "n/a"
        lines[number] = '","'.join(cells)
    table.write_text("\n".join(lines) + "\n")
    (said,) = went_without(read_ncu(table), 0)
    assert said == "Without a value in every kernel: dram__bytes_read.sum."


@pytest.mark.parametrize(
    ("budget_s", "timeout_s", "expected"),
    [(90.0, 1800.0, (5 * 27.0 + 60 + 270, "profiling.ncu.budget_s")), (90.0, 200.0, (200.0, "profiling.pass_timeout_s"))],
)
def test_counting_is_ended_where_the_estimate_was_far_off(
    tmp_path: Path, budget_s: float, timeout_s: float, expected: tuple[float, str]
) -> None:
    folder = RunFolder.create(tmp_path / "run")
    passes = (PassRecord("clean", "complete", seconds=500.0), PassRecord("nsys", "complete", seconds=27.0))
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", "now", ("llm-perf",), passes))
    assert counting_limit(folder, budget_s, timeout_s) == expected
