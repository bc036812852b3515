"""Values as text, the same in every renderer: numbers with units that scale, missing values with their reason."""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from llm_perf_opt.core.records import Distribution, Drift, Maybe, Missing
from llm_perf_opt.core.units import BYTE_RATE, BYTES, FLOP_RATE, FLOPS, SHARE, Scale, durations, in_unit, scaled
from llm_perf_opt.core.units import duration as duration
from llm_perf_opt.core.units import significant as significant

T = TypeVar("T")
R = TypeVar("R")


# --- values that may be missing -------------------------------------------------------------------------------------------


def then(value: Maybe[T], use: Callable[[T], Maybe[R]]) -> Maybe[R]:
    """Return `use(value)`; a missing value stays missing."""
    return value if isinstance(value, Missing) else use(value)


def words(value: Maybe[T], show: Callable[[T], str] = str) -> str:
    """Return a value as text for a sentence, or `n/a:` and the reason."""
    return str(value) if isinstance(value, Missing) else show(value)


def known(value: Maybe[T], default: R) -> T | R:
    """Return the value, or the default if it is missing."""
    return default if isinstance(value, Missing) else value


def present(values: Iterable[Maybe[T]]) -> list[T]:
    """Return the values that are not missing."""
    return [value for value in values if not isinstance(value, Missing)]


def missing(named: Iterable[tuple[str, Maybe[Any]]]) -> list[tuple[str, str]]:
    """Return the name and the reason of each missing value."""
    return [(name, value.why) for name, value in named if isinstance(value, Missing)]


_CODE = re.compile(r"(?<![\w`])`(?=\S)([^`\n]+)(?<=\S)`(?![\w`])")
"""Code in a sentence, such as a command. The script of the pages (rows.js) has the same pattern."""


def code_parts(text: str) -> list[tuple[str, bool]]:
    """Return the pieces of a sentence, and whether each is code: what stands between backticks."""
    return [(piece, bool(place % 2)) for place, piece in enumerate(_CODE.split(text)) if piece]


def capitalized(text: str) -> str:
    """Return a sentence with its first letter in upper case."""
    return text[:1].upper() + text[1:]


# --- numbers --------------------------------------------------------------------------------------------------------------


def count(number: int) -> str:
    """Return a large count in short form: 8.03 B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:  # 999,999 is 1 M, not 1,000 k
            return f"{number / size:.3g} {letter}"
    return str(number)


def grouped(number: float) -> str:
    """Return a whole number with thousands separators."""
    return f"{number:,.0f}"


def mean_count(number: float) -> str:
    """Return a mean of counts, which may be fractional."""
    if number == round(number):
        return grouped(number)
    return f"{number:,.1f}" if number >= 1000 else f"{number:.4g}"


def signed(ns: float) -> str:
    """Return a difference between two times, with its sign."""
    return f"{'+' if ns > 0 else ''}{duration(ns)}"


def flops_per_s(rate: float) -> str:
    """Return a compute rate: 12.34 TFLOP/s, 62.10 MFLOP/s."""
    return scaled(rate, FLOP_RATE)


def bytes_per_s(rate: float) -> str:
    """Return a bandwidth."""
    return scaled(rate, BYTE_RATE)


def flops(amount: float) -> str:
    """Return a number of floating-point operations: 12.34 GFLOP."""
    return scaled(amount, FLOPS)


def moved_bytes(amount: float) -> str:
    """Return an amount of memory traffic: 12.34 MB."""
    return scaled(amount, BYTES)


def fine_percent(share: float) -> str:
    """Return a share in percent with three significant digits."""
    return scaled(share, SHARE, 3)


def times(factor: float) -> str:
    """Return a factor: × 1.70."""
    return f"× {significant(factor, 3)}"


def memory_size(size: float) -> str:
    """Return the size of memory in binary units: 3.31 GiB."""
    scale = next((scale for scale in _MEMORY if abs(size) >= scale[0]), _MEMORY[-1])
    return f"{in_unit(size, scale, 3)} {scale[1]}"


_MEMORY: tuple[Scale, ...] = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def seconds(value: float) -> str:
    """Return seconds in the unit that suits them: 12.3 s, 50.0 ms."""
    return duration(value * 1e9, 3)


def with_unit(value: float, unit: str) -> str:
    """Return a figure in its metric's unit."""
    return duration(value) if unit == "ns" else f"{significant(value)} {unit}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share in percent; one that would round to zero is `< 0.1 %`."""
    least = 10.0**-digits
    return f"< {least:.{digits}f} %" if 0 < share * 100 < least / 2 else f"{share * 100:.{digits}f} %"


def signed_percent(share: float, digits: int = 2) -> str:
    """Return a change in percent, with its sign."""
    return f"{round(share * 100, digits) + 0.0:+.{digits}f} %"  # never -0.0


def signed_percents(low: float, high: float) -> str:
    """Return a range of changes: +0.34 to +14.45 %."""
    return f"{signed_percent(low).removesuffix(' %')} to {signed_percent(high)}"


# --- distributions ----------------------------------------------------------------------------------------------------------


def ends(value: Distribution | Drift) -> Maybe[tuple[float, float]]:
    """Return both ends of the 95 % interval."""
    return then(value.ci_low, lambda low: then(value.ci_high, lambda high: (low, high)))


def interval(value: Distribution, unit: str) -> Maybe[str]:
    """Return the 95 % interval of a median."""
    return then(ends(value), lambda found: _between(*found, value, unit))


def _between(low: float, high: float, value: Distribution, unit: str) -> str:
    return durations(low, high, around_ns=value.median) if unit == "ns" else f"{significant(low)} – {significant(high)}"


def known_within(value: Distribution, unit: str) -> str:
    """Return the 95 % interval of a median; for too few values, their range."""
    found = interval(value, unit)
    if not isinstance(found, Missing):
        return f"95 %: {found}, n = {value.n}"
    return "one value" if value.n == 1 else f"range: {_between(value.minimum, value.maximum, value, unit)}, n = {value.n}"


def bounds(value: Distribution, unit: str) -> Maybe[str]:
    """Return the 95 % interval of a median; for too few values, their range; for one value, why there is neither."""
    found = interval(value, unit)
    return known_within(value, unit) if isinstance(found, Missing) and value.n > 1 else found


def growth(found: Drift) -> str:
    """Return how the time of a decode step grows with the context. A slope that may be zero or negative has no figure."""
    contexts = f"from context {found.first_context} to {found.last_context}"
    within = ends(found)
    if isinstance(within, Missing):
        return f"unknown {contexts}: {within.why}"
    if min(within[0], found.ns_per_token) <= 0:
        return f"no growth measurable {contexts}"
    slope = f"{duration(found.ns_per_token)} per cached token (95 % interval {durations(*within)})"
    return f"{slope}, {signed_percent(found.share, 1)} {contexts}"
