"""Children: output, messages, end. Uses real processes."""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from command import HANG_S
from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, ResourceError
from llm_perf_opt.core.processes import ask
from llm_perf_opt.profiling.vendor import launch
from llm_perf_opt.profiling.vendor.child import DiskWatch
from llm_perf_opt.profiling.vendor.launch import Callbacks, Companion, run_child, verdict
from llm_perf_opt.runners.child import MESSAGE_PREFIX


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


class Clock:
    """The clock of `launch`. It jumps beyond every time limit when the child says that it is ready."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def hear(self, message: dict[str, Any]) -> None:
        if message["event"] == "ready":
            self._ahead += 10 * HANG_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(launch, "time", clock)
    return clock


READY = f"print('{MESSAGE_PREFIX}' + '{{\"event\": \"ready\"}}', flush=True)"
"""Said by a child whose time is over as soon as it is ready."""


def run(code: str, tmp_path: Path, clock: Clock | None = None) -> tuple[launch.Finished, list[dict[str, Any]], str]:
    heard: list[dict[str, Any]] = []

    def hear(message: dict[str, Any]) -> None:
        heard.append(message)
        if clock:
            clock.hear(message)

    log = tmp_path / "log.txt"
    finished = run_child(python(code), log=log, timeout_s=HANG_S, callbacks=Callbacks(on_message=hear))
    return finished, heard, log.read_text()


def ended(pid: int) -> bool:
    """Whether a process that was ended is gone; the system may take its time."""
    deadline = time.monotonic() + HANG_S
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_messages_and_log_are_told_apart(tmp_path: Path) -> None:
    code = """
import sys
from llm_perf_opt.runners.child import send
print("plain"); send("phase", text="loading"); print("to stderr", file=sys.stderr)
print("@llm-perf not json"); print("@llm-perf [1]"); print("no newline", end="")
"""
    finished, heard, log = run(code, tmp_path)
    assert finished.exit_code == 0
    assert heard == [{"event": "phase", "text": "loading"}]
    assert set(log.splitlines()) == {"plain", "to stderr", "@llm-perf not json", "@llm-perf [1]", "no newline"}


def test_output_larger_than_any_pipe_is_kept(tmp_path: Path) -> None:
    finished, _, log = run("print('x' * 3_000_000)", tmp_path)
    assert finished.exit_code == 0
    assert log.count("x") == 3_000_000


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_exit_code_and_signal_are_told(tmp_path: Path, code: str, expected: int) -> None:
    finished, _, _ = run(code, tmp_path)
    assert finished.exit_code == expected
    assert finished.signal_name == ("SIGKILL" if expected == -9 else "")


def test_a_child_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", (0.3, 0.3, HANG_S))
    pids = tmp_path / "pids"
    code = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{other.pid}}")
{READY}
time.sleep({HANG_S})
"""
    finished, _, _ = run(code, tmp_path, clock)
    assert finished.timed_out
    assert finished.exit_code == -signal.SIGKILL
    assert all(ended(int(pid)) for pid in pids.read_text().split())


def test_a_grandchild_that_keeps_the_pipe_does_not_keep_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SETTLE_S", 0.3)
    pid_file = tmp_path / "pid"
    code = f"""
import subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({HANG_S})"], start_new_session=True)
open({str(pid_file)!r}, "w").write(str(other.pid))
print("done", flush=True)
"""
    finished, _, log = run(code, tmp_path)
    assert (finished.exit_code, finished.timed_out) == (0, False)
    left = int(pid_file.read_text())
    assert log.splitlines()[0] == "done"
    assert f"[{left}]" in log.splitlines()[1], "it is said that it was ended"
    assert ended(left)


