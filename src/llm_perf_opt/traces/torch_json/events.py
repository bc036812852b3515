"""Events of a torch trace, decoded: fast where the file is as torch writes it, exactly where its times have more digits than a
float, forgiving where its values have odd types.
"""

import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal

import msgspec

from llm_perf_opt.traces.torch_json.codes import KEPT

EXACT_BELOW_US = float(2**43)
"""Below this many µs (101 days) neighboring floats are less than 1 ns apart: rounding to ns gives back the digits of the file.
torch counts from a base (baseTimeNanoseconds) of at most three months ago to stay below it; before it had one, from 1970."""


NO_TIME = float("nan")
"""The start of an event that has none, where it is a float."""


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """What is read of `args`; the rest is skipped."""

    correlation: int = 0
    device: int = -1
    stream: int = -1
    bytes: int = -1
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    graph_node: int = msgspec.field(default=0, name="graph node id")
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")


NO_ARGUMENTS = Arguments()


class _AnyPhase(msgspec.Struct, gc=False):
    """What events of all phases and categories say. Freed by reference counts alone: it refers to nothing that refers back."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    args: Arguments = NO_ARGUMENTS


class Event(_AnyPhase, gc=False):
    """An event whose times a float holds exactly."""

    ts: float = NO_TIME
    dur: float = 0.0


Category = Literal[
    "", "cpu_op", "kernel", "cuda_runtime", "user_annotation", "gpu_user_annotation", "gpu_memcpy", "gpu_memset",
    "cuda_driver", "python_function", "overhead", "Trace",
]  # fmt: skip


class UsualEvent(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """The same, with a length and of a category that torch writes: that word is not made anew for each event."""

    ph: ClassVar[str] = "X"
    cat: Category = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = NO_TIME
    dur: float = 0.0
    args: Arguments = NO_ARGUMENTS


class PassedOver(msgspec.Struct, gc=False, tag_field="ph"):
    """An arrow from a launch to its kernel, the name of a thread, an instant: a third of a trace, of which nothing is kept."""

    cat: ClassVar[str] = ""


class _ArrowBegins(PassedOver, gc=False, tag="s"):
    pass


class _ArrowEnds(PassedOver, gc=False, tag="f"):
    pass


class _Metadata(PassedOver, gc=False, tag="M"):
    pass


class _Instant(PassedOver, gc=False, tag="i"):
    pass


class ExactEvent(_AnyPhase, gc=False):
    """The same with times read from their decimal text, as numbers or as strings; an eighth as fast."""

    ts: Decimal | None = None
    dur: Decimal = Decimal(0)


AnyEvent = UsualEvent | Event | ExactEvent
"""One that may be kept."""


class NeedsDigits(Exception):  # noqa: N818 - a signal between decoder and columns
    """A time in this chunk has more digits than a float."""


class EventDecoder:
    """Decodes arrays of events and hands them on; remembers which way of decoding the file needs."""

    def __init__(self, take: Callable[[list[Any]], None]) -> None:
        self._take = take
        self._ways: tuple[msgspec.json.Decoder[Any], ...] = (
            msgspec.json.Decoder(list[UsualEvent | _ArrowBegins | _ArrowEnds | _Metadata | _Instant]),
            msgspec.json.Decoder(list[Event]),
            msgspec.json.Decoder(list[ExactEvent]),
        )
        self._way = 0
        self._any = msgspec.json.Decoder(float_hook=Decimal)
        self.not_events = 0
        """Members of the array that were no objects, or had a time beyond all bounds."""

    def __call__(self, text: bytes | memoryview) -> int:
        """Decode a whole array and keep its events; nothing is kept when this raises."""
        for way in range(self._way, len(self._ways)):
            self._way = way  # what one chunk needs, the next will need
            try:
                return self._keep(self._ways[way].decode(text))
            except (NeedsDigits, msgspec.ValidationError, OverflowError):
                continue
        values = self._any.decode(text)
        events = [_coerce(value) for value in values if isinstance(value, dict)]
        sound = [event for event in events if not _is_absurd(event)]
        kept = self._keep(sound)
        self.not_events += len(values) - len(sound)
        return kept

    def _keep(self, events: list[Any]) -> int:
        self._take(events)
        return len(events)


def _coerce(value: dict[str, Any]) -> ExactEvent:
    """An event from whatever stands in it: a value of the wrong kind counts as not given."""
    given = value.get("args")
    given = given if isinstance(given, dict) else {}
    shapes = given.get("Input Dims")
    return ExactEvent(
        ph=_text(value.get("ph")),
        cat=_text(value.get("cat")),
        name=_text(value.get("name")),
        pid=_identity(value.get("pid")),
        tid=_identity(value.get("tid")),
        ts=_number(value.get("ts")),
        dur=_number(value.get("dur")) or Decimal(0),
        args=Arguments(
            correlation=_whole(given.get("correlation"), 0),
            device=_whole(given.get("device"), -1),
            stream=_whole(given.get("stream"), -1),
            bytes=_whole(given.get("bytes"), -1),
            grid=_triple(given.get("grid")),
            block=_triple(given.get("block")),
            graph_node=_whole(given.get("graph node id"), 0),
            shapes=msgspec.Raw(b"" if shapes is None else msgspec.json.encode(shapes)),
        ),
    )


_LARGEST = 2**62


def _is_absurd(event: ExactEvent) -> bool:
    """Whether one that would be kept has a time that no integer holds."""
    times = (event.ts or Decimal(0), event.dur)
    return event.ph == "X" and event.cat in KEPT and not all(-_LARGEST < time < _LARGEST for time in times)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _identity(value: Any) -> int | str:
    return value if isinstance(value, str) else _whole(value, 0)


def _whole(value: Any, default: int) -> int:
    number = _number(value)
    if number is None or not -_LARGEST < number < _LARGEST:  # abs() overflows beyond 10^999,999
        return default
    return int(number)


def _number(value: Any) -> Decimal | None:
    """A number of any size: one that is no time of any clock is found out where times are made of it."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        number = Decimal(value)
    except (InvalidOperation, ValueError):
        return None
    return number if number.is_finite() else None


