"""Nsight Compute's printed output: the CSV apart from the tool's own words, in bounded memory."""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from llm_perf_opt.core.errors import ParseError, words_of
from llm_perf_opt.core.kernel_records import CounterProblem
from llm_perf_opt.core.user_files import open_ordinary

MOST_BYTES = 512 << 20
"""Of text, unpacked. A thousand kernels with every metric take a tenth of it."""
LONGEST_LINE = 8 << 20
MOST_LINES = 4_000_000
MOST_LINES_BEFORE = 100_000
"""Before the table: what a program printed while it was profiled."""
MOST_SAID = 1000
"""Lines of the tool that are kept."""
SMALLER = "Read fewer kernels or fewer metrics."

_CHATTER = re.compile(r"==(PROF|WARNING|ERROR)==\s*(.*)")
_PERMISSION = (
    "Counters need privileges: load the driver with `options nvidia NVreg_RestrictProfilingToAdminUsers=0` (a file in "
    "/etc/modprobe.d, then reboot), or run as root or with CAP_SYS_ADMIN; in a container, also `--cap-add=SYS_ADMIN`."
)
_NO_KERNELS = "Check the NVTX filter (`DOMAIN@range/`), the kernel filter and the launch count: none of the launches matched."


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """The text of a file, plain or gzip, UTF-8 or UTF-16 with a mark; every fault of it is a ParseError."""
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
    """A stream that refuses to be longer than MOST_BYTES."""

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
            raise ParseError(f"{self._path} holds more than {MOST_BYTES >> 20} MiB of text.", SMALLER)
        buffer[: len(data)] = data
        return len(data)


class Said:
    """What the tool said beside the table."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, str]] = []

    def hear(self, line: str) -> bool:
        """Whether a line is the tool's; it is then kept."""
        found = _CHATTER.match(line)
        if found and len(self._lines) < MOST_SAID:
            self._lines.append((found[1], found[2].strip()[:500]))
        return found is not None

    def __bool__(self) -> bool:
        return bool(self._lines)

    def problems(self) -> Iterator[CounterProblem]:
        """What of it casts doubt on the figures."""
        for kind, text in dict.fromkeys(self._lines):
            if "ERR_NVGPUCTRPERM" in text:
                yield CounterProblem("no_permission", f"Nsight Compute: {text}", True, _PERMISSION)
            elif "No kernels were profiled" in text or "No ranges were profiled" in text:
                yield CounterProblem("no_kernels", f"Nsight Compute: {text}", True, _NO_KERNELS)
            elif "shutdown target application" in text:
                yield CounterProblem("aborted", "Nsight Compute was ended before the program was.", False)
            elif kind == "ERROR":
                yield CounterProblem("tool_error", f"Nsight Compute: {text}", False)
            elif kind == "WARNING" and "unmodified GPU clocks" not in text:  # how this program asks for it
                yield CounterProblem("tool_warning", f"Nsight Compute: {text}", False)


class Lines:
    """The records of the CSV; lines of the tool between them go to `said`."""

    def __init__(self, file: IO[str], path: Path, said: Said) -> None:
        self._file = file
        self._path = path
        self._said = said
        self._most = MOST_LINES_BEFORE
        self._rows = csv.reader(self._lines())

    def __iter__(self) -> Iterator[list[str]]:
        return self._rows

    def table_found(self) -> None:
        """From here on a table's length is allowed."""
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
            if not self._said.hear(line):
                yield line
