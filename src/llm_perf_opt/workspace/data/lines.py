"""Read lines of files larger than memory: in chunks, plain or compressed, numbered, with a maximum length."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, ParseError, nearest
from llm_perf_opt.workspace.data.compressed import unpacked
from llm_perf_opt.workspace.data.inventory import Advance

MAX_LINE_BYTES = 16 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024
"""Bytes to split into lines at a time; the results are several times as large."""
NAMED = 10
"""Maximum number of bad records to name; the rest are counted."""
FIELD_OPTION = "--text-field NAME"
"""How to name another field with the dataset verbs."""
RUN_FIELD_OPTION = "dataset.text_field=NAME"
"""How to name another field in a run."""
_MARK = codecs.BOM_UTF8


@dataclass
class BadRecords:
    """Unusable records: an error, or counted, with the first ones named."""

    skip: bool
    count: int = 0
    first: list[str] = field(default_factory=list)
    field_option: str = FIELD_OPTION
    how_to_skip: str = "Use --skip-bad to leave out such records."

    @classmethod
    def of_a_run(cls) -> "BadRecords":
        """Return the handling for a run: an unreadable record is an error, and remedies name settings of a run."""
        how = "Use `llm-perf dataset prepare … --skip-bad` to make a variant without such records."
        return cls(skip=False, field_option=RUN_FIELD_OPTION, how_to_skip=how)

    def note(self, where: str, why: str, remedy: str = "") -> None:
        """Record a bad record, or raise unless they are skipped."""
        if not self.skip:
            raise ParseError(f"{where}: {why}.", f"{remedy} {self.how_to_skip}".strip())
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(f"{where}: {why}")


def missing_column(path: Path, name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a table without the requested text column."""
    return ConfigError(
        f"{path.name} has no column {name!r}.{nearest(name, known)}",
        f"It has: {', '.join(known)}. Name the column with the text: {FIELD_OPTION}, or {RUN_FIELD_OPTION} in a run.",
    )


def line_blocks(path: Path, advance: Advance) -> Iterator[tuple[int, list[bytes | None]]]:
    """Yield blocks of lines with the number of the first. A line that is too long is None; an empty one stays empty.

    Lines end with \\n or \\r\\n; other line separators are part of the text.
    """
    yield from _numbered(_chunks(path, advance))


def _chunks(path: Path, advance: Advance) -> Iterator[bytes]:
    done = 0
    with unpacked(path) as file:
        while chunk := file.read(BLOCK_BYTES):
            if not done and chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ParseError(f"{path} is text in UTF-16.", "Convert it to UTF-8: iconv -f UTF-16 -t UTF-8 FILE.")
            advance(file.consumed - done)
            done = file.consumed
            file.count_values(chunk.count(b"\n"))
            yield chunk


def _numbered(chunks: Iterator[bytes]) -> Iterator[tuple[int, list[bytes | None]]]:
    number, rest, too_long, first = 1, b"", False, True
    for chunk in chunks:
        if first:
            chunk, first = chunk.removeprefix(_MARK), False
        pieces = chunk.split(b"\n")
        if len(pieces) == 1:
            rest, too_long = _held(rest, chunk, too_long)
            continue
        head, too_long_head = _held(rest, pieces[0], too_long)
        lines: list[bytes | None] = [None if too_long_head else _bare(head)]
        lines += [_bare(piece) for piece in pieces[1:-1]]
        yield number, lines
        number += len(lines)
        rest, too_long = pieces[-1], False
    if rest or too_long:
        yield number, [None if too_long else _bare(rest)]


def _held(rest: bytes, more: bytes, too_long: bool) -> tuple[bytes, bool]:
    """Return the line so far with its continuation; dropped once it is too long."""
    if too_long or len(rest) + len(more) > MAX_LINE_BYTES:
        return b"", True
    return rest + more, False


def _bare(line: bytes) -> bytes:
    return line[:-1] if line.endswith(b"\r") else line
