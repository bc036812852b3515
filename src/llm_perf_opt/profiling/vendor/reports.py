"""What the tools make of their own reports: SQLite of an nsys report, a report of a .qdstrm, CSV of an ncu report.

Each result is written beside its place and renamed, so that it is there whole or not at all.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.errors import CaptureError, ResourceError
from llm_perf_opt.core.run_folder import disk_error
from llm_perf_opt.profiling.vendor.launch import Finished, convert
from llm_perf_opt.profiling.vendor.logs import LogProblem, log_error, ncu_log_problems, nsys_log_problems
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
