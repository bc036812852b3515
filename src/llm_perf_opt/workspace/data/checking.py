"""Compare the datasets/ tree with its metadata: list every difference, change nothing."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llm_perf_opt.config.composition import option_root
from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.core.user_files import read_bytes
from llm_perf_opt.core.yaml_text import invalid_yaml, load_yaml
from llm_perf_opt.workspace.data.formats import INDEX_SUFFIX, DataFile, data_files
from llm_perf_opt.workspace.data.inventory import (
    Advance,
    DatasetMetadata,
    FileEntry,
    VariantMetadata,
    content_sha256,
    file_entry,
    files_below,
    ignore,
    total_bytes,
)
from llm_perf_opt.workspace.data.layout import SOURCE, DatasetFolder, DatasetTree, dangling, is_part, option_file
from llm_perf_opt.workspace.data.preparing import Phases, silent
from llm_perf_opt.workspace.data.record_streams import count_records
from llm_perf_opt.workspace.data.stated_metadata import by_author, dataset_metadata, variant_files, variant_metadata
from llm_perf_opt.workspace.data.tokenizing import count_sequences

_NAMED = 20
"""Maximum number of differing files to name; the rest are counted."""


_WORKING_FOLDER = re.compile(r"(?<!\\)\$\{hydra:runtime\.cwd\}")
_INTERPOLATION = re.compile(r"(?<!\\)\$\{")


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
    filled: tuple[str, ...] = ()
    """Facts that the author of the metadata did not state; they were found in the data."""


def listed(folder: DatasetFolder) -> Listed:
    """Return a dataset and its variants as described in their metadata."""
    where = str(folder.source.readlink()) if folder.source.is_symlink() else str(folder.source)
    try:
        metadata = dataset_metadata(folder)
    except LlmPerfError as error:  # a damaged one does not hide the others
        return Listed(folder.name, None, None, None, where, f"unreadable: {error.fact}", {})
    state = "ok" if folder.source.exists() else f"dangling: {where} does not exist"
    variants = {}
    for variant in folder.variants():
        try:
            variants[variant.name] = _described(variant_metadata(folder, variant))
        except LlmPerfError as error:
            variants[variant.name] = f"unreadable: {error.fact}"
    size = metadata.size
    return Listed(metadata.name, metadata.format, size.records, size.bytes, where, state, variants, tuple(metadata.filled))


def _described(variant: VariantMetadata) -> str:
    records = "records not counted" if variant.size.records is None else f"{variant.size.records} records"
    origin = "its origin is not recorded" if variant.parent is None else f"from {variant.parent}"
    marked = f" (found in the data, not stated: {', '.join(variant.filled)})" if variant.filled else ""
    return f"{variant.transform or 'made by a script'}, {records}, {variant.format}, {origin}{marked}"


def unrecorded(folder: DatasetFolder) -> list[str]:
    """Return the parts whose contents cannot be compared because no hashes are recorded."""
    found = []
    with suppress(LlmPerfError):  # `check_dataset` reports it
        found += [SOURCE] if dataset_metadata(folder).content_sha256 is None else []
    for variant in folder.variants():
        with suppress(LlmPerfError):
            found += [variant.name] if variant_metadata(folder, variant).content_sha256 is None else []
    return found


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
        metadata = dataset_metadata(folder)
    except LlmPerfError as error:
        yield folder.name, error.fact
        return
    yield from ((folder.name, what) for what in _option_differences(folder, conf))
    if dangling(folder.source):
        yield SOURCE, f"a dangling link: {folder.source.readlink()} does not exist"
    elif not folder.source.exists():
        yield SOURCE, f"{folder.source} is missing"
    else:
        yield from _part(_Part(SOURCE, folder.source, lambda: files_below(folder.source), metadata), quick, phases)
    hashes = {SOURCE: metadata.content_sha256}
    variants: dict[str, VariantMetadata] = {}
    for variant in folder.variants():
        try:
            variants[variant.name] = variant_metadata(folder, variant)
            hashes[variant.name] = variants[variant.name].content_sha256
        except LlmPerfError as error:
            yield variant.name, error.fact
    for name, found in variants.items():
        variant = folder.variant(name)
        yield from _part(_Part(name, variant.data, partial(variant_files, variant), found), quick, phases)
        if found.parent is None:
            continue  # nobody recorded it
        if found.parent not in hashes:
            yield name, f"its parent {found.parent} no longer exists"
        elif None not in (recorded := (hashes[found.parent], found.parent_sha256)) and len(set(recorded)) > 1:
            yield name, f"it was made from a different version of {found.parent}"


def _bare(metadata_file: Path) -> str:
    return f"{metadata_file} is missing, but the data exist: restore it, or remove the folder and create it again"


def _unfinished(entry: Path) -> str:
    return f"{entry} is unfinished: it is being created, or the command was killed (the next attempt removes it)"


def _option_differences(folder: DatasetFolder, conf: Path) -> Iterator[str]:
    """Yield the problems of the Hydra option, which must exist and name this folder."""
    path = option_file(conf, folder.name)
    try:
        values = load_yaml(read_bytes(path))
    except FileNotFoundError:
        yield f"{path} is missing: dataset={folder.name} cannot be selected"
        return
    except invalid_yaml():
        yield f"{path} cannot be read as YAML"
        return
    root = values.get("root") if isinstance(values, dict) else None
    if not isinstance(root, str) or _named_folder(conf, root) not in (None, folder.path.resolve()):
        yield f"{path} names root {root!r}, not {folder.path}"


def _named_folder(conf: Path, root: str) -> Path | None:
    """Return the folder that an option names; None if only Hydra can tell."""
    plain = _WORKING_FOLDER.sub(lambda _: str(conf.absolute().parent), root)
    if _INTERPOLATION.search(plain):
        return None
    return option_root(conf, plain.replace("\\${", "${")).resolve()


@dataclass(frozen=True)
class _Part:
    """The source or a variant."""

    label: str
    where: Path
    list_files: Callable[[], dict[str, Path]]
    metadata: DatasetMetadata | VariantMetadata


def _part(part: _Part, quick: bool, phases: Phases) -> Iterator[tuple[str, str]]:
    """Yield the problems of the source or a variant: its metadata, its files, then its records."""
    metadata = part.metadata
    wrong = [] if by_author(metadata) else list(_metadata_problems(metadata))
    drifted = [] if metadata.content_sha256 is None else list(_content(part, quick, phases))
    if not (quick or wrong or drifted):  # otherwise the count adds nothing
        wrong = list(_record_problems(part, phases))
    yield from ((part.label, what) for what in (*wrong, *drifted))


def _content(part: _Part, quick: bool, phases: Phases) -> Iterator[str]:
    recorded: Mapping[str, FileEntry] = part.metadata.files
    try:
        files = part.list_files()
        advance = ignore if quick else phases(f"checking {part.label}", total_bytes(files))
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
    for what, stated, counted in (
        ("files", size.files, len(entries)),
        ("bytes", size.bytes, sum(entry.bytes for entry in entries.values())),
        ("records", size.records, sum(metadata.splits.values())),
    ):
        if stated != counted:
            yield f"its metadata give {stated} {what} but list {counted}"


def _record_problems(part: _Part, phases: Phases) -> Iterator[str]:
    """Yield the splits whose number of records differs from the metadata although the files match."""
    metadata = part.metadata
    if by_author(metadata) and not metadata.splits:
        return  # no number is stated
    try:
        files = data_files(part.list_files(), part.where, metadata.format)
        advance = phases(f"counting records of {part.label}", sum(file.bytes for file in files))
        counts = dict.fromkeys(metadata.splits, 0)
        for file in files:
            counts[file.split] = counts.get(file.split, 0) + _records(file, advance)
    except LlmPerfError as error:
        yield error.fact
        return
    if by_author(metadata) and len(metadata.splits) == 1:  # the names of the files need not say which split they are
        counts = dict.fromkeys(metadata.splits, sum(counts.values()))
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
