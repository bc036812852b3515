"""Keep a dataset's README current, and complete the metadata of datasets and variants made by hand or by a script."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.file_lock import changing
from llm_perf_opt.core.inside import root_of
from llm_perf_opt.core.run_folder import write_whole
from llm_perf_opt.core.user_files import read_text
from llm_perf_opt.core.yaml_text import invalid_yaml, load_yaml
from llm_perf_opt.workspace.data.formats import INDEX_SUFFIX, data_files
from llm_perf_opt.workspace.data.inventory import (
    DatasetMetadata,
    Size,
    VariantMetadata,
    content_sha256,
    files_below,
    inventory,
    now,
    read_yaml,
    tool_versions,
    total_bytes,
)
from llm_perf_opt.workspace.data.layout import DatasetFolder, DatasetTree, VariantFolder
from llm_perf_opt.workspace.data.marked_text import README_MARKS, YAML_MARKS, with_block
from llm_perf_opt.workspace.data.preparing import KEPT_OUT_OF_GIT, Phases, first_level, silent
from llm_perf_opt.workspace.data.record_streams import count_records
from llm_perf_opt.workspace.data.stated_metadata import (
    FILLED_IN,
    FilledIn,
    by_author,
    dataset_metadata,
    variant_files,
    variant_metadata,
)
from llm_perf_opt.workspace.data.tokenizing import count_sequences

Render = Callable[[DatasetMetadata, Sequence[str], Sequence[VariantMetadata]], str]
"""Makes the block of a README from the metadata, the first level of the source and the variants."""


@dataclass(frozen=True)
class Refreshed:
    """What `refresh` did."""

    changed: tuple[Path, ...]
    skipped: tuple[str, ...] = ()
    """Variants that are left as they are, each with the reason."""


def refresh(tree: DatasetTree, folder: DatasetFolder, render: Render, phases: Phases = silent) -> Refreshed:
    """Record what the author of a dataset or a variant did not state, and update the README."""
    changed: list[Path] = []
    skipped: list[str] = []
    metadata = dataset_metadata(folder)
    if by_author(metadata):
        found = _found(files_below(folder.source), folder.source, metadata, "source-data", phases)
        changed += _filled(root_of(tree.root), folder.metadata_file, found)
    for variant in folder.variants():
        try:
            changed += _refreshed_variant(folder, variant, phases)
        except LlmPerfError as error:  # one variant does not stop the others
            skipped.append(f"{variant.path}: {error.fact} {error.remedy}".strip())
    return Refreshed((*changed, *update_readme(tree, folder, render)), tuple(skipped))


def _refreshed_variant(folder: DatasetFolder, variant: VariantFolder, phases: Phases) -> list[Path]:
    made = variant_metadata(folder, variant)
    if not by_author(made):
        return []
    return _filled(
        root_of(folder.path.parent),
        variant.metadata_file,
        _found(variant_files(variant), variant.data, made, variant.name, phases),
    )


def update_readme(tree: DatasetTree, folder: DatasetFolder, render: Render) -> list[Path]:
    """Regenerate the block of the README, and add the .gitignore if there is none. Return the files that changed."""
    block = render(dataset_metadata(folder), first_level(folder.source), list(_readable_variants(folder)))
    readme = folder.readme_file
    _refuse_link(readme)
    changed = []
    with changing(root_of(tree.root), folder.path):
        before = _text_of(readme) if readme.exists() else f"# {folder.name}\n"
        after = with_block(before, block, README_MARKS, str(readme))
        if after != before or not readme.exists():
            write_whole(root_of(tree.root), readme, after.encode())
            changed.append(readme)
    if not tree.ignore_file.exists():
        write_whole(root_of(tree.root), tree.ignore_file, KEPT_OUT_OF_GIT.encode())
        changed.append(tree.ignore_file)
    return changed


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise ResourceError(f"{path} is a link, which is not followed.", "Replace it with a file, or update it by hand.")


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise ParseError(f"{path} is not UTF-8 text.", "Convert it to UTF-8.") from error


def _readable_variants(folder: DatasetFolder) -> Iterator[VariantMetadata]:
    for variant in folder.variants():
        with suppress(LlmPerfError):  # `list` and `check` say what is wrong with it
            yield variant_metadata(folder, variant)


def _found(
    files: dict[str, Path], where: Path, metadata: DatasetMetadata | VariantMetadata, label: str, phases: Phases
) -> FilledIn:
    """Return what the data say: the format, the records of each split, sizes and hashes."""
    entries = inventory(files, phases(f"hashing {label}", total_bytes(files)))
    records = data_files(files, where, metadata.format)
    advance = phases(f"counting records of {label}", sum(file.bytes for file in records))
    splits: dict[str, int] = {}
    for file in records:
        index = file.path.with_suffix(INDEX_SUFFIX)
        if file.format != "tokens":
            splits[file.split] = splits.get(file.split, 0) + count_records(file, advance)
        elif index.is_file():
            splits[file.split] = splits.get(file.split, 0) + count_sequences(index)
    size = Size(len(entries), sum(entry.bytes for entry in entries.values()), sum(splits.values()) or None)
    return FilledIn(now(), tool_versions(), records[0].format, splits, size, content_sha256(entries), entries)


def _filled(root: Path, path: Path, found: FilledIn) -> list[Path]:
    """Add the facts to a metadata file, whose own text stays as it is; a missing file is created."""
    _refuse_link(path)
    with changing(root, path.parent):
        write_whole(root, path, _completed(path, found).encode())
    return [path]


def _completed(path: Path, found: FilledIn) -> str:
    """Return the text of a metadata file with the facts at its end."""
    before = _text_of(path) if path.exists() else ""
    stated = {key: value for key, value in (read_yaml(path) if path.exists() else {}).items() if key != FILLED_IN}
    block = yaml.safe_dump({FILLED_IN: dataclasses.asdict(found)}, sort_keys=False, allow_unicode=True, width=130)
    after = with_block(before, block, YAML_MARKS, str(path))
    try:
        now_stated = load_yaml(after)
    except invalid_yaml():
        now_stated = None
    if not isinstance(now_stated, dict) or {str(key) for key in now_stated} != {*stated, FILLED_IN}:
        raise ConfigError(
            f"{path} cannot be completed: facts added at its end would not be part of its mapping.",
            "Write it as a block: one `key: value` per line, without braces around all of them.",
        )
    return after
