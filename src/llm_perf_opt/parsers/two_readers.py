"""A large trace read by two at once: this process takes the first part, a copy of it the rest.

The cut is sought near the middle, at a place that looks like the end of an event. That it is one is known once the first part has
been decoded to its last byte; until then it is a guess. Wherever either part is not sound in every respect, nothing is said here,
and the file is read from its beginning by one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from llm_perf_opt.errors import ParseError
from llm_perf_opt.parsers.column_parts import add_part, write_part
from llm_perf_opt.parsers.event_chunks import BOUNDARY, EventChunks, ReadInto, Surroundings, surroundings
from llm_perf_opt.parsers.packed import PackedFile
from llm_perf_opt.parsers.torch_columns import TorchColumns
from llm_perf_opt.parsers.torch_events import EventDecoder, repaired

SMALLEST_BYTES = 24 << 20
"""Below this a copy costs about as much as it saves. Two that read at once take up to a quarter more processor time than one."""
_SHARE = 0.46
"""Of the bytes, for this process: it has both parts to put together afterwards."""
_SEARCHED_BYTES = 1 << 20


class Beside(Protocol):
    """Work that is being done in a copy of this process."""

    def result(self) -> bytes | None:
        """What it wrote; None where it failed."""

    def abandon(self) -> None:
        """End it."""


StartBeside = Callable[[Callable[[BinaryIO], None]], Beside | None]
"""Begins some work in a copy of this process; None where there can be none."""


@dataclass(frozen=True)
class ReadByTwo:
    """What both have read."""

    columns: TorchColumns
    events: int
    around: Surroundings


def read_by_two(path: Path, start: StartBeside) -> ReadByTwo | None:
    """The whole trace; None where it is small, packed, or not sound in every respect."""
    cut = _cut(path)
    if cut is None:
        return None
    other = start(lambda out: _read_rest(path, cut, out))
    if other is None:
        return None
    try:
        columns = TorchColumns()
        decoder = EventDecoder(columns.take)
        with PackedFile(path) as file:
            chunks = EventChunks(str(path), _up_to(file.read_into, cut.start() + 1), decoder, repaired)
            before = chunks.run_first_part() if file.identity == cut.of else None
        part = other.result() if before is not None and not decoder.not_events else None
    except ParseError:
        return None  # it is said again, and in the words for the whole file, by the one who reads it all
    finally:
        other.abandon()
    if before is None or part is None or not _is_still(path, cut):
        return None
    note = add_part(columns, part)
    events, after = int.from_bytes(note[:8], "little"), note[8:]
    around = surroundings(before, after, repaired)
    return ReadByTwo(columns, chunks.events + events, around) if around.readable else None


@dataclass(frozen=True)
class _Cut:
    base: int
    match: "re.Match[bytes]"
    of: tuple[int, ...]
    """The file it was found in: another may lie under its name by now."""

    def start(self) -> int:
        return self.base + self.match.start()

    def end(self) -> int:
        return self.base + self.match.end()


def _cut(path: Path) -> _Cut | None:
    with PackedFile(path) as file:
        if file.is_packed or file.packed_bytes < SMALLEST_BYTES:
            return None
        middle = int(_SHARE * file.packed_bytes)
        file.skip_to(middle)
        match = BOUNDARY.search(file.read(_SEARCHED_BYTES))
        return None if match is None else _Cut(middle, match, file.identity)


def _is_still(path: Path, cut: _Cut) -> bool:
    """Whether the file is the one that was cut, and nobody wrote to it."""
    try:
        with PackedFile(path) as file:
            return file.identity == cut.of
    except ParseError:
        return False


def _up_to(read: ReadInto, end: int) -> ReadInto:
    left = end

    def limited(room: memoryview) -> int:
        nonlocal left
        count = read(room[: min(len(room), left)])
        left -= count
        return count

    return limited


def _read_rest(path: Path, cut: _Cut, out: BinaryIO) -> None:
    """In the copy: a result only where nothing at all was wrong."""
    columns = TorchColumns()
    decoder = EventDecoder(columns.take)
    with PackedFile(path) as file:
        if file.identity != cut.of:
            raise ParseError("The file was replaced while it was read.")
        file.skip_to(cut.end())
        chunks = EventChunks(str(path), file.read_into, decoder, repaired)
        after = chunks.run_rest()
    if after is None or decoder.not_events or columns.has_made_up_identities:
        raise ParseError("The rest of the trace is not sound.")
    write_part(columns, chunks.events.to_bytes(8, "little") + after, out)
