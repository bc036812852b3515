"""Read JSON and JSON lines of load generators. An error names the file, the line and the field."""

import io
import re
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from llm_perf_opt.core.errors import ParseError, ResourceError, words_of
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.units import as_float
from llm_perf_opt.core.user_files import TooLargeError, open_unpacked, read_unpacked
from llm_perf_opt.core.value_limits import number_in

R = TypeVar("R")

MOST_BYTES = 96 << 20
"""The largest JSON file that is read, unpacked; a token takes 20 to 45 bytes. JSON lines are not read as a whole."""
MOST_VALUES = 6_000_000
"""How many values a JSON file may have. A number takes two bytes in the file, and decoded up to 50."""
MOST_LINE_BYTES = 8 << 20
MOST_REQUESTS = 2_000_000
MOST_KEPT_BYTES = 400_000_000
"""How much memory the requests, spans or samples of a file may take: 68,000 requests of 128 tokens."""
MOST_PART_BYTES = 1 << 20
"""How long a value of unknown shape may be; those of GuideLLM take about 100 kB. Decoded, it takes up to fifty times as much."""
NULL = msgspec.Raw(b"null")
_RECORD_BYTES, _NUMBER_BYTES, _TEXT_BYTES = 600, 40, 200
"""What a request, each of its tokens and its texts take."""
_WRITTEN_BYTES, _WRITTEN_TOKEN_BYTES = 300, 45
"""What a request takes in a JSON file besides its tokens, and what a token takes: its time, and a text of up to four escapes."""
_QUOTE_OR_ODD_NUMBER = re.compile(rb'\\.|"|NaN|-?Infinity', re.DOTALL)
"""Not whole texts: matching one takes memory for each of its escapes."""
HEAD_BYTES = 1 << 16
"""How much of a file is read to recognize its format."""
_MOST_TOKENS, _MOST_LOAD = 1e9, 1e9
"""Of a request, and of requests in a second or at a time."""
LATEST_NS = 4 * 10**18
"""Unix time in the year 2096, and half of what 64 bits hold. Larger numbers are not times."""
NOT_FINISHED = "not finished when the measurement ended"
"""The error of a request that a generator cut."""
SHORTER = "Use a shorter measurement: fewer requests, or fewer tokens per request."
_REMEDY = "The file is damaged, or another version of the tool wrote it. Copy it again, or repeat the measurement."


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file, unpacked. Raise a ParseError if it is empty or cannot be read."""
    try:
        with open_unpacked(path) as file:
            content = file.read(HEAD_BYTES)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not content.strip():
        raise ParseError(f"{path} is empty.", "The load generator did not finish; repeat the measurement.")
    return content


def read_json(path: Path, kind: type[R]) -> R:
    """Return a JSON file as `kind`, or raise a ParseError."""
    content = _content(path)
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:  # there are at most as many values
        what = f"{path} has too many values: there are more than {MOST_VALUES:,} commas and brackets."
        raise ResourceError(what, SHORTER)
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise ParseError(f"{path}: {error}.", _REMEDY) from error
    except (ValueError, RecursionError) as error:
        if not any(word in content for word in (b"NaN", b"Infinity")):  # Python writes them; JSON has none
            raise ParseError(f"{path}, line {_line_of(content, error)}: {words_of(error)}.", _REMEDY) from error
    content = _without_odd_numbers(content)
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise ParseError(f"{path}: {error}.", _REMEDY) from error
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{path}, line {_line_of(content, error)}: {words_of(error)}.", _REMEDY) from error


def _without_odd_numbers(content: bytes) -> bytes:
    """Return JSON with null for NaN and Infinity; `json` decodes them, but also builds everything that is not used."""
    made, done, in_text = io.BytesIO(), 0, False
    for found in _QUOTE_OR_ODD_NUMBER.finditer(content):
        if found[0] == b'"':
            in_text = not in_text
        elif not in_text and not found[0].startswith(b"\\"):
            made.write(memoryview(content)[done : found.start()])
            made.write(b"null")
            done = found.end()
    made.write(memoryview(content)[done:])
    return made.getvalue()


def _line_of(content: bytes, error: BaseException) -> int:
    """Return the line of an error of msgspec, which names a byte; the last line if it does not."""
    digits = str(error).rpartition("byte ")[2].rstrip(")")
    return content.count(b"\n", 0, int(digits) if digits.isdigit() else len(content)) + 1


def read_lines(path: Path, kind: type[R], *, cut_short: bool = False) -> Iterator[tuple[int, R]]:
    """Yield each line of a JSON lines file with its number. With `cut_short`, an incomplete last line is left out."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except (ValueError, RecursionError) as error:
            if cut_short and not line.endswith(b"\n"):
                return
            ends = "" if line.endswith(b"\n") else " The file ends in the middle of it."
            raise ParseError(f"{path}, line {number}: {words_of(error)}.{ends}", _REMEDY) from error


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_unpacked(path) as file:
            for number in count(1):
                line = file.readline(MOST_LINE_BYTES + 1)
                if not line:
                    return
                if number > MOST_REQUESTS:
                    raise ResourceError(f"{path} has more than {MOST_REQUESTS:,} lines.", SHORTER)
                if len(line) > MOST_LINE_BYTES:
                    raise ParseError(f"{path}, line {number} is longer than {MOST_LINE_BYTES >> 20} MiB.", _REMEDY)
                yield line
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _content(path: Path) -> bytes:
    try:
        return read_unpacked(path, MOST_BYTES)
    except TooLargeError as error:
        raise ResourceError(f"{path} is larger than {MOST_BYTES >> 20} MiB.", SHORTER) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ParseError:
    remedy = "Check the path." if isinstance(error, OSError) else _REMEDY
    return ParseError(f"{path} cannot be read: {words_of(error)}.", remedy)


