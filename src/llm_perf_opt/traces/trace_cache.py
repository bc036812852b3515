"""Parse a trace once: its tables are stored in the user's cache under a fingerprint of its bytes and are read afterwards."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.inside import make_folder, remove_if_possible, remove_leftovers
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.open_trace import read_trace
from llm_perf_opt.traces.trace_mark import (
    META_FILE,
    MOST_BYTES,
    SCHEMA_VERSION,
    Checksum,
    FileState,
    checksum_of,
    file_state,
    kept_bytes,
    kept_for,
    note_use,
    seen_of,
    tables_of,
)
from llm_perf_opt.traces.trace_tables import made_of, read_tables, write_tables

StageColumns = Callable[[Trace], dict[str, dict[str, Any]]]
"""Returns additional columns for the tables of a trace: table → column → values. Analysis provides them."""


@dataclass(frozen=True)
class CachedTrace:
    """A trace and its tables."""

    trace: Trace
    tables: Maybe[Path]
    """Missing if they could not be stored."""
    parsed: bool
    """Whether the source was parsed, rather than read from tables."""


def cached_trace(
    source: Path,
    folder: Path | None = None,
    *,
    root: Path | None = None,
    columns: StageColumns,
    meanwhile: Callable[[Trace], None] = lambda _: None,
) -> CachedTrace:
    """Return the trace in `source`: from its tables if they are valid and of the same bytes, else parsed, and write the tables.

    The tables are in the user's cache, or in `folder` below `root`. If they cannot be written, the result contains the reason.
    `columns` returns the columns that assign work to stages. `meanwhile` is called with the trace while the tables are written.
    """
    seen, state = seen_of(source), file_state(source)
    places = [folder] if folder else tables_of(source)
    for tables in places:
        if seen and (trace := _kept(tables, seen=seen)):
            return _used(trace, tables, folder, meanwhile)
    of = ""
    if any((place / META_FILE).is_file() for place in places):  # otherwise there is nothing to compare with
        of = fingerprint(source)
        same = folder or _place(source, of)
        if not isinstance(same, Missing) and (trace := _kept(same, of=of)):
            return _used(trace, same, folder, meanwhile)
    checksum = Checksum()
    trace = read_trace(source, checksum)
    if checksum.size == state.size:  # every byte was read
        of = _fingerprint(checksum)
    with ThreadPoolExecutor(1, "tables") as writer:  # both release the GIL most of the time
        writing = writer.submit(_write, trace, columns, source, folder, root, of, seen, state)
        meanwhile(trace)
        written = writing.result()
    return CachedTrace(trace, written, True)


def _used(trace: Trace, tables: Path, folder: Path | None, meanwhile: Callable[[Trace], None]) -> CachedTrace:
    if folder is None:
        note_use(tables.parent)
    meanwhile(trace)
    return CachedTrace(trace, tables, parsed=False)


def _write(
    trace: Trace,
    columns: StageColumns,
    source: Path,
    folder: Path | None,
    root: Path | None,
    of: str,
    seen: str,
    state: FileState,
) -> Maybe[Path]:
    """Write the tables of a trace. Return their folder, or why they were not written."""
    try:
        of = of or fingerprint(source)
        if file_state(source) != state:
            return Missing("the tables were not kept: the file changed while it was read")
        tables = folder or _place(source, of)
        if isinstance(tables, Missing):
            return Missing(f"the tables were not kept: {tables.why}")
        if folder is None:
            make_folder(tables.parent, tables.parent, 0o700)
        write_tables(trace, tables, columns(trace), of=of, seen=seen, root=root or tables.parent)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Missing(f"the tables were not kept: {where}{error.strerror or error}")
    except (ParseError, ResourceError) as error:
        return Missing(f"the tables were not kept: {error.fact}")
    if folder is None:
        _remove_others(source, tables)
        make_room(tables.parent)
    return tables


def _place(source: Path, of: str) -> Maybe[Path]:
    kept = kept_for(source)
    return kept if isinstance(kept, Missing) else kept / f"tables-{of}"


def make_room(kept: Path) -> None:
    """Remove the least recently used entries of the cache until it is within its limit. The entry `kept` stays."""
    note_use(kept)
    entries: list[tuple[int, int, Path]] = []
    with suppress(OSError):
        for entry in kept.parent.iterdir():
            with suppress(OSError):  # another process may remove it
                entries.append((entry.lstat().st_mtime_ns, kept_bytes(entry), entry))
    total = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries):
        if total <= MOST_BYTES:
            return
        if entry != kept:
            remove_if_possible(kept.parent, entry)
            total -= size


def _kept(tables: Path, of: str = "", seen: str = "") -> Trace | None:
    """Return the trace in tables of these bytes (`of`) or of this unchanged file (`seen`); None if stale, damaged or missing."""
    try:
        known_of, known_seen = made_of(tables)
        return read_tables(tables) if (of and of == known_of) or (seen and seen == known_seen) else None
    except (ParseError, ResourceError):
        return None


def fingerprint(source: Path) -> str:
    """Return a text that changes with the bytes of the file and with the schema of the tables."""
    return _fingerprint(checksum_of(source))


def _fingerprint(checksum: Checksum) -> str:
    return f"v{SCHEMA_VERSION}-{checksum}"


def _remove_others(source: Path, kept: Path) -> None:
    """Remove the tables of earlier contents of this source, and those that a killed process did not complete."""
    for folder in tables_of(source):
        if folder != kept:
            remove_if_possible(kept.parent, folder)
    remove_leftovers(kept.parent, ".tables-")
