"""Derive a variant of a dataset: the source is never modified, and the variant is created completely or not at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llm_perf_opt.config.choices import packaged_options
from llm_perf_opt.config.composition import root_for_option
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError, nearest
from llm_perf_opt.core.inside import link, make_folder, remove, remove_if_possible, root_of
from llm_perf_opt.core.run_folder import there, write_whole
from llm_perf_opt.core.terminal import visible
from llm_perf_opt.workspace.data.cleaning import RULES, write_cleaned
from llm_perf_opt.workspace.data.conversion import TARGETS, Conversion, write_converted, write_selected
from llm_perf_opt.workspace.data.formats import INDEX_SUFFIX, SUFFIXES, DataFile, Format, data_files, only_split
from llm_perf_opt.workspace.data.images import FORMATS as IMAGE_FORMATS
from llm_perf_opt.workspace.data.inventory import (
    SCHEMA,
    Advance,
    DatasetMetadata,
    Size,
    Skipped,
    VariantMetadata,
    content_sha256,
    files_below,
    ignore,
    inventory,
    now,
    tool_versions,
    total_bytes,
    write_metadata,
)
from llm_perf_opt.workspace.data.layout import (
    MODELS_ROOT,
    SOURCE,
    DatasetFolder,
    DatasetTree,
    VariantFolder,
    dangling,
    dangling_error,
    made_whole,
    option_file,
    refuse_existing,
)
from llm_perf_opt.workspace.data.lines import BadRecords
from llm_perf_opt.workspace.data.named_transforms import Preparation, completed
from llm_perf_opt.workspace.data.record_streams import TEXT_FIELD, check_text_field, count_records
from llm_perf_opt.workspace.data.stated_metadata import dataset_metadata, variant_files, variant_metadata
from llm_perf_opt.workspace.data.subset import Sample, write_subset
from llm_perf_opt.workspace.data.tokenizing import Tokenizer, load_tokenizer, write_tokenized

Phases = Callable[[str, int], Advance]
"""Called at the start of each phase with its name and bytes; returns a function that receives the progress."""


def silent(_: str, __: int) -> Advance:
    """Report no progress."""
    return ignore


@dataclass(frozen=True)
class _Parent:
    """The parent data."""

    files: dict[str, Path]
    records: tuple[DataFile, ...]
    sha256: str
    text_field: str


@dataclass(frozen=True)
class _Written:
    """The result of a transform."""

    format: Format
    splits: dict[str, int]
    left_out: dict[str, int] = field(default_factory=dict)


def prepare(folder: DatasetFolder, request: Preparation, phases: Phases = silent, models: Path = MODELS_ROOT) -> VariantMetadata:
    """Make the variant and return its metadata. Without a transform, its name says what to make."""
    place = folder.new_variant(request.variant)
    files, metadata = _parent_files(folder, request.parent)
    every = data_files(files, folder.path / request.parent, metadata.format)
    request = completed(request, [file.split for file in every], _folders(every), models)
    _check_request(request)
    tokenizer = load_tokenizer(request.tokenizer) if request.tokenizer else None
    parent = _verified_parent(folder, request, (files, metadata, every), phases)
    bad = BadRecords(request.skip_bad)
    with made_whole(root_of(folder.path.parent), place.path) as part:
        made = VariantFolder(part)
        make_folder(part, made.made_data)
        advance = phases(request.transform, sum(file.bytes for file in parent.records))
        written = _write(parent, made.made_data, request, tokenizer, bad, advance)
        if not sum(written.splits.values()):
            why = f"; {bad.first[0]}" if bad.first else ""
            many = bad.count + sum(written.left_out.values())
            raise ResourceError(f"No records are left for a variant: {many} were left out{why}.", "Fix the data.")
        found = _describe(folder.name, made, request, parent, tokenizer, bad, written, phases)
        write_metadata(part, made.metadata_file, found)
    return found


def _folders(files: Sequence[DataFile]) -> list[str]:
    return sorted({file.name.split("/", 1)[0] for file in files if "/" in file.name})


def _parent_files(folder: DatasetFolder, name: str) -> tuple[dict[str, Path], DatasetMetadata | VariantMetadata]:
    if name == SOURCE:
        if dangling(folder.source):
            raise dangling_error(folder.source)
        return files_below(folder.source), dataset_metadata(folder)
    variant = folder.variant(name)
    return variant_files(variant), variant_metadata(folder, variant)


def _check_request(request: Preparation) -> None:
    chosen = list(request.transforms)
    if len(chosen) > 1:
        raise ConfigError(
            f"A variant needs exactly one transform, but {' and '.join(chosen)} are given.",
            "Give one of: --num-samples N (a subset), --tokenizer bytes|DIR (token ids), --to FORMAT (another format), --clean.",
        )
    if request.num_samples is not None and request.num_samples < 1:
        raise ConfigError(f"--num-samples {request.num_samples}: must be 1 or more.", "Give the number of records.")
    if request.seed is not None and request.num_samples is None:
        raise ConfigError(f"--seed {request.seed} has no effect without --num-samples.", "Omit it.")
    if not 0 <= (request.seed or 0) < 2**63:
        raise ConfigError(f"--seed {request.seed} is out of range.", "Give a number from 0 to 2⁶³ - 1.")
    if request.to is not None and request.to not in TARGETS:
        raise ConfigError(f"--to {request.to} is not known.{nearest(request.to, TARGETS)}", f"Known: {', '.join(TARGETS)}.")
    if request.join_lines and request.to != "txt":
        raise ConfigError("--join-lines has no effect without --to txt.", "Omit it.")


def _verified_parent(
    folder: DatasetFolder,
    request: Preparation,
    opened: tuple[dict[str, Path], DatasetMetadata | VariantMetadata, tuple[DataFile, ...]],
    phases: Phases,
) -> _Parent:
    """Return the parent, or raise if it differs from its metadata: a recorded hash must be that of the data."""
    files, metadata, every = opened
    found = content_sha256(inventory(files, phases(f"verifying {request.parent}", total_bytes(files))))
    if metadata.content_sha256 not in (None, found):
        raise ResourceError(
            f"{folder.path / request.parent} has changed since its metadata was written.",
            f"`llm-perf dataset check {folder.name}` lists what changed. Restore the data, or add it under another name.",
        )
    records = only_split(_inside(every, request.within), request.split)
    if metadata.format == "tokens":
        raise ConfigError(f"{request.parent} contains token ids, which cannot be transformed further.", "Start from texts.")
    reads_texts = request.tokenizer is not None or request.clean or request.to == "txt"
    if request.text_field is not None and not reads_texts:  # the metadata will name it, so it must exist
        check_text_field(records, request.text_field)
    return _Parent(files, records, found, request.text_field or metadata.text_field)


def _inside(files: tuple[DataFile, ...], folder: str | None) -> tuple[DataFile, ...]:
    """Return the files in a folder of the parent, or all."""
    if folder is None:
        return files
    kept = tuple(file for file in files if file.name.startswith(f"{folder.rstrip('/')}/"))
    if not kept:
        known = _folders(files)
        raise ConfigError(
            f"--within {folder}: there are no data files in this folder.{nearest(folder, known)}",
            f"Folders with data files: {', '.join(known) or 'none'}.",
        )
    return kept


def _write(
    parent: _Parent, out: Path, request: Preparation, tokenizer: Tokenizer | None, bad: BadRecords, advance: Advance
) -> _Written:
    if request.num_samples is not None:
        sample = Sample(request.num_samples, request.seed or 0, request.at_most)
        return _Written(*write_subset(parent.records, out, sample, bad, advance))
    if tokenizer is not None:
        return _Written(*write_tokenized(parent.records, out, tokenizer, parent.text_field, bad, advance))
    if request.clean:
        return _Written(*write_cleaned(parent.records, out, parent.text_field, bad, advance))
    if request.to is None:
        return _Written(*write_selected(parent.records, out, bad, advance))
    target = next(kind for kind in TARGETS if kind == request.to)
    conversion = Conversion(target, parent.text_field, request.join_lines)
    return _Written(*write_converted(parent.records, out, conversion, bad, advance))


def _arguments(request: Preparation, parent: _Parent, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the arguments that determine the bytes."""
    found: dict[str, Any] = {"split": request.split, "skip_bad": request.skip_bad}
    if request.within is not None:
        found["within"] = request.within
    if request.clean:
        return {"text_field": parent.text_field, "rules": list(RULES), **found}
    if request.num_samples is not None:
        fewer = {"at_most": True} if request.at_most else {}
        return {"num_samples": request.num_samples, "seed": request.seed or 0, **fewer, **found}
    if tokenizer is not None:
        described = {"tokenizer": tokenizer.name, "tokenizer_sha256": tokenizer.sha256, "vocabulary": tokenizer.vocabulary}
        return {**described, "id_bytes": tokenizer.id_bytes, "text_field": parent.text_field, **found}
    if request.to is None:
        return found
    more = {"text_field": parent.text_field, "join_lines": request.join_lines} if request.to == "txt" else {}
    return {"to": request.to, **more, **found}