def test_what_hides_in_a_session_of_its_own_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """As the agent of nsys does: a daemon below init, here deaf to SIGTERM. A stranger of the same kind is left alone."""
    monkeypatch.setattr(launch, "SETTLE_S", 0.1)
    monkeypatch.setattr(launch, "GRACE_S", (HANG_S, 0.5, HANG_S))
    deaf = f"import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep({HANG_S})"
    middle = (
        "import subprocess, sys; "
        f"daemon = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True, stdout=subprocess.PIPE); "
        f"daemon.stdout.readline(); open({str(tmp_path / 'pid')!r}, 'w').write(str(daemon.pid))"
    )
    code = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {middle!r}])\n{READY}\ntime.sleep({HANG_S})"
    stranger = subprocess.Popen(python(deaf), start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        finished, _, log = run(code, tmp_path, clock)
        assert finished.timed_out
        daemon = int((tmp_path / "pid").read_text())
        assert str(daemon) in log
        assert ended(daemon)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_whose_environment_is_gone_is_ended_with_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine's core is that outlives a killed child: nothing in its environment leads to it."""
    monkeypatch.setattr(launch, "SETTLE_S", 0.1)
    pid_file = tmp_path / "pid"
    code = f"""
import os, signal, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({HANG_S})"], env={{}})
open({str(pid_file)!r}, "w").write(str(other.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    finished, _, _ = run(code, tmp_path)
    assert finished.signal_name == "SIGKILL"
    assert ended(int(pid_file.read_text()))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is asked to end may take as long as a busy machine makes it."""
    monkeypatch.setattr(launch, "GRACE_S", (HANG_S, HANG_S, HANG_S))


@pytest.mark.usefixtures("patient")
def test_a_child_that_talks_while_it_ends_is_heard_to_its_end(tmp_path: Path, clock: Clock) -> None:
    """More than a pipe holds: it must be read while the child is given its time to end."""
    code = f"""
import time
try:
    {READY}
    time.sleep({HANG_S})
except KeyboardInterrupt:
    print("y" * 1_000_000)
    print("report written", flush=True)
"""
    finished, _, log = run(code, tmp_path, clock)
    assert finished.timed_out
    assert finished.exit_code == 0, "not killed while it waited for room in the pipe"
    assert log.endswith("report written\n")


def test_a_message_behind_a_progress_bar_is_heard(tmp_path: Path) -> None:
    code = """
import sys
from llm_perf_opt.runners.child import send
sys.stdout.write("\\r[1/1] 97% run.nsys-rep"); send("phase", text="decode"); print("a line that quotes @llm-perf and goes on")
"""
    _, heard, log = run(code, tmp_path)
    assert heard == [{"event": "phase", "text": "decode"}]
    assert "97% run.nsys-rep\n" in log
    assert "a line that quotes @llm-perf and goes on" in log


@pytest.mark.usefixtures("patient")
def test_a_child_that_fills_the_disk_is_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    code = f"""
import time
try:
    with open({str(folder / "trace")!r}, "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 100_000); time.sleep(0.01)
except KeyboardInterrupt:
    print("report written", flush=True)
"""
    log = tmp_path / "log.txt"
    watch = DiskWatch([folder], 1_000_000, interval_s=0.05)
    finished = run_child(python(code), log=log, timeout_s=HANG_S, watch=watch, callbacks=Callbacks(on_message=lambda _: None))
    assert isinstance(finished.stopped, CaptureError)
    assert "profiling.max_trace_gb" in finished.stopped.remedy
    assert not finished.timed_out
    assert log.read_text() == "report written\n", "it was interrupted, not killed"
    assert verdict("The pass", finished, [], log, limit="x", longer="x", smaller="x") is finished.stopped


@pytest.mark.usefixtures("patient")
def test_a_child_of_a_background_job_is_interrupted_too(tmp_path: Path, clock: Clock) -> None:
    """A shell script starts its background jobs with SIGINT ignored, and so are their children."""
    code = f"""
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
from llm_perf_opt.runners.child import enable_interrupts
enable_interrupts()
try:
    {READY}
    time.sleep({HANG_S})
except KeyboardInterrupt:
    print("last words", flush=True)
"""
    finished, _, log = run(code, tmp_path, clock)
    assert (finished.timed_out, finished.exit_code, log) == (True, 0, "last words\n")


@pytest.mark.usefixtures("patient")
def test_interrupting_us_interrupts_the_child_and_keeps_its_last_words(tmp_path: Path) -> None:
    code = f"""
import time
try:
    print("begun", flush=True)
    time.sleep({HANG_S})
except KeyboardInterrupt:
    print("last words", flush=True)
"""
    log = tmp_path / "log.txt"

    def interrupt() -> None:
        while not log.exists() or "begun" not in log.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted):
        run_child(python(code), log=log, timeout_s=HANG_S, callbacks=Callbacks(on_message=lambda _: None))
    thread.join()
    assert "last words" in log.read_text()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no-such-program cannot be started"):
        run_child(
            [str(tmp_path / "no-such-program")], log=tmp_path / "log", timeout_s=5, callbacks=Callbacks(on_message=lambda _: None)
        )


