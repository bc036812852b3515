"""Format numbers with significant digits and a unit that scales to the value. Every output uses this module."""

import math
import re

from llm_perf_opt.core.errors import ConfigError

Scale = tuple[float, str]
"""The size of a unit in base units, and its name."""

TIME: tuple[Scale, ...] = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
"""Units of times in nanoseconds."""
FLOP_RATE: tuple[Scale, ...] = (
    (1e12, "TFLOP/s"),
    (1e9, "GFLOP/s"),
    (1e6, "MFLOP/s"),
    (1e3, "kFLOP/s"),
    (1.0, "FLOP/s"),
)
"""Units of rates in FLOP/s."""
BYTE_RATE: tuple[Scale, ...] = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
"""Units of rates in bytes per second."""
FLOPS: tuple[Scale, ...] = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))
BYTES: tuple[Scale, ...] = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
SHARE: tuple[Scale, ...] = ((0.01, "%"),)

TIMES_WRITTEN = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
"""Units of a time on the command line, in seconds."""
SIZES_WRITTEN = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
"""Units of a size on the command line, in bytes."""
_WRITTEN = re.compile(r"\s*(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[A-Za-z]+)\s*")

DIGITS = 4
_LEAST = 1e-4
"""In the smallest unit. Smaller numbers are shown as `< 0.0001`."""
_MOST = 1e15
"""In the largest unit. Larger numbers have an exponent instead of rows of digits."""
_MOST_DIGITS = 40
"""Of a whole number that is shown with all of them."""


def as_float(value: float) -> float:
    """Return a number as a float: an integer beyond all floats becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _extreme(value: float, digits: int) -> str:
    """Return the text of a number that no unit fits: not a number, infinite, or beyond `_MOST`; empty for any other."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.{digits - 1}e}" if abs(value) >= _MOST else ""


def significant(value: float, digits: int = DIGITS) -> str:
    """Return a number with `digits` significant digits, with an exponent only if it is very small or very large."""
    value = as_float(value)
    if value == 0:
        return "0"
    if extreme := _extreme(value, digits):
        return extreme
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    return _plain(value, digits)


def scale_of(value: float, scales: tuple[Scale, ...], digits: int = DIGITS) -> Scale:
    """Return the largest unit in which the rounded value is at least one, or the smallest unit."""
    rounded = abs(float(f"{as_float(value):.{digits - 1}e}"))  # 999.96 µs is 1.000 ms
    return next((scale for scale in scales if rounded >= scale[0]), scales[-1])


def in_unit(value: float, scale: Scale, digits: int = DIGITS) -> str:
    """Return the number in a unit, without the unit; an integer in the base unit has no decimals. No exponent below 10^15."""
    number = as_float(value) / scale[0]
    if number == 0:
        return "0"
    if extreme := _extreme(number, digits):
        return extreme
    if abs(number) < _LEAST:
        return f"{'>' if number < 0 else '<'} {'-' if number < 0 else ''}{_LEAST:.4f}"
    if scale[0] == 1.0 and number == round(number) and abs(number) < 10**digits:
        return f"{number:,.0f}"
    return _plain(number, digits)


def scaled(value: float, scales: tuple[Scale, ...], digits: int = DIGITS) -> str:
    """Return a number with the unit that fits its size."""
    scale = scale_of(value, scales, digits)
    return f"{in_unit(value, scale, digits)} {scale[1]}"


def duration(ns: float, digits: int = DIGITS) -> str:
    """Return a time in nanoseconds as text: 726 ns, 12.40 µs, 3.062 ms, 1.200 s."""
    return "0 ms" if ns == 0 else scaled(ns, TIME, digits)


def durations(low_ns: float, high_ns: float, digits: int = DIGITS, *, around_ns: float | None = None) -> str:
    """Return two times in the same unit: the unit of `around_ns`, or else of the longer time."""
    scale = scale_of(max(abs(low_ns), abs(high_ns)) if around_ns is None else around_ns, TIME, digits)
    return f"{in_unit(low_ns, scale, digits)} – {in_unit(high_ns, scale, digits)} {scale[1]}"


def counted(number: int, word: str) -> str:
    """Return a number of things: 1 run, 2,000 runs."""
    shown = f"{number:,}" if abs(number) < 10**_MOST_DIGITS else significant(number)
    return f"{shown} {word}{'' if number == 1 else 's'}"


def _plain(value: float, digits: int) -> str:
    rounded = float(f"{value:.{digits - 1}e}")  # 9.9996 rounds to 10.00: one more digit before the point
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def percentage(share: float, decimals: int = 0, *, signed: bool = False) -> str:
    """Return a share in percent: 50 %, or with a sign +4.0 %."""
    percent = as_float(share) * 100
    extreme = _extreme(percent, DIGITS)
    if extreme:
        return f"{'+' if signed and percent > 0 else ''}{extreme} %"
    return f"{percent:{'+' if signed else ''}.{decimals}f} %"


def byte_count(number: int) -> str:
    """Return a size in bytes with one decimal in the unit that fits."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= 0.99995 * size:  # a value that rounds up to the next unit is shown in it
            in_size = as_float(number) / size
            return f"{_extreme(in_size, DIGITS) or f'{in_size:.1f}'} {unit}"
    return f"{number} bytes" if abs(number) < _MOST else f"{significant(number)} bytes"


def seconds_of(text: str, option: str) -> float:
    """Return the seconds of a time as the user wrote it: `90s`, `20m` or `1.5h`. Raise a ConfigError that names the option."""
    return _written(text, TIMES_WRITTEN, f"{option} {text!r} is not a time.", "Write 90s, 20m or 1.5h.")


def bytes_of(text: str, option: str) -> int:
    """Return the bytes of a size as the user wrote it: `500MB` or `2GB`. Raise a ConfigError that names the option."""
    return round(_written(text, SIZES_WRITTEN, f"{option} {text!r} is not a size.", "Write 500MB, 2GB or 1.5GiB."))


def _written(text: str, units: dict[str, float], fact: str, remedy: str) -> float:
    found = _WRITTEN.fullmatch(text)
    value = float(found["number"]) * units.get(found["unit"], 0.0) if found else 0.0
    if not value:
        raise ConfigError(fact, remedy)
    return value
