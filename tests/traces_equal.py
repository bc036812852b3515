"""Whether two traces say the same, whatever numbers their names have."""

from typing import Any

import numpy as np

from llm_perf_opt.traces.events import Trace

_NAMES = ("name", "domain", "collective", "process_group", "group_ranks")


def said(trace: Trace) -> dict[str, Any]:
    """Everything that a trace says: rows with their names, in an order of their own, so that events of equal times compare."""
    tables = {}
    for table in ("work", "calls", "ranges", "operators", "collectives"):
        columns = getattr(trace, table).columns()
        types = {name: column.dtype for name, column in columns.items()}
        plain = [_plain(trace, name, column) for name, column in columns.items()]
        tables[table] = (types, sorted(zip(*plain, strict=True)))
    return {"source": trace.source, "problems": trace.problems, "facts": trace.facts, **tables}


def _plain(trace: Trace, name: str, column: Any) -> list[Any]:
    if name == "shapes":  # an event that had to be coerced gets them spelled without spaces, as do its neighbors in the chunk
        return [trace.name_of(value).replace(" ", "") for value in column]
    return [trace.name_of(value) for value in column] if name in _NAMES else list(column.tolist())


def in_order(trace: Trace) -> bool:
    """Whether every table is in the order of its starts."""
    return all((np.diff(table.start_ns) >= 0).all() for table in (trace.work, trace.calls, trace.ranges, trace.operators))
