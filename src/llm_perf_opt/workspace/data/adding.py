"""Add a dataset: link, metadata, README and Hydra option are created together or not at all."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from llm_perf_opt.config.choices import packaged_options
from llm_perf_opt.config.composition import root_for_option
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.run_folder import there, write_whole
from llm_perf_opt.core.terminal import visible
from llm_perf_opt.workspace.data.formats import DataFile, data_files
from llm_perf_opt.workspace.data.inventory import content_sha256, files_below, inventory, total_bytes
from llm_perf_opt.workspace.data.layout import DatasetFolder, DatasetTree, option_file, refuse_existing
from llm_perf_opt.workspace.data.making import made_whole
from llm_perf_opt.workspace.data.metadata import SCHEMA, DatasetMetadata, Size, now, tool_versions, write_metadata
from llm_perf_opt.workspace.data.preparing import Phases, silent
from llm_perf_opt.workspace.data.record_streams import check_text_field, count_records

_KEPT_OUT_OF_GIT = "*/source-data\n*/source-data/**\n*/*/data/\n.*.part/\n"
_OPTION_HEAD = "# Written by `llm-perf dataset add`. dataset.variant=NAME selects a variant; without one, the source is read.\n"


@dataclass(frozen=True)
class Description:
    """The user's description of a dataset; None: not given."""

    version: str | None = None
    origin: str | None = None
    """The URL it came from."""
    license: str | None = None
    notes: str | None = None
    text_field: str = "text"
    format: str | None = None


def add_dataset(
    tree: DatasetTree,
    conf: Path,
    name: str,
    source: Path,
    said: Description,
    readme: Callable[[DatasetMetadata, Sequence[str]], str],
    phases: Phases = silent,
) -> tuple[DatasetFolder, DatasetMetadata]:
    """Link `source` as the dataset `name`; `readme` writes its page from the metadata and the source's first level."""
    folder = tree.new_dataset(name)
    if name in packaged_options("dataset"):
        raise ConfigError(f"dataset={name} is a packaged option.", "Choose another name.")
    option, content = option_file(conf, name), _option(folder, conf, said)
    if not (option.is_file() and option.read_text(errors="replace") == content):  # our own, of an add that was killed
        refuse_existing(option, "Choose another name, or remove that file first.")
    files = files_below(there(source, "Give the folder or the file of the data."))
    _refuse_itself(tree, source)
    records = data_files(files, source, said.format)
    if records[0].format == "tokens":
        raise ConfigError(f"{source} contains token ids, not texts.", "Add the texts instead.")
    check_text_field(records, said.text_field)
    metadata = _describe(name, source, said, files, records, phases)
    try:
        with made_whole(folder.path) as part:
            made = DatasetFolder(part)
            made.source.symlink_to(_lasting(source, files))
            write_metadata(made.metadata_file, metadata)
            write_whole(made.readme_file, readme(metadata, _first_level(source, files)).encode())
            if not tree.ignore_file.exists():
                write_whole(tree.ignore_file, _KEPT_OUT_OF_GIT.encode())
            write_whole(option, content.encode())
    except BaseException:
        if not folder.path.exists():
            with suppress(OSError):  # the error that brought us here says more
                option.unlink(missing_ok=True)
        raise
    return folder, metadata


def _option(folder: DatasetFolder, conf: Path, said: Description) -> str:
    """Return the option's YAML; `${` in a path is escaped."""
    values = {"name": folder.name, "kind": "prompts", "path": None, "text_field": said.text_field, "seed": 0}
    values |= {"root": root_for_option(conf, folder.path), "variant": None}
    return _OPTION_HEAD + yaml.safe_dump(values, sort_keys=False, allow_unicode=True).replace("${", "\\${")


def _refuse_itself(tree: DatasetTree, source: Path) -> None:
    if tree.root.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{source} contains {tree.root} itself.", "Give a folder with only this dataset.")


def _describe(
    name: str, source: Path, said: Description, files: dict[str, Path], records: Sequence[DataFile], phases: Phases
) -> DatasetMetadata:
    entries = inventory(files, phases("hashing the source", total_bytes(files)))
    advance = phases("counting records", sum(file.bytes for file in records))
    splits: dict[str, int] = {}
    for file in records:
        splits[file.split] = splits.get(file.split, 0) + count_records(file, advance)
    if not sum(splits.values()):
        raise ResourceError(f"{source} has no records: every file is empty.", "Give the folder with the data.")
    return DatasetMetadata(
        schema=SCHEMA,
        name=name,
        version=said.version,
        source=said.origin or visible(str(_lasting(source, files))),
        license=said.license,
        notes=said.notes,
        format=records[0].format,
        text_field=said.text_field,
        splits=splits,
        size=Size(len(entries), sum(entry.bytes for entry in entries.values()), sum(splits.values())),
        content_sha256=content_sha256(entries),
        added=now(),
        tool=tool_versions(),
        files=entries,
    )


def _lasting(source: Path, files: dict[str, Path]) -> Path:
    """Return the path to link to: the real path of a folder; for a file, the name that shows its format."""
    return next(iter(files.values())) if source.is_file() else source.resolve()


def _first_level(source: Path, files: dict[str, Path]) -> list[str]:
    if source.is_file():
        return list(files)
    return [f"{entry.name}/" if entry.is_dir() else entry.name for entry in sorted(source.iterdir())]
