"""What torch writes about a collective: its name, its process group, and the size of its input and output."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from llm_perf_opt.traces.events import NO_NAME, Collectives, Int64
from llm_perf_opt.traces.torch_json.codes import LARGEST_NS, OPERATORS, RANGES, WORK, Codes
from llm_perf_opt.traces.torch_json.events import AnyEvent, Arguments

_LABEL = re.compile(r"(nccl|gloo|mpi|ucc|xccl|hccl):\w")
"""Labels of torch's process groups: `nccl:all_reduce`."""
_OPERATOR = "record_param_comms"
"""The operator that carries the parameters of a collective."""
_KERNEL = "nccl"
"""In the name of every kernel that carries them, also those of RCCL."""
_SIZES = {
    "double": 8, "long": 8, "long int": 8, "int64": 8, "uint64": 8, "unsigned long": 8, "complexfloat": 8, "complexdouble": 16,
    "float": 4, "int": 4, "int32": 4, "uint32": 4, "unsigned int": 4,
    "half": 2, "bfloat16": 2, "short": 2, "short int": 2, "int16": 2, "uint16": 2,
    "char": 1, "signed char": 1, "unsigned char": 1, "byte": 1, "bool": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
"""Bytes of an element by the name of its type, in lower case and without `c10::`. Types that begin with `float8` have one."""
_MOST_GROUPS_TEXT = 100_000
"""Characters. A longer list of process groups is left out."""
_LONGEST_TEXT = 500


def states_collective(category: str, name: str) -> bool:
    """Return whether events with this name state something about a collective."""
    if category in RANGES:
        return _LABEL.match(name) is not None
    if category in OPERATORS:
        return name == _OPERATOR
    return category in WORK and _KERNEL in name.lower()


def collective_columns(codes: Codes, events: Sequence[AnyEvent], start: Int64, end: Int64, *, on_device: bool) -> Collectives:
    """Return what these events state."""
    known: dict[tuple[bytes, ...], tuple[int, ...]] = {}
    rows = np.array([_stated(codes, event.args, known) for event in events], np.int64).reshape(len(events), 7).T
    where = [(event.args.device, event.args.stream) if on_device else (event.pid, event.tid) for event in events]
    return Collectives(
        start_ns=start,
        end_ns=end,
        name=np.array([codes.name[event.name] for event in events], np.int32),
        on_device=np.full(len(events), on_device, np.uint8),
        collective=rows[0].astype(np.int32),
        process_group=rows[1].astype(np.int32),
        group_ranks=rows[2].astype(np.int32),
        group_size=rows[3],
        in_bytes=rows[4],
        out_bytes=rows[5],
        sequence=rows[6],
        process=np.array([codes.identity[first] for first, _ in where], np.int64),
        thread=np.array([codes.identity[second] for _, second in where], np.int64),
    )


def _stated(codes: Codes, given: Arguments, known: dict[tuple[bytes, ...], tuple[int, ...]]) -> tuple[int, ...]:
    """Return collective, group, ranks of the group, its size, bytes in and out, and sequence number.

    All but the number repeat, so each distinct text is read once.
    """
    texts = (given.collective, given.group, given.group_ranks, given.dtype, given.elements_in, given.elements_out)
    key = tuple(map(bytes, (*texts, given.group_size, given.shapes, given.types)))
    if key not in known:
        known[key] = _read(codes, given)
    return *known[key], _whole(given.sequence, -1) if given.sequence else -1


def _read(codes: Codes, given: Arguments) -> tuple[int, ...]:
    """Return all of it but the number."""
    names = [_text(raw) for raw in (given.collective, given.group, given.group_ranks)]
    width = element_size(_text(given.dtype))
    elements = [_whole(raw, -1) for raw in (given.elements_in, given.elements_out)]
    bytes_in, bytes_out = (count * width if width and count >= 0 else -1 for count in elements)
    if bytes_in < 0 and not given.elements_in:
        bytes_in = _tensor_bytes(given)
    codes_of = [codes.name[name] if name else NO_NAME for name in names]
    return *codes_of, max(_whole(given.group_size, 0), 0), bytes_in, bytes_out


def element_size(dtype: str) -> int:
    """Return the bytes of an element of a type as torch names it; 0 if unknown."""
    name = dtype.removeprefix("c10::").lower()
    return 1 if name.startswith("float8") else _SIZES.get(name, 0)


def _tensor_bytes(given: Arguments) -> int:
    """Return the size of the inputs by their shapes and types; -1 if unknown."""
    shapes, types = _decoded(given.shapes), _decoded(given.types)
    if not isinstance(shapes, list) or not isinstance(types, list) or len(shapes) != len(types) or not shapes:
        return -1
    total = 0
    for shape, dtype in zip(shapes, types, strict=True):
        width = element_size(dtype) if isinstance(dtype, str) else 0
        elements = _elements(shape)
        if not width or elements < 0:
            return -1
        total += elements * width
    return total if total < LARGEST_NS else -1


def _elements(shape: Any) -> int:
    """Return the elements of a tensor; -1 if its shape is not one, or has too many."""
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        return -1
    if 0 in shape:
        return 0
    elements = 1
    for size in shape:
        elements *= size
        if elements >= LARGEST_NS:  # multiplying on takes time that grows with the square of the length
            return -1
    return elements


def process_groups(stated: Any) -> str:
    """Return the process groups with more than one rank, as a JSON list of name and ranks; empty if unknown."""
    if not isinstance(stated, list):
        return ""
    groups = [(group.get("pg_name"), group.get("ranks")) for group in stated if isinstance(group, dict)]
    found = [
        [str(name)[:_LONGEST_TEXT], ranks]
        for name, ranks in groups
        if isinstance(ranks, list) and len(ranks) > 1 and all(isinstance(rank, int) for rank in ranks)
    ]
    text = msgspec.json.encode(found).decode()
    return text if found and len(text) <= _MOST_GROUPS_TEXT else ""


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw) if raw else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _text(raw: msgspec.Raw) -> str:
    value = _decoded(raw)
    return value[:_LONGEST_TEXT] if isinstance(value, str) else ""


def _whole(raw: msgspec.Raw, default: int) -> int:
    value = _decoded(raw)
    known = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_NS // 16
    return value if known else default