def _describe(
    dataset: str,
    made: VariantFolder,
    request: Preparation,
    parent: _Parent,
    tokenizer: Tokenizer | None,
    bad: BadRecords,
    written: _Written,
    phases: Phases,
) -> VariantMetadata:
    splits = written.splits
    for scratch in made.data.glob(".*"):
        remove(made.data, scratch)
    files = files_below(made.data)
    entries = inventory(files, phases("hashing the result", total_bytes(files)))
    packages = ["tokenizers"] if request.tokenizer and tokenizer and tokenizer.sha256 else ["duckdb"] if request.to else []
    return VariantMetadata(
        schema=SCHEMA,
        dataset=dataset,
        name=request.variant,
        parent=request.parent,
        parent_sha256=parent.sha256,
        transform=request.transform,
        arguments=_arguments(request, parent, tokenizer),
        format=written.format,
        text_field=TEXT_FIELD if parent.records[0].format == "txt" else parent.text_field,
        splits=splits,
        size=Size(len(entries), sum(entry.bytes for entry in entries.values()), sum(splits.values())),
        skipped=Skipped(bad.count, bad.first),
        content_sha256=content_sha256(entries),
        created=now(),
        tool=tool_versions(*packages),
        files=entries,
        left_out=written.left_out,
    )


# --- adding -----------------------------------------------------------------------------------------------------------


