"""Compress the raw files of a run in place: FILE becomes FILE.gz, which every reader of a run opens."""

import gzip
import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.config.passes import known_passes
from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.inside import disk_error, inside, move, open_new, remove, remove_if_possible
from llm_perf_opt.core.proportion import HIGHEST_RATIO, RATIO_COUNTS_FROM_BYTES
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.user_files import COMPRESSED, open_ordinary
from llm_perf_opt.traces.trace_mark import kept_bytes

LEAST_BYTES = 64 * 1024
"""Smaller files stay as they are: they can be read without tools, and save little."""
_LEAST_SAVING = 0.1
_LEVEL = 6
_CHUNK_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 4, 64 * 1024
_PART = ".part"


@dataclass(frozen=True)
class Compressible:
    """What compressing a run would do."""

    files: tuple[Path, ...]
    tables: tuple[Path, ...]
    """Folders of tables that are regenerated from a trace when they are needed; they are removed."""
    partial: tuple[Path, ...]
    """Unfinished files of an interrupted attempt; they are removed."""
    bytes: int
    """Their size now."""
    frees: int
    """About how much space it frees, estimated from samples of each file."""


def compressible(run: RunFolder) -> Compressible:
    """Return what can be compressed in a run; a file that would hardly shrink is left as it is."""
    files = [(path, saving) for path in run.compressible() if (saving := _saving(path))]
    tables = [run.tables(item.name) for item in known_passes() if item.trace and item.trace_file(run).is_file()]
    tables = [folder for folder in tables if folder.is_dir() and not folder.is_symlink()]
    partial = [path for path in (run.path / "raw").glob(f"*/.*{COMPRESSED}{_PART}") if path.is_file() and not path.is_symlink()]
    removed = sum(map(kept_bytes, tables)) + sum(path.lstat().st_size for path in partial)
    return Compressible(
        tuple(path for path, _ in files),
        tuple(tables),
        tuple(partial),
        removed + sum(path.stat().st_size for path, _ in files),
        removed + sum(saving for _, saving in files),
    )


def compress_file(run: RunFolder, path: Path) -> int:
    """Replace a file of a run by its compressed form and return the bytes that this frees; 0 if it is left as it is.

    The original is removed only after the compressed form was written to disk, unpacked again and found equal.
    """
    path = inside(run.path, path)
    target = path.with_name(path.name + COMPRESSED)
    partial = path.with_name(f".{path.name}{COMPRESSED}{_PART}")
    try:
        before = path.stat()
        written = _pack(run, path, partial)
        after = path.stat()
        size, packed = before.st_size, partial.stat().st_size
        if _contents(partial) != written or (after.st_size, after.st_mtime_ns) != (size, before.st_mtime_ns):
            raise ResourceError(f"{path} changed while it was compressed.", "It is left as it is. Try again later.")
        if packed >= size or size > max(RATIO_COUNTS_FROM_BYTES, HIGHEST_RATIO * packed):  # readers refuse such a ratio
            remove(run.path, partial)
            return 0
        os.utime(partial, ns=(before.st_atime_ns, before.st_mtime_ns))
        move(run.path, partial, target)
        remove(run.path, path)
    except BaseException as error:
        remove_if_possible(run.path, partial)
        if isinstance(error, OSError):
            raise disk_error(error, target) from error
        raise
    return size - packed


def _pack(run: RunFolder, path: Path, partial: Path) -> tuple[int, int]:
    """Write the compressed form, and return size and checksum of the original."""
    size = checksum = 0
    with open_ordinary(path) as source, open_new(run.path, partial) as raw:
        os.fchmod(raw.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode))
        with gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=raw, mtime=0) as out:
            while piece := source.read(_CHUNK_BYTES):
                size, checksum = size + len(piece), zlib.crc32(piece, checksum)
                out.write(piece)
        raw.flush()
        os.fsync(raw.fileno())
    return size, checksum


def _contents(packed: Path) -> tuple[int, int]:
    size = checksum = 0
    with gzip.open(packed) as file:
        while piece := file.read(_CHUNK_BYTES):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return size, checksum


def _saving(path: Path) -> int:
    """Return about how many bytes compressing frees, from samples of the file; 0 if it is small or hardly shrinks."""
    size = path.stat().st_size
    if size < LEAST_BYTES:
        return 0
    taken = packed = 0
    with open_ordinary(path) as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            piece = file.read(_SAMPLE_BYTES)
            taken, packed = taken + len(piece), packed + len(zlib.compress(piece, _LEVEL))
    share = 1 - packed / taken if taken else 0.0
    return int(size * share) if share >= _LEAST_SAVING else 0
