"""Which processes descend from a child."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llm_perf_opt.profiling.vendor import child as descendants
from llm_perf_opt.profiling.vendor.child import MARK, Descendants, new_mark

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@contextmanager
def sleeping(mark: str = "") -> Iterator[int]:
    environment = {**os.environ, **({MARK: mark} if mark else {})}
    process = subprocess.Popen(SLEEP, env=environment, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_mark_leads_to_a_process_that_is_nobodys_child() -> None:
    mark = new_mark()
    with sleeping(mark) as ours, sleeping() as stranger, sleeping(new_mark()) as another:
        family = Descendants(2**22 + 1, mark)  # a pid that no process has: only the mark can tell
        family.look(child_is_known=False)
        assert family.alive() == [ours]
        family.send(signal.SIGKILL)
        os.waitid(os.P_PID, ours, os.WEXITED | os.WNOWAIT)
        assert family.alive() == [], "one that has ended and was not yet waited for does not run"
        assert all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in (stranger, another))


def test_a_mark_within_a_mark_belongs_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = new_mark()
    monkeypatch.setenv(MARK, outer)
    inner = new_mark()
    assert inner.startswith(f"{outer}:")
    with sleeping(inner) as pid:
        for mark in (outer, inner):
            family = Descendants(2**22 + 1, mark)
            family.look(child_is_known=False)
            assert family.alive() == [pid]


def test_a_pid_that_passed_to_another_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = new_mark()
    with sleeping(mark) as pid:
        family = Descendants(pid, mark)
        family.look(child_is_known=True)
        assert family.alive() == [pid]
        real = descendants._read

        def later(asked: int) -> descendants._Seen | None:
            seen = real(asked)
            return None if seen is None else descendants._Seen(seen.parent, seen.session, seen.began + 1, seen.ended)

        monkeypatch.setattr(descendants, "_read", later)
        family.send(signal.SIGKILL)
        assert family.alive() == []
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "it still runs"


def test_a_session_whose_number_passed_to_another_process_is_left_alone() -> None:
    with sleeping() as pid:
        family = Descendants(pid, new_mark())
        family.look(child_is_known=False)
        assert family.alive() == [], "the pid runs, but it is not the child any more"