_SCRIPTS_DATA = "".join(f"*/*/**/*{suffix}\n" for suffix in (*SUFFIXES, INDEX_SUFFIX))
"""A script may keep the files of its variant outside of data/."""
KEPT_OUT_OF_GIT = (
    f"*/source-data\n*/source-data/**\n*/*/data/\n{_SCRIPTS_DATA}!*/analysis/**\n!*/*/[Rr][Ee][Aa][Dd][Mm][Ee]*\n"
    ".*.part/\n.*.lock\n"
)
"""The .gitignore of the datasets: data stay out of version control; descriptions and results of an analysis do not."""
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
    description: Description,
    readme: Callable[[DatasetMetadata, Sequence[str]], str],
    phases: Phases = silent,
) -> tuple[DatasetFolder, DatasetMetadata]:
    """Link `source` as the dataset `name`; `readme` writes its page from the metadata and the source's first level."""
    folder = tree.new_dataset(name)
    if name in packaged_options("dataset"):
        raise ConfigError(f"dataset={name} is a packaged option.", "Choose another name.")
    option, content = option_file(conf, name), _option(folder, conf, description)
    if not (option.is_file() and option.read_text(errors="replace") == content):  # written by an `add` that was killed
        refuse_existing(option, "Choose another name, or remove that file first.")
    files = files_below(there(source, "Give the folder or the file of the data."))
    _refuse_itself(tree, source)
    try:
        records = _texts_of(files, source, description)
    except LlmPerfError as error:
        if not any(Path(name).suffix.lower() in IMAGE_FORMATS for name in files):
            raise
        remedy = f"{error.remedy} A folder of images needs no command: run with dataset=image_folder dataset.path={source}."
        raise type(error)(error.fact, remedy) from error
    metadata = _describe_added(name, source, description, files, records, phases)
    try:
        with made_whole(root_of(tree.root), folder.path) as part:
            made = DatasetFolder(part)
            link(part, made.source, _lasting(source, files))
            write_metadata(part, made.metadata_file, metadata)
            write_whole(part, made.readme_file, readme(metadata, first_level(source)).encode())
            if not tree.ignore_file.exists():
                write_whole(root_of(tree.root), tree.ignore_file, KEPT_OUT_OF_GIT.encode())
            write_whole(root_of(conf), option, content.encode())
    except BaseException:
        if not folder.path.exists():
            remove_if_possible(root_of(conf), option)  # the original error is raised
        raise
    return folder, metadata


def _texts_of(files: dict[str, Path], source: Path, description: Description) -> tuple[DataFile, ...]:
    """Return the files with the records, or raise if they contain no texts."""
    records = data_files(files, source, description.format)
    if records[0].format == "tokens":
        raise ConfigError(f"{source} contains token ids, not texts.", "Add the texts instead.")
    check_text_field(records, description.text_field)
    return records


def _option(folder: DatasetFolder, conf: Path, description: Description) -> str:
    """Return the option's YAML; `${` in a path is escaped."""
    values = {"name": folder.name, "kind": "prompts", "path": None, "text_field": description.text_field, "seed": 0}
    values |= {"root": root_for_option(conf, folder.path), "variant": None}
    return _OPTION_HEAD + yaml.safe_dump(values, sort_keys=False, allow_unicode=True).replace("${", "\\${")


def _refuse_itself(tree: DatasetTree, source: Path) -> None:
    if tree.root.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{source} contains {tree.root} itself.", "Give a folder with only this dataset.")


def _describe_added(
    name: str, source: Path, description: Description, files: dict[str, Path], records: Sequence[DataFile], phases: Phases
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
        version=description.version,
        source=description.origin or visible(str(_lasting(source, files))),
        license=description.license,
        notes=description.notes,
        format=records[0].format,
        text_field=description.text_field,
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


def first_level(source: Path) -> list[str]:
    """Return the names in the folder of the data; folders end with a slash."""
    if source.is_file():
        return list(files_below(source))
    return [f"{entry.name}/" if entry.is_dir() else entry.name for entry in sorted(source.iterdir())]
