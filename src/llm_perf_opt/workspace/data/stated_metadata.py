"""The metadata of any dataset or variant. Facts that the author's metadata does not state are found in the data, and marked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import ConfigError, LlmPerfError
from llm_perf_opt.workspace.data.formats import INDEX_SUFFIX, DataFile, data_files
from llm_perf_opt.workspace.data.inventory import (
    SCHEMA,
    DatasetMetadata,
    FileEntry,
    Size,
    Skipped,
    VariantMetadata,
    converted,
    files_below,
    read_metadata,
    read_yaml,
    total_bytes,
)
from llm_perf_opt.workspace.data.layout import (
    METADATA,
    DatasetFolder,
    VariantFolder,
    dangling,
    dangling_error,
)
from llm_perf_opt.workspace.data.record_streams import TEXT_FIELD
from llm_perf_opt.workspace.data.tokenizing import count_sequences, id_bytes_of

FILLED_IN = "filled_in"
"""The key of the facts that `llm-perf dataset refresh` adds to the metadata of an author."""
_SCHEMA = "schema"
"""The key that all metadata of this program have."""
_COUNTS = ("records", "samples", "num_examples", "rows", "count")
_TOKENIZED = "tokenized-"
_ID_BYTES = {"uint16": 2, "uint32": 4, "int32": 4}


@dataclass(frozen=True)
class FilledIn:
    """Facts that were found in the data and recorded next to those of the author."""

    at: str | None = None
    tool: dict[str, str] = field(default_factory=dict)
    format: str | None = None
    splits: dict[str, int] = field(default_factory=dict)
    size: Size | None = None
    content_sha256: str | None = None
    files: dict[str, FileEntry] = field(default_factory=dict)


@dataclass(frozen=True)
class _Stated:
    """Facts that an author may state; other keys are ignored. Those that only describe may have any form."""

    version: Any = None
    source: Any = None
    license: Any = None
    notes: Any = None
    format: str | None = None
    text_field: str | None = None
    splits: dict[str, Any] | list[str] | None = None
    size: Any = None
    added: Any = None
    parent: str | None = None
    created: Any = None
    transform: Any = None
    tokenizer: str | None = None
    id_bytes: int | None = None
    dtype: str | None = None
    filled_in: FilledIn = field(default_factory=FilledIn)

    @property
    def counts(self) -> dict[str, int]:
        """Records of each split, as far as they are stated."""
        given = self.splits if isinstance(self.splits, dict) else {}
        found = {name: _count(value) for name, value in given.items()}
        return {name: count for name, count in found.items() if count is not None}


def by_author(metadata: DatasetMetadata | VariantMetadata) -> bool:
    """Return whether the metadata was not written by this program, but by hand or by a script of the user."""
    return bool(metadata.filled)


def dataset_metadata(folder: DatasetFolder) -> DatasetMetadata:
    """Return the metadata of a dataset, or raise an error that names the file."""
    values = read_yaml(folder.metadata_file)
    if _SCHEMA in values:
        return read_metadata(folder.metadata_file, DatasetMetadata, values)
    stated = converted(folder.metadata_file, values, _Stated)
    if dangling(folder.source):
        raise dangling_error(folder.source)
    files = files_below(folder.source)
    known = stated.filled_in
    records = data_files(files, folder.source, stated.format or known.format)
    facts = _Filled()
    splits = facts.first("splits", stated.counts or None, known.splits)
    return DatasetMetadata(
        schema=SCHEMA,
        name=folder.name,
        version=stated.version if isinstance(stated.version, int | float) else _as_text(stated.version),
        source=_as_text(stated.source) or str(folder.source.resolve()),
        license=_as_text(stated.license),
        notes=_as_text(stated.notes, between=" "),
        format=facts.first("format", records[0].format if stated.format else None, records[0].format),
        text_field=facts.first("text_field", stated.text_field, TEXT_FIELD),
        splits=splits,
        size=facts.first("size", None, known.size or Size(len(files), total_bytes(files), sum(splits.values()) or None)),
        content_sha256=known.content_sha256,
        added=_as_text(stated.added),
        tool=known.tool,
        files=known.files,
        filled=facts.names,
    )


def variant_metadata(folder: DatasetFolder, variant: VariantFolder) -> VariantMetadata:
    """Return the metadata of a variant, also of one without a metadata file, or raise an error that names the file."""
    values = read_yaml(variant.metadata_file) if variant.metadata_file.exists() else {}
    if _SCHEMA in values:
        return read_metadata(variant.metadata_file, VariantMetadata, values)
    stated = converted(variant.metadata_file, values, _Stated)
    known = stated.filled_in
    files = variant_files(variant)
    records = data_files(files, variant.data, stated.format or known.format)
    kind, facts = records[0].format, _Filled()
    splits = facts.first("splits", stated.counts or None, known.splits)
    counted = stated_records(stated.size) or sum(splits.values()) or _sequences(records)
    return VariantMetadata(
        schema=SCHEMA,
        dataset=folder.name,
        name=variant.name,
        parent=stated.parent,
        parent_sha256=None,
        transform=_as_text(stated.transform),
        arguments=_token_arguments(variant, stated, records[0], facts) if kind == "tokens" else {},
        format=facts.first("format", kind if stated.format else None, kind),
        text_field=facts.first("text_field", stated.text_field, default_text_field(folder)),
        splits=splits,
        size=facts.first("size", None, known.size or Size(len(files), total_bytes(files), counted)),
        skipped=Skipped(),
        content_sha256=known.content_sha256,
        created=_as_text(stated.created),
        tool=known.tool,
        files=known.files,
        filled=facts.names,
    )


def variant_files(variant: VariantFolder) -> dict[str, Path]:
    """Return the files of a variant without its metadata, by name."""
    return {name: path for name, path in files_below(variant.data).items() if name != METADATA}


def _as_text(value: Any, between: str = ", ") -> str | None:
    """Return a fact in words: the items of a list or a mapping one after the other; None if there are none."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        return between.join(f"{key}: {_as_text(item)}" for key, item in value.items()) or None
    if isinstance(value, list):
        return between.join(str(_as_text(item)) for item in value) or None
    return str(value)


