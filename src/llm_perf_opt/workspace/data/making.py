"""Create a folder completely or not at all: it is filled under a temporary name and renamed at the end."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llm_perf_opt.core.errors import LlmPerfError, ResourceError
from llm_perf_opt.workspace.data.layout import PART_SUFFIX, refuse_existing

_LOCK = ".lock"


@contextmanager
def made_whole(final: Path) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `final` if the block succeeds and is removed otherwise.

    A folder left by a killed process is cleared; one that another process is filling is an error.
    """
    part = final.with_name(f".{final.name}{PART_SUFFIX}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(part, final)
    except OSError as error:
        raise write_error(error, part) from error
    try:
        yield part
        _settle(part)
        refuse_existing(final, "It appeared in the meantime and is not overwritten.")
        (part / _LOCK).unlink()
        part.rename(final)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise write_error(error, final) from error
        raise
    finally:
        os.close(lock)


def write_error(error: OSError, path: Path) -> LlmPerfError:
    """Return the error for a failed read or write under `path`."""
    where = error.filename or path
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"No space left on the disk while writing {where}.",
            "Nothing unfinished was left behind. Free some space and try again.",
        )
    return ResourceError(f"{where} cannot be used: {error.strerror or error}.", "Check its path and permissions.")


def _locked(part: Path, final: Path) -> int:
    """Create an empty `part` folder with a lock that ends with this process."""
    if part.is_symlink():
        raise ResourceError(f"{part} is a link, which is not followed.", "Remove it.")
    part.mkdir(exist_ok=True)
    lock = os.open(part / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ResourceError(f"{final} is being created by another process.", "Wait for it to finish.") from error
    for left in part.iterdir():  # of a process that was killed
        if left.name != _LOCK:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return lock


def _settle(folder: Path) -> None:
    """Flush every file to disk before the folder is renamed."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file, suppress(OSError):  # a file system without fsync still has the bytes
                os.fsync(file.fileno())
