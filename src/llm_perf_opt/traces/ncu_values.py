"""Parse the CSV of Nsight Compute: lines, messages, and cells (numbers in any locale, units, launch sizes, NVTX ranges)."""

import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from llm_perf_opt.core.errors import ParseError, words_of
from llm_perf_opt.core.machine_records import CounterProblem
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.user_files import open_ordinary
from llm_perf_opt.core.value_limits import number_in

Decimal = Literal[".", ","]

_SPACES = re.compile(r"(?<=\d)[\s\u00a0\u202f\u2009'’](?=\d{3})")
_INSTANCES = re.compile(r"(?<!\s)\s*\([^()]*\)$")  # tried once per run of spaces, not once per space
_ABSENT = {"n/a", "(!) n/a", "nan", "-nan", "+nan", "inf", "-inf", "+inf", "no data", "(!) nan"}
_PLAIN = re.compile(r"[+-]?\d+(?:[eE][+-]?\d+)?$")
_GROUPED = {
    ".": re.compile(r"[+-]?\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d*)?$"),
    ",": re.compile(r"[+-]?\d{1,3}(?:\.\d{2,3})*\.\d{3}(?:,\d*)?$"),
}
_POINTED = {".": re.compile(r"[+-]?\d+\.\d*(?:[eE][+-]?\d+)?$"), ",": re.compile(r"[+-]?\d+,\d*(?:[eE][+-]?\d+)?$")}
# Cells that only one of the two notations allows. ncu prints two decimals; three digits may be thousands.
_SHOWS: dict[Decimal, re.Pattern[str]] = {
    ".": re.compile(r"[+-]?(?:\d{1,3}(?:,\d{2,3})*,\d{3}\.\d*|\d{1,3}(?:,\d{3}){2,}|\d+\.(?:\d{1,2}|\d{4,})(?:[eE].*)?)$"),
    ",": re.compile(r"[+-]?(?:\d{1,3}(?:\.\d{2,3})*\.\d{3},\d*|\d{1,3}(?:\.\d{3}){2,}|\d+,(?:\d{1,2}|\d{4,})(?:[eE].*)?)$"),
}
_EITHER = re.compile(r"[+-]?\d{1,3}\.\d{3}$")
"""One point before three digits: thousands in one locale; in the other, decimals that ncu never prints."""

EMPTY = Missing("Nsight Compute left the cell empty")
NOT_AVAILABLE = Missing("Nsight Compute reports n/a: the chip does not have this counter, or it could not be read")


