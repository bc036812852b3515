"""Read files compressed with gzip or Zstandard from start to end, in constant memory."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.proportion import STREAM_RATIO_COUNTS_FROM_BYTES, DisproportionError, Proportion
from llm_perf_opt.core.user_files import open_ordinary

GZIP, ZSTD = ".gz", ".zst"
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)


class Readable(Protocol):
    """A stream of unpacked bytes."""

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most `size`; none at the end."""
        ...


def is_plain(path: Path) -> bool:
    """Return whether the name is not that of a compressed file."""
    return path.suffix.lower() not in (GZIP, ZSTD)


class UnpackedFile:
    """The unpacked bytes of a file. A small file that unpacks to an enormous size is refused."""

    def __init__(self, raw: io.BufferedReader, stream: Readable, path: Path) -> None:
        self._raw, self._stream, self._path = raw, stream, path
        self._proportion = None if is_plain(path) else Proportion(STREAM_RATIO_COUNTS_FROM_BYTES)

    @property
    def consumed(self) -> int:
        """Bytes read from the disk so far."""
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most `size`; none at the end."""
        data = self._stream.read(size)
        self._count(len(data), 0)
        return data

    def count_values(self, count: int) -> None:
        """Count lines or elements in the bytes that were read."""
        self._count(0, count)

    def _count(self, size: int, values: int) -> None:
        if self._proportion is not None:
            try:
                self._proportion.add(self.consumed, size, values)
            except DisproportionError as error:
                raise error.of(self._path) from error


@contextmanager
def unpacked(path: Path) -> Iterator[UnpackedFile]:
    """Open a plain, gzip or Zstandard file, by its suffix. Damage raises a ParseError, also while it is read."""
    try:
        with open_ordinary(path) as raw:
            if path.suffix.lower() == ZSTD:
                with _zstd(raw, path) as stream:
                    yield UnpackedFile(raw, stream, path)
            elif path.suffix.lower() == GZIP:
                yield UnpackedFile(raw, gzip.GzipFile(fileobj=raw), path)
            else:
                yield UnpackedFile(raw, raw, path)
    except _DAMAGE as error:
        raise ParseError(f"{path} is damaged: {error}.", "Download or copy it again.") from error
    except OSError as error:
        raise ResourceError(f"{path} cannot be read: {error.strerror or error}.", "Check its permissions.") from error


@contextmanager
def _zstd(raw: io.BufferedReader, path: Path) -> Iterator[Readable]:
    """Open a Zstandard file with the standard library (from Python 3.14), or with pyarrow."""
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        with _arrow_zstd(raw, path) as stream:
            yield stream
        return
    try:
        yield zstd.ZstdFile(raw)
    except zstd.ZstdError as error:
        raise EOFError(_words(error)) from error


@contextmanager
def _arrow_zstd(raw: io.BufferedReader, path: Path) -> Iterator[Readable]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ResourceError(
            f"{path.name} is compressed with Zstandard. Reading it needs Python 3.14 or pyarrow, which is not installed.",
            "Install it: pip install 'llm-perf-opt[datasets]'. Or unpack the file: zstd -d FILE.",
        ) from error
    with pa.PythonFile(raw, mode="r") as file, pa.CompressedInputStream(file, "zstd") as stream:
        yield _Arrow(stream)


class _Arrow:
    """A stream of pyarrow, whose errors for damaged data are OSErrors without a number."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, size: int) -> bytes:
        try:
            found: bytes = self._stream.read(size)
        except OSError as error:
            if error.errno is not None:
                raise
            raise EOFError(_words(error)) from error
        return found


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
