"""How a capture ends when a signal or a closed terminal ends it."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from builders import clean_timings, manifest, run_analysis
from command import HANG_S, llm_perf
from llm_perf_opt.cli import run as verb
from llm_perf_opt.cli.advise import advise
from llm_perf_opt.cli.signals import graceful_exit
from llm_perf_opt.config.composition import Composed
from llm_perf_opt.core.errors import CaptureError, HungUp, Interrupted, LlmPerfError, Preempted, Terminated
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.sweep_folder import SweepFolder
from writing import write_record


def signalled(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # where Python hears it


def run_verb(overrides: list[str] | None = None, **options: Any) -> None:
    """Run the verb as the app does."""
    with graceful_exit():
        verb.run(overrides, **options)


@pytest.mark.parametrize(("number", "kind", "code"), [(signal.SIGTERM, Terminated, 143), (signal.SIGHUP, HungUp, 129)])
def test_a_signal_ends_what_is_done_with_its_own_code(number: int, kind: type[Interrupted], code: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(kind) as caught, graceful_exit():
        signalled(number)
    assert caught.value.exit_code == code
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("second", [signal.SIGHUP, signal.SIGTERM])
def test_a_second_signal_does_not_break_into_the_clearing_up(second: int) -> None:
    def work() -> None:
        try:
            signalled(signal.SIGHUP)
        except KeyboardInterrupt:
            signalled(second)
            raise Interrupted("Interrupted.", "Cleared up.") from None

    with pytest.raises(HungUp) as caught, graceful_exit():
        work()
    assert caught.value.remedy == "Cleared up."


def test_below_nohup_a_closed_terminal_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with graceful_exit():
            signalled(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_warning_of_a_scheduler_ends_a_capture_and_keeps_what_else_is_said() -> None:
    def work() -> None:
        try:
            signalled(signal.SIGUSR2)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted. Point 3 is queued.", "Resume it.") from None

    with pytest.raises(Preempted, match="Ended by SIGUSR2") as caught, graceful_exit():
        work()
    assert caught.value.fact.endswith("Point 3 is queued.")
    assert (caught.value.exit_code, caught.value.remedy) == (140, "Resume it.")


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_printing_to_a_terminal_that_is_gone_breaks_no_clearing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", Gone())
    with pytest.raises(OSError, match="Input/output"), graceful_exit():
        print("while nobody hung up, a lost file is an error")

    def work() -> None:
        try:
            signalled(signal.SIGHUP)
        finally:
            print("report: …", flush=True)
            print("error: …", file=sys.stderr, flush=True)

    with pytest.raises(HungUp), graceful_exit():
        work()


def hung_up(composed: Composed, quiet: bool) -> tuple[RunFolder, None, LlmPerfError]:
    """A capture during which the terminal is closed."""
    run = RunFolder.create(composed.run_dir)
    run.write_manifest(manifest(status="partial"))
    try:
        signalled(signal.SIGHUP)
    except KeyboardInterrupt:
        return run, None, Interrupted("Interrupted.", "What was captured so far is kept.")
    raise AssertionError("it was not interrupted")


def test_a_closed_terminal_ends_a_sweep_at_its_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "_capture", hung_up)
    with pytest.raises(HungUp) as caught:
        run_verb(["runtime.batch_size=1,2", f"hydra.run.dir={tmp_path / 'sweep'}"], multirun=True, quiet=True)
    assert "--resume" in caught.value.remedy
    assert [point.status for point in SweepFolder(tmp_path / "sweep").points()] == ["partial", "pending"]
    assert capsys.readouterr().err == "", "it was asked to be quiet"


def test_a_closed_terminal_ends_the_trying_of_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Finding:
        pass

    def tried(*_: Any, **__: Any) -> Any:
        signalled(signal.SIGHUP)

    found = run_analysis()
    monkeypatch.setattr("llm_perf_opt.workflows.advise.findings_of", lambda path: (RunReader(RunFolder(path)), found, []))
    monkeypatch.setattr("llm_perf_opt.workflows.advise.to_try", lambda found, top: [Finding()])
    monkeypatch.setattr("llm_perf_opt.workflows.advise.verify", tried)
    with pytest.raises(HungUp), graceful_exit():
        advise(tmp_path, verify=True, top=1, quiet=True)


def captured(composed: Composed, *_: Any) -> tuple[RunFolder, LlmPerfError | None]:
    """A capture that completes."""
    run = RunFolder.create(composed.run_dir)
    run.write_manifest(manifest(status="complete"))
    write_record(run.clean_file, clean_timings())
    return run, None


def pressed(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_of_the_report_says_how_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llm_perf_opt.profiling.capture.capture", captured)
    monkeypatch.setattr("llm_perf_opt.workflows.analyze_run.report_run", pressed)
    place = tmp_path / "a run"
    with pytest.raises(Interrupted) as caught:
        run_verb([f"hydra.run.dir='{place}'"], quiet=True, as_json=True)
    assert caught.value.fact == "Interrupted while the report was written."
    assert caught.value.remedy == f"`llm-perf report '{place}'` writes the report."
    assert json.loads(capsys.readouterr().out)["status"] == "complete"


@pytest.mark.parametrize("interrupted", ["analyze_run.report_run", "images.draw_images"])
def test_an_interrupt_of_the_report_keeps_why_the_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    def failed(composed: Composed, *_: Any) -> tuple[RunFolder, LlmPerfError | None]:
        run = captured(composed)[0]
        run.write_manifest(manifest(status="partial", why="The torch pass ran out of memory."))
        return run, CaptureError("The torch pass ran out of memory.", "Use a smaller batch.")

    monkeypatch.setattr("llm_perf_opt.profiling.capture.capture", failed)
    monkeypatch.setattr(f"llm_perf_opt.workflows.{interrupted}", pressed)
    run, sweep = tmp_path / "run", tmp_path / "sweep"
    with pytest.raises(Interrupted) as caught:
        run_verb([f"hydra.run.dir={run}"], quiet=True)
    assert caught.value.fact == "Interrupted while the report was written. Before that: The torch pass ran out of memory."
    assert caught.value.remedy == f"Use a smaller batch. `llm-perf report {run}` writes the report."
    with pytest.raises(Interrupted, match=r"written\. Before that: The torch pass"):
        run_verb(["runtime.batch_size=1,2", f"hydra.run.dir={sweep}"], multirun=True, quiet=True)
    assert [point.status for point in SweepFolder(sweep).points()] == ["partial", "pending"], "the sweep stopped"


def test_an_interrupt_of_the_images_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_perf_opt.profiling.capture.capture", captured)
    monkeypatch.setattr("llm_perf_opt.workflows.images.draw_images", pressed)
    with pytest.raises(Interrupted, match="while the report was written"):
        run_verb([f"hydra.run.dir={tmp_path / 'run'}"], quiet=True)
    assert (tmp_path / "run" / "report.html").exists()


def test_a_signal_during_the_report_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_perf_opt.profiling.capture.capture", captured)
    monkeypatch.setattr("llm_perf_opt.workflows.analyze_run.report_run", lambda _: signalled(signal.SIGTERM))
    with pytest.raises(Terminated) as caught:
        run_verb([f"hydra.run.dir={tmp_path / 'run'}"], quiet=True)
    assert caught.value.fact == "Ended by SIGTERM. The report was not written."


def test_resuming_a_sweep_writes_the_report_that_an_interrupt_prevented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_perf_opt.profiling.capture.capture", captured)
    monkeypatch.setattr("llm_perf_opt.workflows.sweep.require_same_hardware", lambda *_: None)
    sweep = tmp_path / "sweep"
    with monkeypatch.context() as during:
        during.setattr("llm_perf_opt.workflows.analyze_run.report_run", pressed)
        with pytest.raises(Interrupted) as caught:
            run_verb(["runtime.batch_size=1,2", f"hydra.run.dir={sweep}"], multirun=True, quiet=True)
    assert caught.value.fact == "Interrupted while the report was written."
    assert f"llm-perf run --resume {sweep}" in caught.value.remedy
    assert [point.status for point in SweepFolder(sweep).points()] == ["complete", "pending"]
    assert (sweep / "sweep.html").exists()
    assert not (sweep / "000" / "report.html").exists()
    run_verb(resume=sweep, quiet=True)
    assert [point.folder for point in SweepFolder(sweep).points()] == ["000", "001"], "the first was not measured again"
    assert (sweep / "000" / "report.html").exists()


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from builders import clean_timings, manifest
from llm_perf_opt.cli import run as verb
from llm_perf_opt.cli.signals import graceful_exit
from llm_perf_opt.core.run_folder import RunFolder
from writing import write_record
from llm_perf_opt.profiling import capture

def captured(composed, *_):
    run = RunFolder.create(composed.run_dir)
    if composed.config.runtime.batch_size == 2:
        run.write_manifest(manifest(status="partial"))
        os.kill(os.getpid(), signal.SIGKILL)
    run.write_manifest(manifest(status="complete"))
    write_record(run.clean_file, clean_timings())
    return run, None

capture.capture = captured
with graceful_exit():
    verb.run(["runtime.batch_size=1,2,4", f"hydra.run.dir={sys.argv[1]}"], multirun=True, quiet=True)
"""


