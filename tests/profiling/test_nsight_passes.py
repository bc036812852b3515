"""A pass under a tool: which error is reported when it fails, and the note when it counted fewer launches than requested."""

import gzip
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.core.errors import CaptureError, ConfigError, LlmPerfError
from llm_perf_opt.core.records import SCHEMA, Manifest, Missing, PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.ncu_counters import counting_limit, missing_notes
from llm_perf_opt.profiling.nsys_timeline import TimelineCheck, record_timeline
from llm_perf_opt.profiling.passes import PassPlan, restart_note
from llm_perf_opt.profiling.vendor.launch import Finished, UnexplainedEndError
from llm_perf_opt.profiling.vendor.logs import nsys_log_problems
from llm_perf_opt.profiling.vendor.tool_pass import ToolRun
from llm_perf_opt.traces.health import Expected
from llm_perf_opt.traces.ncu_csv import read_ncu

COMPLAINT = "print('Unknown runtime API function index: 470');"
SAID = "from llm_perf_opt.runners.child import send;"
SAID += "send('error', kind='ConfigError', fact='A tool said: exit code 9.', remedy='');"


class Nobody:
    """Is told and says nothing."""

    def pass_started(self, name: str, label: str) -> None: ...

    def pass_message(self, name: str, message: dict[str, Any]) -> None: ...

    def pass_ended(self, entry: PassRecord) -> None: ...


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (f"{COMPLAINT} raise SystemExit(3)", CaptureError, "newer than itself"),
        (f"{COMPLAINT} import os; os.abort()", CaptureError, "newer than itself"),
        (f"{COMPLAINT} {SAID} raise SystemExit(3)", ConfigError, "A tool said: exit code 9."),
        ("print('exit code'); raise SystemExit(3)", UnexplainedEndError, "ended with exit code 3"),
        (COMPLAINT, CaptureError, "newer than itself"),
        ("pass", CaptureError, "ended without an error"),
    ],
)
def test_who_says_most_is_heard(tmp_path: Path, code: str, kind: type[LlmPerfError], said: str) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest(Manifest(SCHEMA, "0", "partial", "now", ("x",), (PassRecord("nsys"),)))
    plan = PassPlan("nsys", [sys.executable, "-c", code], 120)
    with pytest.raises(LlmPerfError) as caught:
        record_timeline(folder, plan, Nobody(), TimelineCheck(Path("nsys"), Expected(), 1.0))
    assert type(caught.value) is kind, caught.value
    assert said in caught.value.fact
    assert folder.manifest().passes[0].why == caught.value.fact


@pytest.mark.parametrize("code", ["raise ValueError('my own bug')", "print('ValueError: my own bug'); raise SystemExit(1)"])
def test_a_program_that_failed_before_its_range_is_told_first(tmp_path: Path, code: str) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest(Manifest(SCHEMA, "0", "partial", "now", ("x",), (PassRecord("nsys"),)))
    below = f"import atexit; atexit.register(print, 'Generated:', flush=True); {code}"
    body = f"import subprocess, sys; done = subprocess.run([sys.executable, '-uc', {below!r}]); sys.exit(done.returncode)"
    plan = PassPlan("nsys", [sys.executable, "-c", body], 120)
    with pytest.raises(CaptureError) as caught:
        record_timeline(folder, plan, Nobody(), TimelineCheck(Path("nsys"), Expected(), 1.0))
    first, _, then = caught.value.fact.partition(" nsys recorded nothing: ")
    assert first == "The pass nsys (Nsight Systems) ended with exit code 1: ValueError: my own bug."
    assert "the program ended before it" in then
    assert caught.value.remedy.startswith(f"See {folder.log_file('nsys')}.")


@pytest.mark.parametrize(
    ("starts", "lost", "said"),
    [
        (1, True, ""),
        (2, False, "nsys lost the connection to its agent and was started 2 times."),
        (3, True, "It was started 3 times and lost the connection each time."),
    ],
)
def test_what_is_said_of_several_starts_is_what_happened(starts: int, lost: bool, said: str) -> None:
    problems = nsys_log_problems("End of file") if lost else ()
    result = ToolRun(Finished(int(lost), 1.0, False), Missing("nsys wrote no report"), problems, starts)
    assert restart_note(result) == said


COUNTED = Path(__file__).parents[1] / "fixtures" / "h200" / "ncu_decode_step_raw.csv.gz"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "counters.csv"
    file.write_bytes(gzip.decompress(COUNTED.read_bytes()))
    return file


def test_a_whole_table_goes_without_nothing(table: Path) -> None:
    found = read_ncu(table)
    assert list(missing_notes(found, len(found.kernels))) == []


def test_fewer_launches_than_asked_for_are_told(table: Path) -> None:
    counted = len(read_ncu(table).kernels)
    (said,) = missing_notes(read_ncu(table), counted + 3)
    assert said.startswith(f"Of {counted + 3} requested launches, {counted} were counted")


def test_a_counter_without_a_value_is_told(table: Path) -> None:
    lines = table.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if "dram__bytes_read.sum" in line)
    place = [cell.strip('"') for cell in lines[start].split('","')].index("dram__bytes_read.sum")
    for number in range(start + 2, len(lines)):
        cells = lines[number].split('","')
        cells[place] = "n/a"
        lines[number] = '","'.join(cells)
    table.write_text("\n".join(lines) + "\n")
    (said,) = missing_notes(read_ncu(table), 0)
    assert "any kernel: dram__bytes_read.sum" in said


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
