"""Prompts as token ids: synthetic ones of exact length, or tokenized texts."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from llm_perf_opt.config.schema import DatasetConfig
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError, words_of
from llm_perf_opt.core.records import TextUse
from llm_perf_opt.core.user_files import check_ordinary
from llm_perf_opt.core.vision_records import VisionInput
from llm_perf_opt.workspace.data.compressed import is_plain
from llm_perf_opt.workspace.data.formats import DataFile, data_files
from llm_perf_opt.workspace.data.inventory import VariantMetadata, files_below, ignore
from llm_perf_opt.workspace.data.layout import DatasetFolder, DatasetTree, dangling, dangling_error
from llm_perf_opt.workspace.data.lines import RUN_FIELD_OPTION, BadRecords
from llm_perf_opt.workspace.data.record_streams import check_text_field, count_records, single_file, texts
from llm_perf_opt.workspace.data.stated_metadata import (
    by_author,
    dataset_metadata,
    default_text_field,
    variant_files,
    variant_metadata,
)
from llm_perf_opt.workspace.data.tokenizing import token_sequences

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Entry:
    """The dataset that `dataset=NAME dataset.variant=NAME` selects."""

    label: str
    files: tuple[DataFile, ...]
    text_field: str
    tokenizer: str | None
    """The tokenizer of a tokenized variant, which has ids instead of texts."""
    id_bytes: int
    records: int | None
    """As counted when it was added or prepared; None: not counted."""
    whole: bool = False
    """Whether the ids of a file may be one text, without an index."""
    left_out: int = 0
    """Records of its source that were left out when the variant was made."""

    def check_first(self) -> bool:
        """Return whether it has any records; raise if the first has no text in the requested field."""
        if self.tokenizer:
            return next(self.sequences(1), None) is not None
        check_text_field(self.files, self.text_field, RUN_FIELD_OPTION)
        return any(text.strip() for text in self.texts())

    def texts(self) -> Iterator[str]:
        """Yield every text, file by file, read on demand."""
        for file in self.files:
            for block in texts(file, self.text_field, BadRecords.of_a_run(), ignore):
                yield from block

    def sequences(self, longest: int = 4096) -> Iterator[list[int]]:
        """Yield every sequence of ids; of a file that is one text, pieces of `longest` ids."""
        for file in self.files:
            for ids in token_sequences(file, self.id_bytes, longest if self.whole else 0):
                yield ids.tolist()


def open_entry(root: str, variant: str | None, text_field: str) -> Entry:
    """Return the source or a variant of the dataset in `root`, or raise an error that says what is there."""
    path = Path(root)
    folder = DatasetTree(path.parent).dataset(path.name)
    if variant is None:
        return _source(folder, text_field)
    chosen = folder.variant(variant)
    metadata = variant_metadata(folder, chosen)
    files = data_files(variant_files(chosen), chosen.data, metadata.format)
    label, records = f"{folder.name}, variant {variant}", metadata.size.records
    left_out = metadata.skipped.count + sum(metadata.left_out.values())
    if metadata.format == "tokens":
        tokenizer, id_bytes = str(metadata.arguments.get("tokenizer")), int(metadata.arguments.get("id_bytes", 0))
        return Entry(label, files, text_field, tokenizer, id_bytes, records, by_author(metadata), left_out)
    return Entry(label, files, _field_of_variant(folder, metadata, text_field), None, 0, records, left_out=left_out)


def _field_of_variant(folder: DatasetFolder, variant: VariantMetadata, requested: str) -> str:
    """Return the variant's own field if the option names the dataset's default; any other field was requested explicitly."""
    return variant.text_field if requested == default_text_field(folder) else requested


def _source(folder: DatasetFolder, text_field: str) -> Entry:
    if dangling(folder.source):
        raise dangling_error(folder.source)
    metadata = dataset_metadata(folder)
    files = data_files(files_below(folder.source), folder.source, metadata.format)
    return Entry(f"{folder.name}, source-data", files, text_field, None, 0, metadata.size.records)


Tokenize = Callable[[str], list[int]]

_MAX_RECORD_CHARS = 16 * 1024 * 1024
_MOST_COUNTED_BYTES = 256 * 1024 * 1024
_OWN = (".jsonl", ".txt")
_READ_FILES = ".jsonl, .ndjson, .json or .txt (also compressed: .gz, .zst), or .parquet"


@dataclass(frozen=True)
class Prompts:
    """The sequences of a batch, and where they came from."""

    ids: tuple[tuple[int, ...], ...]
    source: str
    images: "PromptImages | None" = None
    """The images in the prompts; None without images."""
    texts: TextUse | None = None
    """How the dataset's texts were used; None for synthetic ids."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(len(sequence) for sequence in self.ids)

    def sha256(self) -> str:
        """Hash of the input: equal for equal ids."""
        content = self.ids if self.images is None else [self.ids, self.images.identity]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def synthetic_prompts(batch_size: int, length: int, vocabulary: int, seed: int) -> Prompts:
    """Return uniform random ids, the same for the same arguments on every machine."""
    draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
    ids = tuple(tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(batch_size))
    return Prompts(ids, f"synthetic ids, seed {seed}")