@pytest.mark.slow
def test_after_kill_9_a_sweep_is_resumed_with_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = tmp_path / "sweep"
    argv = [sys.executable, "-c", KILLED, str(sweep), str(Path(__file__).parents[1])]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [point.status for point in SweepFolder(sweep).points()] == ["complete", "partial", "pending"]
    first = (sweep / "000" / "run.json").read_bytes()
    monkeypatch.setattr("llm_perf_opt.profiling.capture.capture", captured)
    monkeypatch.setattr("llm_perf_opt.workflows.sweep.require_same_hardware", lambda *_: None)
    run_verb(resume=sweep, quiet=True)
    assert [point.status for point in SweepFolder(sweep).points()] == ["complete"] * 3
    assert (sweep / "000" / "run.json").read_bytes() == first, "the first was not measured again"


def test_an_interrupt_of_the_page_of_a_sweep_names_the_way_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_perf_opt.profiling.capture.capture", captured)
    monkeypatch.setattr("llm_perf_opt.workflows.sweep.report_sweep", pressed)
    with pytest.raises(Interrupted, match="Interrupted") as caught:
        run_verb(["runtime.batch_size=1,2", f"hydra.run.dir={tmp_path / 'sweep'}"], multirun=True, quiet=True)
    assert f"llm-perf run --resume {tmp_path / 'sweep'}" in caught.value.remedy


