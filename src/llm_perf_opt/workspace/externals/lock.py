"""externals.lock.json: what was fetched for each pin, to verify it later without network access."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.run_folder import write_record

SCHEMA = 1


@dataclass(frozen=True)
class Locked:
    """The fetched content of an entry, by git's own ids, which the index of a repository has as well."""

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
    remedy = "Delete it and run `llm-perf externals init`: it is made anew."
    try:
        lock = msgspec.json.decode(content, type=Lock)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ParseError(f"{where} cannot be read: {error}.", remedy) from error
    if lock.schema > SCHEMA:
        raise ParseError(f"{where} was written by a newer version (schema {lock.schema}).", "Upgrade llm-perf-opt.")
    return lock.externals


def write_lock(path: Path, locked: dict[str, Locked]) -> None:
    """Replace the file; entries are sorted by name, so that additions merge."""
    write_record(path, Lock(externals={name: locked[name] for name in sorted(locked)}))