def test_waiting_wakes_only_when_there_is_something_to_hear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that polls takes a processor from the child that it measures."""
    waited: list[float | None] = []
    plain = selectors.DefaultSelector.select

    def select(selector: selectors.DefaultSelector, timeout: float | None = None) -> object:
        waited.append(timeout)
        return plain(selector, timeout)

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    monkeypatch.setattr(launch, "TICK_S", HANG_S)
    run("import time; time.sleep(0.5)", tmp_path)
    assert len(waited) <= 3, "the end of the pipe, the end of the child"


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(0.6)", "import time\nfor _ in range(300): print(flush=True); time.sleep(0.002)"]
)
def test_time_is_told_while_a_child_is_silent_and_while_it_only_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(launch, "TICK_S", 0.05)
    heard: list[dict[str, Any]] = []
    ticks: list[float] = []
    run_child(
        python(code),
        log=tmp_path / "log",
        timeout_s=HANG_S,
        callbacks=Callbacks(on_message=heard.append, on_tick=lambda: ticks.append(time.monotonic())),
    )
    assert ticks
    assert heard == []


def test_companion_hears_and_ends_with_its_input(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    code = f"import sys; print('ready', flush=True); open({str(heard)!r}, 'w').write(sys.stdin.read())"
    companion = Companion(python(code), tmp_path / "log", "ready")
    companion.tell("42")
    assert companion.stop().exit_code == 0
    assert heard.read_text() == "42\n"


def test_companion_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="did not start"):
        Companion(python("raise SystemExit(3)"), tmp_path / "log", "ready")


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = (
        "import os, subprocess, sys, time; from llm_perf_opt.runners.child import die_with_parent; die_with_parent(); "
        f"engine = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({HANG_S})'], start_new_session=True); "
        f"open({str(pid_file)!r}, 'w').write(f'{{os.getpid()}} {{engine.pid}} '); time.sleep({HANG_S})"
    )
    # a tool stands between: what must die with the parent is its grandchild, which the tool would outlive
    tool = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    starter = (
        "import subprocess, sys; from llm_perf_opt.profiling.vendor.launch import child_environment; "
        f"subprocess.run([sys.executable, '-c', {tool!r}], env=child_environment())"
    )
    parent = subprocess.Popen(python(starter))
    deadline = time.monotonic() + HANG_S
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert all(ended(int(pid)) for pid in pid_file.read_text().split()), "also the process that it started"


ENGINE_LOG = """\
(EngineCore pid=7) ERROR 11-16 19:27:45 [core.py:1199] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-16 19:27:45 [core.py:1199] ValueError: No available memory for the cache blocks.
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_cause_of_an_engines_error_is_found_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(ENGINE_LOG)
    finished = launch.Finished(3, 1.0, False)

    def judged(fact: str) -> LlmPerfError | None:
        return launch.verdict("It", finished, [ResourceError(fact, "See the log.")], log, limit="", longer="", smaller="")

    found = judged("vLLM cannot open this model: Engine core initialization failed. See root cause above.")
    assert isinstance(found, ResourceError)
    assert found.fact.endswith("See root cause above: ValueError: No available memory for the cache blocks.")
    assert found.remedy == "See the log."
    plain = judged("The model does not fit.")
    assert plain is not None
    assert plain.fact == "The model does not fit."
    log.unlink()
    lost = judged("See root cause above.")
    assert lost is not None
    assert lost.fact == "See root cause above."


def test_ask() -> None:
    assert ask(python("print('hello')")) == "hello"
    assert ask(python("raise SystemExit(1)")) is None
    assert ask(["/no/such/program"]) is None
    assert ask(python("import time; time.sleep(600)"), timeout_s=0.2) is None
    assert ask(python("print('all the same'); raise SystemExit(1)"), whatever_code=True) == "all the same"
