"""Open files that the user names, but only regular files.

A named pipe blocks until something writes to it, and a device may never end. Files under /proc and /sys are generated while they
are read: their reported size is wrong, and some block too. All of these are refused before they are opened.
"""

import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.core.proportion import Proportion

PROJECT_CONF = Path("conf")
"""Options of the project in the current directory; `llm-perf dataset add` writes there."""
PROJECT_MODELS = Path("models")
"""Links to folders of weights; `llm-perf model link` writes there."""
DEEPEST_RUN = 6
"""How many levels of folders are searched for runs."""
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A safe folder name: no path, not hidden, nothing that a shell or a page would interpret."""
_KERNEL = ("/proc", "/sys")
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
_DEEPEST, _MOST_ENTRIES = 4, 20_000
"""How far a folder is searched: the runs of a sweep, their passes, the files of a pass."""


def is_file_name(text: str) -> bool:
    """Return whether a text from a file is the name of a file or a folder, and no path to another place."""
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


class SpecialFileError(ConfigError, ParseError):
    """Not a regular file. The exit code is 2; code that skips a damaged file (ParseError) skips this one too."""


def check_ordinary(path: Path) -> None:
    """Raise a SpecialFileError unless the path is a regular file, a folder or does not exist."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    _check(path, mode)


def check_folder(folder: Path) -> None:
    """Check everything in a folder, some levels deep. Sockets are allowed: opening one does not block."""
    for entry in _entries(folder, _DEEPEST, [_MOST_ENTRIES]):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            path = Path(entry.path)
            try:
                mode = path.stat().st_mode
            except OSError:
                continue  # a broken link
            if not stat.S_ISSOCK(mode):
                _check(path, mode)


def open_ordinary(path: Path) -> io.BufferedReader:
    """Open a regular file for reading bytes. Raise a SpecialFileError, or OSError as `open` does."""
    return open(path, "rb", opener=_opened)


def read_bytes(path: Path) -> bytes:
    """Return all bytes of a regular file. Raise as `open_ordinary` does."""
    with open_ordinary(path) as file:
        return file.read()


COMPRESSED = ".gz"
"""Added to the name of a file of a run that was compressed."""
_READ_BYTES = 1 << 16


def present(path: Path) -> Path:
    """Return the path, or that of its compressed form if only that exists."""
    packed = path.with_name(path.name + COMPRESSED)
    return packed if not path.exists() and packed.exists() else path


def open_unpacked(path: Path) -> io.BufferedReader:
    """Open a regular file, unpacked while it is read if its name ends with .gz. Raise as `open_ordinary` does.

    Reading raises ValueError if the file is damaged or a bomb.
    """
    raw = open_ordinary(path)
    return io.BufferedReader(_Unpacked(raw), _READ_BYTES) if path.suffix == COMPRESSED else raw


class TooLargeError(ValueError):
    """A file is larger than what is read of it."""


def read_unpacked(path: Path, most: int) -> bytes:
    """Return all bytes of a file as `open_unpacked` gives them. Raise as it does, or TooLargeError beyond `most` bytes."""
    content = io.BytesIO()  # unlike pieces that are joined, it never holds the content twice
    with open_unpacked(path) as file:
        while piece := file.read(min(_READ_BYTES, most + 1 - content.tell())):
            content.write(piece)
            if content.tell() > most:
                raise TooLargeError(f"it is larger than {most >> 20} MiB")
    return content.getvalue()


class _Unpacked(io.RawIOBase):
    """The unpacked content of a gzip file."""

    def __init__(self, packed: io.BufferedReader) -> None:
        self._packed = packed
        self._file = gzip.GzipFile(fileobj=packed)
        self._proportion = Proportion()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        try:
            data = self._file.read(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"it is a damaged gzip file ({error})") from error
        self._proportion.add(self._packed.tell(), len(data))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        self._packed.close()
        super().close()


def read_text(path: Path) -> str:
    """Return the text of a regular file in UTF-8. Raise as `open_ordinary` does, and UnicodeDecodeError."""
    return read_bytes(path).decode().replace("\r\n", "\n")


def _opened(name: str, flags: int) -> int:
    path = Path(name)
    before = path.stat()
    _check(path, before.st_mode)
    handle = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)  # in case the path was replaced in the meantime
    try:
        opened = os.fstat(handle)
        if (opened.st_dev, opened.st_ino, opened.st_mode) != (before.st_dev, before.st_ino, before.st_mode):
            _check(path, opened.st_mode)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        return
    what = _KINDS.get(stat.S_IFMT(mode), "")
    if not what:
        real = os.path.realpath(path)
        what = next((f"generated by the kernel, under {root}" for root in _KERNEL if real.startswith(f"{root}/")), "")
    if what:
        raise SpecialFileError(
            f"{path} is not a regular file: it is {what}.", "Copy its content to a file on disk and give that."
        )


def _entries(folder: Path, depth: int, left: list[int]) -> Iterator["os.DirEntry[str]"]:
    """Yield what is in a folder, so many levels deep and so many at most, without following links."""
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError:
        return
    for entry in found:
        left[0] -= 1
        if left[0] < 0:
            return
        yield entry
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            yield from _entries(Path(entry.path), depth - 1, left)


# --- paths and names in SQL -------------------------------------------------------------------------------------------


AS_WRITTEN = "hive_partitioning=false"
"""For every read: take columns from the file only, not from the names of its folders."""
_WILD = "[*?"


def pattern_of(path: Path) -> str:
    """Return a glob pattern that matches only this file. Raise a ParseError if there is none or it is not a regular file."""
    check_ordinary(path)
    text = str(path.absolute())  # DuckDB expands ~ at the start of a relative path
    if not any(char in text for char in _WILD):
        return text
    if "\\" in text:
        raise ParseError(
            f"{path} cannot be read: its name has both a backslash and one of [ * ?.", "Rename the file or its folder."
        )
    return "".join(f"[{char}]" if char in _WILD else char for char in text)


def literal(text: str) -> str:
    """Return a string literal for SQL. Raise a ParseError if the text is not valid UTF-8."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParseError(f"{text} cannot be a table: its name is not UTF-8.", "Rename the file or its folder.") from error
    return "'" + text.replace("'", "''") + "'"


def quoted(name: str) -> str:
    """Return a quoted name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def parquet_rows(path: Path, *options: str) -> str:
    """Return the FROM expression for the rows of a Parquet file."""
    return f"read_parquet({', '.join((literal(pattern_of(path)), AS_WRITTEN, *options))})"
