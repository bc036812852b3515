"""Numbers in words, the same in every report: significant digits, and units that scale to the value."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from llm_perf_opt.core.records import Distribution, Drift, Maybe, Missing
from llm_perf_opt.core.units import BYTE_RATE, BYTES, FLOP_RATE, FLOPS, SHARE, duration, durations, scaled
from llm_perf_opt.core.units import significant as significant

T = TypeVar("T")
R = TypeVar("R")


# --- values that may be missing -------------------------------------------------------------------------------------------


def then(value: Maybe[T], use: Callable[[T], Maybe[R]]) -> Maybe[R]:
    """Return what follows from a value; what is missing stays missing."""
    return value if isinstance(value, Missing) else use(value)


def words(value: Maybe[T], show: Callable[[T], str] = str) -> str:
    """Return a value inside a sentence, or `n/a:` and the reason."""
    return str(value) if isinstance(value, Missing) else show(value)


def known(value: Maybe[T], default: R) -> T | R:
    """Return the value, or the default where it is missing."""
    return default if isinstance(value, Missing) else value


def present(values: Iterable[Maybe[T]]) -> list[T]:
    """Return the values that are there."""
    return [value for value in values if not isinstance(value, Missing)]


def missing(named: Iterable[tuple[str, Maybe[Any]]]) -> list[tuple[str, str]]:
    """Return name and reason of each value that is missing."""
    return [(name, value.why) for name, value in named if isinstance(value, Missing)]


# --- numbers --------------------------------------------------------------------------------------------------------------


def count(number: int) -> str:
    """Return a large count as people say it: 8.03 B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:  # what rounds up to the next unit is shown in it
            return f"{number / size:.3g} {letter}"
    return str(number)


def grouped(number: float) -> str:
    """Return a whole number with its thousands apart."""
    return f"{number:,.0f}"


def milliseconds(ns: float) -> str:
    """Return nanoseconds in the unit that suits them."""
    return duration(ns)


def signed(ns: float) -> str:
    """Return a difference of two times, with its sign."""
    return f"{'+' if ns > 0 else ''}{duration(ns)}"


def flops_per_s(rate: float) -> str:
    """Return a compute rate: 12.34 TFLOP/s, 62.10 MFLOP/s."""
    return scaled(rate, FLOP_RATE)


def bytes_per_s(rate: float) -> str:
    """Return a bandwidth."""
    return scaled(rate, BYTE_RATE)


def flops(amount: float) -> str:
    """Return an amount of computing: 12.34 GFLOP."""
    return scaled(amount, FLOPS)


def moved_bytes(amount: float) -> str:
    """Return an amount of memory traffic: 12.34 MB."""
    return scaled(amount, BYTES)


def fine_percent(share: float) -> str:
    """Return a share with three significant digits, however small."""
    return scaled(share, SHARE, 3)


def times(factor: float) -> str:
    """Return a factor: × 1.70."""
    return f"× {significant(factor, 3)}"


def gibibytes(count: int) -> str:
    """Return bytes in GiB, or MiB where that is clearer."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"


def seconds(value: float) -> str:
    """Return seconds in the unit that suits them."""
    return duration(value * 1e9, 3)


def with_unit(value: float, unit: str) -> str:
    """Return a figure in its metric's unit."""
    return duration(value) if unit == "ns" else f"{significant(value)} {unit}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share in percent."""
    return f"{share * 100:.{digits}f} %"


def share_words(share: float) -> str:
    """Return a share in percent, where a small one must not look like none."""
    return "under 0.1 %" if 0 < abs(share) < 0.0005 else percent(share)


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
    """Return what a median is known within: its 95 % interval, or the range of the values where they are too few for one."""
    found = interval(value, unit)
    if not isinstance(found, Missing):
        return f"95 %: {found}, n = {value.n}"
    return "one value" if value.n == 1 else f"range of {value.n} values: {_between(value.minimum, value.maximum, value, unit)}"


def bounds(value: Distribution, unit: str) -> Maybe[str]:
    """Return the interval of a median; of few values their range."""
    found = interval(value, unit)
    return known_within(value, unit) if isinstance(found, Missing) and value.n > 1 else found


def growth(found: Drift) -> str:
    """Return how a decode step's time grows with the context. A slope that may be zero, or is negative, has no figure."""
    contexts = f"from context {found.first_context} to {found.last_context}"
    within = ends(found)
    if isinstance(within, Missing):
        return f"not known {contexts}: {within.why}"
    if min(within[0], found.ns_per_token) <= 0:
        return f"no growth measurable {contexts}"
    return f"{duration(found.ns_per_token)} per cached token (95 % interval {durations(*within)}), {found.share:+.1%} {contexts}"
