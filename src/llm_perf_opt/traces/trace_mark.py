"""The cache of traces: where the tables of a trace are, and whether they are up to date, without reading the trace."""

import hashlib
import os
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec

from llm_perf_opt import __version__
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.host import user_cache_folder
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.user_files import open_ordinary, read_bytes

META_FILE = "meta.json"
SCHEMA_VERSION = 6
"""Version of the tables. Incremented when an older reader would misread newer tables or miss something."""
MOST_BYTES = 5_000_000_000
"""The limit of the cache. The least recently used entries are removed first."""
_DECIDES = ("core/*.py", "config/*.py", "traces/**/*.py", "analysis/**/*.py", "runners/*.py", "workflows/*.py")
"""The source files that affect the analysis of a trace. Runtimes, also those of other packages, say how stages are labeled."""
_PLUGINS = "llm_perf_opt.runners"


class _Mark(msgspec.Struct):
    schema: int
    seen: str
    by: str


@cache
def made_by() -> str:
    """Return the release and a fingerprint of the code that analyzes traces. Results of other code are not reused."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(file for pattern in _DECIDES for file in package.glob(pattern)):
        digest.update(f"{file.relative_to(package)}\0".encode())
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    for entry in sorted(metadata.entry_points(group=_PLUGINS), key=lambda entry: entry.name):
        digest.update(f"{entry.name}={entry.value} {entry.dist.version if entry.dist else ''}\0".encode())
    return f"{__version__}-{digest.hexdigest()}"


class FileState(NamedTuple):
    """Properties that change whenever a file changes."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def file_state(source: Path) -> FileState:
    """Return the state of a file, or raise a ParseError if it cannot be read."""
    try:
        stat = source.stat()
    except OSError as error:
        raise ParseError(f"{source} cannot be read: {error.strerror or error}.", "Give a trace file.") from error
    return FileState(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def seen_of(source: Path) -> str:
    """Return a text that changes with the file, without reading it: every write and every change of its times sets its ctime.

    Empty for a file that changed so recently that another change might get the same time.
    """
    state = file_state(source)
    if time.time() - state.changed_ns / 1e9 < 0.1:
        return ""
    return "-".join(f"{value:x}" for value in state)


def cache_folder() -> Maybe[Path]:
    """Return the folder of the user's cache of traces. The tables of a run are in its own folder."""
    return user_cache_folder("traces")


def kept_for(source: Path) -> Maybe[Path]:
    """Return the cache folder of a file, derived from its path; it may not exist yet."""
    cache = cache_folder()
    if isinstance(cache, Missing):
        return cache
    return cache / hashlib.blake2b(os.fsencode(source.resolve()), digest_size=12).hexdigest()


def note_use(kept: Path) -> None:
    """Mark a cache folder as recently used."""
    with suppress(OSError):
        os.utime(kept)


def kept_bytes(folder: Path) -> int:
    """Return the size of all files in a folder; files that disappear are skipped."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total


def tables_of(source: Path) -> list[Path]:
    """Return the folders of tables for a file with this path."""
    kept = kept_for(source)
    try:
        inside = [] if isinstance(kept, Missing) else list(kept.iterdir())
    except OSError:
        return []  # nothing is cached yet, or it is not readable
    return [folder for folder in inside if folder.name.startswith("tables-v") and (folder / META_FILE).is_file()]


def fresh_tables(source: Path) -> Path | None:
    """Return the tables of a file that has not changed since, or None. The tables are not read."""
    seen = seen_of(source)
    for folder in tables_of(source) if seen else []:
        with suppress(OSError, ParseError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            mark = msgspec.json.decode(read_bytes(folder / META_FILE), type=_Mark)
            if mark.schema == SCHEMA_VERSION and mark.seen == seen and mark.by == made_by():
                note_use(folder.parent)
                return folder
    return None


# --- checksum ---------------------------------------------------------------------------------------------------------


_READ_BYTES = 1 << 20


@dataclass
class Checksum:
    """CRC-32, a fast check that detects any single change, and the number of bytes."""

    crc: int = 0
    size: int = 0

    def add(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the file."""
        self.crc = zlib.crc32(data, self.crc)
        self.size += len(data)

    def __str__(self) -> str:
        return f"{self.size:x}-{self.crc:08x}"


def checksum_of(path: Path) -> Checksum:
    """Return the checksum of a file, or raise a ParseError."""
    checksum = Checksum()
    with memoryview(bytearray(_READ_BYTES)) as buffer:
        try:
            with open_ordinary(path) as file:
                while count := file.readinto(buffer):
                    checksum.add(buffer[:count])
        except OSError as error:
            raise ParseError(f"{path} cannot be read: {error.strerror or error}.", "Give a trace file.") from error
    return checksum