def text_prompts(dataset: DatasetConfig, batch_size: int, longest: int, vocabulary: int, tokenize: Tokenize | None) -> Prompts:
    """Return the first `batch_size` texts of the dataset, cut to `longest` tokens; fewer texts are repeated."""
    entry = open_entry(dataset.root, dataset.variant, dataset.text_field) if dataset.root else None
    sequences: list[tuple[int, ...]] = []
    lengths: list[int] = []
    taken = empty = 0
    for ids in _sequences(dataset, entry, longest, vocabulary, tokenize):
        taken += 1
        empty += not ids
        if ids:
            sequences.append(tuple(ids[:longest]))
            lengths.append(len(ids))
        if len(sequences) == batch_size:
            break
    if not sequences:
        raise _no_text(dataset, entry)
    found = len(sequences)
    repeated = [sequences[index % found] for index in range(batch_size)]
    tokenizer = "the model's tokenizer" if tokenize else "bytes as ids, without a tokenizer"
    if entry and entry.tokenizer:
        tokenizer = f"ids of the tokenizer {entry.tokenizer}"
    repeats = f", {found} texts repeated to fill the batch" if found < batch_size else ""
    where = f"dataset {dataset.name}" if dataset.path is None else f"file {dataset.path}"
    if entry:
        where = f"dataset {entry.label}"
    total = entry.records if entry else _count(dataset)
    unused = None if total is None else max(0, total - taken)
    left_out = entry.left_out if entry else 0
    use = TextUse(found, sum(length > longest for length in lengths), max(lengths), longest, unused, empty, left_out)
    return Prompts(tuple(repeated), f"{where}, {tokenizer}{repeats}", texts=use)


def repeated_prompt(dataset: DatasetConfig, batch_size: int, longest: int, vocabulary: int, tokenize: Tokenize | None) -> Prompts:
    """Return `dataset.prompt` for each sequence, cut to `longest` tokens."""
    text = dataset.prompt or ""
    ids = tokenize(text) if tokenize else [byte % vocabulary for byte in text.encode(errors="replace")]
    if not ids:
        raise ConfigError("dataset.prompt is empty.", "Give a prompt, or leave it out for random ids.")
    tokenizer = "the model's tokenizer" if tokenize else "bytes as ids, without a tokenizer"
    use = TextUse(1, int(len(ids) > longest), len(ids), longest, 0)
    return Prompts((tuple(ids[:longest]),) * batch_size, f"dataset.prompt, {tokenizer}", texts=use)


def _count(dataset: DatasetConfig) -> int | None:
    """Return the number of records of a file; None if it is too large to count, or packed: its size is then unknown."""
    if dataset.path is None:
        return sum(1 for _ in _texts(dataset))
    path = Path(dataset.path)
    try:
        if not is_plain(path) or path.stat().st_size > _MOST_COUNTED_BYTES:
            return None
        if path.suffix not in _OWN and (file := single_file(path)):
            return count_records(file, ignore)
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except (OSError, LlmPerfError):  # removed since it was read, or damaged after the texts that are used
        return None


def check_first_text(dataset: DatasetConfig) -> None:
    """Raise if a dataset does not exist or its first text cannot be read, before a model is loaded."""
    entry = open_entry(dataset.root, dataset.variant, dataset.text_field) if dataset.root else None
    has_text = entry.check_first() if entry else next(_texts(dataset), None) is not None
    if not has_text:
        raise _no_text(dataset, entry)


def _no_text(dataset: DatasetConfig, entry: Entry | None) -> ResourceError:
    holder = dataset.path or (entry.label if entry else dataset.name)
    return ResourceError(f"{holder} contains no text.", "Check dataset.path and dataset.text_field.")


def _sequences(
    dataset: DatasetConfig, entry: Entry | None, longest: int, vocabulary: int, tokenize: Tokenize | None
) -> Iterator[list[int]]:
    if entry and entry.tokenizer:
        for ids in entry.sequences(longest):
            if ids and max(ids) >= vocabulary:
                raise ConfigError(
                    f"{entry.label} contains the id {max(ids)}, but the model's vocabulary has {vocabulary} ids.",
                    f"It was made with the tokenizer {entry.tokenizer}; prepare a variant with the model's own.",
                )
            yield ids
        return
    for text in entry.texts() if entry else _texts(dataset):
        if not text.strip():
            yield []
        else:
            yield tokenize(text) if tokenize else [byte % vocabulary for byte in text.encode()]


