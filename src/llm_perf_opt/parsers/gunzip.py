"""Unpack a gzip file to disk, with a limit: a few kilobytes can hold terabytes of zeros."""

import gzip
import zlib
from pathlib import Path

from llm_perf_opt.errors import ParseError, ResourceError

LARGEST_BYTES = 4 * 2**30
"""A gzip file is not unpacked beyond this."""
LARGEST_RATIO = 250
"""Nor beyond this multiple of its packed size: profiler output packs 5 to 20 times, zeros 1,000 times."""
RATIO_FREE_BYTES = 16 * 2**20
"""Up to this size any ratio is harmless."""
_BLOCK = 2**20
_MAGIC = b"\x1f\x8b"


def is_gzip(path: Path) -> bool:
    """Whether a file begins as gzip does, whatever it is called."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def gunzip(path: Path, to: Path) -> None:
    """Unpack `path` into the file `to`, block by block."""
    limit = min(LARGEST_BYTES, max(RATIO_FREE_BYTES, LARGEST_RATIO * path.stat().st_size))
    written = 0
    with gzip.open(path) as packed, to.open("wb") as unpacked:
        while True:
            try:
                block = packed.read(_BLOCK)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ParseError(
                    f"{path} is a damaged or truncated gzip file: {error}", "Copy it again, or make the report anew."
                ) from error
            if not block:
                return
            written += len(block)
            if written > limit:
                raise ParseError(
                    f"{path} unpacks to more than {limit:,} bytes, from {path.stat().st_size:,}.",
                    "This looks like a file made to fill the disk. If it is a real report, unpack it with gunzip first.",
                )
            try:
                unpacked.write(block)
            except OSError as error:
                raise ResourceError(
                    f"{path} cannot be unpacked into {to.parent}: {error.strerror}.",
                    "Free some disk space, or set TMPDIR to a folder with more.",
                ) from error