def test_ctrl_c_outside_a_pass_is_not_silent() -> None:
    with pytest.raises(Interrupted) as caught, graceful_exit():
        pressed()
    assert (caught.value.fact, caught.value.exit_code) == ("Interrupted.", 130)


@pytest.mark.parametrize(
    ("words", "work"),
    [
        (["report", "."], "llm_perf_opt.workflows.run_reader.RunReader.open"),
        (["compare", ".", "."], "llm_perf_opt.workflows.compare.compare_runs"),
        (["metrics", "list"], "llm_perf_opt.cli.metrics.note_debug"),
        (["options"], "llm_perf_opt.cli.app._command"),
    ],
)
def test_ctrl_c_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], work: str) -> None:
    monkeypatch.setattr(work, pressed)
    done = llm_perf(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "error: Interrupted.\n")


def test_an_interrupt_while_a_module_is_imported_ends_with_the_code_of_the_command(tmp_path: Path) -> None:
    """Python marks an interrupt of a string in `exec` as unhandled, and would end by the signal."""
    code = """
import signal
from llm_perf_opt.cli import app

def imported():
    try:
        exec("signal.raise_signal(signal.SIGINT)")
    except KeyboardInterrupt:
        raise SystemExit(130)

signal.signal(signal.SIGINT, signal.default_int_handler)
app._main = imported
app.main()
"""
    (tmp_path / "interrupted.py").write_text(code)
    paths = os.pathsep.join(filter(None, (str(tmp_path), *sys.path)))
    ended = subprocess.run(
        [sys.executable, "-m", "interrupted"], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.slow
def test_a_real_terminal_that_is_closed_ends_a_program_in_order(tmp_path: Path) -> None:
    """As when a window is closed: the kernel hangs up, and nothing can be printed any more."""
    code = "import os, time; open('pid.part', 'w').write(str(os.getpid())); os.rename('pid.part', 'pid'); time.sleep(600)"
    words = ["exec", "--passes", "program", "--out", "run", "--", sys.executable, "-c", code]
    starter = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from llm_perf_opt.cli.app import main; main()"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", starter, *words], cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.02)
        os.close(ours)
        assert process.wait(timeout=HANG_S) == 129
    finally:
        if process.poll() is None:
            process.kill()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
    left = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [entry["status"] for entry in left["passes"]] == ["failed"]
    assert "SIGHUP" in left["why"]
    assert (tmp_path / "run" / "report.md").exists()


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR2: 140}
IN_THE_MIDDLE = """
import os, signal, sys
from llm_perf_opt.__main__ import main
number, os.fsync = int(sys.argv.pop()), lambda file: os.kill(os.getpid(), number)
main()
"""


@pytest.mark.parametrize("number", CODES)
def test_a_signal_while_a_file_is_written_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    argv = ["baseline", "set", "a", "run", str(int(number))]
    run = RunFolder.create(tmp_path / "run")
    run.write_manifest(manifest())
    write_record(run.clean_file, clean_timings())
    ended = subprocess.run([sys.executable, "-c", IN_THE_MIDDLE, *argv], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, "Traceback" in ended.stderr) == (CODES[number], False), ended.stderr
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("number", CODES)
def test_what_a_library_makes_of_the_exception_of_a_signal_is_still_the_end(number: int) -> None:
    def imported() -> None:
        try:
            signalled(number)
        except KeyboardInterrupt as error:
            raise ImportError("an extension could not be loaded") from error

    with pytest.raises(Interrupted) as caught, graceful_exit():
        imported()
    assert caught.value.exit_code == CODES[signal.Signals(number)]


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("words", [["options"], ["cost", "model=tiny"]], ids=["cheap", "torch"])
def test_a_signal_at_any_moment_ends_with_its_code(number: signal.Signals, words: list[str], tmp_path: Path) -> None:
    code = "from llm_perf_opt.cli.__main__ import main; import os; os.write(1, b'1'); main()"
    for delay_s in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 2.0, 3.0):
        argv = [sys.executable, "-c", code, *words]
        with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.read(1)  # Python itself has started
            time.sleep(delay_s)
            child.send_signal(number)
            _, said = child.communicate(timeout=HANG_S)
        assert child.returncode in (0, CODES[number], -number), (delay_s, said)
        assert "Traceback" not in said, (delay_s, said)
