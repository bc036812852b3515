"""Whether the tables beside a trace are still of it: told from a few bytes, so that what is kept is shown at once."""

import hashlib
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from llm_perf_opt import __version__
from llm_perf_opt.errors import ParseError
from llm_perf_opt.user_files import read_bytes

META_FILE = "meta.json"
SCHEMA_VERSION = 5
"""Of the tables; raised when a reader of the old ones would misread the new, or miss something."""


_DECIDES = ("*.py", "parsers/**/*.py", "analysis/**/*.py", "reading/**/*.py")
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


def tables_beside(source: Path) -> list[Path]:
    """Folders of tables that were made of a file of this name."""
    prefix = f"{source.name}.tables-v"
    try:
        return [folder for folder in source.parent.iterdir() if folder.name.startswith(prefix) and (folder / META_FILE).is_file()]
    except OSError:
        return []  # a folder that may be entered and not listed


def fresh_tables(source: Path) -> Path | None:
    """The tables beside a file that has not been touched since they were made of it; they are not read."""
    seen = seen_of(source)
    for folder in tables_beside(source) if seen else []:
        with suppress(OSError, ParseError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            mark = msgspec.json.decode(read_bytes(folder / META_FILE), type=_Mark)
            if mark.schema == SCHEMA_VERSION and mark.seen == seen and mark.by == made_by():
                return folder
    return None
