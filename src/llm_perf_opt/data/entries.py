"""A dataset of the tree as a run reads it: the texts of its source or of a variant, or the ids of a tokenized one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.data.formats import DataFile, data_files
from llm_perf_opt.data.inventory import files_below, ignore
from llm_perf_opt.data.layout import DatasetFolder, DatasetTree, dangling, dangling_error
from llm_perf_opt.data.lines import RUN_FIELD_OPTION, BadRecords
from llm_perf_opt.data.metadata import DatasetMetadata, VariantMetadata, read_metadata
from llm_perf_opt.data.record_streams import check_text_field, texts
from llm_perf_opt.data.tokenizing import token_sequences


@dataclass(frozen=True)
class Entry:
    """What `dataset=NAME dataset.variant=NAME` chose."""

    label: str
    files: tuple[DataFile, ...]
    text_field: str
    tokenizer: str | None
    """Of a tokenized variant; it has ids in place of texts."""
    id_bytes: int
    records: int
    """As counted when it was added or made."""

    def check_first(self) -> bool:
        """Whether it holds anything; an error where its first record has no text in the field asked for."""
        if self.tokenizer:
            return next(self.sequences(), None) is not None
        check_text_field(self.files, self.text_field, RUN_FIELD_OPTION)
        return next(self.texts(), None) is not None

    def texts(self) -> Iterator[str]:
        """Every text that is not empty, file by file, read as it is asked for."""
        for file in self.files:
            for block in texts(file, self.text_field, BadRecords.of_a_run(), ignore):
                yield from (text for text in block if text.strip())

    def sequences(self) -> Iterator[list[int]]:
        """Every sequence of ids."""
        for file in self.files:
            for ids in token_sequences(file, self.id_bytes):
                yield ids.tolist()


def open_entry(root: str, variant: str | None, text_field: str) -> Entry:
    """The source or a variant of the dataset in `root`, or an error that says what is there."""
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


def _field_of_variant(folder: DatasetFolder, variant: VariantMetadata, asked: str) -> str:
    """The dataset's own field is what its option says of itself: a variant made with another has that. Any other was meant."""
    dataset = read_metadata(folder.metadata_file, DatasetMetadata)
    return variant.text_field if asked == dataset.text_field else asked


def _source(folder: DatasetFolder, text_field: str) -> Entry:
    if dangling(folder.source):
        raise dangling_error(folder.source)
    metadata = read_metadata(folder.metadata_file, DatasetMetadata)
    files = data_files(files_below(folder.source), folder.source, metadata.format)
    return Entry(f"{folder.name}, source-data", files, text_field, None, 0, metadata.size.records)
