"""A copy of the process: its result, its failures, and that none is left behind; tried in processes of one thread each."""

import sys
import threading

import pytest

from llm_perf_opt.profiling.vendor.beside import beside
from llm_perf_opt.profiling.vendor.launch import ask

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux only")

BEGIN = """
import os, sys
from llm_perf_opt.profiling.vendor import beside as module
module.usable_cpus = lambda: 2
def left():
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return "none"
def open_files():
    return len(os.listdir("/proc/self/fd"))
before = open_files()
"""


def said(code: str) -> str:
    return (ask([sys.executable, "-W", "error", "-c", BEGIN + code]) or "nothing").strip()


def test_what_the_copy_writes_comes_back() -> None:
    code = "other = module.beside(lambda out: out.write(b'x' * 3_000_000))\n"
    assert said(code + "print(len(other.result()), left(), open_files() - before)") == "3000000 none 0"


@pytest.mark.parametrize("failing", ["1 / 0", "sys.exit(0)", "os.abort()", "os.kill(os.getpid(), 9)"])
def test_a_copy_that_fails_has_no_result(failing: str) -> None:
    code = f"other = module.beside(lambda out: ({failing}))\nprint(other.result(), left(), open_files() - before)"
    assert said(code) == "None none 0"


def test_the_copy_runs_nothing_of_the_original() -> None:
    code = "import atexit\natexit.register(print, 'once')\nprint('before', end=' ')\nmodule.beside(lambda out: None).result()"
    assert said(code) == "before once"


def test_an_abandoned_copy_is_gone() -> None:
    code = "import time\nother = module.beside(lambda out: time.sleep(600))\nother.abandon()\nother.abandon()\n"
    assert said(code + "print(left(), open_files() - before)") == "none 0"


def test_one_who_is_interrupted_while_waiting_can_still_end_it() -> None:
    code = """import signal, time
signal.signal(signal.SIGALRM, signal.default_int_handler)
other = module.beside(lambda out: time.sleep(600))
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    other.result()
except KeyboardInterrupt:
    other.abandon()
print(left(), open_files() - before)"""
    assert said(code) == "none 0"


def test_the_copy_ends_when_the_original_is_killed() -> None:
    code = """import time
read, write = os.pipe()
if os.fork() == 0:
    other = module.beside(lambda out: (os.write(write, str(os.getpid()).encode()), time.sleep(600)))
    time.sleep(600)
copy = int(os.read(read, 20))
original = int(open(f"/proc/{copy}/stat").read().split()[3])
os.kill(original, 9)
os.waitpid(original, 0)
for _ in range(200):
    try:
        gone = open(f"/proc/{copy}/stat").read().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        gone = True
    if gone:
        break
    time.sleep(0.05)
print(gone)"""
    assert said(code) == "True"


def test_a_copy_collected_by_somebody_else_has_no_result() -> None:
    code = "other = module.beside(lambda out: None)\nos.waitpid(-1, 0)\nprint(other.result(), open_files() - before)"
    assert said(code) == "None 0"


def test_no_copy_beside_other_threads_or_on_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    thread = threading.Thread(target=going.wait)
    thread.start()
    try:
        assert beside(lambda _: None) is None
    finally:
        going.set()
        thread.join()
    assert said("module.usable_cpus = lambda: 1\nprint(module.beside(lambda out: None))") == "None"
