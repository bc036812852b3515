"""Read Arrow files saved by Hugging Face datasets, batch by batch."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.proportion import STREAM_RATIO_COUNTS_FROM_BYTES, DisproportionError, Proportion
from llm_perf_opt.core.user_files import check_ordinary
from llm_perf_opt.workspace.data.inventory import Advance
from llm_perf_opt.workspace.data.lines import MAX_LINE_BYTES, missing_column

_ROWS_AT_ONCE = 1024
_BLOCK_BYTES = 32 * 1024 * 1024
_CELL_BYTES = 16
"""What a value counts besides its text."""


def count_rows(path: Path) -> int:
    """Return the number of rows."""
    return sum(batch.num_rows for batch in _batches(path, lambda _: None))


def objects(path: Path, advance: Advance) -> Iterator[list[dict[str, Any]]]:
    """Yield blocks of rows as objects."""
    yield from (rows.to_pylist() for rows in _blocks(path, advance))


def column(path: Path, name: str, advance: Advance) -> Iterator[list[Any]]:
    """Yield blocks of one column."""
    yield from (rows.column(0).to_pylist() for rows in _blocks(path, advance, name))


def _blocks(path: Path, advance: Advance, name: str | None = None) -> Iterator[Any]:
    """Yield pieces of batches that are bounded by rows and bytes, with all columns or one."""
    proportion, file_bytes = Proportion(STREAM_RATIO_COUNTS_FROM_BYTES), path.stat().st_size
    with _reading(path):
        for batch in _batches(path, advance):
            if name is not None and name not in batch.schema.names:
                raise missing_column(path, name, batch.schema.names)
            wanted = batch if name is None else batch.select([name])
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                for rows, size in _halved(wanted.slice(start, _ROWS_AT_ONCE), path):
                    proportion.add(file_bytes, size)
                    yield rows


def _batches(path: Path, advance: Advance) -> Iterator[Any]:
    check_ordinary(path)
    with _reading(path):
        import pyarrow as pa

        with pa.memory_map(str(path)) as mapped:  # what is not compressed is not read
            for message in pa.ipc.MessageReader.open_stream(mapped):
                _check_compression(message)
        done, proportion, size = 0, Proportion(STREAM_RATIO_COUNTS_FROM_BYTES), path.stat().st_size
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                proportion.add(size, 0, batch.num_rows)  # a row may take no bytes
                yield batch
                advance(file.tell() - done)
                done = file.tell()


def _check_compression(message: Any) -> None:
    """Raise a DisproportionError if unpacking a message takes far more memory than its size: all of it is unpacked at once."""
    kind = message.type
    if kind not in (_BATCH, _DICTIONARY):
        return
    batch = _Table(memoryview(message.metadata)).table(_HEADER_FIELD)
    if kind == _DICTIONARY:
        batch = batch.table(_DATA_FIELD)
    if not batch.at(_COMPRESSION_FIELD):
        return
    body, unpacked = memoryview(message.body), 0
    for start, length in batch.pairs(_BUFFERS_FIELD):
        unpacked += max(0, *_INT64.unpack_from(body, start)) if length else 0  # -1: this buffer is not compressed
    Proportion(STREAM_RATIO_COUNTS_FROM_BYTES).add(len(body), unpacked)


_BATCH, _DICTIONARY = "record batch", "dictionary"
_HEADER_FIELD, _DATA_FIELD, _BUFFERS_FIELD, _COMPRESSION_FIELD = 2, 1, 2, 3
"""Of Message, DictionaryBatch and RecordBatch in Message.fbs of Apache Arrow, whose Python package does not show them."""
_INT64 = struct.Struct("<q")


class _Table:
    """A table of a FlatBuffer, which Arrow has verified."""

    def __init__(self, data: memoryview, at: int | None = None) -> None:
        self._data = data
        self._at = self._number("<I", 0) if at is None else at

    def _number(self, form: str, at: int) -> int:
        return int(struct.unpack_from(form, self._data, at)[0])

    def at(self, field: int) -> int:
        """Return where a field is; 0 if the table does not have it."""
        layout = self._at - self._number("<i", self._at)
        place = 4 + 2 * field
        inner = self._number("<H", layout + place) if place < self._number("<H", layout) else 0
        return self._at + inner if inner else 0

    def table(self, field: int) -> "_Table":
        """Return the table in a field."""
        return _Table(self._data, self._follow(field))

    def pairs(self, field: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs of 64-bit numbers in a list."""
        start = self._follow(field)
        yield from struct.iter_unpack("<qq", self._data[start + 4 : start + 4 + 16 * self._number("<I", start)])

    def _follow(self, field: int) -> int:
        at = self.at(field)
        if not at:
            raise ParseError("The Arrow file has a message without content.", "The file is damaged.")
        return at + self._number("<I", at)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ResourceError(
            f"{path.name} is an Arrow file, and reading it needs pyarrow, which is not installed.",
            "Install it: pip install 'llm-perf-opt[datasets]'. Or save the dataset as JSONL or Parquet.",
        ) from error
    try:
        yield
    except DisproportionError as error:
        raise error.of(path) from error
    except (pa.ArrowException, OSError, MemoryError, struct.error) as error:
        raise ParseError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}", "The file is damaged.") from error


def _halved(rows: Any, path: Path) -> Iterator[tuple[Any, int]]:
    """Yield rows with their size, halved until they are a block. Raise a ParseError if a row is beyond the longest line."""
    size = sum(map(_size_of, rows.columns))
    if size <= (_BLOCK_BYTES if rows.num_rows > 1 else MAX_LINE_BYTES):
        yield rows, size
    elif rows.num_rows == 1:
        raise ParseError(f"{path} has a record longer than {MAX_LINE_BYTES >> 20} MiB.", "Split it.")
    else:
        half = rows.num_rows // 2
        yield from _halved(rows.slice(0, half), path)
        yield from _halved(rows.slice(half), path)


def _size_of(array: Any) -> int:
    """Return about how many bytes the values take as Python values. A dictionary may repeat a long text in every row and list."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, own = array.type, len(array) * _CELL_BYTES
    if isinstance(array, pa.ExtensionArray):
        return _size_of(array.storage)
    if pa.types.is_struct(kind):
        return own + sum(map(_size_of, array.flatten()))
    if pa.types.is_map(kind):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return own + sum(_size_of(part.slice(first, last - first)) for part in (array.keys, array.items))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return own + _size_of(array.flatten())
    if pa.types.is_dictionary(kind) and _is_text(kind.value_type):
        return own + (pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0)
    if _is_text(kind):
        return own + (pc.sum(pc.binary_length(array)).as_py() or 0)
    if pa.types.is_null(kind) or pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
        return own
    raise ParseError(f"A column of the type {kind} cannot be read.", "Save the dataset as JSONL or Parquet.")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    tests = pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary
    return any(test(kind) for test in tests) or pa.types.is_fixed_size_binary(kind)
