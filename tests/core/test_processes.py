"""A point of a sweep ends with the process that launched it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llm_perf_opt.core import processes
from llm_perf_opt.core.processes import LAUNCHER_PID, RUN_MODULE, argument_problem, end_with_launcher, is_stopped, module_argv


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


def test_a_module_is_run_without_the_working_folder_where_python_would_search_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.10 does whatever PYTHONSAFEPATH says: neither the module itself nor what it imports comes from there."""
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    for folder, text in ((own, "import sys, json; print('own', sys.argv[1:], __name__)"), (theirs, "print('theirs')")):
        (folder / "package").mkdir(parents=True)
        (folder / "package" / "__init__.py").touch()
        (folder / "package" / "work.py").write_text(text)
    (theirs / "json.py").write_text("print('theirs')")
    (theirs / "runpy.py").write_text("print('theirs')")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(own))
    monkeypatch.setattr(processes, "_KNOWS_SAFE_PATH", False)

    def ran(argv: list[str]) -> str:
        return subprocess.run(argv, cwd=theirs, capture_output=True, text=True, check=True).stdout

    argv = module_argv("package.work", "a", "-m")
    assert ran(argv) == "own ['a', '-m'] __main__\n"
    assert RUN_MODULE in argv
    assert "theirs" in ran([sys.executable, "-m", "package.work"]), "the plant works"


def test_a_module_is_run_by_its_name_where_the_variable_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_KNOWS_SAFE_PATH", True)
    assert module_argv("a.b", "c") == [sys.executable, "-m", "a.b", "c"]
