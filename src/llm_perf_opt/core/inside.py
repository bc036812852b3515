"""Write, move and remove below a folder, and nowhere else.

A run, a dataset or a project may come from someone else, and any name in it may be a link. Each function takes the folder that
the caller works in (`root`, which may be reached through links) and a path below it. Links in the folders of this path are
followed only where they stay inside `root`. The last name of the path is not followed: a link is replaced, moved or removed
itself. `tests/test_architecture.py` holds that nothing else writes files.
"""

import errno
import io
import os
import re
import shutil
import stat
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.user_files import open_ordinary

PRIVATE, SHARED = 0o600, 0o666
"""The permissions of a new file: its owner alone, or what the umask of the process leaves."""


_REMEDY = (
    "Links are followed only where they stay inside: remove this one, or give the absolute path of the folder that you mean."
)


class OutsideError(ConfigError, ParseError):
    """A path leads out of its folder. The exit code is 2; code that skips a damaged file (ParseError) skips this one too."""


def inside(root: Path, path: Path) -> Path:
    """Return the path with the links in its folders resolved, but not its last name. Raise an OutsideError if it is outside."""
    home = Path(os.path.realpath(root))
    real = Path(os.path.realpath(path.parent), path.name)
    if path.name in ("", "..") or not real.is_relative_to(home) or real == home:
        raise _outside(root, path, real)
    return real


def followed(root: Path, path: Path) -> Path:
    """Return the path with all links resolved. Raise an OutsideError if that is neither `root` nor inside it."""
    real = Path(os.path.realpath(path))
    if not leads_inside(root, real):
        raise _outside(root, path, real)
    return real


def leads_inside(root: Path, path: Path) -> bool:
    """Return whether a path, with all links resolved, is `root` or inside it."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def leading_out(root: Path, path: Path) -> Path | None:
    """Return the first link in a path that leads out of `root`; None if it is outside for another reason, or inside."""
    home = root.absolute()
    for place in reversed([path.absolute(), *path.absolute().parents]):
        if place.is_relative_to(home) and place.is_symlink() and not leads_inside(home, place):
            return place
    return None


def _outside(root: Path, path: Path, real: Path) -> OutsideError:
    home = root.absolute()
    if (found := leading_out(root, path)) is not None:
        return OutsideError(f"{found} is a link that leads out of {home}, to {os.path.realpath(found)}.", _REMEDY)
    return OutsideError(f"{real} is not inside {home}.", "Give a path inside this folder.")


def check_links(folder: Path) -> None:
    """Raise an OutsideError for a link in a folder of someone else, at any depth, that leads out of the folder."""
    for place, folders, names in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *names)):
            if path.is_symlink():
                followed(folder, path)


def root_of(folder: Path) -> Path:
    """Return the root for a folder that the command line or a default names.

    A relative path stays inside the current folder: a project may contain `runs` or `datasets` as links.
    """
    return folder if folder.is_absolute() or ".." in folder.parts else Path()


def make_folder(root: Path, folder: Path, mode: int = 0o777) -> Path:
    """Create a folder and its parents unless they exist, and return it without links. Its permissions follow the umask."""
    real = followed(root, folder)
    real.mkdir(mode, parents=True, exist_ok=True)
    return real


def new_folder(root: Path, folder: Path) -> Path:
    """Create a folder in an existing one. Raise FileExistsError if something has its name."""
    real = inside(root, folder)
    real.mkdir()
    return real


def open_new(root: Path, path: Path, mode: int = SHARED, *, readable: bool = False) -> BinaryIO:
    """Open a new file for writing, and for reading too if `readable`. A file or a link of its name is removed first."""
    real = inside(root, path)
    _refuse_device(real)
    real.unlink(missing_ok=True)
    descriptor = _opened(real, os.O_EXCL | (os.O_RDWR if readable else os.O_WRONLY), mode)
    return os.fdopen(descriptor, "w+b" if readable else "wb")


def _refuse_device(real: Path) -> None:
    """Raise an OSError for a device: a superuser could replace it by a file, for every program of the machine."""
    if os.path.lexists(real) and stat.S_IFMT(real.lstat().st_mode) in (stat.S_IFCHR, stat.S_IFBLK):
        raise OSError(errno.EINVAL, "it is a device", str(real))


def open_to_append(root: Path, path: Path, mode: int = SHARED) -> io.FileIO:
    """Open a file for writing at its end, unbuffered; it is created if needed. A link to a file inside `root` is followed."""
    real = inside(root, followed(root, path))
    opened = _opened(real, os.O_WRONLY | os.O_APPEND, mode)
    return io.FileIO(str(real), "ab", opener=lambda *_: opened)  # errors name the path, not the descriptor


def open_lock(root: Path, path: Path) -> int:
    """Return the descriptor of a file that only serves as a lock; it is created if needed, for all who may write here."""
    make_folder(root, path.parent)
    return _opened(inside(root, path), os.O_RDWR, SHARED)


def _opened(real: Path, flags: int, mode: int) -> int:
    return os.open(real, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def partial_of(path: Path) -> Path:
    """Return the path of the unfinished form of a file or a folder, which no other writer uses.

    `path` has no links in its folders. What writers of the same file left here that ended without cleaning up is removed.
    """
    remove_leftovers(path.parent, f".{path.name}.")
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}-{threading.get_ident()}.part")


def remove_leftovers(folder: Path, start: str) -> None:
    """Remove the unfinished forms whose names start so, if the process of this machine that wrote them has ended."""
    with suppress(OSError):  # it cannot be read, or another writer removes the same
        for left in folder.iterdir():
            found = _LEFT.search(left.name) if left.name.startswith(start) else None
            if found and found["host"] == _host() and not _runs(int(found["pid"])):
                remove_if_possible(folder, left)


_LEFT = re.compile(r"\.(?P<host>[0-9a-f]{8})\.(?P<pid>\d{1,9})-\d+\.(part|old)$")


def _host() -> str:
    """Return a short name of this machine or container: a process number means nothing elsewhere."""
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def _runs(pid: int) -> bool:
    """Return whether a process of this number runs; it may be another one."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True


