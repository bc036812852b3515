"""What is kept of a trace in the user's cache, and whether it is still of it: told from a few bytes, and so shown at once."""

import hashlib
import os
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from llm_perf_opt import __version__
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.host import user_cache_folder
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.user_files import open_ordinary, read_bytes

META_FILE = "meta.json"
SCHEMA_VERSION = 5
"""Of the tables; raised when a reader of the old ones would misread the new, or miss something."""
MOST_BYTES = 5_000_000_000
"""Of all that is kept of traces; what was used least recently goes first."""


_DECIDES = ("core/*.py", "traces/**/*.py", "analysis/**/*.py", "workflows/*.py")
"""The files of this program that decide what is said of a trace."""


class _Mark(msgspec.Struct):
    schema: int
    seen: str
    by: str


@cache
def made_by() -> str:
    """The release, and a fingerprint of the code that reads and judges traces: what another one said is not said again."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(file for pattern in _DECIDES for file in package.glob(pattern)):
        digest.update(f"{file.relative_to(package)}\0".encode())
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return f"{__version__}-{digest.hexdigest()}"


def seen_of(source: Path) -> str:
    """What tells an untouched file without reading it: every write and every change of its times sets its change time anew.

    Empty for a file changed so lately that a further change might get the same time.
    """
    try:
        stat = source.stat()
    except OSError as error:
        raise ParseError(f"{source} cannot be read: {error.strerror or error}.", "Give a trace file.") from error
    age = time.time() - stat.st_ctime
    if age < 0.1:
        return ""
    return f"{stat.st_dev:x}-{stat.st_ino:x}-{stat.st_size:x}-{stat.st_mtime_ns:x}-{stat.st_ctime_ns:x}"


def cache_folder() -> Maybe[Path]:
    """Where everything that is kept of traces lies, for this user; a run keeps what is made of its own in itself."""
    return user_cache_folder("traces")


def kept_for(source: Path) -> Maybe[Path]:
    """The folder for what is kept of one file, by where the file lies; it may not be there yet."""
    cache = cache_folder()
    if isinstance(cache, Missing):
        return cache
    return cache / hashlib.blake2b(os.fsencode(source.resolve()), digest_size=12).hexdigest()


def note_use(kept: Path) -> None:
    """What was used last is removed last."""
    with suppress(OSError):
        os.utime(kept)


def kept_bytes(folder: Path) -> int:
    """All that lies below a folder; what is removed meanwhile counts no more."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total


def tables_of(source: Path) -> list[Path]:
    """Folders of tables that were made of a file in this place."""
    kept = kept_for(source)
    try:
        inside = [] if isinstance(kept, Missing) else list(kept.iterdir())
    except OSError:
        return []  # nothing was kept yet, or it may not be looked into
    return [folder for folder in inside if folder.name.startswith("tables-v") and (folder / META_FILE).is_file()]


def fresh_tables(source: Path) -> Path | None:
    """The tables of a file that has not been touched since they were made of it; they are not read."""
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
    """CRC-32, the fastest check that misses no single change, and the number of bytes it is of."""

    crc: int = 0
    size: int = 0

    def add(self, data: bytes | memoryview) -> None:
        """The file's next bytes."""
        self.crc = zlib.crc32(data, self.crc)
        self.size += len(data)

    def __str__(self) -> str:
        return f"{self.size:x}-{self.crc:08x}"


def checksum_of(path: Path) -> Checksum:
    """Of all bytes of a file, or a ParseError."""
    checksum = Checksum()
    with memoryview(bytearray(_READ_BYTES)) as room:
        try:
            with open_ordinary(path) as file:
                while count := file.readinto(room):
                    checksum.add(room[:count])
        except OSError as error:
            raise ParseError(f"{path} cannot be read: {error.strerror or error}.", "Give a trace file.") from error
    return checksum
