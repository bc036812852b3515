"""A point of a sweep ends with the process that launched it."""

import os
import signal
import subprocess
import sys

import pytest

from llm_perf_opt.core.processes import LAUNCHER_PID, argument_problem, end_with_launcher, is_stopped


def test_a_point_whose_launcher_has_already_ended_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has adopted it: not only init adopts processes."""
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    sent: list[tuple[int, int]] = []
    monkeypatch.setenv(LAUNCHER_PID, str(launcher.pid))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    end_with_launcher()
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert LAUNCHER_PID not in os.environ


def test_a_stopped_process_is_told_from_a_running_one() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert is_stopped(child.pid)
    finally:
        child.kill()
        child.communicate()
    assert not is_stopped(child.pid)


@pytest.mark.parametrize("text", ["--help", "a\nb", "a\x00", "\ud800", " ", "m" * 1_000_000])
def test_texts_that_are_no_arguments(text: str) -> None:
    assert argument_problem(text)


@pytest.mark.parametrize("text", ["../x", "<b>", "m" * 5000, "@a", "a b"])
def test_texts_that_are_arguments(text: str) -> None:
    assert argument_problem(text) == ""
