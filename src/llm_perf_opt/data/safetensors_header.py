"""The head of a .safetensors file: which tensors it should hold, and whether it holds them. Weights are not read."""

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from llm_perf_opt.errors import ParseError
from llm_perf_opt.user_files import open_ordinary

_MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the header describes it."""

    dtype: str
    elements: int
    bytes: int


class _Described(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, or a ParseError that says how it is damaged."""
    try:
        size = path.stat().st_size
        with open_ordinary(path) as file:
            length = int.from_bytes(start, "little") if len(start := file.read(8)) == 8 else -1
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise _damaged(path, "it does not begin with the length of a header")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        described = {name: msgspec.json.decode(raw, type=_Described) for name, raw in header.items() if name != "__metadata__"}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, f"its header is not sound ({error})") from error
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror or error}.", "Check its permissions.") from error
    return _checked(path, described, size - 8 - length)


def _checked(path: Path, described: dict[str, _Described], stored: int) -> dict[str, StoredTensor]:
    """The tensors, which must follow one another without gap and end where the file does."""
    found, end = {}, 0
    for name, tensor in sorted(described.items(), key=lambda item: item[1].data_offsets):
        begin, until = tensor.data_offsets
        if begin != end or until < begin or any(length < 0 for length in tensor.shape):
            raise _damaged(path, f"the tensor {name!r} does not lie where it should")
        elements = math.prod(tensor.shape)
        if tensor.dtype in _BITS and elements * _BITS[tensor.dtype] != (until - begin) * 8:
            raise _damaged(path, f"the tensor {name!r} has {until - begin} bytes, which its shape and dtype do not make")
        found[name] = StoredTensor(tensor.dtype, elements, until - begin)
        end = until
    if end != stored:
        short = "cut short" if stored < end else "longer than it should be"
        raise _damaged(path, f"it is {short}: {stored} bytes of weights, the header tells of {end}")
    return found


def _damaged(path: Path, why: str) -> ParseError:
    return ParseError(f"{path.name} is damaged: {why}.", "Obtain it again.")
