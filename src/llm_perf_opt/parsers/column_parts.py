"""The columns of one part of a trace as bytes, and those added to the columns of another: its names are numbered anew."""

from typing import Any, BinaryIO

import msgspec
import numpy as np

from llm_perf_opt.events import Columns, DeviceWork, HostCalls, Operators, Ranges
from llm_perf_opt.parsers.torch_columns import TorchColumns

_KINDS: tuple[type[Columns], ...] = (DeviceWork, HostCalls, Operators, Ranges)
_NAME_COLUMNS = ("name", "shapes", "domain")
_ALIGNED = 8


class _Header(msgspec.Struct):
    rows: list[int]
    """Of each kind."""
    names: list[str]
    other_categories: list[str]
    unplaced_work: int
    negative_work: int
    negative_host: int
    note: bytes


def write_part(columns: TorchColumns, note: bytes, out: BinaryIO) -> None:
    """Everything in the columns, which are empty afterwards, and a note beside it."""
    tables = [columns.unsorted(kind) for kind in _KINDS]
    header = msgspec.msgpack.encode(
        _Header(
            [len(table) for table in tables], columns.names, columns.other_categories,
            columns.unplaced_work, columns.negative_work, columns.negative_host, note,
        )
    )  # fmt: skip
    out.write(len(header).to_bytes(_ALIGNED, "little") + header + bytes(-len(header) % _ALIGNED))
    for table in tables:
        for column in table.columns().values():
            out.write(np.ascontiguousarray(column).data)
            out.write(bytes(-column.nbytes % _ALIGNED))


def add_part(columns: TorchColumns, part: bytes) -> bytes:
    """Add what `write_part` wrote; returns the note."""
    size = int.from_bytes(part[:_ALIGNED], "little")
    header = msgspec.msgpack.decode(part[_ALIGNED : _ALIGNED + size], type=_Header)
    at = _ALIGNED + size + -size % _ALIGNED
    code = np.array([*(columns.code(name) for name in header.names), -1], np.int32)  # the last answers NO_NAME
    for kind, rows in zip(_KINDS, header.rows, strict=True):
        made: dict[str, Any] = {}
        for name, like in kind.none().columns().items():
            column = np.frombuffer(part, like.dtype, rows, at)
            made[name] = code[column] if name in _NAME_COLUMNS else column
            at += column.nbytes + -column.nbytes % _ALIGNED
        if rows:
            columns.add(kind(**made))
    for category in header.other_categories:
        columns.pass_over(category)
    columns.unplaced_work += header.unplaced_work
    columns.negative_work += header.negative_work
    columns.negative_host += header.negative_host
    return header.note