class Locale:
    """Determines the decimal separator of a file from its cells."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def look(self, cells: Iterable[str]) -> None:
        """Add cells."""
        for cell in cells:
            if "." in cell or "," in cell:
                text = _bare(cell)
                for mark, pattern in _SHOWS.items():
                    if pattern.match(text):
                        self._seen[mark] += 1
                if _EITHER.match(text):
                    self._seen["either"] += 1

    @property
    def decimal(self) -> Maybe[Decimal]:
        """The separator that most cells show."""
        point, comma = self._seen["."], self._seen[","]
        if point == comma and (point or self._seen["either"]):
            return Missing("the file does not show whether a point separates decimals or thousands")
        return "," if comma > point else "."


def number(cell: str, decimal: Maybe[Decimal]) -> Maybe[float] | None:
    """Return the number in a cell; None for text, which is not the value of a counter."""
    text = _bare(cell)
    if not text:
        return EMPTY
    if text.lower() in _ABSENT:
        return NOT_AVAILABLE
    if not any(char.isdigit() for char in text) or text[0] not in "+-0123456789":
        return None
    if _PLAIN.match(text):
        return _finite(text)
    if isinstance(decimal, Missing):
        return decimal
    other = "," if decimal == "." else "."
    if _POINTED[decimal].match(text) or _GROUPED[decimal].match(text):
        return _finite(text.replace(other, "").replace(decimal, "."))
    return Missing(f"{text[:40]!r} is not a number with decimals after {decimal!r}") if text[-1].isdigit() else None


def _bare(cell: str) -> str:
    """Return a cell without spaces between thousands and without the instance values that follow some aggregates."""
    return _INSTANCES.sub("", _SPACES.sub("", cell.strip()))


def _finite(text: str) -> Maybe[float]:
    value = float(text)
    return value if number_in(value) is not None else Missing(f"{text[:40]} is larger than any counter")


# --- units ------------------------------------------------------------------------------------------------------------

_TIME_NS = {
    **dict.fromkeys(("ns", "nsecond", "nsec"), 1.0),
    **dict.fromkeys(("us", "usecond", "usec"), 1e3),
    **dict.fromkeys(("ms", "msecond", "msec"), 1e6),
    **dict.fromkeys(("s", "second", "sec"), 1e9),
}
_PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SCALED = ("byte", "hz", "inst", "cycle", "sector", "request", "thread", "warp", "block", "bit", "b")


@dataclass(frozen=True)
class Unit:
    """A base unit, and the factor that converts a printed value to it."""

    name: str
    factor: float


def unit(text: str) -> Unit:
    """Return the base unit: `Kbyte` → byte × 1000, `us` → ns × 1000, `Gbyte/s` → byte/second × 1e9; unknown units stay."""
    above, slash, below = text.strip().partition("/")
    if not slash:
        return Unit("ns", _TIME_NS[above]) if above in _TIME_NS else _prefixed(above)
    top = Unit("ns", _TIME_NS[above]) if above in _TIME_NS else _prefixed(above)
    if below in _TIME_NS:
        return Unit(f"{top.name}/second", top.factor * 1e9 / _TIME_NS[below])
    bottom = _prefixed(below)
    return Unit(f"{top.name}/{bottom.name}", top.factor / bottom.factor)


def _prefixed(text: str) -> Unit:
    if text[1:].lower() in _SCALED and text[:1] in _PREFIXES:
        return Unit(text[1:].lower(), _PREFIXES[text[0]])
    return Unit(text, 1.0)


# --- launches ---------------------------------------------------------------------------------------------------------

_SIZE = re.compile(r"\(?\s*(\d{1,10})\s*,\s*(\d{1,10})\s*,\s*(\d{1,10})\s*\)?$")
_CLOSING = re.compile(r'"(?=\s|$)')
_NAME_REPEATED = re.compile(r"([^:]*):(.*):[^:]*:[^:]*:[^:]*:[^:]*:[^:]*:\2$", re.DOTALL)
_LONGEST_RANGE = 4096
_FIELDS_AFTER_NAME = 6
_DEFAULT_DOMAIN = "<default domain>"


def size(cell: str) -> tuple[int, int, int] | None:
    """Return the three numbers of `(384, 1, 1)`, or None for other text."""
    found = _SIZE.match(cell.strip())
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def ranges(cell: str) -> tuple[str, ...]:
    """Return the ranges in `691  "LLM:decode:none:…"  "LLM:decode_step:…"` as `LLM@decode`, `LLM@decode_step`."""
    found, opening = [], cell.find('"')
    while opening >= 0 and (closing := _CLOSING.search(cell, opening + 1)):  # without one, no later quote has one either
        found.append(_range(cell[opening + 1 : closing.start()]))
        opening = cell.find('"', closing.end())
    return tuple(found)


def _range(text: str) -> str:
    """Return `DOMAIN@name`, or `name` in the default domain.

    Six fields follow the name, which may contain colons. Most ranges repeat the name at the end, which shows where it ends.
    """
    repeated = _NAME_REPEATED.match(text) if len(text) <= _LONGEST_RANGE else None
    if repeated:
        domain, name = repeated[1], repeated[2]
    else:
        domain, _, rest = text.partition(":")
        name = rest.rsplit(":", _FIELDS_AFTER_NAME)[0]
    return name if domain in ("", _DEFAULT_DOMAIN) else f"{domain}@{name}"


# --- lines and messages -----------------------------------------------------------------------------------------------

MOST_BYTES = 512 << 20
"""Unpacked text. A thousand kernels with every metric take a tenth of it."""
LONGEST_LINE = 8 << 20
MOST_LINES = 4_000_000
MOST_LINES_BEFORE = 100_000
"""Lines before the table, which the profiled program printed."""
MOST_MESSAGES = 1000
"""Messages of ncu that are kept."""
SMALLER = "Read fewer kernels or fewer metrics."

_MESSAGE = re.compile(r"==(PROF|WARNING|ERROR)==\s*(.*)")
_PERMISSION = (
    "Counters need permission: load the driver with `options nvidia NVreg_RestrictProfilingToAdminUsers=0` (a file in "
    "/etc/modprobe.d, then reboot), or run as root or with CAP_SYS_ADMIN; in a container, also `--cap-add=SYS_ADMIN`."
)
_NO_KERNELS = "Check the NVTX filter (`DOMAIN@range/`), the kernel filter and the launch count: none of the launches matched."


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """Open a plain or gzip file as text: UTF-8, or UTF-16 with a byte order mark. Raise a ParseError if it cannot be read."""
    try:
        with open_ordinary(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            raw: IO[bytes] = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
            bounded = io.BufferedReader(_Bounded(raw, path))
            start = bounded.peek(2)[:2]
            encoding = "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
            yield io.TextIOWrapper(bounded, encoding, newline="")
    except UnicodeError as error:
        raise ParseError(
            f"{path} is not text in UTF-8: {error.reason if isinstance(error, UnicodeDecodeError) else error}."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ParseError(f"{path} cannot be read: {words_of(error)}.") from error
    except csv.Error as error:
        raise ParseError(f"{path} is not CSV: {error}.") from error


class _Bounded(io.RawIOBase):
    """A stream that raises after MOST_BYTES."""

    def __init__(self, raw: IO[bytes], path: Path) -> None:
        self._raw = raw
        self._path = path
        self._left = MOST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        data = self._raw.read(min(len(buffer), 1 << 16))
        self._left -= len(data)
        if self._left < 0:
            raise ParseError(f"{self._path} contains more than {MOST_BYTES >> 20} MiB of text.", SMALLER)
        buffer[: len(data)] = data
        return len(data)


class Messages:
    """The messages of ncu around the table."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, str]] = []

    def add(self, line: str) -> bool:
        """Keep a line if it is a message of ncu. Return whether it is."""
        found = _MESSAGE.match(line)
        if found and len(self._lines) < MOST_MESSAGES:
            self._lines.append((found[1], found[2].strip()[:500]))
        return found is not None

    def __bool__(self) -> bool:
        return bool(self._lines)

    def problems(self) -> Iterator[CounterProblem]:
        """Yield the problems that the messages report."""
        for kind, text in dict.fromkeys(self._lines):
            if "ERR_NVGPUCTRPERM" in text:
                yield CounterProblem("no_permission", f"Nsight Compute: {text}", True, _PERMISSION)
            elif "No kernels were profiled" in text or "No ranges were profiled" in text:
                yield CounterProblem("no_kernels", f"Nsight Compute: {text}", True, _NO_KERNELS)
            elif "shutdown target application" in text:
                yield CounterProblem("aborted", "Nsight Compute ended before the program.", False)
            elif kind == "ERROR":
                yield CounterProblem("tool_error", f"Nsight Compute: {text}", False)
            elif kind == "WARNING" and "unmodified GPU clocks" not in text:  # llm-perf requests this
                yield CounterProblem("tool_warning", f"Nsight Compute: {text}", False)


class Lines:
    """The records of the CSV. Messages of ncu between them are collected in `messages`."""

    def __init__(self, file: IO[str], path: Path, messages: Messages) -> None:
        self._file = file
        self._path = path
        self._messages = messages
        self._most = MOST_LINES_BEFORE
        self._rows = csv.reader(self._lines())

    def __iter__(self) -> Iterator[list[str]]:
        return self._rows

    def table_found(self) -> None:
        """Allow the number of lines of a table from now on."""
        self._most = MOST_LINES

    def _lines(self) -> Iterator[str]:
        count = 0
        while line := self._file.readline(LONGEST_LINE):
            count += 1
            if len(line) == LONGEST_LINE:
                raise ParseError(f"{self._path} has a line of more than {LONGEST_LINE >> 20} million characters.", SMALLER)
            if count > self._most:
                table = "" if self._most == MOST_LINES else " and no table of Nsight Compute in them"
                raise ParseError(f"{self._path} has more than {self._most:,} lines{table}.", SMALLER)
            if not self._messages.add(line):
                yield line
