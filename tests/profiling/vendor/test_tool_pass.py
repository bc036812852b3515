"""A pass under a tool: its report is kept or its absence explained, and no process is left running."""

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command import HANG_S
from llm_perf_opt.core.errors import CaptureError, Interrupted
from llm_perf_opt.core.records import Missing
from llm_perf_opt.profiling.vendor import launch, tool_pass
from llm_perf_opt.profiling.vendor.child import OnMessage
from llm_perf_opt.profiling.vendor.launch import Callbacks, Finished
from llm_perf_opt.profiling.vendor.logs import log_error
from llm_perf_opt.profiling.vendor.nsys import NsysRequest, build_nsys_cmd
from llm_perf_opt.profiling.vendor.probe import find_importer
from llm_perf_opt.profiling.vendor.tool_pass import STARTS, ToolLimits, ToolRun, export_nsys, import_qdstrm, report_of, run_tool
from llm_perf_opt.runners.child import MESSAGE_PREFIX

PROGRAM = """
import os, sys, time, nvtx
with nvtx.annotate("profile", domain="LLM"):
    open(sys.argv[1], "w").write(str(os.getpid()))  # nsys has been loaded by the range
    end = time.monotonic() + 900
    while time.monotonic() < end:
        for _ in range(int(sys.argv[2])):
            with nvtx.annotate("decode", domain="LLM"):
                pass
        time.sleep(0.01)
"""


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def agents_in(scratch: str) -> list[str]:
    """Processes of nsys that use a scratch folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"TMPDIR={scratch}".encode() in environment and alive(int(entry.name)):
                found.append((entry / "cmdline").read_text())
    return found


class Pass:
    """One pass of the real nsys over a program that would take many minutes."""

    def __init__(self, nsys: Path, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "run"
        self.log = folder / "log.txt"
        self._nsys = nsys
        (folder / "program.py").write_text(PROGRAM)

    def run(
        self, timeout_s: float, *, events: int = 1, max_trace_gb: float = 1, grace_s: tuple[float, float, float] = (900, 10, 10)
    ) -> ToolRun:
        work = [sys.executable, str(self.folder / "program.py"), str(self.folder / "pid"), str(events)]
        argv = build_nsys_cmd(self._nsys, self.out, work, NsysRequest(trace=["nvtx"]))
        return run_tool(
            "nsys",
            argv,
            self.out,
            log=self.log,
            limits=ToolLimits(timeout_s=timeout_s, max_trace_gb=max_trace_gb, grace_s=grace_s, starts=STARTS),
            callbacks=Callbacks(on_message=lambda _: None),
        )

    def begun(self) -> bool:
        """Whether nsys records: its stream is there, which on a busy machine is seconds after the range has begun."""
        pid = self.folder / "pid"
        streams = (self.folder / "tmp").rglob("*.qdstrm")
        return pid.exists() and pid.read_text() != "" and any(_size(stream) for stream in streams)

    def assert_nothing_runs(self) -> None:
        assert not alive(int((self.folder / "pid").read_text()))
        assert agents_in(str(self.folder / "tmp")) == []
        assert list((self.folder / "tmp").iterdir()) == [], "and its scratch folder is gone"


@pytest.fixture
def real_pass(real_nsys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pass:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return Pass(real_nsys, tmp_path)


class LateClock:
    """A clock by which the time of a pass is over two seconds after its program began, however long nsys took to start it."""

    def __init__(self, begun: Callable[[], bool]) -> None:
        self._begun = begun
        self._seen: float | None = None

    def monotonic(self) -> float:
        now = time.monotonic()
        if self._seen is None and self._begun():
            self._seen = now
        return now + 10_000 if self._seen is not None and now - self._seen > 2 else now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def late(real_pass: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "time", LateClock(real_pass.begun))


@pytest.mark.usefixtures("late")
def test_a_time_limit_leaves_a_report_and_no_process(real_pass: Pass) -> None:
    run = real_pass.run(timeout_s=HANG_S)
    assert run.finished.timed_out
    assert run.report == report_of("nsys", real_pass.out), real_pass.log.read_text()
    real_pass.assert_nothing_runs()


def test_an_interrupt_leaves_a_report_and_no_process(real_pass: Pass) -> None:
    def interrupt() -> None:
        while not real_pass.begun():
            time.sleep(0.05)
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted):
        real_pass.run(timeout_s=HANG_S)
    thread.join()
    assert _size(report_of("nsys", real_pass.out)) > 0, real_pass.log.read_text()
    real_pass.assert_nothing_runs()


@pytest.mark.usefixtures("late")
def test_a_tool_that_gets_no_time_leaves_an_honest_absence_and_no_process(real_pass: Pass) -> None:
    """Killed outright: its agent and the program would go on below init, and what was recorded is not whole."""
    run = real_pass.run(timeout_s=HANG_S, grace_s=(0, 0, 900))
    assert run.finished.timed_out
    if isinstance(run.report, Missing):
        assert "no report" in run.report.why
    else:
        assert run.report.stat().st_size > 0, "it was quicker than the signals"
    real_pass.assert_nothing_runs()


def test_the_budget_sees_what_nsys_writes_outside_the_run(real_pass: Pass) -> None:
    run = real_pass.run(timeout_s=HANG_S, events=2000, max_trace_gb=0.03)
    assert isinstance(run.finished.stopped, CaptureError)
    assert "profiling.max_trace_gb" in run.finished.stopped.fact
    assert not run.finished.timed_out
    real_pass.assert_nothing_runs()


# --- without the tools --------------------------------------------------------------------------------------------------


def stand_in(path: Path, body: str) -> list[str]:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return [str(path)]


def run_stand_in(
    argv: list[str], folder: Path, timeout_s: float = 900, on_message: OnMessage = lambda _: None, starts: int = 1
) -> ToolRun:
    return run_tool(
        "nsys",
        argv,
        folder / "a.b",
        log=folder / "log",
        limits=ToolLimits(timeout_s=timeout_s, max_trace_gb=1, starts=starts),
        callbacks=Callbacks(on_message=on_message),
    )


def test_a_report_of_an_earlier_run_does_not_pass_for_this_ones(tmp_path: Path) -> None:
    report_of("nsys", tmp_path / "a.b").write_text("of another run")
    run = run_stand_in(stand_in(tmp_path / "nsys", "exit 0"), tmp_path)
    assert run.report == Missing("nsys wrote no report")


def test_a_stream_left_alone_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[tuple[Path, Path]] = []

    def importing(nsys: Path, stream: Path, report: Path, *, log: Path) -> tuple[()]:
        imported.append((stream, report))
        report.write_bytes(stream.read_bytes())
        return ()

    monkeypatch.setattr(tool_pass, "import_qdstrm", importing)
    body = 'echo small > "$TMPDIR/nsys-report-1.qdstrm"; echo recorded > "$TMPDIR/nsys-report-2.qdstrm"'
    run = run_stand_in(stand_in(tmp_path / "nsys", body), tmp_path)
    assert imported == [(tmp_path / "a.b.qdstrm", tmp_path / "a.b.nsys-rep")]
    assert run.report == tmp_path / "a.b.nsys-rep"
    assert (tmp_path / "a.b.nsys-rep").read_text() == "recorded\n"


def test_only_what_this_run_said_counts(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ERR_NVGPUCTRPERM\n")
    run = run_stand_in(stand_in(tmp_path / "nsys", "echo fine"), tmp_path)
    assert run.problems == ()


LOST = (
    "End of file",
    """Connection to Agent lost. This is most likely a bug. Internal reason: 'Connection reset by peer'.
