"""externals.lock.json: what was made from each pin, so that content is verified later without the network."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.run_folder import write_record

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
