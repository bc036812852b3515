"""A pass under an Nsight tool: run it, keep what it wrote even when it was cut short, say what became of it."""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, ResourceError
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import disk_error
from llm_perf_opt.profiling.vendor import ncu, nsys
from llm_perf_opt.profiling.vendor.child import BYTES_PER_GB, DiskWatch
from llm_perf_opt.profiling.vendor.gates import Tool
from llm_perf_opt.profiling.vendor.launch import REPORT_GRACE_S, Callbacks, Finished, child_environment, convert, run_child
from llm_perf_opt.profiling.vendor.logs import AGENT_LOST, LogProblem, log_error, ncu_log_problems, nsys_log_problems
from llm_perf_opt.profiling.vendor.probe import find_importer

CONVERT_S = 1800.0
"""The longest a conversion may take."""

Page = Literal["raw", "details", "session"]


def export_nsys(nsys: Path, report: Path, sqlite: Path, *, log: Path, timeout_s: float = CONVERT_S) -> tuple[LogProblem, ...]:
    """An nsys report as SQLite; returns what the tool complained of."""
    _must_exist(report)
    with _beside(sqlite) as part:
        argv = [str(nsys), "export", "--type=sqlite", "--force-overwrite=true", "--quiet=true", f"--output={part}", str(report)]
        begun = _size(log)
        finished = convert(argv, log=log, timeout_s=timeout_s)
        return _judge("Exporting the report of nsys", finished, part, log, begun, nsys_log_problems)


def import_qdstrm(nsys: Path, stream: Path, report: Path, *, log: Path, timeout_s: float = CONVERT_S) -> tuple[LogProblem, ...]:
    """A report of the .qdstrm that nsys left alone, by the importer of the same installation; returns its complaints."""
    _must_exist(stream)
    importer = find_importer(nsys)
    if importer is None:
        raise ResourceError(
            f"{stream} holds what nsys recorded, but there is no QdstrmImporter here to make a report of it.",
            "Install the host part of Nsight Systems, or import the file on another machine: QdstrmImporter -i FILE.",
        )
    with _beside(report) as part:
        begun = _size(log)
        finished = convert([str(importer), "-i", str(stream), "-o", str(part)], log=log, timeout_s=timeout_s)
        return _judge("Importing what nsys recorded", finished, part, log, begun, nsys_log_problems)


def import_ncu_csv(
    ncu: Path, report: Path, page: Page, out: Path, *, log: Path, timeout_s: float = CONVERT_S
) -> tuple[LogProblem, ...]:
    """A page of an ncu report as CSV in base units; returns what the tool complained of."""
    _must_exist(report)
    with _beside(out) as part:
        argv = [str(ncu), "--import", str(report), "--page", page, "--csv", "--print-units", "base"]
        begun = _size(log)
        finished = convert(argv, log=log, timeout_s=timeout_s, output=part)
        if finished.exit_code != 0 and part.exists():  # ncu complains on the same stream as it prints on
            with log.open("ab") as file:
                file.write(part.read_bytes()[:4096])
        return _judge("Reading the report of ncu", finished, part, log, begun, ncu_log_problems)


