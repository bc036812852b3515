"""The error that a child's end results in."""

import signal
from pathlib import Path

import pytest

from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError
from llm_perf_opt.profiling.vendor.launch import Finished, UnexplainedEndError, verdict

STOPPED = CaptureError("The disk ran full.", "")
SAID = ConfigError("The program ended with exit code 3.", "")


@pytest.mark.parametrize(
    ("finished", "said", "kind"),
    [
        (Finished(0, 1.0, False), [], None),
        (Finished(3, 1.0, False), [], UnexplainedEndError),
        (Finished(-signal.SIGSEGV, 1.0, False), [], UnexplainedEndError),
        (Finished(-signal.SIGKILL, 1.0, False), [], CaptureError),
        (Finished(-signal.SIGTERM, 1.0, True), [], CaptureError),
        (Finished(130, 1.0, False), [], Interrupted),
        (Finished(3, 1.0, False), [SAID], ConfigError),
        (Finished(3, 1.0, False, STOPPED), [SAID], CaptureError),
    ],
)
def test_only_an_end_without_a_reason_is_unexplained(
    tmp_path: Path, finished: Finished, said: list[LlmPerfError], kind: type[LlmPerfError] | None
) -> None:
    (tmp_path / "log.txt").write_text("an error with exit code 7\n")
    words = {"limit": "the limit", "longer": "Wait longer.", "smaller": "take less."}
    found = verdict("The pass", finished, said, tmp_path / "log.txt", **words)
    assert (type(found) if found else None) is kind


RECORDED = """Generating '/tmp/x/nsys-report-4807.qdstrm'
[1/1] [0%                          ] run.nsys-rep\r[1/1] [========================100%] run.nsys-rep
Generated:
    /runs/of errors/raw/nsys/run.nsys-rep
"""
"""What nsys 2023.4 says behind a program."""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (f"loading\nno such prompt\n{RECORDED}", "with exit code 5: no such prompt."),
        (
            f"Traceback (most recent call last):\n  raise ValueError(text)\nValueError: my own bug\n{RECORDED}",
            "with exit code 5: ValueError: my own bug.",
        ),
        ("ValueError: my own bug\nGenerated:\n", "with exit code 5: ValueError: my own bug."),
        (RECORDED, "with exit code 5."),
        ("==PROF== Connected\nbroken\n==PROF== Disconnected\n", "with exit code 5: broken."),
        ("==ERROR== no driver\n==PROF== Disconnected\n", "with exit code 5: no driver."),
    ],
)
def test_a_programs_failure_is_not_explained_by_the_tools_progress(tmp_path: Path, log: str, said: str) -> None:
    (tmp_path / "log.txt").write_text(log)
    found = verdict("It", Finished(5, 1.0, False), [], tmp_path / "log.txt", limit="", longer="", smaller="")
    assert found is not None
    assert found.fact == f"It ended {said}"
