"""Run a pass under an Nsight tool and convert its report; a stopped pass keeps what it has recorded."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, ResourceError
from llm_perf_opt.core.inside import PRIVATE, copy, disk_error, move, open_to_append, remove, remove_if_possible
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.profiling.vendor import ncu, nsys
from llm_perf_opt.profiling.vendor.child import BYTES_PER_GB, DiskWatch
from llm_perf_opt.profiling.vendor.gates import Tool
from llm_perf_opt.profiling.vendor.launch import REPORT_GRACE_S, Callbacks, Finished, child_environment, convert, run_child
from llm_perf_opt.profiling.vendor.logs import AGENT_LOST, LogProblem, log_error, ncu_log_problems, nsys_log_problems
from llm_perf_opt.profiling.vendor.probe import find_importer

CONVERT_S = 1800.0
"""Timeout of a conversion."""

Page = Literal["raw", "details", "session"]


def export_nsys(nsys: Path, report: Path, sqlite: Path, *, log: Path, timeout_s: float = CONVERT_S) -> tuple[LogProblem, ...]:
    """Export an nsys report to SQLite and return the problems that the tool reported."""
    _must_exist(report)
    with _atomic(sqlite) as part:
        argv = [str(nsys), "export", "--type=sqlite", "--force-overwrite=true", "--quiet=true", f"--output={part}", str(report)]
        begun = _size(log)
        finished = convert(argv, log=log, timeout_s=timeout_s)
        return _check_conversion("Exporting the nsys report", finished, part, log, begun, nsys_log_problems)


def import_qdstrm(nsys: Path, stream: Path, report: Path, *, log: Path, timeout_s: float = CONVERT_S) -> tuple[LogProblem, ...]:
    """Create the report from a .qdstrm with the importer of the same installation; return the problems that it reported."""
    _must_exist(stream)
    importer = find_importer(nsys)
    if importer is None:
        raise ResourceError(
            f"nsys left only {stream}, and there is no QdstrmImporter on this machine to create a report from it.",
            "Install the host components of Nsight Systems, or import the file on another machine: QdstrmImporter -i FILE.",
        )
    with _atomic(report) as part:
        begun = _size(log)
        finished = convert([str(importer), "-i", str(stream), "-o", str(part)], log=log, timeout_s=timeout_s)
        return _check_conversion("Importing the nsys recording", finished, part, log, begun, nsys_log_problems)


def import_ncu_csv(
    ncu: Path, report: Path, page: Page, out: Path, *, log: Path, timeout_s: float = CONVERT_S
) -> tuple[LogProblem, ...]:
    """Write a page of an ncu report as CSV in base units; return the problems that the tool reported."""
    _must_exist(report)
    with _atomic(out) as part:
        argv = [str(ncu), "--import", str(report), "--page", page, "--csv", "--print-units", "base"]
        begun = _size(log)
        finished = convert(argv, log=log, timeout_s=timeout_s, output=part)
        if finished.exit_code != 0 and part.exists():  # ncu writes errors to standard output
            with open_to_append(log.parent, log, PRIVATE) as file:
                file.write(part.read_bytes()[:4096])
        return _check_conversion("Reading the ncu report", finished, part, log, begun, ncu_log_problems)


def _must_exist(source: Path) -> None:
    if not source.is_file() or source.stat().st_size == 0:
        state = "empty" if source.is_file() else "missing"
        raise CaptureError(f"{source} is {state}.", "Its pass failed; run.json has the reason.")


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


@contextmanager
def _atomic(target: Path) -> Iterator[Path]:
    """Yield a hidden file that replaces `target` on success, so that concurrent conversions each leave a complete file.

    It keeps the file's suffix, because the tools would append theirs otherwise.
    """
    part = target.with_name(f".part-{os.getpid()}-{threading.get_ident()}-{target.name}")
    _remove_stale(target)
    try:
        remove(target.parent, part)
        yield part
        move(target.parent, part, target)
    except OSError as error:
        raise disk_error(error, target) from error
    finally:
        remove_if_possible(target.parent, part)


def _remove_stale(target: Path) -> None:
    """Remove the partial files of killed conversions."""
    with suppress(OSError):
        for part in target.parent.iterdir():
            if part.name.startswith(".part-") and part.name.endswith(f"-{target.name}"):
                with suppress(OSError):
                    if time.time() - part.stat().st_mtime > 2 * CONVERT_S:
                        remove(target.parent, part)


def _check_conversion(
    what: str, finished: Finished, part: Path, log: Path, begun: int, problems: Callable[[str], tuple[LogProblem, ...]]
) -> tuple[LogProblem, ...]:
    """Return the problems that the tool reported; raise a CaptureError if it failed or wrote nothing."""
    if finished.timed_out:
        raise CaptureError(f"{what} took longer than {finished.seconds:.0f} s and was stopped.", f"See {log}.")
    with log.open("rb") as file:
        file.seek(begun)
        output = file.read().decode(errors="replace")
    found = problems(output)
    if finished.exit_code == 0 and part.exists() and part.stat().st_size:
        return found
    error = log_error(found)
    if error is not None:
        raise error
    how = f"ended with exit code {finished.exit_code}" if finished.exit_code else "wrote nothing"
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    raise CaptureError(f"{what} {how}{': ' + last[:300] if last else ''}.", f"See {log}.")


ENDINGS: dict[Tool, str] = {"nsys": nsys.REPORT_ENDING, "ncu": ncu.REPORT_ENDING}
"""The suffix that each tool appends to the base name of its report."""
STARTS = 3
"""Maximum number of starts if nsys loses its agent. On a busy machine up to one start in a hundred does (2023.4), mostly before
the program has started; a new start is independent of it."""


@dataclass(frozen=True)
class ToolRun:
    """How a tool ended, and its report."""

    finished: Finished
    """Result of the last start; the seconds are the total of all starts."""
    report: Maybe[Path]
    """The report, also of a stopped run, or why there is none."""
    problems: tuple[LogProblem, ...]
    """Problems in the log of the last start."""
    starts: int = 1
    """More than one if it lost its agent."""


def report_of(tool: Tool, out_base: Path) -> Path:
    """Return where the tool writes its report. The base name may contain dots, so the suffix is appended."""
    return out_base.with_name(out_base.name + ENDINGS[tool])


@dataclass(frozen=True)
class ToolLimits:
    """The limits of a tool."""

    timeout_s: float
    """For all starts together."""
    max_trace_gb: float
    grace_s: tuple[float, float, float] = REPORT_GRACE_S
    """Seconds to wait after SIGINT, SIGTERM and SIGKILL."""
    starts: int = 1
    """Maximum number of starts if nsys loses its agent; more than one only for a program that may run twice."""


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
    """Run the command that `build_nsys_cmd` or `build_ncu_cmd` built for `out_base`, within its limits.

    `environment` is the program's; None: that of the measured process.
    An interrupted run raises Interrupted, like every pass; its report is saved.
    """
    program_failed = False

    def on_message(message: dict[str, Any]) -> None:
        nonlocal program_failed
        program_failed = program_failed or message.get("event") == "error"
        callbacks.on_message(message)

    watched = replace(callbacks, on_message=on_message)
    starts, spent_s = limits.starts, 0.0
    for number in range(1, starts + 1):
        left = replace(limits, timeout_s=limits.timeout_s - spent_s)
        result = _run_once(tool, argv, out_base, log, left, watched, environment)
        spent_s += result.finished.seconds
        if number == starts or program_failed or spent_s >= limits.timeout_s or not _lost_its_agent(result):
            break
        callbacks.on_message({"event": "phase", "text": f"nsys lost its agent and is restarted ({number + 1} of {starts})"})
    return replace(result, starts=number, finished=replace(result.finished, seconds=spent_s))


def _lost_its_agent(result: ToolRun) -> bool:
    """Return whether that is the only problem. The exit code does not tell: nsys then ends with 0 as well."""
    cut_short = result.finished.timed_out or result.finished.stopped is not None
    no_report = isinstance(result.report, Missing)
    return no_report and not cut_short and [problem.id for problem in result.problems] == [AGENT_LOST]


def _run_once(
    tool: Tool,
    argv: Sequence[str],
    out_base: Path,
    log: Path,
    limits: ToolLimits,
    callbacks: Callbacks,
    environment: Mapping[str, str] | None,
) -> ToolRun:
    begun = log.stat().st_size if log.exists() else 0
    for previous in (report_of(tool, out_base), _stream_of(out_base)):
        remove(out_base.parent, previous)
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
        output = file.read().decode(errors="replace")
    problems = nsys_log_problems(output) if tool == "nsys" else ncu_log_problems(output)
    if not isinstance(report, Missing):  # then the line came from the program
        problems = tuple(problem for problem in problems if problem.id != AGENT_LOST)
    return ToolRun(finished, report, problems)


@contextmanager
def _scratch(tool: Tool) -> Iterator[Path | None]:
    """Yield a temporary folder for nsys, so that the disk watch sees what it writes before the report; None for ncu.

    The path is short, because nsys creates sockets in it. ncu needs the common folder: a lock there prevents two of them from
    using the counters at the same time.
    """
    if tool == "ncu":
        yield None
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="llm-perf-"))
    except OSError as error:
        raise ResourceError(
            f"The folder for nsys's temporary files cannot be created: {error.strerror}.",
            "Set TMPDIR to a writable folder.",
        ) from error
    try:
        yield folder
    finally:
        remove_if_possible(folder.parent, folder)


def _salvage(tool: Tool, binary: Path, out_base: Path, scratch: Path | None, log: Path) -> Maybe[Path]:
    """Return the report; if nsys left only a .qdstrm, import it."""
    report = report_of(tool, out_base)
    if report.is_file() and report.stat().st_size:
        return report
    streams = _streams(out_base, scratch)
    if tool == "ncu" or not streams:
        return Missing(f"{tool} wrote no report")
    kept = _stream_of(out_base)
    if streams[0] != kept:
        copy(kept.parent, streams[0], kept)
    try:
        import_qdstrm(binary, kept, report, log=log)
    except LlmPerfError as error:
        return Missing(f"nsys left only {kept.name}, and no report could be created from it: {error.fact}")
    return report


def _stream_of(out_base: Path) -> Path:
    return out_base.with_name(out_base.name + nsys.STREAM_ENDING)


def _streams(out_base: Path, scratch: Path | None) -> list[Path]:
    """Return the recordings without a report, the largest first."""
    found = [_stream_of(out_base), *(scratch.glob(f"*{nsys.STREAM_ENDING}") if scratch else ())]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_size, reverse=True)