def _triple(value: Any) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        return (0, 0, 0)
    x, y, z = (_whole(one, 0) for one in value)
    return (x, y, z) if abs(x * y * z) < _LARGEST else (0, 0, 0)


# --- mending --------------------------------------------------------------------------------------------------------------------
# torch writes names into its JSON as they are: a label with a quote in it breaks the file. Other tools write NaN and Infinity.
# Each byte is looked at a fixed number of times, and no pattern repeats a group, which takes a hundred bytes each time.

_NAME = re.compile(rb'"name"\s*:\s*"')
_NEXT_KEY = re.compile(rb'"\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|s|id)"\s*:')
_LONGEST_NAME = 4000
_AFTER_NAME = re.compile(rb"\s*[,}]")
_STRING_OR_NUMBER = re.compile(rb'"[^"\\\x00-\x1f]*(")?|-?\b(?:nan|NaN|inf|Infinity)\b')
_STOP = re.compile(rb'["\\]')
_NAME_STOP = re.compile(rb'["\\\n]')
_LONGEST_STRING = 1 << 20
"""A longer one with escapes or control characters in it is not mended: it costs its event."""
_ESCAPE = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_CONTROL = re.compile(rb"[\x00-\x1f]")


def repaired(piece: bytes) -> bytes:
    """The piece with bare quotes, wrong escapes, control characters, non-numbers and text that is not UTF-8 put right."""
    text = piece.decode("utf-8", "replace").encode()
    return _joined(_with_values(_joined(_with_names(text))))


def _joined(pieces: Iterator[bytes]) -> bytes:
    """One after another: joining millions at once takes eighty bytes for each."""
    text = bytearray()
    for piece in pieces:
        text += piece
    return bytes(text)


def _with_names(text: bytes) -> Iterator[bytes]:
    """The text in pieces, with the quotes in names escaped. A name that is sound is left alone, and nothing in it is taken for a
    beginning; one that is not goes up to what looks like the next key of its event, in the same line."""
    done = 0
    key = _NEXT_KEY.search(text)
    newline = text.find(b"\n")
    while name := _NAME.search(text, done):
        begin = name.end()
        yield text[done:begin]
        done = begin
        end = _string_end(text, begin, _NAME_STOP)
        if end is not None and text[end] == ord('"') and _AFTER_NAME.match(text, end + 1):
            done = end + 1
            yield text[begin:done]
            continue
        if key is not None and key.start() < begin:
            key = _NEXT_KEY.search(text, begin)
        if 0 <= newline < begin:
            newline = text.find(b"\n", begin)
        if key is not None and key.start() - begin <= _LONGEST_NAME and not begin <= newline < key.start():
            yield text[begin : key.start()].replace(b'\\"', b'"').replace(b'"', b'\\"')
            yield key[0]
            done = key.end()
    yield text[done:]


def _with_values(text: bytes) -> Iterator[bytes]:
    """The text in pieces, with its strings mended and null for what is no number."""
    done = at = 0
    while found := _STRING_OR_NUMBER.search(text, at):
        at = found.end()
        if found[1]:  # a valid string
            continue
        yield text[done : found.start()]
        done = found.start()
        if not found[0].startswith(b'"'):
            yield b"null"
            done = at
            continue
        end = _string_end(text, found.start() + 1, _STOP)
        if end is None:
            break
        done = at = end + 1
        escaped = _ESCAPE.sub(lambda one: one[0] if one[1] else b"\\\\", text[found.start() : done])
        yield _CONTROL.sub(lambda char: b"\\u%04x" % char[0][0], escaped)
    yield text[done:]


def _string_end(text: bytes, begin: int, stop: "re.Pattern[bytes]") -> int | None:
    """Where the string that begins there ends, or where else it stops; None where that is nowhere near."""
    at = begin
    most = begin + _LONGEST_STRING
    while found := stop.search(text, at, most):
        if found[0] != b"\\":
            return found.start()
        at = found.start() + 2
    return None