def stated_records(size: Any) -> int | None:
    """Return the number of records in a `size` that an author wrote, such as `{samples: 1000, disk_mb: 47.5}`."""
    return _count(size) if isinstance(size, dict) else None


class _Filled:
    """Collects which facts were not stated."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def first(self, name: str, stated: Any, found: Any) -> Any:
        """Return the stated value, or the one that was found, whose name is noted."""
        if stated is not None:
            return stated
        self.names.append(name)
        return found


def _count(value: Any) -> int | None:
    if isinstance(value, Mapping):
        value = next((value[key] for key in _COUNTS if key in value), None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def default_text_field(folder: DatasetFolder) -> str:
    """Return the field with the text of a dataset; the usual one if its source is not available."""
    try:
        return dataset_metadata(folder).text_field
    except LlmPerfError:  # the variant does not need the source
        return TEXT_FIELD


def _sequences(records: tuple[DataFile, ...]) -> int | None:
    """Return the number of texts of token files that have an index."""
    indices = [file.path.with_suffix(INDEX_SUFFIX) for file in records]
    if records[0].format != "tokens" or not all(index.is_file() for index in indices):
        return None
    return sum(count_sequences(index) for index in indices)


def _token_arguments(variant: VariantFolder, stated: _Stated, file: DataFile, facts: _Filled) -> dict[str, Any]:
    """Return how the ids of a token file are stored and which tokenizer made them."""
    named = variant.name.removeprefix(_TOKENIZED) if variant.name.startswith(_TOKENIZED) else "that is not recorded"
    if stated.dtype is not None and stated.dtype not in _ID_BYTES:
        raise ConfigError(
            f"{variant.metadata_file}: dtype {stated.dtype!r} is not known for token ids.", f"Known: {', '.join(_ID_BYTES)}."
        )
    if stated.id_bytes not in (None, *_ID_BYTES.values()):
        raise ConfigError(f"{variant.metadata_file}: id_bytes {stated.id_bytes} is not possible.", "Give 2 or 4.")
    width = stated.id_bytes or (_ID_BYTES[stated.dtype] if stated.dtype else None)
    return {
        "tokenizer": facts.first("tokenizer", stated.tokenizer, named),
        "id_bytes": facts.first("id_bytes", width, id_bytes_of(file)),
    }
