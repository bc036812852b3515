"""Ceilings read back from a file. A measured value and a missing one are told apart by their fields."""

from dataclasses import fields, make_dataclass
from pathlib import Path
from types import GenericAlias
from typing import Any

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.machine_records import CeilingRow, Ceilings, FoundCeilings
from llm_perf_opt.core.records import Distribution, Missing
from llm_perf_opt.core.run_folder import read_record


def read_ceilings(path: Path) -> FoundCeilings:
    """What `write_record` wrote of FoundCeilings, or a ParseError."""
    stored: Any = read_record(path, _FOUND)
    try:
        rows = tuple(CeilingRow(**{**_values(row), "value": _value(row.value)}) for row in stored.ceilings.rows)
    except msgspec.ValidationError as error:
        raise ParseError(f"{path} cannot be read: {error}", "The file is damaged, or was written by another version.") from error
    ceilings = Ceilings(**{**_values(stored.ceilings), "rows": rows})
    return FoundCeilings(**{**_values(stored), "ceilings": ceilings})


def _value(stored: dict[str, Any]) -> Distribution | Missing:
    if stored.keys() == {"why"}:
        return msgspec.convert(stored, Missing)
    return msgspec.convert(stored, Distribution)


def _values(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _stored(kind: type, **replaced: Any) -> Any:
    """The same record with other types for some fields: msgspec does not read a union of two records."""
    return make_dataclass(
        f"Stored{kind.__name__}", [(field.name, replaced.get(field.name, field.type)) for field in fields(kind)]
    )


_ROWS = GenericAlias(list, (_stored(CeilingRow, value=dict[str, Any]),))
_FOUND = _stored(FoundCeilings, ceilings=_stored(Ceilings, rows=_ROWS))
