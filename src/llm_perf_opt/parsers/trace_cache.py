"""A trace is parsed once: its tables lie beside it under a name with a fingerprint of its bytes, and are read from then on."""

import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.analysis.stage_columns import stage_columns
from llm_perf_opt.errors import ParseError, ResourceError
from llm_perf_opt.events import Trace
from llm_perf_opt.parsers.open_trace import read_trace
from llm_perf_opt.tables import made_of, read_tables, write_tables
from llm_perf_opt.trace_mark import SCHEMA_VERSION, seen_of, tables_beside


@dataclass(frozen=True)
class CachedTrace:
    """A trace, and the tables that hold it."""

    trace: Trace
    tables: Path | None
    """None: they could not be written."""
    parsed: bool
    """Whether the source was parsed now."""
    note: str = ""
    """Why there are no tables."""


def cached_trace(source: Path, folder: Path | None = None) -> CachedTrace:
    """The trace in `source`, from its tables where they are sound and of these very bytes, else parsed and the tables written.

    The tables lie beside the source, or in `folder`. Where they cannot be written the trace comes all the same, with a note.
    """
    seen = seen_of(source)
    for tables in [folder] if folder else tables_beside(source):
        if seen and (trace := _kept(tables, seen=seen)):
            return CachedTrace(trace, tables, parsed=False)
    of = fingerprint(source)
    tables = folder or source.with_name(f"{source.name}.tables-{of}")
    if trace := _kept(tables, of=of):
        return CachedTrace(trace, tables, parsed=False)
    trace = read_trace(source)
    try:
        write_tables(trace, tables, stage_columns(trace), of=of, seen=seen)
    except OSError as error:
        return CachedTrace(trace, None, True, f"the tables were not kept: {error.strerror or error}")
    except ResourceError as error:
        return CachedTrace(trace, None, True, f"the tables were not kept: {error.fact}")
    if folder is None:
        _remove_others(source, tables)
    return CachedTrace(trace, tables, parsed=True)


def _kept(tables: Path, of: str = "", seen: str = "") -> Trace | None:
    """The trace of sound tables made of that; None where they are stale, damaged or not there: the source says the same."""
    try:
        known_of, known_seen = made_of(tables)
        return read_tables(tables) if (of and of == known_of) or (seen and seen == known_seen) else None
    except (ParseError, ResourceError):
        return None


def fingerprint(source: Path) -> str:
    """The schema's version, the file's size and the CRC-32 of all its bytes: the fastest check that misses no single change."""
    checksum = size = 0
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    try:
        with source.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                checksum = zlib.crc32(view[:count], checksum)
                size += count
    except OSError as error:
        raise ParseError(f"{source} cannot be read: {error.strerror or error}.", "Give a trace file.") from error
    return f"v{SCHEMA_VERSION}-{size:x}-{checksum:08x}"


def _remove_others(source: Path, kept: Path) -> None:
    """Tables of what this source held before serve nobody."""
    for folder in tables_beside(source):
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)
