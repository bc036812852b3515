"""Read YAML of someone else: no file of a few bytes takes the memory, the time or the stack of a large one."""

import re
from functools import cache
from typing import Any

from llm_perf_opt.core.value_limits import MOST_LEVELS, check_plain

MOST_VALUES = 100_000
"""In settings."""
_LONG_NUMBER = re.compile(r"[-+\d_:.]{100,}")
"""Numbers of base 60 (1:30:00) take time that grows with the square of their length."""


def load_yaml(text: str | bytes, most: int = MOST_VALUES) -> Any:
    """Return the plain values in a YAML text. Raise as `check_yaml` and `check_plain` do, or another error of `invalid_yaml`."""
    import yaml

    check_yaml(text, most)
    values = yaml.load(text, _fastest())  # noqa: S506 - a safe loader
    check_plain(values, most)
    return values


def invalid_yaml() -> tuple[type[Exception], ...]:
    """Return what reading a file that is no YAML raises; AttributeError and TypeError are those of invalid dates and keys."""
    import yaml

    return (yaml.YAMLError, ValueError, OSError, RecursionError, AttributeError, TypeError)


def check_yaml(text: Any, most: int = MOST_VALUES) -> None:
    """Raise a ValueError if a YAML text, or an open file, has too many values with its aliases expanded, or too deep ones.

    Aliases repeat values, and `<<` copies them. Only the words of the text are read here; nothing is built.
    """
    import yaml

    check = _Expanded(most)
    for event in yaml.parse(text, Loader=_fastest()):
        check.add(event)


@cache
def _fastest() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Expanded:
    """Counts the values of a text with each alias expanded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._sizes: dict[str, int] = {}
        self._open: list[tuple[str | None, int]] = []
        """Anchor of each list and mapping that has not ended, and the count before it."""

    def add(self, event: Any) -> None:
        """Count an event of the parser."""
        import yaml

        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = self._open.pop()
            if anchor:
                self._sizes[anchor] = self._count - before
        elif isinstance(event, yaml.AliasEvent):
            self._add_alias(event)
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(self._open) == MOST_LEVELS:
                raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
            self._open.append((event.anchor, self._count))
            self._count += 1
        elif isinstance(event, yaml.ScalarEvent):
            self._count += 1
            if event.anchor:
                self._sizes[event.anchor] = 1
            if (event.implicit[0] or event.tag) and _LONG_NUMBER.fullmatch(event.value):
                raise ValueError("it contains a number beyond 64 bits")
        if self._count > self._most:
            raise ValueError(f"it contains more than {self._most:,} values")

    def _add_alias(self, event: Any) -> None:
        if any(anchor == event.anchor for anchor, _ in self._open):
            raise ValueError(f"line {event.start_mark.line + 1}: a value contains itself")
        self._count += self._sizes.get(event.anchor, 0)  # an alias of nothing is an error of the loader
