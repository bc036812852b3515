"""Problems in the tools' logs, in their real wording."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.core.errors import CaptureError, ResourceError
from llm_perf_opt.profiling.vendor.logs import log_error, ncu_log_problems, nsys_log_problems

MESSAGES = (Path(__file__).parents[2] / "fixtures" / "nsight" / "ncu_messages.txt").read_text()


def said_to(option: str) -> str:
    """What ncu answered to an option."""
    line = next(line for line in MESSAGES.splitlines() if option in line)
    return "\n".join(part.strip() for part in line[line.index("==") :].split(" / "))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--section", ["unknown_section"]),
        ("flop_count_hp", ["unknown_metric"]),
        ("decode*", ["no_kernels"]),
        ("app-range", ["no_kernels"]),
        ("killed at its time limit", ["cut_short", "profiling_error"]),
    ],
)
def test_what_ncu_said_on_an_h200(option: str, expected: list[str]) -> None:
    found = ncu_log_problems(f"==PROF== Connected to process 1\nthe program's own words\n{said_to(option)}\n")
    assert [problem.id for problem in found] == expected
    assert all(problem.what and problem.remedy and problem.line for problem in found)


def test_a_report_that_was_cut_short_may_still_be_used() -> None:
    assert log_error(ncu_log_problems(said_to("killed at its time limit"))) is None
    assert log_error(ncu_log_problems("==ERROR== An error occurred while trying to profile.\n")) is not None


def test_permission_has_both_remedies() -> None:
    text = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on device 0."
    for problems in (ncu_log_problems(text), nsys_log_problems(text)):
        error = log_error(problems)
        assert isinstance(error, ResourceError)
        assert "CAP_SYS_ADMIN" in error.remedy
        assert "NVreg_RestrictProfilingToAdminUsers=0" in error.remedy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The importer binary and its dependencies were not found", "importer_missing"),
        ("Unknown runtime API function index: 482", "tool_older_than_cuda"),
        ("**** Errors occurred while processing the raw events. ****", "events_not_processed"),
        ("No reports were generated", "no_report"),
        ("Capture range never started\nGenerated:\n\n", "no_report"),
        ("unrecognized option '--gpu-metrics-devices=all'\n\nusage: nsys profile", "unknown_option"),
        ("Illegal --trace argument 'nvlink'", "unknown_option"),
        ("Illegal --gpu-metrics-device arguments.", "gpu_metrics_unsupported"),
        ("Qdstrm file is incomplete or invalid.", "stream_incomplete"),
        ("[1/1] [0%    ] a\r[1/1] [=16% ] a\rErrors occurred while processing the raw events", "events_not_processed"),
    ],
)
def test_what_nsys_says(text: str, expected: str) -> None:
    (problem,) = nsys_log_problems(text)
    assert problem.id == expected
    assert isinstance(log_error([problem]), CaptureError)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Capture range started in the application.\nGenerated:\n    /runs/a/run.nsys-rep\n",
        "the program says: unrecognized option '--x'",
        "Generated: 64 tokens",
    ],
)
def test_a_good_log_has_no_problems(text: str) -> None:
    assert nsys_log_problems(text) == ()
    assert ncu_log_problems(text) == ()


def test_the_programs_own_words_are_not_those_of_ncu() -> None:
    assert ncu_log_problems("RuntimeError: Failed to find metric accuracy\nNo kernels were profiled today") == ()


@given(st.text())
def test_no_log_is_too_odd(text: str) -> None:
    log_error([*nsys_log_problems(text), *ncu_log_problems(text)])
