"""Prompts as token ids: synthetic ones of exact length, or tokenized texts."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TextIO

from llm_perf_opt.config.schema import DatasetConfig
from llm_perf_opt.core.errors import ConfigError, ResourceError, words_of
from llm_perf_opt.core.records import TextUse
from llm_perf_opt.core.user_files import check_ordinary
from llm_perf_opt.workspace.data.formats import DataFile, data_files
from llm_perf_opt.workspace.data.inventory import DatasetMetadata, VariantMetadata, files_below, ignore, read_metadata
from llm_perf_opt.workspace.data.layout import DatasetFolder, DatasetTree, dangling, dangling_error
from llm_perf_opt.workspace.data.lines import RUN_FIELD_OPTION, BadRecords
from llm_perf_opt.workspace.data.record_streams import check_text_field, texts
from llm_perf_opt.workspace.data.tokenizing import token_sequences


@dataclass(frozen=True)
class Entry:
    """The dataset that `dataset=NAME dataset.variant=NAME` selects."""

    label: str
    files: tuple[DataFile, ...]
    text_field: str
    tokenizer: str | None
    """The tokenizer of a tokenized variant, which has ids instead of texts."""
    id_bytes: int
    records: int
    """As counted when it was added or prepared."""

    def check_first(self) -> bool:
        """Return whether it has any records; raise if the first has no text in the requested field."""
        if self.tokenizer:
            return next(self.sequences(), None) is not None
        check_text_field(self.files, self.text_field, RUN_FIELD_OPTION)
        return next(self.texts(), None) is not None

    def texts(self) -> Iterator[str]:
        """Yield every non-empty text, file by file, read on demand."""
        for file in self.files:
            for block in texts(file, self.text_field, BadRecords.of_a_run(), ignore):
                yield from (text for text in block if text.strip())

    def sequences(self) -> Iterator[list[int]]:
        """Yield every sequence of ids."""
        for file in self.files:
            for ids in token_sequences(file, self.id_bytes):
                yield ids.tolist()


def open_entry(root: str, variant: str | None, text_field: str) -> Entry:
    """Return the source or a variant of the dataset in `root`, or raise an error that says what is there."""
    path = Path(root)
    folder = DatasetTree(path.parent).dataset(path.name)
    if variant is None:
        return _source(folder, text_field)
    chosen = folder.variant(variant)
    metadata = read_metadata(chosen.metadata_file, VariantMetadata)
    files = data_files(files_below(chosen.data), chosen.data, metadata.format)
    label, records = f"{folder.name}, variant {variant}", metadata.size.records
    if metadata.format == "tokens":
        arguments = metadata.arguments
        return Entry(label, files, text_field, str(arguments.get("tokenizer")), int(arguments.get("id_bytes", 0)), records)
    return Entry(label, files, _field_of_variant(folder, metadata, text_field), None, 0, records)


def _field_of_variant(folder: DatasetFolder, variant: VariantMetadata, requested: str) -> str:
    """Return the variant's own field if the option names the dataset's default; any other field was requested explicitly."""
    dataset = read_metadata(folder.metadata_file, DatasetMetadata)
    return variant.text_field if requested == dataset.text_field else requested


def _source(folder: DatasetFolder, text_field: str) -> Entry:
    if dangling(folder.source):
        raise dangling_error(folder.source)
    metadata = read_metadata(folder.metadata_file, DatasetMetadata)
    files = data_files(files_below(folder.source), folder.source, metadata.format)
    return Entry(f"{folder.name}, source-data", files, text_field, None, 0, metadata.size.records)


Tokenize = Callable[[str], list[int]]

_MAX_RECORD_CHARS = 16 * 1024 * 1024
_MOST_COUNTED_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Prompts:
    """The sequences of a batch, and where they came from."""

    ids: tuple[tuple[int, ...], ...]
    source: str
    pixels: tuple[int, ...] = ()
    """Shape of the pixel values (images, channels, height, width); empty without images."""
    pixel_seed: int = 0
    texts: TextUse | None = None
    """How the dataset's texts were used; None for synthetic ids."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(len(sequence) for sequence in self.ids)

    def sha256(self) -> str:
        """Hash of the input: equal for equal ids."""
        content = [self.ids, self.pixels, self.pixel_seed] if self.pixels else self.ids
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
    taken = 0
    for ids in _sequences(dataset, entry, vocabulary, tokenize):
        taken += 1
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
    use = TextUse(found, sum(length > longest for length in lengths), max(lengths), longest, unused)
    return Prompts(tuple(repeated), f"{where}, {tokenizer}{repeats}", texts=use)