def _must_exist(source: Path) -> None:
    if not source.is_file() or source.stat().st_size == 0:
        state = "empty" if source.is_file() else "not there"
        raise CaptureError(f"{source} is {state}.", "Its pass did not end well; run.json says why.")


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A hidden file of this writer's own that takes its place when all went well: of two that convert the same report at once,
    each leaves a whole one. It keeps its ending: the tools add theirs otherwise."""
    part = target.with_name(f".part-{os.getpid()}-{threading.get_ident()}-{target.name}")
    _remove_stale(target)
    try:
        part.unlink(missing_ok=True)
        yield part
        part.replace(target)
    except OSError as error:
        raise disk_error(error, target) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _remove_stale(target: Path) -> None:
    """Parts of writers that were killed: none works on one for so long."""
    with suppress(OSError):
        for part in target.parent.iterdir():
            if part.name.startswith(".part-") and part.name.endswith(f"-{target.name}"):
                with suppress(OSError):
                    if time.time() - part.stat().st_mtime > 2 * CONVERT_S:
                        part.unlink()


def _judge(
    what: str, finished: Finished, part: Path, log: Path, begun: int, problems: Callable[[str], tuple[LogProblem, ...]]
) -> tuple[LogProblem, ...]:
    """What the tool complained of; a CaptureError with its own words where it did not end well or left nothing."""
    if finished.timed_out:
        raise CaptureError(f"{what} took longer than {finished.seconds:.0f} s and was ended.", f"See {log}.")
    with log.open("rb") as file:
        file.seek(begun)
        said = file.read().decode(errors="replace")
    found = problems(said)
    if finished.exit_code == 0 and part.exists() and part.stat().st_size:
        return found
    error = log_error(found)
    if error is not None:
        raise error
    how = f"ended with exit code {finished.exit_code}" if finished.exit_code else "left nothing"
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    raise CaptureError(f"{what} {how}{': ' + last[:300] if last else ''}.", f"See {log}.")


ENDINGS: dict[Tool, str] = {"nsys": nsys.REPORT_ENDING, "ncu": ncu.REPORT_ENDING}
"""What each tool puts behind the base name of its report."""
STARTS = 3
"""How often nsys may be started where it loses its agent: on a busy machine up to one start in a hundred (2023.4), mostly before
the program has begun, and the next one knows nothing of it."""


@dataclass(frozen=True)
class ToolRun:
    """How a tool ended and what it left."""

    finished: Finished
    """Of its last start; the seconds are of all."""
    report: Maybe[Path]
    """Also of a run that was cut short, with what had been recorded until then; Missing says why there is none."""
    problems: tuple[LogProblem, ...]
    """What its log complains of, of its last start."""
    starts: int = 1
    """More than one where it had lost its agent."""


def report_of(tool: Tool, out_base: Path) -> Path:
    """Where the tool writes its report. The base name may hold dots, so that an ending is added, never replaced."""
    return out_base.with_name(out_base.name + ENDINGS[tool])


@dataclass(frozen=True)
class ToolLimits:
    """What a tool may use."""

    timeout_s: float
    """For all starts together."""
    max_trace_gb: float
    grace_s: tuple[float, float, float] = REPORT_GRACE_S
    """How long it may take to end after SIGINT, SIGTERM and SIGKILL."""
    starts: int = 1
    """How often nsys may be started where it loses its agent; more than once only for a program that may run twice."""


def run_tool(
    tool: Tool,
    argv: Sequence[str],
    out_base: Path,
    *,
    log: Path,
    limits: ToolLimits,
    callbacks: Callbacks,
    environment: Mapping[str, str] | None = None,
) -> ToolRun:
    """Run what `build_nsys_cmd` or `build_ncu_cmd` made of `out_base`, within its limits.

    `environment` is the program's; without one, that of our own measured process.
    An interrupted run raises Interrupted as every pass does; its report is saved all the same.
    """
    said_error = False

    def hear(message: dict[str, Any]) -> None:
        nonlocal said_error
        said_error = said_error or message.get("event") == "error"
        callbacks.on_message(message)

    heard = replace(callbacks, on_message=hear)
    starts, spent_s = limits.starts, 0.0
    for number in range(1, starts + 1):
        left = replace(limits, timeout_s=limits.timeout_s - spent_s)
        went = _started(tool, argv, out_base, log, left, heard, environment)
        spent_s += went.finished.seconds
        if number == starts or said_error or spent_s >= limits.timeout_s or not _lost_its_agent(went):
            break
        callbacks.on_message({"event": "phase", "text": f"nsys lost its agent and is started again ({number + 1} of {starts})"})
    return replace(went, starts=number, finished=replace(went.finished, seconds=spent_s))


def _lost_its_agent(went: ToolRun) -> bool:
    """Whether that is all that went wrong."""
    cut_short = went.finished.timed_out or went.finished.stopped is not None
    failed = went.finished.exit_code != 0 and isinstance(went.report, Missing)
    return failed and not cut_short and [problem.id for problem in went.problems] == [AGENT_LOST]


def _started(
    tool: Tool,
    argv: Sequence[str],
    out_base: Path,
    log: Path,
    limits: ToolLimits,
    callbacks: Callbacks,
    environment: Mapping[str, str] | None,
) -> ToolRun:
    begun = log.stat().st_size if log.exists() else 0
    for left in (report_of(tool, out_base), _stream_of(out_base)):
        left.unlink(missing_ok=True)  # that of an earlier run would pass for this one's
    with _scratch(tool) as scratch:
        folders = (out_base.parent, scratch) if scratch else (out_base.parent,)
        inherited = child_environment() if environment is None else environment
        watch = DiskWatch(folders, int(limits.max_trace_gb * BYTES_PER_GB))
        try:
            finished = run_child(
                argv,
                log=log,
                timeout_s=limits.timeout_s,
                callbacks=callbacks,
                environment={**inherited, **({"TMPDIR": str(scratch)} if scratch else {})},
                watch=watch,
                grace_s=limits.grace_s,
            )
        except Interrupted:
            _salvage(tool, Path(argv[0]), out_base, scratch, log)
            raise
        report = _salvage(tool, Path(argv[0]), out_base, scratch, log)
    with log.open("rb") as file:
        file.seek(begun)
        said = file.read().decode(errors="replace")
    problems = nsys_log_problems(said) if tool == "nsys" else ncu_log_problems(said)
    if not isinstance(report, Missing):  # then it was the program that said so
        problems = tuple(problem for problem in problems if problem.id != AGENT_LOST)
    return ToolRun(finished, report, problems)


@contextmanager
def _scratch(tool: Tool) -> Iterator[Path | None]:
    """A folder for what nsys writes before its report is made: in the common one it is out of the watch's sight.

    Its path is short, because nsys makes sockets in it. ncu is left with the common one: a lock in it keeps two of them from
    using the counters at the same time.
    """
    if tool == "ncu":
        yield None
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="llm-perf-"))
    except OSError as error:
        raise ResourceError(
            f"nsys has no place for its temporary files: {error.strerror}.",
            "Set TMPDIR to a folder that can be written to.",
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _salvage(tool: Tool, binary: Path, out_base: Path, scratch: Path | None, log: Path) -> Maybe[Path]:
    """The report; made of the .qdstrm where nsys left only that."""
    report = report_of(tool, out_base)
    if report.is_file() and report.stat().st_size:
        return report
    streams = _streams(out_base, scratch)
    if tool == "ncu" or not streams:
        return Missing(f"{tool} wrote no report")
    kept = _stream_of(out_base)
    if streams[0] != kept:
        shutil.move(streams[0], kept)
    try:
        import_qdstrm(binary, kept, report, log=log)
    except LlmPerfError as error:
        return Missing(f"nsys left only {kept.name}, of which no report could be made: {error.fact}")
    return report


def _stream_of(out_base: Path) -> Path:
    return out_base.with_name(out_base.name + nsys.STREAM_ENDING)


def _streams(out_base: Path, scratch: Path | None) -> list[Path]:
    """What nsys recorded and did not turn into a report, the largest first."""
    found = [_stream_of(out_base), *(scratch.glob(f"*{nsys.STREAM_ENDING}") if scratch else ())]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_size, reverse=True)
