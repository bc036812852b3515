"""Files that somebody else made, opened only where they are ordinary ones.

A named pipe waits for its writer, a device may never end. What lies under /proc and /sys is made while it is read: it reports a
size that is not its own, and some of it waits, too. Each is refused before it is opened.
"""

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, ParseError

_KERNEL = ("/proc", "/sys")
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
_DEEPEST, _MOST_ENTRIES = 4, 20_000
"""How far a folder is looked through: a sweep's runs, their passes, what these left."""


class SpecialFileError(ConfigError, ParseError):
    """A file that cannot be read like one. The request is wrong (exit code 2); what goes on without a damaged file goes on."""


def check_ordinary(path: Path) -> None:
    """Raise a SpecialFileError where something else than an ordinary file or a folder lies there. Nothing there is no fault."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    _check(path, mode)


def check_folder(folder: Path) -> None:
    """The same for all that lies in a folder, some levels deep; sockets, which nothing waits for, may stay."""
    for entry in _entries(folder, _DEEPEST, [_MOST_ENTRIES]):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            path = Path(entry.path)
            try:
                mode = path.stat().st_mode
            except OSError:
                continue  # a link that leads nowhere
            if not stat.S_ISSOCK(mode):
                _check(path, mode)


def open_ordinary(path: Path) -> io.BufferedReader:
    """Open an ordinary file to read its bytes. Raises a SpecialFileError, or OSError as `open` does."""
    return open(path, "rb", opener=_opened)


def read_bytes(path: Path) -> bytes:
    """All bytes of an ordinary file. Raises as `open_ordinary` does."""
    with open_ordinary(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """The text of an ordinary file in UTF-8. Raises as `open_ordinary` does, and UnicodeDecodeError."""
    return read_bytes(path).decode().replace("\r\n", "\n")


def _opened(name: str, flags: int) -> int:
    path = Path(name)
    _check(path, path.stat().st_mode)
    handle = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)  # in case it became another file meanwhile
    try:
        _check(path, os.fstat(handle).st_mode)
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
        what = next((f"made by the kernel, under {root}" for root in _KERNEL if real.startswith(f"{root}/")), "")
    if what:
        raise SpecialFileError(
            f"{path} is no ordinary file: it is {what}.", "Write what it gives to a file on disk, and give that."
        )


def _entries(folder: Path, depth: int, left: list[int]) -> Iterator["os.DirEntry[str]"]:
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


# --- sql files --------------------------------------------------------------------------------------------------------


AS_WRITTEN = "hive_partitioning=false"
"""For every read: columns come from the file, none from the names of its folders."""
_WILD = "[*?"


def pattern_of(path: Path) -> str:
    """The pattern that only this file fits; or a ParseError where there is none, or the file is no ordinary one."""
    check_ordinary(path)
    text = str(path.absolute())  # a relative path may begin with ~, which stands for the home folder there
    if not any(sign in text for sign in _WILD):
        return text
    if "\\" in text:
        raise ParseError(
            f"{path} cannot be read: its name has both a backslash and one of [ * ?.", "Rename the file or its folder."
        )
    return "".join(f"[{sign}]" if sign in _WILD else sign for sign in text)


def literal(text: str) -> str:
    """A text in SQL, or a ParseError where it is none that a database takes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParseError(f"{text} cannot be a table: its name is no UTF-8.", "Rename the file or its folder.") from error
    return "'" + text.replace("'", "''") + "'"


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def parquet_rows(path: Path, *options: str) -> str:
    """What stands after FROM for the rows of one Parquet file."""
    return f"read_parquet({', '.join((literal(pattern_of(path)), AS_WRITTEN, *options))})"
