"""metadata.yaml of datasets and variants."""

import dataclasses
import platform
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from llm_perf_opt import __version__
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.run_folder import write_whole
from llm_perf_opt.core.user_files import read_bytes
from llm_perf_opt.workspace.data.formats import Format
from llm_perf_opt.workspace.data.inventory import FileEntry

SCHEMA = 1
M = TypeVar("M", "DatasetMetadata", "VariantMetadata")


@dataclass(frozen=True)
class Size:
    """Number of files, bytes and records."""

    files: int
    bytes: int
    records: int


@dataclass(frozen=True)
class DatasetMetadata:
    """Where a dataset comes from and what it contained when it was added."""

    schema: int
    name: str
    version: str | int | float | None
    """None: not given."""
    source: str
    """The URL or folder it came from."""
    license: str | None
    notes: str | None
    format: Format
    text_field: str
    splits: dict[str, int]
    """Records of each split."""
    size: Size
    content_sha256: str
    added: str
    tool: dict[str, str]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Skipped:
    """Records that were left out."""

    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class VariantMetadata:
    """What a variant was made from, how, and the result."""

    schema: int
    dataset: str
    name: str
    parent: str
    """source-data, or another variant."""
    parent_sha256: str
    """The content hash of what was read."""
    transform: str
    """subset, tokenized or converted."""
    arguments: dict[str, Any]
    format: Format
    text_field: str
    splits: dict[str, int]
    size: Size
    skipped: Skipped
    content_sha256: str
    created: str
    tool: dict[str, str]
    files: dict[str, FileEntry]


def write_metadata(path: Path, metadata: DatasetMetadata | VariantMetadata) -> None:
    """Write the metadata as YAML."""
    write_whole(path, yaml.safe_dump(dataclasses.asdict(metadata), sort_keys=False, allow_unicode=True, width=130).encode())


def read_metadata(path: Path, kind: type[M]) -> M:
    """Return the metadata, or raise a ParseError with the file and the place in it."""
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        found = msgspec.convert(yaml.load(read_bytes(path), Loader=loader), kind)  # noqa: S506 - a safe loader
    except FileNotFoundError as error:
        raise ParseError(f"{path} is missing.", "Restore it, or remove the folder and add the dataset again.") from error
    except (yaml.YAMLError, msgspec.MsgspecError, OSError, ValueError, RecursionError) as error:
        raise ParseError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}", "Fix it, or create it again.") from error
    if found.schema > SCHEMA:
        raise ParseError(f"{path} was written by a newer version (schema {found.schema}).", "Upgrade llm-perf-opt.")
    return found


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def tool_versions(*packages: str) -> dict[str, str]:
    """Return the versions of this program and of packages that may affect the bytes."""
    from importlib.metadata import version

    return {
        "llm-perf-opt": __version__,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
