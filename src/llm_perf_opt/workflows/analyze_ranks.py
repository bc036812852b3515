"""The analysis of several ranks: find their traces, read them on all cores, match their collectives."""

import itertools
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.processes import IMPORTING_NOTHING_HERE
from llm_perf_opt.core.run_folder import there
from llm_perf_opt.core.user_files import check_ordinary

if TYPE_CHECKING:
    from llm_perf_opt.analysis.ranks.document import RanksAnalysis
    from llm_perf_opt.workflows.rank_reader import RankRead

_RUN_FILE = "run.json"
MOST_PROCESSES = 4
"""This process and its children. Each holds one trace at a time and takes about 170 MB for 100,000 events, libraries included:
with the results of 64 ranks, all stay below 1 GB."""
_SMALL_BYTES = 4_000_000
"""Traces of less than this in total are read faster in this process than others start."""
_ENDINGS = (".json", ".json.gz", ".json.zip", ".sqlite", ".sqlite.gz", ".nsys-rep", ".qdrep")
_MARKS = (b'"traceEvents"', b'"schemaVersion"')
"""One of them is near the beginning of a trace as torch writes it."""
_EVENT = b'"ph"'
"""In every event. A trace may also be a plain list of events."""
_PREVIEW_BYTES = 1 << 16
_MOST_FILES = 5
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,9})", re.IGNORECASE)
_CHILD = f"{IMPORTING_NOTHING_HERE}from llm_perf_opt.workflows.rank_reader import main; sys.exit(main(sys.argv[1:]))"
"""What a child runs."""


@dataclass(frozen=True)
class RanksResult:
    """The analysis of several ranks, with notes for the user."""

    document: "RanksAnalysis"
    notes: tuple[str, ...] = ()
    error: LlmPerfError | None = None
    """The error that the command ends with."""


def traces_of(sources: Sequence[Path]) -> tuple[list[Path], tuple[str, ...]]:
    """Return the traces that the user means, and notes: files as they are, the traces in a folder, the matches of a pattern.

    A run folder is returned as it is.
    """
    found: list[Path] = []
    notes: tuple[str, ...] = ()
    for source in sources:
        files = _matches(source)
        if files is None and there(source, "Give traces, a folder of traces or a run folder.").is_dir():
            is_run = os.path.lexists(source / _RUN_FILE)  # also if it is not a file: reading the run says so
            files, more = ([source], ()) if is_run else _in_folder(source)
            notes += more
        found += files or [source]
    return list(dict.fromkeys(found)), notes


def _matches(source: Path) -> list[Path] | None:
    """Return the files that match a pattern which the shell did not expand; None if the path is no pattern."""
    if source.exists() or not set("*?[") & set(source.name):
        return None
    found = sorted(source.parent.glob(source.name))
    if not found:
        raise ConfigError(f"No file matches {source}.", "Check the folder and the names of the traces.")
    return found


def _in_folder(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.name.endswith(_ENDINGS) and entry.is_file())
    except OSError as error:
        raise ResourceError(f"{folder} cannot be read: {error.strerror}.", "Check its permissions.") from error
    exported = {file.stem for file in files if file.suffix == ".sqlite"}
    files = [file for file in files if file.suffix not in (".nsys-rep", ".qdrep") or file.stem not in exported]
    traces = [file for file in files if _is_trace(file)]
    if not traces:
        raise ParseError(
            f"{folder} is neither a run folder nor a folder of traces.",
            f"Give a folder with {_RUN_FILE}, or with files that end in {', '.join(_ENDINGS)}.",
        )
    kept = set(traces)
    others = [file.name for file in files if file not in kept]
    notes = (f"skipped, because they are not traces: {_named(others)}",) if others else ()
    return traces, notes


def _is_trace(file: Path) -> bool:
    from llm_perf_opt.traces.nsys_sqlite import is_nsys_export
    from llm_perf_opt.traces.packed import PackedFile

    try:
        if not file.name.endswith(_ENDINGS[:3]):
            return file.suffix != ".sqlite" or is_nsys_export(file)
        with PackedFile(file) as packed:
            first = packed.read(_PREVIEW_BYTES)
    except LlmPerfError:
        return True  # reading it names the damage
    return any(mark in first for mark in _MARKS) or (first.lstrip().startswith(b"[") and _EVENT in first)


def analyze_rank_files(files: Sequence[Path], source: str, *, use_cache: bool = True, with_analyses: bool = False) -> RanksResult:
    """Return the analysis of one trace per rank. With `with_analyses`, it includes that of each trace alone."""
    from llm_perf_opt.analysis.ranks.ranks_analysis import analyze_ranks

    for file in files:
        check_ordinary(there(file, "Give one trace per rank."))
    files, reads, notes = _of_ranks(files, _read_all(files, use_cache, with_analyses))
    numbers, more = _numbers(files, reads)
    notes += more
    order = sorted(range(len(files)), key=lambda index: numbers[index])
    document = analyze_ranks([reads[index].file(numbers[index], str(files[index])) for index in order], source)
    if with_analyses:
        lines = [
            msgspec.structs.replace(line, analysis=reads[index].analysis)
            for index, line in zip(order, document.ranks, strict=True)
        ]
        document = msgspec.structs.replace(document, ranks=lines)
    notes += tuple(dict.fromkeys(note for read in reads for note in read.notes))
    return RanksResult(document, notes, _incomplete(document))