class Kept:
    """How much memory the records take that are kept of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = MOST_KEPT_BYTES

    def add(self, numbers: int, *texts: str) -> None:
        """Count a record. Raise a ResourceError if all of them take too much memory."""
        self._left -= _RECORD_BYTES + _NUMBER_BYTES * numbers + sum(map(sys.getsizeof, texts))
        if self._left < 0:
            what = f"The records of {self._path} take more than {MOST_KEPT_BYTES / 1e6:.0f} MB of memory."
            raise ResourceError(what, SHORTER)


def most_requests(tokens: int, file: str) -> int:
    """Return how many requests of this many tokens can be read from the file of a load generator."""
    if file.endswith(".jsonl"):
        return MOST_KEPT_BYTES // (_RECORD_BYTES + _TEXT_BYTES + _NUMBER_BYTES * tokens)
    return MOST_BYTES // (_WRITTEN_BYTES + _WRITTEN_TOKEN_BYTES * tokens)


def ns_of(seconds: float, what: str) -> int:
    """Return seconds in nanoseconds. Raise ValueError if they are negative, infinite or no time at all."""
    if number_in(seconds) is None or not 0 <= seconds < LATEST_NS / 1e9:
        raise ValueError(f"{what} is {seconds!r}, which is not a time in seconds")
    whole = int(seconds)
    return whole * 10**9 + round((seconds - whole) * 1e9)  # more precise than rounding the product


def checked_ns(time_ns: int, what: str) -> int:
    """Return a time in nanoseconds. Raise ValueError if it is negative or beyond all clocks."""
    if not 0 <= time_ns < LATEST_NS:
        raise ValueError(f"{what} is {str(time_ns)[:40]}, which is not a time in nanoseconds")
    return time_ns


def count_of(value: int | float | None) -> Maybe[int]:
    """Return a count of tokens; missing if there is none or it is no count."""
    number = number_in(value, _MOST_TOKENS)
    return int(number) if number is not None and 0 <= number == int(number) else Missing("not recorded")


def refused(path: Path, place: str, error: ValueError) -> ParseError:
    """Return the error for a record whose values are impossible."""
    return ParseError(f"{path}, {place}: {error}.", _REMEDY)


def statistics_of(found: dict[str, float | None], scale: float) -> dict[str, float]:
    """Return the statistics that have a value, in base units."""
    scaled = {name: number_in(value * scale) for name, value in found.items() if value is not None}
    return {name: value for name, value in scaled.items() if value is not None}


# --- values of unknown shape ----------------------------------------------------------------------------------------------


def plain(path: Path, value: msgspec.Raw) -> Any:
    """Return a part of a file as plain objects, which can take fifty times its bytes. Raise a ParseError if it is too long."""
    if memoryview(value).nbytes > MOST_PART_BYTES:
        raise ParseError(
            f"{path} has a value of more than {MOST_PART_BYTES >> 20} MiB where settings or figures belong.", _REMEDY
        )
    try:
        return msgspec.json.decode(value)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"{path}: {words_of(error)}.", _REMEDY) from error


def field_of(value: Any, *keys: str) -> Any:
    """Return the value under nested keys; None if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def first_of(value: Any) -> Any:
    """Return the first value of a list; None if there is none."""
    return value[0] if isinstance(value, list) and value else None


def number_of(value: Any) -> float | None:
    """Return a number that a measurement can have; None for anything else."""
    return number_in(value)


def seconds_of(value: Any) -> Maybe[float]:
    """Return how long a measurement took; missing if that is no time."""
    seconds = number_in(value, LATEST_NS / 1e9)
    return seconds if seconds is not None and seconds > 0 else Missing("not recorded")


def load_number(value: float, what: str) -> float:
    """Return an asked rate or number of requests at a time. Raise ValueError if it is none, so that no other load is shown."""
    number = number_in(value, _MOST_LOAD)
    if number is None:
        raise ValueError(f"{what} is {str(as_float(value))[:40]}, which is not a load")
    return number


def text_of(value: Any) -> Maybe[str]:
    """Return a text, shortened if it is very long."""
    return value[:500] if isinstance(value, str) and value else Missing("not recorded")
