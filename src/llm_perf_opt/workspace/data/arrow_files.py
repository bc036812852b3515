"""Read Arrow files saved by Hugging Face datasets, batch by batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.user_files import check_ordinary
from llm_perf_opt.workspace.data.inventory import Advance
from llm_perf_opt.workspace.data.lines import missing_column

_ROWS_AT_ONCE = 1024


def count_rows(path: Path) -> int:
    """Return the number of rows."""
    return sum(batch.num_rows for batch in _batches(path, lambda _: None))


def objects(path: Path, advance: Advance) -> Iterator[list[dict[str, Any]]]:
    """Yield blocks of rows as objects."""
    for batch in _batches(path, advance):
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            yield batch.slice(start, _ROWS_AT_ONCE).to_pylist()


def column(path: Path, name: str, advance: Advance) -> Iterator[list[Any]]:
    """Yield blocks of one column."""
    for batch in _batches(path, advance):
        if name not in batch.schema.names:
            raise missing_column(path, name, batch.schema.names)
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            yield batch.column(name).slice(start, _ROWS_AT_ONCE).to_pylist()


def _batches(path: Path, advance: Advance) -> Iterator[Any]:
    check_ordinary(path)
    with _reading(path):
        import pyarrow as pa

        done = 0
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
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
    except (pa.ArrowException, OSError) as error:
        raise ParseError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}", "The file is damaged.") from error
