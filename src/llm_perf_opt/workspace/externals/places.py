"""The paths of reference code; the only module that knows the names under third_party/."""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError, words_of
from llm_perf_opt.core.git import Git, find_repository
from llm_perf_opt.core.inside import OutsideError, make_folder, move, remove, remove_empty, remove_if_possible
from llm_perf_opt.core.run_folder import write_record, write_whole
from llm_perf_opt.core.user_files import read_bytes, read_text
from llm_perf_opt.workspace.externals.git import EXACT
from llm_perf_opt.workspace.externals.listing import External, read_listing

SCHEMA = 1


@dataclass(frozen=True)
class Locked:
    """The fetched content of an entry, by git's object ids."""

    commit: str
    tree: str = ""
    """For a subtree: the commit's tree."""
    files: dict[str, str] = field(default_factory=dict)
    """For a Hub snapshot: blob id by path."""
    licenses: dict[str, str] = field(default_factory=dict)
    """Copied licenses: blob id by path."""


@dataclass(frozen=True)
class Lock:
    """The whole file."""

    schema: int = SCHEMA
    externals: dict[str, Locked] = field(default_factory=dict)


def blob_id(content: bytes) -> str:
    """Return git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def read_lock(content: bytes, where: str) -> dict[str, Locked]:
    """Return the locked entries by name, or raise a ParseError."""
    remedy = "Delete it and run `llm-perf externals init` to regenerate it."
    try:
        lock = msgspec.json.decode(content, type=Lock)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ParseError(f"{where} cannot be read: {error}.", remedy) from error
    if lock.schema > SCHEMA:
        raise ParseError(f"{where} was written by a newer version (schema {lock.schema}).", "Upgrade llm-perf-opt.")
    return lock.externals


def write_lock(places: "Places", locked: dict[str, Locked]) -> None:
    """Replace the file; entries are sorted by name, so that additions merge."""
    write_record(places.root, places.lock_file, Lock(externals={name: locked[name] for name in sorted(locked)}))


THIRD_PARTY = "third_party"
LISTING = "externals.yaml"
LOCK = "externals.lock.json"
IGNORE = ".gitignore"
LICENSES = "licenses"
_MAKING = ".making-"


class Places:
    """A project with a third_party/ folder."""

    def __init__(self, root: Path, in_git: bool) -> None:
        self.root = root
        self.in_git = in_git
        """Whether the project is a git repository; submodule and subtree need one."""

    @classmethod
    def find(cls, root: Path | None) -> "Places":
        """Return the project at `root`; by default the git repository of the current folder, or that folder."""
        start = (root or Path.cwd()).resolve()
        if not start.is_dir():
            raise ConfigError(f"{start} is not a folder.", "Give the project's folder with --root.")
        found = find_repository(start)
        if root is not None:
            return cls(start, found is not None and found.top == start)
        return cls(found.top if found else start, found is not None)

    @property
    def third_party(self) -> Path:
        """The folder third_party/."""
        return self.root / THIRD_PARTY

    @property
    def listing_file(self) -> Path:
        """externals.yaml, written by people."""
        return self.third_party / LISTING

    @property
    def lock_file(self) -> Path:
        """The lock file, written by `init` and `update`."""
        return self.third_party / LOCK

    @property
    def ignore_file(self) -> Path:
        """The .gitignore of third_party/."""
        return self.third_party / IGNORE

    def licenses(self, name: str) -> Path:
        """Return the folder for an entry's licenses."""
        return self.third_party / LICENSES / name

    def folder(self, entry: External) -> Path:
        """Return the folder of an entry."""
        return self.third_party / entry.into

    def shown(self, entry: External) -> str:
        """Return the same relative to the project."""
        return f"{THIRD_PARTY}/{entry.into}"

    @cached_property
    def git(self) -> Git:
        """Git in the project, without network access."""
        return Git(self.root, settings=EXACT)

    def listing_text(self) -> str:
        """Return the text of externals.yaml, or raise an error that says how to create it."""
        try:
            return read_text(self.listing_file)
        except FileNotFoundError:
            raise ConfigError(
                f"{self.listing_file} does not exist.", "`llm-perf externals init --template` writes one to fill in."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.listing_file} cannot be read: {words_of(error)}.", "Fix the file.") from error

    def listing(self) -> dict[str, External]:
        """Return the entries of externals.yaml."""
        return read_listing(self.listing_text(), f"{THIRD_PARTY}/{LISTING}")

    def locked(self) -> dict[str, Locked]:
        """Return the locked entries; empty if the file does not exist."""
        try:
            content = read_bytes(self.lock_file)
        except FileNotFoundError:
            return {}
        return read_lock(content, f"{THIRD_PARTY}/{LOCK}")

    def ignore(self, entry: External) -> None:
        """Write the .gitignore for entries that are local to this machine."""
        self.check_plain(self.ignore_file)
        text = read_text(self.ignore_file) if self.ignore_file.exists() else ""
        lines = text.splitlines()
        missing = [line for line in (f"/{_MAKING}*/", f"/{entry.into}") if line not in lines]
        if missing:
            write_whole(self.root, self.ignore_file, "\n".join([*lines, *missing, ""]).encode())

    def make_room(self, entry: External) -> Path:
        """Return the entry's folder and create its parents, of which none may be a link: it could lead to another entry."""
        folder = self.folder(entry)
        self.check_plain(folder.parent)
        try:
            make_folder(self.third_party, folder.parent)
        except OSError as error:
            raise ResourceError(f"{folder.parent} cannot be created: {error.strerror}.", "Check what is at this path.") from error
        return folder

    def check_plain(self, path: Path) -> None:
        """Raise an OutsideError if a path below the project is a link, or has one in its folders."""
        for part in (path, *path.parents):
            if part == self.root:
                return
            if part.is_symlink():
                raise OutsideError(
                    f"{part} is a link that leads to {os.path.realpath(part)}.", "Remove it: nothing is written through it."
                )

    def drop_empty_room(self, entry: External) -> None:
        """Remove empty parents that were created for an entry that failed."""
        folder = self.folder(entry).parent
        while folder != self.third_party and remove_empty(self.third_party, folder):
            folder = folder.parent

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock third_party/, and remove what a killed process left unfinished."""
        for path in (self.third_party, self.third_party / LICENSES, self.lock_file, self.listing_file):
            self.check_plain(path)
        make_folder(self.root, self.third_party)
        handle = os.open(self.third_party, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ResourceError(
                    f"Another `llm-perf externals` is running in {self.third_party}.", "Wait until it has finished."
                ) from error
            for left in self.third_party.glob(f"{_MAKING}*"):
                remove(self.third_party, left)
            yield
        finally:
            os.close(handle)

    def put(self, new: Path, folder: Path) -> None:
        """Rename a finished folder into place; what it replaces moves to the staging folder, and back on failure."""
        before = new.with_name("before")
        if folder.exists():
            move(self.third_party, folder, before)
        try:
            move(self.third_party, new, folder)
        except BaseException:
            if before.exists():
                move(self.third_party, before, folder)
            raise

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a temporary folder on the same disk; finished folders are renamed out of it."""
        made = Path(tempfile.mkdtemp(prefix=_MAKING, dir=self.third_party))
        try:
            yield made
        finally:
            remove_if_possible(self.third_party, made)