def _count(dataset: DatasetConfig) -> int | None:
    """Return the number of non-blank lines of a file; None if it is too large to count."""
    if dataset.path is None:
        return sum(1 for _ in _texts(dataset))
    path = Path(dataset.path)
    try:
        if path.stat().st_size > _MOST_COUNTED_BYTES:
            return None
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError:  # removed since it was read
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


def _sequences(dataset: DatasetConfig, entry: Entry | None, vocabulary: int, tokenize: Tokenize | None) -> Iterator[list[int]]:
    if entry and entry.tokenizer:
        for ids in entry.sequences():
            if ids and max(ids) >= vocabulary:
                raise ConfigError(
                    f"{entry.label} contains the id {max(ids)}, but the model's vocabulary has {vocabulary} ids.",
                    f"It was made with the tokenizer {entry.tokenizer}; prepare a variant with the model's own.",
                )
            yield ids
        return
    for text in entry.texts() if entry else _texts(dataset):
        yield tokenize(text) if tokenize else [byte % vocabulary for byte in text.encode()]


def _texts(dataset: DatasetConfig) -> Iterator[str]:
    if dataset.path is None:
        packaged = files("llm_perf_opt.workspace.data").joinpath("sample_prompts.jsonl").read_text(encoding="utf-8")
        yield from _records(packaged.splitlines(), "sample_prompts.jsonl", dataset.text_field)
        return
    path = Path(dataset.path)
    check_ordinary(path)
    if not _is_file(path):
        raise ConfigError(f"dataset.path={path}: no such file.", "Give a .jsonl or a .txt file.")
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
    if path.suffix not in (".jsonl", ".txt"):
        raise ConfigError(
            f"dataset.path={path}: '{path.suffix}' is not supported.", "Give a .jsonl or a .txt file (one prompt per line)."
        )
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
class PromptImage:
    """An image as the model sees it."""

    tokens: int
    """Number of tokens it takes in the prompt."""
    token_id: int
    """The id of such a token."""
    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of its pixel values."""
        return self.channels, self.height, self.width


def with_images(prompts: Prompts, image: PromptImage, longest: int, seed: int) -> Prompts:
    """Return every prompt with one image after its first token, at most `longest` tokens; its text is shortened."""
    least = image.tokens + 2
    if longest < least:
        raise ConfigError(
            f"An image takes {image.tokens} tokens of this model's prompt, but runtime.prompt_tokens={longest}.",
            f"Set runtime.prompt_tokens={least} or more: one token before the image and one after it.",
        )
    placeholder = 0 if image.token_id else 1
    room = longest - image.tokens
    texts = prompts.texts
    if texts is not None:
        texts = replace(texts, cut=sum(len(ids) > room for ids in prompts.ids[: texts.used]), limit=room)
    found = []
    for ids in prompts.ids:
        text = [placeholder if token == image.token_id else token for token in ids[:room]]
        text += [placeholder] * (2 - len(text))
        found.append((text[0], *[image.token_id] * image.tokens, *text[1:]))
    source = f"{prompts.source}; one image of random pixels each, seed {seed} ({image.tokens} of the prompt's tokens)"
    pixels = (len(found), *image.shape)
    return replace(prompts, ids=tuple(found), source=source, pixels=pixels, pixel_seed=seed, texts=texts)
