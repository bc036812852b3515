"""Compare the datasets/ tree with its metadata: list every difference, change nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from llm_perf_opt.config.composition import option_root
from llm_perf_opt.core.errors import LlmPerfError, ParseError
from llm_perf_opt.core.user_files import read_bytes
from llm_perf_opt.workspace.data.formats import DataFile, data_files
from llm_perf_opt.workspace.data.inventory import (
    Advance,
    DatasetMetadata,
    FileEntry,
    Size,
    VariantMetadata,
    content_sha256,
    file_entry,
    files_below,
    ignore,
    read_metadata,
    total_bytes,
)
from llm_perf_opt.workspace.data.layout import INDEX_SUFFIX, SOURCE, DatasetFolder, DatasetTree, dangling, is_part, option_file
from llm_perf_opt.workspace.data.preparing import Phases, silent
from llm_perf_opt.workspace.data.record_streams import count_records
from llm_perf_opt.workspace.data.tokenizing import count_sequences

_NAMED = 20
"""Maximum number of differing files to name; the rest are counted."""


@dataclass(frozen=True)
class Difference:
    """A difference from the metadata."""

    dataset: str
    part: str
    """source-data, a variant, or the dataset itself."""
    what: str


@dataclass(frozen=True)
class Listed:
    """A dataset, as `list` shows it."""

    name: str
    format: str | None
    records: int | None
    bytes: int | None
    """Format, records and bytes are None if the metadata cannot be read."""
    source: str
    state: str
    """ok, or why it cannot be used. Contents are not checked; `check` does that."""
    variants: dict[str, str]
    """Name → description."""


def listed(folder: DatasetFolder) -> Listed:
    """Return a dataset and its variants as described in their metadata."""
    where = str(folder.source.readlink()) if folder.source.is_symlink() else str(folder.source)
    try:
        metadata = read_metadata(folder.metadata_file, DatasetMetadata)
    except ParseError as error:  # a damaged one does not hide the others
        return Listed(folder.name, None, None, None, where, f"unreadable: {error.fact}", {})
    state = "ok" if folder.source.exists() else f"dangling: {where} does not exist"
    variants = {}
    for variant in folder.variants():
        try:
            found = read_metadata(variant.metadata_file, VariantMetadata)
            variants[variant.name] = f"{found.transform}, {found.size.records} records, {found.format}, from {found.parent}"
        except ParseError as error:
            variants[variant.name] = f"unreadable: {error.fact}"
    return Listed(metadata.name, metadata.format, metadata.size.records, metadata.size.bytes, where, state, variants)


def check_dataset(folder: DatasetFolder, conf: Path, quick: bool = False, phases: Phases = silent) -> list[Difference]:
    """Return every difference; `quick` compares names and sizes without reading the data."""
    return [Difference(folder.name, part, what) for part, what in _differences(folder, conf, quick, phases)]


def unfinished(tree: DatasetTree) -> list[Difference]:
    """Return what a killed `add` left behind, and datasets without metadata."""
    if not tree.root.is_dir():
        return []
    left = sorted(entry for entry in tree.root.iterdir() if entry.name.startswith(".") and is_part(entry))
    found = [Difference(entry.name, entry.name, _unfinished(entry)) for entry in left]
    return found + [Difference(folder.name, folder.name, _bare(folder.metadata_file)) for folder in tree.without_metadata()]


def _differences(folder: DatasetFolder, conf: Path, quick: bool, phases: Phases) -> Iterator[tuple[str, str]]:
    for entry in folder.unfinished():
        yield entry.name, _unfinished(entry)
    try:
        metadata = read_metadata(folder.metadata_file, DatasetMetadata)
    except ParseError as error:
        yield folder.name, error.fact
        return
    yield from ((folder.name, what) for what in _option_differences(folder, conf))
    for bare in folder.without_metadata():
        yield bare.name, _bare(bare.metadata_file)
    if dangling(folder.source):
        yield SOURCE, f"a dangling link: {folder.source.readlink()} does not exist"
    elif not folder.source.exists():
        yield SOURCE, f"{folder.source} is missing"
    else:
        yield from _part(folder.source, metadata, SOURCE, quick, phases)
    hashes = {SOURCE: metadata.content_sha256}
    variants: dict[str, VariantMetadata] = {}
    for variant in folder.variants():
        try:
            variants[variant.name] = read_metadata(variant.metadata_file, VariantMetadata)
            hashes[variant.name] = variants[variant.name].content_sha256
        except ParseError as error:
            yield variant.name, error.fact
    for name, found in variants.items():
        yield from _part(folder.variant(name).data, found, name, quick, phases)
        if found.parent not in hashes:
            yield name, f"its parent {found.parent} no longer exists"
        elif hashes[found.parent] != found.parent_sha256:
            yield name, f"it was made from a different version of {found.parent}"


def _bare(metadata_file: Path) -> str:
    return f"{metadata_file} is missing, but the data exist: restore it, or remove the folder and create it again"


def _unfinished(entry: Path) -> str:
    return f"{entry} is unfinished: it is being created, or the command was killed (the next attempt removes it)"


def _option_differences(folder: DatasetFolder, conf: Path) -> Iterator[str]:
    """Yield the problems of the Hydra option, which must exist and name this folder."""
    path = option_file(conf, folder.name)
    try:
        values = yaml.safe_load(read_bytes(path))
    except FileNotFoundError:
        yield f"{path} is missing: dataset={folder.name} cannot be selected"
        return
    except (yaml.YAMLError, OSError, ValueError, RecursionError):
        yield f"{path} cannot be read as YAML"
        return
    root = values.get("root") if isinstance(values, dict) else None
    if not isinstance(root, str) or option_root(conf, root.replace("\\${", "${")).resolve() != folder.path.resolve():
        yield f"{path} names root {root!r}, not {folder.path}"


def _part(
    where: Path, metadata: DatasetMetadata | VariantMetadata, label: str, quick: bool, phases: Phases
) -> Iterator[tuple[str, str]]:
    """Yield the problems of the source or a variant: its metadata, its files, then its records."""
    wrong = list(_metadata_problems(metadata))
    drifted = list(_content(where, metadata.files, label, quick, phases))
    if not (quick or wrong or drifted):  # otherwise the count adds nothing
        wrong = list(_record_problems(where, metadata, label, phases))
    yield from ((label, what) for what in (*wrong, *drifted))


def _content(where: Path, recorded: Mapping[str, FileEntry], label: str, quick: bool, phases: Phases) -> Iterator[str]:
    try:
        files = files_below(where)
        advance = ignore if quick else phases(f"checking {label}", total_bytes(files))
        found = [_differing(name, path, recorded.get(name), quick, advance) for name, path in files.items()]
    except LlmPerfError as error:
        yield error.fact
        return
    differing = [what for what in found if what] + [f"{name} is missing" for name in recorded if name not in files]
    yield from differing[:_NAMED]
    if len(differing) > _NAMED:
        yield f"… and {len(differing) - _NAMED} more files differ"


def _metadata_problems(metadata: DatasetMetadata | VariantMetadata) -> Iterator[str]:
    """Yield the contradictions inside the metadata, which must have been edited."""
    entries, size = metadata.files, metadata.size
    if content_sha256(entries) != metadata.content_sha256:
        yield "content_sha256 in its metadata does not match the files listed there"
    recorded = Size(len(entries), sum(entry.bytes for entry in entries.values()), sum(metadata.splits.values()))
    for what, stated, counted in (
        ("files", size.files, recorded.files),
        ("bytes", size.bytes, recorded.bytes),
        ("records", size.records, recorded.records),
    ):
        if stated != counted:
            yield f"its metadata give {stated} {what} but list {counted}"


def _record_problems(where: Path, metadata: DatasetMetadata | VariantMetadata, label: str, phases: Phases) -> Iterator[str]:
    """Yield the splits whose number of records differs from the metadata although the files match."""
    try:
        files = data_files(files_below(where), where, metadata.format)
        advance = phases(f"counting records of {label}", sum(file.bytes for file in files))
        counts = dict.fromkeys(metadata.splits, 0)
        for file in files:
            counts[file.split] = counts.get(file.split, 0) + _records(file, advance)
    except LlmPerfError as error:
        yield error.fact
        return
    for split, count in counts.items():
        if count != (stated := metadata.splits.get(split, 0)):
            yield f"its metadata give {stated} records in the split {split}, but there are {count}"


def _records(file: DataFile, advance: Advance) -> int:
    if file.format != "tokens":
        return count_records(file, advance)
    advance(file.bytes)
    return count_sequences(file.path.with_suffix(INDEX_SUFFIX))


def _differing(name: str, path: Path, recorded: FileEntry | None, quick: bool, advance: Advance) -> str:
    if recorded is None:
        return f"{name} is new"
    size = path.stat().st_size
    if size != recorded.bytes:
        return f"{name} has {size} bytes instead of the recorded {recorded.bytes}"
    if not quick and file_entry(path, advance).sha256 != recorded.sha256:
        return f"{name} has the same size but different contents"
    return ""
