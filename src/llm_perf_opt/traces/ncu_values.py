"""Cells of Nsight Compute's CSV: numbers in the machine's locale, units, launch sizes, NVTX stacks."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.core.records import Maybe, Missing

Decimal = Literal[".", ","]

_SPACES = re.compile(r"(?<=\d)[\s\u00a0\u202f\u2009'’](?=\d{3})")
_INSTANCES = re.compile(r"\s*\([^()]*\)$")
_ABSENT = {"n/a", "(!) n/a", "nan", "-nan", "+nan", "inf", "-inf", "+inf", "no data", "(!) nan"}
_PLAIN = re.compile(r"[+-]?\d+(?:[eE][+-]?\d+)?$")
_GROUPED = {
    ".": re.compile(r"[+-]?\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d*)?$"),
    ",": re.compile(r"[+-]?\d{1,3}(?:\.\d{2,3})*\.\d{3}(?:,\d*)?$"),
}
_POINTED = {".": re.compile(r"[+-]?\d+\.\d*(?:[eE][+-]?\d+)?$"), ",": re.compile(r"[+-]?\d+,\d*(?:[eE][+-]?\d+)?$")}
# What only one of the two ways of writing allows. Two decimals are what the tool prints; three digits may be thousands.
_SHOWS: dict[Decimal, re.Pattern[str]] = {
    ".": re.compile(r"[+-]?(?:\d{1,3}(?:,\d{2,3})*,\d{3}\.\d*|\d{1,3}(?:,\d{3}){2,}|\d+\.(?:\d{1,2}|\d{4,})(?:[eE].*)?)$"),
    ",": re.compile(r"[+-]?(?:\d{1,3}(?:\.\d{2,3})*\.\d{3},\d*|\d{1,3}(?:\.\d{3}){2,}|\d+,(?:\d{1,2}|\d{4,})(?:[eE].*)?)$"),
}
_EITHER = re.compile(r"[+-]?\d{1,3}\.\d{3}$")
"""One point before three digits: thousands in one locale, decimals that the tool never prints in the other."""

EMPTY = Missing("Nsight Compute left the cell empty")
NOT_AVAILABLE = Missing("Nsight Compute says n/a: the chip lacks this counter, or it could not be read")


class Locale:
    """Finds out from a file's own cells which mark separates decimals."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def look(self, cells: Iterable[str]) -> None:
        """Take cells into account."""
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
        """The mark, by the weight of what was seen."""
        point, comma = self._seen["."], self._seen[","]
        if point == comma and (point or self._seen["either"]):
            return Missing("the file does not show whether a point separates decimals or thousands")
        return "," if comma > point else "."


def number(cell: str, decimal: Maybe[Decimal]) -> Maybe[float] | None:
    """A cell's number; None for words, which are no counter's value."""
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
    """Without blanks between thousands, and without the single values that some counters list after their aggregate."""
    return _INSTANCES.sub("", _SPACES.sub("", cell.strip()))


def _finite(text: str) -> Maybe[float]:
    value = float(text)
    return value if math.isfinite(value) else Missing(f"{text[:40]} is beyond any counter")


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
    """A base unit and what a printed value is multiplied with to be in it."""

    name: str
    factor: float


def unit(text: str) -> Unit:
    """`Kbyte` → bytes × 1000, `us` → ns × 1000, `Gbyte/s` → byte/second × 1e9; an unknown unit is taken as it stands."""
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
_RANGE = re.compile(r'"(.*?)"(?=\s|$)', re.DOTALL)
_TOLD_TWICE = re.compile(r"([^:]*):(.*):[^:]*:[^:]*:[^:]*:[^:]*:[^:]*:\2$", re.DOTALL)
_LONGEST_RANGE = 4096
_FIELDS_AFTER_NAME = 6
_DEFAULT_DOMAIN = "<default domain>"


def size(cell: str) -> tuple[int, int, int] | None:
    """`(384, 1, 1)`, or None where it is something else."""
    found = _SIZE.match(cell.strip())
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def ranges(cell: str) -> tuple[str, ...]:
    """`691  "LLM:decode:none:…"  "LLM:decode_step:…"` → `LLM@decode`, `LLM@decode_step`; of the default domain the name alone."""
    return tuple(_range(text) for text in _RANGE.findall(cell))


def _range(text: str) -> str:
    """Domain, name and six more fields. A name may hold colons itself; most messages repeat it, which tells where it ends."""
    twice = _TOLD_TWICE.match(text) if len(text) <= _LONGEST_RANGE else None
    if twice:
        domain, name = twice[1], twice[2]
    else:
        domain, _, rest = text.partition(":")
        name = rest.rsplit(":", _FIELDS_AFTER_NAME)[0]
    return name if domain in ("", _DEFAULT_DOMAIN) else f"{domain}@{name}"
