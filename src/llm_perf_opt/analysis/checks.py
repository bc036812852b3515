"""Checks of numbers a user gave: each failure names the field, what it must be and what it was."""

import math

from llm_perf_opt.errors import ConfigError

_MOST = 10**12
"""Past any real size; products of a few such numbers still fit a float."""


def whole_number(field: str, value: object, *, at_least: int) -> int:
    """The value as an int, or a ConfigError that names the field. A bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{field} must be a whole number, not {shown(value)}.")
    if value < at_least:
        raise ConfigError(f"{field} must be at least {at_least}, not {value}.")
    if value > _MOST:
        raise ConfigError(f"{field} must be at most {_MOST:,}.")
    return value


def positive_number(field: str, value: object) -> float:
    """The value as a finite float above zero, or a ConfigError that names the field."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{field} must be a number, not {shown(value)}.")
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{field} must be above zero and finite, not {value}.")
    return float(value)


def shown(value: object) -> str:
    """A value for an error message: its text, cut short, and its kind."""
    kind = "null" if value is None else type(value).__name__
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"
