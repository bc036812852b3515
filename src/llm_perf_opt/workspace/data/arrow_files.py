"""Read Arrow files saved by Hugging Face datasets, batch by batch."""

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

        done, proportion, size = 0, Proportion(STREAM_RATIO_COUNTS_FROM_BYTES), path.stat().st_size
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                proportion.add(size, 0, batch.num_rows)  # a row may take no bytes
                yield batch
                advance(file.tell() - done)
                done = file.tell()


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
    except (pa.ArrowException, OSError, MemoryError) as error:
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
