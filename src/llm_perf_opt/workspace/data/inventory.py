"""List every file of a folder with size and hash. Links are followed; dangling and circular ones are errors."""

import dataclasses
import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from llm_perf_opt import __version__
from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.run_folder import write_whole
from llm_perf_opt.core.user_files import check_ordinary, open_ordinary, read_bytes
from llm_perf_opt.core.yaml_text import invalid_yaml, load_yaml
from llm_perf_opt.workspace.data.formats import Format, suffix_of
from llm_perf_opt.workspace.data.layout import dangling

Advance = Callable[[int], None]
"""Called with the number of bytes processed since the last call."""

CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class FileEntry:
    """A file."""

    bytes: int
    sha256: str


def ignore(_: int) -> None:
    """Ignore progress."""


def files_below(folder: Path) -> dict[str, Path]:
    """Return every file under `folder`, or `folder` itself if it is a file, by name; sorted."""
    if dangling(folder):
        raise ResourceError(f"{folder} is a link to {folder.readlink()}, which does not exist.", "Give an existing path.")
    try:
        check_ordinary(folder)
        if folder.is_file():
            named = _named_as_data(folder)
            return {named.name: named}
        if not folder.is_dir():
            raise ResourceError(f"{folder}: no such file or folder.", "Give an existing file, or a folder with files in it.")
    except OSError as error:  # the name is too long, or a folder is not accessible
        raise ResourceError(f"{folder} cannot be accessed: {error.strerror or error}.", "Give an accessible path.") from error
    return dict(sorted(_walk(folder, folder, (_identity(folder),))))


def _named_as_data(file: Path) -> Path:
    """Return the file under the first name along its links that shows a format; names in a cache are hashes."""
    while file.is_symlink() and not suffix_of(file.name):
        file = file.parent / file.readlink()
    return file.parent.resolve() / file.name


def inventory(files: Mapping[str, Path], advance: Advance = ignore) -> dict[str, FileEntry]:
    """Return size and hash of every file."""
    return {name: file_entry(path, advance) for name, path in files.items()}


def file_entry(path: Path, advance: Advance = ignore) -> FileEntry:
    """Return size and hash of a file, read in chunks."""
    digest, size = hashlib.sha256(), 0
    try:
        with open_ordinary(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                advance(len(chunk))
    except OSError as error:
        raise ResourceError(f"{path} cannot be read: {error.strerror or error}.", "Check its permissions.") from error
    return FileEntry(size, digest.hexdigest())


def content_sha256(entries: Mapping[str, FileEntry]) -> str:
    """Return one hash over names, sizes and contents: equal for equal folders."""
    digest = hashlib.sha256()
    for name, entry in sorted(entries.items()):
        digest.update(f"{len(name.encode())}:{name}\0{entry.bytes}\0{entry.sha256}\n".encode())
    return digest.hexdigest()


def total_bytes(paths: Mapping[str, Path]) -> int:
    """Return the total size of all files."""
    return sum(path.stat().st_size for path in paths.values())


def _walk(top: Path, folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, Path]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ResourceError(f"{folder} cannot be read: {error.strerror or error}.", "Check its permissions.") from error
    for entry in entries:
        path = Path(entry.path)
        if dangling(path):
            raise ResourceError(f"{path} is a link to {path.readlink()}, which does not exist.", "Remove or fix it.")
        if entry.is_dir():
            identity = _identity(path)
            if identity in above:
                raise ResourceError(f"{path} is a link to a folder that contains it, which never ends.", "Remove it.")
            yield from _walk(top, path, (*above, identity))
        else:
            check_ordinary(path)
            yield _name(path.relative_to(top)), path


def _name(relative: Path) -> str:
    name = relative.as_posix()
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ResourceError(f"{name!r}: the file's name is not UTF-8.", "Rename it.") from error
    return name


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


# --- metadata ---------------------------------------------------------------------------------------------------------


SCHEMA = 1
MOST_FACTS = 10_000_000
"""Values in a metadata file, which lists every file of the data. Aliases can expand a few lines of YAML beyond any memory."""
M = TypeVar("M", "DatasetMetadata", "VariantMetadata")
T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """Number of files, bytes and records."""

    files: int
    bytes: int
    records: int | None
    """None: not counted."""


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
    content_sha256: str | None
    """None: not recorded."""
    added: str | None
    tool: dict[str, str]
    files: dict[str, FileEntry]
    filled: list[str] = field(default_factory=list)
    """Facts that the author of the metadata did not state; they were found in the data."""


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
    parent: str | None
    """source-data, or another variant; None: not recorded."""
    parent_sha256: str | None
    """The content hash of what was read; None: not recorded."""
    transform: str | None
    """subset, split, tokenized, converted or cleaned; in the words of the author, or None, for a variant of the user."""
    arguments: dict[str, Any]
    format: Format
    text_field: str
    splits: dict[str, int]
    size: Size
    skipped: Skipped
    content_sha256: str | None
    created: str | None
    tool: dict[str, str]
    files: dict[str, FileEntry]
    left_out: dict[str, int] = field(default_factory=dict)
    """Readable records that the transform leaves out, by reason."""
    filled: list[str] = field(default_factory=list)
    """Facts that the author of the metadata did not state; they were found in the data."""


def write_metadata(root: Path, path: Path, metadata: DatasetMetadata | VariantMetadata) -> None:
    """Write the metadata as YAML; optional facts only if there are any."""
    values = {key: value for key, value in dataclasses.asdict(metadata).items() if value or key not in ("filled", "left_out")}
    write_whole(root, path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=130).encode())


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, with dates as text, or raise a ParseError."""
    try:
        found = load_yaml(read_bytes(path), MOST_FACTS)
    except FileNotFoundError as error:
        raise ParseError(f"{path} is missing.", "Restore it, or remove the folder and add the dataset again.") from error
    except invalid_yaml() as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        raise ParseError(f"{path} cannot be read: it is not a mapping.", "Write one fact per line, such as `name: NAME`.")
    return {str(key): _without_dates(value) for key, value in found.items()}


def converted(path: Path, values: dict[str, Any], kind: type[T]) -> T:
    """Return the values of a file as a record, or raise a ParseError with the file and the place in it."""
    try:
        return msgspec.convert(values, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error


def read_metadata(path: Path, kind: type[M], values: dict[str, Any] | None = None) -> M:
    """Return metadata that this program wrote, or raise a ParseError with the file and the place in it.

    `values` is the content of the file if it was read before.
    """
    found = converted(path, read_yaml(path) if values is None else values, kind)
    if found.schema > SCHEMA:
        raise ParseError(f"{path} was written by a newer version (schema {found.schema}).", "Upgrade llm-perf-opt.")
    return found


def _unreadable(path: Path, error: Exception) -> ParseError:
    return ParseError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}", "Fix it, or create it again.")


def _without_dates(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_dates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_dates(item) for item in value]
    return value.isoformat() if isinstance(value, date) else value


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
