"""externals.lock.json: what was made from each pin, so that content is verified later without the network."""

import fnmatch
import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.run_folder import write_record, write_whole
from llm_perf_opt.workspace.externals.fetching import remote_git
from llm_perf_opt.workspace.externals.git import FETCH_S, GitError
from llm_perf_opt.workspace.externals.listing import External
from llm_perf_opt.workspace.externals.places import Places

SCHEMA = 1


@dataclass(frozen=True)
class Locked:
    """What one entry came to. Content is named by git's own ids, which the index of a repository holds as well."""

    commit: str
    tree: str = ""
    """Of a subtree: the commit's tree."""
    files: dict[str, str] = field(default_factory=dict)
    """Of a Hub snapshot: blob id by path."""
    licenses: dict[str, str] = field(default_factory=dict)
    """Licences copied beside: blob id by path."""


@dataclass(frozen=True)
class Lock:
    """The whole file."""

    schema: int = SCHEMA
    externals: dict[str, Locked] = field(default_factory=dict)


def blob_id(content: bytes) -> str:
    """The name git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def read_lock(content: bytes, where: str) -> dict[str, Locked]:
    """What is locked, by name, or a ParseError."""
    remedy = "Delete it and run `llm-perf externals init`: it is made anew."
    try:
        lock = msgspec.json.decode(content, type=Lock)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ParseError(f"{where} cannot be read: {error}.", remedy) from error
    if lock.schema > SCHEMA:
        raise ParseError(f"{where} was written by a newer version (schema {lock.schema}).", "Upgrade llm-perf-opt.")
    return lock.externals


def write_lock(path: Path, locked: dict[str, Locked]) -> None:
    """Replace the file; entries are in order of name, so that two people's additions merge."""
    write_record(path, Lock(externals={name: locked[name] for name in sorted(locked)}))


LICENCE_PATTERNS = ("licen[cs]e*", "copying*", "notice*", "unlicense*")
LARGEST_LICENCE = 1_000_000


def copy_licences(places: Places, entry: External) -> dict[str, str]:
    """Copy what there is and say what came: blob id by path. What is listed and not there is left to `warnings`."""
    folder, beside = places.folder(entry), places.licenses(entry.name)
    wanted = entry.licenses or _called_so(folder)
    found = {path: content for path in wanted if (content := _read(entry, folder, path)) is not None}
    if beside.is_dir() and not beside.is_symlink():
        shutil.rmtree(beside)
    for path, content in found.items():
        write_whole(beside / path, content)
    return {path: blob_id(content) for path, content in found.items()}


def licence_warnings(places: Places, entry: External, locked: Locked | None) -> tuple[str, ...]:
    """What is wrong with an entry's licences, in words; only asked of an entry that is there."""
    if locked is None:
        return ("licences not copied: run `llm-perf externals init`",)
    found = []
    for path in entry.licenses:
        if path not in locked.licenses:
            found.append(f"licence {path} is listed, and the commit has no such file")
    if not locked.licenses and not entry.licenses:
        found.append("no licence found; name it with licenses: [FILE], or ask whether the code may be used")
    for path, blob in locked.licenses.items():
        copy = places.licenses(entry.name) / path
        if not copy.is_file():
            found.append(f"licence copy {path} is gone: run `llm-perf externals init`")
        elif blob_id(copy.read_bytes()) != blob:
            found.append(f"licence copy {path} was edited: run `llm-perf externals init`")
    return tuple(found)


def _called_so(folder: Path) -> tuple[str, ...]:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return tuple(name for name in names if any(fnmatch.fnmatchcase(name.lower(), one) for one in LICENCE_PATTERNS))


def _read(entry: External, folder: Path, path: str) -> bytes | None:
    """The file, which must lie inside: a link out of the repository is not followed."""
    file = folder / path
    if file.is_file() and file.resolve().is_relative_to(folder.resolve()) and file.stat().st_size <= LARGEST_LICENCE:
        return file.read_bytes()
    if entry.way == "sparse":  # it may lie in a folder that is not checked out
        try:
            return remote_git(entry, folder).content("cat-file", "blob", f"{entry.commit}:{path}", timeout_s=FETCH_S)
        except GitError:
            return None
    return None