Please refer to the troubleshooting section of the docs:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html#troubleshooting""",
    """/dvs/p4/build/sw/devtools/Agora/Rel/CUDA12.4/QuadD/Common/ProtobufComm/Client/ClientProxy.cpp(389): Throw in function QuadD
Dynamic exception type: boost::wrapexcept<QuadDCommon::RuntimeException>
std::exception::what: RuntimeException
[QuadDCommon::tag_message*] = Local Endpoint is not available.""",
)
"""All that the real one said, of 480 starts on a busy machine six times. Its exit code is 0 or 1."""
ERROR = MESSAGE_PREFIX + '{"event": "error", "kind": "CaptureError", "fact": "x", "remedy": "y"}'


def lost_at_first(folder: Path, said: str, and_then: str = "echo recorded > a.b.nsys-rep", code: int = 1) -> list[str]:
    """A tool that says this when it is started first, and does that from then on."""
    (folder / "said").write_text(said + "\n")
    body = f'cd "{folder}"; echo . >> starts; if [ -e begun ]; then {and_then}; else touch begun; cat said; exit {code}; fi'
    return stand_in(folder / "nsys", body)


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("said", LOST)
def test_nsys_is_started_again_when_it_has_lost_its_agent(tmp_path: Path, said: str, code: int) -> None:
    heard: list[dict[str, object]] = []
    run = run_stand_in(lost_at_first(tmp_path, said, code=code), tmp_path, on_message=heard.append, starts=3)
    assert (run.starts, run.finished.exit_code, run.problems) == (2, 0, ())
    assert run.report == tmp_path / "a.b.nsys-rep"
    assert [message["text"] for message in heard] == ["nsys lost its agent and is restarted (2 of 3)"]


