"""Decode the events of a torch trace: fast if the file is as torch writes it, exactly if times have more digits than a float,
tolerantly if values have other types.
"""

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal

import msgspec

from llm_perf_opt.traces.torch_json.codes import KEPT

EXACT_BELOW_US = float(2**43)
"""Below this many µs (101 days) adjacent floats are less than 1 ns apart, so rounding to ns restores the digits of the file.
torch counts from a base (baseTimeNanoseconds) of at most three months ago to stay below it; older versions count from 1970."""
NO_TIME = float("nan")
"""The start of an event without one, as a float."""


_NO_TEXT = msgspec.Raw(b"")


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """The keys of `args` that are read; others are skipped. Those that only collectives need are kept as text."""

    correlation: int = 0
    device: int = -1
    stream: int = -1
    bytes: int = -1
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    graph_node: int = msgspec.field(default=0, name="graph node id")
    shapes: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Input type")
    collective: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Collective name")
    dtype: msgspec.Raw = _NO_TEXT
    elements_in: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="In msg nelems")
    elements_out: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Out msg nelems")
    group: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Process Group Name")
    group_ranks: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Process Group Ranks")
    group_size: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Group size")
    sequence: msgspec.Raw = msgspec.field(default=_NO_TEXT, name="Seq")


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
        self._any = msgspec.json.Decoder(float_hook=_parsed)
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
            **{field: _raw(given.get(key)) for field, key in _RAW.items()},
        ),
    )


_RAW = {field.name: field.encode_name for field in msgspec.structs.fields(Arguments) if field.type is msgspec.Raw}
"""Field → key of the arguments that are kept as text."""


def _raw(value: Any) -> msgspec.Raw:
    return _NO_TEXT if value is None else msgspec.Raw(msgspec.json.encode(value))


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


_LONG_EXPONENT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?e(-?)\+?[0-9]{18,}", re.I)
_BEYOND = Decimal("1e99")
"""In place of a number whose exponent is too large for a Decimal: such a time is impossible, too.
One that is too small becomes 0."""


def _parsed(text: str) -> Decimal | None:
    """Return a number from its text, or None if it is not one."""
    try:
        return Decimal(text)
    except (InvalidOperation, ValueError):
        found = _LONG_EXPONENT.fullmatch(text)
        return None if found is None else Decimal(0) if found[1] else _BEYOND


def _number(value: Any) -> Decimal | None:
    """Return a finite number of any size, or None. Impossible times are detected later."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    number = _parsed(value) if isinstance(value, str) else Decimal(value)
    return number if number is not None and number.is_finite() else None


def _triple(value: Any) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        return (0, 0, 0)
    x, y, z = (_whole(item, 0) for item in value)
    return (x, y, z) if abs(x * y * z) < _LARGEST else (0, 0, 0)
