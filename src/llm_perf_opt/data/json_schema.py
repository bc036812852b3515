"""The columns that hold a stream of JSON objects without changing a value: texts stay texts, mixed values stay JSON."""

from collections.abc import Iterable
from typing import Any

from llm_perf_opt.errors import ConfigError
from llm_perf_opt.sql_files import quoted

_EXACT_IN_DOUBLE = 2**53
_MOST_FIELDS = 200
"""An object with more names than this is a dictionary, not a record: its names are data."""


class Seen:
    """What kinds of values one place of the records holds."""

    def __init__(self) -> None:
        self.scalars: set[str] = set()
        self.item: Seen | None = None
        self.fields: dict[str, Seen] | None = None

    def note(self, value: Any) -> None:
        """One more value."""
        kind = type(value)
        if kind is str:
            self.scalars.add("VARCHAR")
        elif kind is dict:
            self.note_object(value)
        elif kind is list:
            self.item = self.item or Seen()
            for item in value:
                self.item.note(item)
        elif value is not None:
            self.scalars.add(_scalar(value))

    def note_object(self, record: dict[str, Any]) -> None:
        """One more object."""
        if self.fields is None:
            self.fields = {}
        if len(self.fields) > _MOST_FIELDS:
            return  # it is JSON by now
        for name, value in record.items():
            field = self.fields.get(name)
            if field is None:
                field = self.fields[name] = Seen()
            field.note(value)

    def column_type(self) -> str:
        """The DuckDB type."""
        whole = (self.item is not None) + (self.fields is not None) + bool(self.scalars)
        if whole == 0:
            return "VARCHAR"  # nothing but null
        if whole > 1:
            return "JSON"
        if self.item is not None:
            return f"{self.item.column_type()}[]"
        if self.fields is not None:
            return self._struct(self.fields)
        return _one_scalar(self.scalars)

    @staticmethod
    def _struct(fields: dict[str, "Seen"]) -> str:
        names = list(fields)
        if not names or len(names) > _MOST_FIELDS or "" in names or len({name.casefold() for name in names}) < len(names):
            return "JSON"
        return f"STRUCT({', '.join(f'{quoted(name)} {field.column_type()}' for name, field in fields.items())})"


def columns(seen: Seen, where: str) -> dict[str, str]:
    """Name and type of each column, or a ConfigError where the records cannot be columns."""
    fields = seen.fields or {}
    if not fields:
        raise ConfigError(f"{where} holds no record with a field.", "A table needs at least one.")
    if len(fields) > _MOST_FIELDS:
        raise ConfigError(f"The records of {where} have more than {_MOST_FIELDS} fields.", "Keep it as JSONL.")
    if "" in fields:
        raise ConfigError(f"{where} has a field without a name.", "A column needs one: rename it, or keep it as JSONL.")
    for one, other in _alike(fields):
        raise ConfigError(f"{where} has the fields {one!r} and {other!r}, one column to a database.", "Rename one of them.")
    return {name: field.column_type() for name, field in fields.items()}


def _alike(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    folded: dict[str, str] = {}
    for name in names:
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            yield other, name


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, float):
        return "DOUBLE"
    if isinstance(value, int):
        if -_EXACT_IN_DOUBLE <= value <= _EXACT_IN_DOUBLE:
            return "INTEGER"
        return "BIGINT" if -(2**63) <= value < 2**63 else "JSON"
    return "JSON"


def _one_scalar(kinds: set[str]) -> str:
    if kinds == {"INTEGER", "DOUBLE"}:
        return "DOUBLE"
    if kinds <= {"INTEGER", "BIGINT"}:
        return "BIGINT"
    return next(iter(kinds)) if len(kinds) == 1 else "JSON"
