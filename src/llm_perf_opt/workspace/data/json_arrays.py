"""Read a JSON array of any length element by element, as lines of JSON."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.workspace.data.compressed import UnpackedFile, unpacked
from llm_perf_opt.workspace.data.inventory import Advance
from llm_perf_opt.workspace.data.lines import BLOCK_BYTES, MAX_LINE_BYTES

_OTHER = re.compile(r"[^ \t\r\n]")
_MARK = "\ufeff"
_DECODER = json.JSONDecoder()
_SNIFFED_BYTES = 4096


def is_array(path: Path) -> bool:
    """Return whether a file starts with an array; otherwise it has one object per line."""
    with unpacked(path) as file:
        while piece := file.read(_SNIFFED_BYTES):
            start = piece.removeprefix(codecs.BOM_UTF8).lstrip()
            if start:
                return start.startswith(b"[")
    return False


def element_blocks(path: Path, advance: Advance) -> Iterator[tuple[int, list[bytes | None]]]:
    """Yield blocks of elements, each as one line, with the number of the first. Text that is not JSON raises a ParseError."""
    with unpacked(path) as file:
        elements = _Elements(file, path, advance)
        first, block, size = 1, list[bytes | None](), 0
        for line in elements:
            block.append(line)
            size += len(line)
            if size >= BLOCK_BYTES:
                yield first, block
                first, block, size = first + len(block), [], 0
        if block:
            yield first, block


class _Elements:
    """The elements of an array. Text is kept until the end of an element is found, up to the longest line allowed."""

    def __init__(self, file: UnpackedFile, path: Path, advance: Advance) -> None:
        self._file, self._path, self._advance = file, path, advance
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        """Bytes that are not UTF-8 are kept; the reader of the line reports them with the number of their record."""
        self._text, self._place = "", 0
        self._ended = False
        self._reported = 0
        self._count = 0

    def __iter__(self) -> Iterator[bytes]:
        self._more()
        self._text = self._text.removeprefix(_MARK)
        self._expect("[")
        if self._next() == "]":
            self._place += 1
        else:
            yield from self._until_the_end()
        if self._next():
            raise self._error("text follows the end of the array")

    def _until_the_end(self) -> Iterator[bytes]:
        while True:
            yield self._element()
            if self._next() == "]":
                self._place += 1
                return
            self._expect(",")

    def _element(self) -> bytes:
        """Return the next element. Text is added until it is complete: twice as much each time."""
        self._next()
        self._count += 1
        self._file.count_values(1)
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._place)
                if end < len(self._text) or self._ended:  # a number may continue in the next piece
                    return self._line(end)
                why = "it has no end"
            except RecursionError as error:
                raise self._error("it is nested too deeply") from error
            except ValueError as error:
                why = " ".join(str(error).split())[:120]
            if self._ended:
                raise self._error(f"{why}; the array is truncated or not JSON")
            if len(self._text) - self._place > MAX_LINE_BYTES:
                raise self._error(f"{why}; it is not JSON, or longer than {MAX_LINE_BYTES // 2**20} MiB")
            self._more(len(self._text) - self._place)

    def _line(self, end: int) -> bytes:
        found = self._text[self._place : end].encode("utf-8", "surrogateescape")
        self._place = end
        if b"\n" not in found and b"\r" not in found:
            return found
        try:
            return msgspec.json.format(found, indent=-1)
        except msgspec.DecodeError:  # the reader of the line says what is wrong with it
            return found.replace(b"\r", b" ").replace(b"\n", b" ")

    def _next(self) -> str:
        """Return the next character that is not white space, without taking it; empty at the end."""
        while True:
            found = _OTHER.search(self._text, self._place)
            if found:
                self._place = found.start()
                return found[0]
            self._place = len(self._text)
            if self._ended:
                return ""
            self._more()

    def _expect(self, wanted: str) -> None:
        found = self._next()
        if found != wanted:
            raise self._error(f"{wanted!r} was expected, but {found!r} follows" if found else "the array is truncated")
        self._place += 1

    def _more(self, size: int = 0) -> None:
        """Add text, and drop what was read."""
        data = self._file.read(max(size, BLOCK_BYTES))
        self._advance(self._file.consumed - self._reported)
        self._reported = self._file.consumed
        self._ended = not data
        self._text = self._text[self._place :] + self._decoder.decode(data, self._ended)
        self._place = 0

    def _error(self, why: str) -> ParseError:
        return ParseError(
            f"{self._path.name}, record {self._count}: {why}.",
            "Records after such a place cannot be found, so --skip-bad does not help. Repair the file, or write one object per "
            "line (.jsonl).",
        )