def test_nsys_that_loses_its_agent_each_time_is_given_up(tmp_path: Path) -> None:
    run = run_stand_in(lost_at_first(tmp_path, LOST[0], "cat said; exit 1"), tmp_path, starts=3)
    assert (tmp_path / "starts").read_text().count(".") == run.starts == 3
    error = log_error(run.problems)
    assert error is not None
    assert "lost the connection to its own agent" in error.fact


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("No such file", 1),
        ("", 1),
        (f"{LOST[0]}\nNo reports were generated", 1),
        (f"{LOST[0]}\nNo reports were generated", 0),
        (f"{ERROR}\n{LOST[0]}", 1),
    ],
)
def test_nsys_is_not_started_again_where_more_went_wrong(tmp_path: Path, said: str, code: int) -> None:
    run = run_stand_in(lost_at_first(tmp_path, said, code=code), tmp_path, starts=3)
    assert (run.starts, (tmp_path / "starts").read_text()) == (1, ".\n")


def test_what_says_more_is_told_first(tmp_path: Path) -> None:
    run = run_stand_in(lost_at_first(tmp_path, f"{LOST[0]}\nNo reports were generated", code=0), tmp_path, starts=3)
    assert [problem.id for problem in run.problems] == ["no_report", "agent_lost"]


def test_a_program_that_had_begun_is_started_again_where_it_may(tmp_path: Path) -> None:
    run = run_stand_in(lost_at_first(tmp_path, f"loading\n{LOST[1]}"), tmp_path, starts=3)
    assert (run.starts, run.report) == (2, tmp_path / "a.b.nsys-rep")


def test_a_sound_report_is_not_spoilt_by_what_the_program_said(tmp_path: Path) -> None:
    body = f'cd "{tmp_path}"; echo "End of file"; echo "Generated:"; echo "    a.b.nsys-rep"; echo kept > a.b.nsys-rep'
    run = run_stand_in(stand_in(tmp_path / "nsys", body), tmp_path, starts=3)
    assert (run.starts, run.problems, run.report) == (1, (), tmp_path / "a.b.nsys-rep")


def test_nsys_is_started_once_where_nothing_else_is_asked(tmp_path: Path) -> None:
    run = run_stand_in(lost_at_first(tmp_path, LOST[0]), tmp_path)
    assert (run.starts, (tmp_path / "starts").read_text()) == (1, ".\n")


def test_nsys_is_not_started_again_when_its_time_was_over(tmp_path: Path) -> None:
    argv = stand_in(tmp_path / "nsys", f"echo '{LOST[0]}'; exec sleep 600")
    assert run_stand_in(argv, tmp_path, timeout_s=1, starts=3).starts == 1


def test_all_starts_together_have_the_time_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_s: list[float] = []

    def start(argv: list[str], *, timeout_s: float, log: Path, **_: object) -> Finished:
        given_s.append(timeout_s)
        with log.open("a") as file:
            file.write(f"{LOST[0]}\n")
        return Finished(1, 40.0, False)

    monkeypatch.setattr(tool_pass, "run_child", start)
    run = run_stand_in(["nsys"], tmp_path, timeout_s=100, starts=5)
    assert given_s == [100, 60, 20]
    assert (run.starts, run.finished.seconds) == (3, 120.0)


def test_what_an_earlier_start_left_does_not_pass_for_this_ones(tmp_path: Path) -> None:
    (tmp_path / "a.b.qdstrm").write_text("of another start")
    run = run_stand_in(stand_in(tmp_path / "nsys", "exit 0"), tmp_path)
    assert run.report == Missing("nsys wrote no report")
    assert not (tmp_path / "a.b.qdstrm").exists()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another disk
        shutil.copy2(source, target)


@pytest.mark.usefixtures("late")
def test_a_real_stream_without_an_importer_is_kept_and_can_be_imported_later(real_pass: Pass, real_nsys: Path) -> None:
    """The target part of nsys alone, as a container may have it."""
    importer = find_importer(real_nsys)
    assert importer is not None
    (target,) = importer.parents[1].glob("target-linux-*")
    alone = real_pass.folder / "alone"
    shutil.copytree(target, alone / target.name, copy_function=_link)
    script = f'export LD_LIBRARY_PATH="{alone / target.name}/inject"; exec "{alone / target.name}/nsys" "$@"'
    (nsys,) = stand_in(alone / "nsys", script)
    if find_importer(Path(nsys)) is not None:
        pytest.skip("another installation of nsys lends its importer")
    run = Pass(Path(nsys), real_pass.folder).run(timeout_s=HANG_S)
    assert isinstance(run.report, Missing)
    assert "no QdstrmImporter" in run.report.why
    assert "importer_missing" in [problem.id for problem in run.problems]
    real_pass.assert_nothing_runs()
    report = report_of("nsys", real_pass.out)
    import_qdstrm(real_nsys, real_pass.folder / "run.qdstrm", report, log=real_pass.log)
    export_nsys(real_nsys, report, real_pass.folder / "run.sqlite", log=real_pass.log)
    assert (real_pass.folder / "run.sqlite").stat().st_size > 0