def write(root: Path, path: Path, content: bytes, mode: int = SHARED) -> None:
    """Write a temporary file, then rename it: a reader sees the old file or the new one, never half of one."""
    try:
        make_folder(root, path.parent)
        partial = partial_of(inside(root, path))
        try:
            with open_new(root, partial, mode) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            move(root, partial, path)
        except BaseException:
            with suppress(OSError):  # a file that cannot be written may not be removable either
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise disk_error(error, path) from error


def move(root: Path, source: Path, target: Path) -> None:
    """Rename a file, a link or a folder. A file or a link at the target is replaced; a folder that is not empty is an error."""
    real = inside(root, target)
    _refuse_device(real)
    inside(root, source).replace(real)


def remove(root: Path, path: Path) -> None:
    """Remove a file, a link or a folder with all that it contains, if it exists. A link is removed, not what it leads to."""
    real = inside(root, path)
    if real.is_dir() and not real.is_symlink():
        shutil.rmtree(real)
    else:
        real.unlink(missing_ok=True)


def remove_empty(root: Path, folder: Path) -> bool:
    """Remove a folder that has nothing in it, and return whether it could be removed."""
    try:
        inside(root, folder).rmdir()
    except OSError:
        return False
    return True


def remove_if_possible(root: Path, path: Path) -> None:
    """Remove as `remove` does what can be removed, without an error for the rest."""
    real = inside(root, path)
    if real.is_dir() and not real.is_symlink():
        shutil.rmtree(real, ignore_errors=True)
    else:
        with suppress(OSError):
            real.unlink(missing_ok=True)


def copy(root: Path, source: Path, target: Path) -> None:
    """Write a copy of a regular file. What has the name of the target is replaced."""
    with open_ordinary(source) as read, open_new(root, target) as written:
        shutil.copyfileobj(read, written)


def share(root: Path, source: Path, target: Path) -> None:
    """Give a file a second name, as a hard link. Raise FileExistsError if something has this name."""
    os.link(inside(root, source), inside(root, target))


def link(root: Path, path: Path, target: Path) -> None:
    """Create a link; the target may be anywhere. What has its name already is an error."""
    inside(root, path).symlink_to(target)


def restrict(root: Path, folder: Path, chosen: Callable[[Path], bool]) -> None:
    """Make the chosen files in a folder readable by their owner alone. Links are left as they are."""
    for place, _, names in os.walk(followed(root, folder)):
        for path in (Path(place, name) for name in names):
            with suppress(OSError):  # removed in the meantime, or of another user
                if chosen(path) and not path.is_symlink():
                    path.chmod(PRIVATE)


def disk_error(error: OSError, path: Path, elsewhere: str = "") -> LlmPerfError:
    """Return the error for a failed write. `elsewhere`: how to write to another place, if the command can."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"No space left on the disk while writing {path}.", f"Free some space{elsewhere}.")
    return ResourceError(
        f"{path} cannot be written: {error.strerror or error}.", f"Check the permissions of {path.parent}{elsewhere}."
    )