def _incomplete(document: "RanksAnalysis") -> LlmPerfError | None:
    fatal = next((problem for problem in document.problems if problem.fatal), None)
    return None if fatal is None else ParseError(f"A trace is incomplete: {fatal.what}.", fatal.remedy or "Record it again.")


def _of_ranks(files: Sequence[Path], reads: "Sequence[RankRead]") -> "tuple[list[Path], list[RankRead], tuple[str, ...]]":
    """Return the traces and a note, without those of processes that are no rank: they state none, and the job is complete."""
    numbers = [_number(file, read) for file, read in zip(files, reads, strict=True)]
    sizes = {read.trace.world_size for read in reads if read.trace.world_size}
    stated = {number for number in numbers if number is not None}
    complete = len(sizes) == 1 and min(sizes) <= len(stated) and stated >= set(range(min(sizes)))
    kept = [index for index, number in enumerate(numbers) if number is not None or not complete]
    others = [file.name for file, number in zip(files, numbers, strict=True) if complete and number is None]
    notes = (f"left out, because they state no rank: {_named(others)}",) if others else ()
    return [files[index] for index in kept], [reads[index] for index in kept], notes


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_FILES]) + (" …" if len(names) > _MOST_FILES else "")


def _numbers(files: Sequence[Path], reads: "Sequence[RankRead]") -> tuple[list[int], tuple[str, ...]]:
    """Return the rank of each trace: stated in it, in its name, or otherwise the first that is free."""
    found = [_number(file, read) for file, read in zip(files, reads, strict=True)]
    known = Counter(number for number in found if number is not None)
    twice = [number for number, count in known.items() if count > 1]
    if twice:
        names = ", ".join(str(file) for file, number in zip(files, found, strict=True) if number == twice[0])
        raise ConfigError(f"Several traces are of rank {twice[0]}: {names}.", "Give one trace per rank.")
    free = (number for number in itertools.count() if number not in known)
    numbers = [next(free) if number is None else number for number in found]
    if not known:
        return numbers, ("the traces do not state their ranks: they are numbered in the order given.",)
    guessed = [f"{file.name} as {new}" for file, number, new in zip(files, found, numbers, strict=True) if number is None]
    words = f"some traces do not state their ranks and are numbered: {_named(guessed)}."
    return numbers, (words,) if guessed else ()


def _number(file: Path, read: "RankRead") -> int | None:
    if read.trace.rank is not None:
        return read.trace.rank
    named = _RANK_IN_NAME.findall(file.name)
    return int(named[-1]) if named else None


# --- reading on all cores ---------------------------------------------------------------------------------------------


def _read_all(files: Sequence[Path], use_cache: bool, with_analyses: bool) -> "list[RankRead]":
    from llm_perf_opt.workflows.rank_reader import read_rank

    processes = min(_cores(), len(files), MOST_PROCESSES)
    if processes < 2 or sum(file.stat().st_size for file in files) < _SMALL_BYTES:
        return [read_rank(file, use_cache=use_cache, with_analysis=with_analyses) for file in files]
    return _read_in_children(files, processes, use_cache, with_analyses)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_in_children(files: Sequence[Path], processes: int, use_cache: bool, with_analyses: bool) -> "list[RankRead]":
    """Read a share of the traces here, the others in children, which need a second to start."""
    from llm_perf_opt.core.processes import answers
    from llm_perf_opt.workflows.rank_reader import NO_CACHE, WITH_ANALYSIS, check_stored, read_all, stored_rank

    with tempfile.TemporaryDirectory(prefix="llm-perf-ranks-") as scratch:
        places = [Path(scratch, f"rank{index}") for index in range(len(files))]
        options = ",".join([*([] if use_cache else [NO_CACHE]), *([WITH_ANALYSIS] if with_analyses else [])])
        reader = [sys.executable, "-c", _CHILD, options]
        pairs = [[str(file), str(place)] for file, place in zip(files, places, strict=True)]
        commands = [[*reader, *(word for pair in pairs[child::processes] for word in pair)] for child in range(1, processes)]
        own = list(zip(files, places, strict=True))[::processes]
        done = answers(commands, _environment(), lambda: read_all(own, use_cache=use_cache, with_analysis=with_analyses))
        for number, (place, file) in enumerate(zip(places, files, strict=True)):
            if number % processes:
                check_stored(place, str(file), done[number % processes - 1])
        return [stored_rank(place) for place in places]


def _environment() -> dict[str, str]:
    """Return the environment of a child: this package from where this process has it, and one thread per child."""
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **single, "PYTHONPATH": os.pathsep.join(paths)}


def only_traces(files: Sequence[Path]) -> Sequence[Path]:
    """Return the files, or raise if one of several is a folder."""
    folders = [file for file in files if file.is_dir()]
    if folders:
        raise ConfigError(
            f"{folders[0]} is a run; several traces must be those of one job's ranks.", "To compare runs, use llm-perf compare."
        )
    return files