def _texts(dataset: DatasetConfig) -> Iterator[str]:
    if dataset.path is None:
        packaged = files("llm_perf_opt.workspace.data").joinpath("sample_prompts.jsonl").read_text(encoding="utf-8")
        yield from _records(packaged.splitlines(), "sample_prompts.jsonl", dataset.text_field)
        return
    path = Path(dataset.path)
    check_ordinary(path)
    if not _is_file(path):
        raise ConfigError(f"dataset.path={path}: no such file.", f"Give a file with texts: {_READ_FILES}.")
    try:
        yield from _file_texts(path, dataset.text_field)
    except UnicodeDecodeError as error:
        raise ResourceError(f"{path} is not UTF-8 text: {error.reason}.", "Convert it to UTF-8.") from error
    except OSError as error:
        raise ResourceError(f"dataset.path={path} cannot be read: {error.strerror or error}.") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long, or a folder is not accessible
        return False


def _file_texts(path: Path, field: str) -> Iterator[str]:
    if path.suffix not in _OWN and (file := single_file(path)):
        for block in texts(file, field, BadRecords.of_a_run(), ignore):
            yield from block
        return
    if path.suffix not in _OWN:
        raise ConfigError(f"dataset.path={path}: '{path.suffix}' is not supported.", f"Give a file with texts: {_READ_FILES}.")
    with path.open(encoding="utf-8-sig") as lines:
        if path.suffix == ".txt":
            yield from (line.strip() for line in _bounded(lines, path) if line.strip())
        else:
            yield from _records(_bounded(lines, path), str(path), field)


def _bounded(lines: TextIO, path: Path) -> Iterator[str]:
    while line := lines.readline(_MAX_RECORD_CHARS):
        if len(line) == _MAX_RECORD_CHARS:
            raise ResourceError(f"{path}: a line is longer than {_MAX_RECORD_CHARS} characters.", "Split it.")
        yield line


def _records(lines: Iterable[str], where: str, field: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError also for a number with too many digits
            raise ResourceError(
                f"{where}, line {number}: not JSON ({words_of(error)}).", "Write one JSON object per line."
            ) from error
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            known = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise ConfigError(
                f"{where}, line {number}: no text in the field {field!r} (it has: {known}).", "Set dataset.text_field."
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ResourceError(
                f"{where}, line {number}: the text is not valid Unicode ({error.reason} at character {error.start}).",
                "Remove the unpaired surrogate.",
            ) from error
        yield text


# --- images -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptImages:
    """The images of a batch. They are recorded as `record`."""

    record: VisionInput
    token_id: int
    """The id of a token that stands for a part of an image."""
    seed: int
    """Of random pixels."""
    arrays: Mapping[str, "np.ndarray[Any, Any]"] = field(default_factory=dict)
    """Pixels of real images, by the argument of the model's forward; empty: random ones of the recorded shapes."""

    @property
    def identity(self) -> list[Any]:
        """What distinguishes these images from others: the seed of random pixels, or a hash of real ones."""
        hashes = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in sorted(self.arrays.items())}
        return [self.record.pixel_shapes, self.record.grids, self.record.tiles, hashes or self.seed]


@dataclass(frozen=True)
class ImageTokens:
    """The placeholder tokens of the images in the prompts."""

    lengths: tuple[int, ...]
    """Tokens of each image, in the order of the prompts."""
    token_id: int
    brackets: tuple[int, int] | None
    """Ids of the tokens before and after an image; None if the model has none."""

    def placed(self, prompts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return the prompts with an equal number of images after the first token of each."""
        each = len(self.lengths) // len(prompts)
        placeholder = 0 if self.token_id else 1
        found = []
        for index, ids in enumerate(prompts):
            text = [placeholder if token == self.token_id else token for token in ids]
            images = [self._image(length) for length in self.lengths[index * each : (index + 1) * each]]
            found.append((*text[:1], *(token for image in images for token in image), *text[1:]))
        return tuple(found)

    def per_prompt(self, prompts: int) -> tuple[int, ...]:
        """Return the image tokens of each prompt, without brackets."""
        each = len(self.lengths) // prompts
        return tuple(sum(self.lengths[start : start + each]) for start in range(0, len(self.lengths), each))

    def added(self, prompts: int) -> int:
        """Return the most tokens that images add to a prompt."""
        each = len(self.lengths) // prompts
        return max(self.per_prompt(prompts)) + (2 * each if self.brackets else 0)

    def _image(self, length: int) -> list[int]:
        tokens = [self.token_id] * length
        return [self.brackets[0], *tokens, self.brackets[1]] if self.brackets else tokens
