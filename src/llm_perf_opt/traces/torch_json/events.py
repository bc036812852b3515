"""Decode the events of a torch trace: fast if the file is as torch writes it, exactly if times have more digits than a float,
tolerantly if values have other types. And repair text that is not JSON.
"""

import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal

import msgspec

from llm_perf_opt.traces.torch_json.codes import KEPT

EXACT_BELOW_US = float(2**43)
"""Below this many µs (101 days) adjacent floats are less than 1 ns apart, so rounding to ns restores the digits of the file.
torch counts from a base (baseTimeNanoseconds) of at most three months ago to stay below it; older versions count from 1970."""
NO_TIME = float("nan")
"""The start of an event without one, as a float."""


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """The keys of `args` that are read; others are skipped."""

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
    """The keys of events of all phases and categories. `gc=False`: events have no reference cycles."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    args: Arguments = NO_ARGUMENTS


class Event(_AnyPhase, gc=False):
    """An event whose times fit exactly in a float."""

    ts: float = NO_TIME
    dur: float = 0.0


Category = Literal[
    "", "cpu_op", "kernel", "cuda_runtime", "user_annotation", "gpu_user_annotation", "gpu_memcpy", "gpu_memset",
    "cuda_driver", "python_function", "overhead", "Trace",
]  # fmt: skip


class UsualEvent(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """The same with a duration and a category that torch writes, whose text is then shared by all events."""

    ph: ClassVar[str] = "X"
    cat: Category = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = NO_TIME
    dur: float = 0.0
    args: Arguments = NO_ARGUMENTS


class PassedOver(msgspec.Struct, gc=False, tag_field="ph"):
    """An arrow from a launch to its kernel, the name of a thread, or an instant: a third of a trace, and not kept."""

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
    """The same with times read from their decimal text, as numbers or strings; an eighth as fast."""

    ts: Decimal | None = None
    dur: Decimal = Decimal(0)


AnyEvent = UsualEvent | Event | ExactEvent
"""An event that may be kept."""


class NeedsDigits(Exception):  # noqa: N818 - a signal between decoder and columns
    """A time in this chunk needs more digits than a float has."""


class EventDecoder:
    """Decodes arrays of events and passes them on. Remembers which decoder the file needs."""

    def __init__(self, take: Callable[[list[Any]], None]) -> None:
        self._take = take
        self._decoders: tuple[msgspec.json.Decoder[Any], ...] = (
            msgspec.json.Decoder(list[UsualEvent | _ArrowBegins | _ArrowEnds | _Metadata | _Instant]),
            msgspec.json.Decoder(list[Event]),
            msgspec.json.Decoder(list[ExactEvent]),
        )
        self._first = 0
        self._any = msgspec.json.Decoder(float_hook=Decimal)
        self.not_events = 0
        """Array members that are not objects, or have an impossible time."""

    def __call__(self, text: bytes | memoryview) -> int:
        """Decode an array, pass on its events and return their number; or raise and pass on none."""
        for number in range(self._first, len(self._decoders)):
            self._first = number  # the next chunk will need the same
            try:
                return self._keep(self._decoders[number].decode(text))
            except (NeedsDigits, msgspec.ValidationError, OverflowError):
                continue
        values = self._any.decode(text)
        events = [_coerce(value) for value in values if isinstance(value, dict)]
        valid = [event for event in events if not _is_impossible(event)]
        kept = self._keep(valid)
        self.not_events += len(values) - len(valid)
        return kept

    def _keep(self, events: list[Any]) -> int:
        self._take(events)
        return len(events)


def _coerce(value: dict[str, Any]) -> ExactEvent:
    """Return an event from any object: a value of the wrong type counts as missing."""
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


def _is_impossible(event: ExactEvent) -> bool:
    """Return whether an event that would be kept has a time beyond 64 bits."""
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
    """Return a finite number of any size, or None. Impossible times are detected later."""
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
    x, y, z = (_whole(item, 0) for item in value)
    return (x, y, z) if abs(x * y * z) < _LARGEST else (0, 0, 0)


# --- repairing ------------------------------------------------------------------------------------------------------------------
# torch does not escape names: a label with a quote breaks the JSON. Other tools write NaN and Infinity. Each byte is examined a
# fixed number of times, and no pattern repeats a group, because each repetition takes a hundred bytes of memory.

_NAME = re.compile(rb'"name"\s*:\s*"')
_NEXT_KEY = re.compile(rb'"\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|s|id)"\s*:')
_LONGEST_NAME = 4000
_AFTER_NAME = re.compile(rb"\s*[,}]")
_STRING_OR_NUMBER = re.compile(rb'"[^"\\\x00-\x1f]*(")?|-?\b(?:nan|NaN|inf|Infinity)\b')
_STOP = re.compile(rb'["\\]')
_NAME_STOP = re.compile(rb'["\\\n]')
_LONGEST_STRING = 1 << 20
"""A longer string with escapes or control characters is not repaired, and its event is lost."""
_ESCAPE = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_CONTROL = re.compile(rb"[\x00-\x1f]")


def repaired(piece: bytes) -> bytes:
    """Return the piece with unescaped quotes, wrong escapes, control characters, NaN and invalid UTF-8 repaired."""
    text = piece.decode("utf-8", "replace").encode()
    return _joined(_with_values(_joined(_with_names(text))))


def _joined(pieces: Iterator[bytes]) -> bytes:
    """Join pieces one by one: `bytes.join` takes eighty bytes for each of millions."""
    text = bytearray()
    for piece in pieces:
        text += piece
    return bytes(text)


def _with_names(text: bytes) -> Iterator[bytes]:
    """Yield the text in pieces, with the quotes in names escaped. A valid name is skipped as a whole; an invalid one extends to
    what looks like the next key of its event on the same line."""
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
    """Yield the text in pieces, with repaired strings, and null instead of NaN and Infinity."""
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
        escaped = _ESCAPE.sub(lambda escape: escape[0] if escape[1] else b"\\\\", text[found.start() : done])
        yield _CONTROL.sub(lambda char: b"\\u%04x" % char[0][0], escaped)
    yield text[done:]


def _string_end(text: bytes, begin: int, stop: "re.Pattern[bytes]") -> int | None:
    """Return where the string that begins there ends or is interrupted, or None if that is too far away."""
    at = begin
    most = begin + _LONGEST_STRING
    while found := stop.search(text, at, most):
        if found[0] != b"\\":
            return found.start()
        at = found.start() + 2
    return None
