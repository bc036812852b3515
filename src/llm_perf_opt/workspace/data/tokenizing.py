"""The transform `tokenized`: consecutive token ids in a .bin, and the start of each text in an .idx.

NAME.bin  ids, uint16 if the vocabulary fits, else uint32, little-endian
NAME.idx  uint64, little-endian: text n is ids[idx[n]:idx[n + 1]]; one entry more than there are texts
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.inside import open_new
from llm_perf_opt.core.user_files import check_ordinary
from llm_perf_opt.workspace.data.formats import INDEX_SUFFIX, TOKENS_SUFFIX, DataFile, Format
from llm_perf_opt.workspace.data.inventory import Advance, file_entry
from llm_perf_opt.workspace.data.lines import BadRecords
from llm_perf_opt.workspace.data.record_streams import texts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BYTES = "bytes"
"""The tokenizer without files: every byte of the UTF-8 text is an id."""
TOKENIZER_FILE = "tokenizer.json"
_BATCH_CHARS = 4_000_000
_PLAIN_ID_BYTES = 2


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its description."""

    name: str
    vocabulary: int
    """One more than the highest id."""
    sha256: str | None
    _encoder: Any

    @property
    def id_bytes(self) -> int:
        """Bytes per id on disk: the fewest that fit the vocabulary."""
        return 2 if self.vocabulary <= 2**16 else 4

    def encode(self, batch: Sequence[str]) -> tuple["NDArray[np.unsignedinteger[Any]]", "NDArray[np.int64]"]:
        """Return the consecutive ids of all texts, and how many each has."""
        import numpy as np

        if self._encoder is None:
            encoded = [text.encode() for text in batch]
            lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
            return np.frombuffer(b"".join(encoded), np.uint8), lengths
        found = [encoding.ids for encoding in self._encoder.encode_batch_fast(list(batch))]
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        flat = np.fromiter((token for ids in found for token in ids), np.uint32, int(lengths.sum()))
        return flat, lengths


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `bytes`, or that of a local folder or tokenizer.json; its template adds special tokens."""
    if name == BYTES:
        return Tokenizer(BYTES, 256, None, None)
    path = Path(name).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    check_ordinary(file)
    if not file.is_file():
        raise ResourceError(
            f"--tokenizer {name}: there is no {TOKENIZER_FILE}.",
            f"Give a model's folder with a {TOKENIZER_FILE} (AutoTokenizer's save_pretrained writes one), or `{BYTES}`.",
        )
    import tokenizers

    try:
        encoder = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ParseError(
            f"{file} is not a tokenizer: {' '.join(str(error).split())[:200]}", "Save the tokenizer again."
        ) from error
    encoder.no_truncation()  # the model's batch settings do not apply here
    encoder.no_padding()
    # Ids may have gaps, so the number of entries is not the highest id.
    highest = max(encoder.get_vocab(with_added_tokens=True).values(), default=-1)
    return Tokenizer(str(path), highest + 1, file_entry(file).sha256, encoder)


def write_tokenized(
    files: Sequence[DataFile], out: Path, tokenizer: Tokenizer, text_field: str, bad: BadRecords, advance: Advance
) -> tuple[Format, dict[str, int]]:
    """Write one .bin and .idx per split."""
    splits: dict[str, int] = {}
    for split in dict.fromkeys(file.split for file in files):
        of_split = [file for file in files if file.split == split]
        with open_new(out, out / f"{split}{TOKENS_SUFFIX}") as ids, open_new(out, out / f"{split}{INDEX_SUFFIX}") as index:
            splits[split] = _write_split(of_split, ids, index, tokenizer, text_field, bad, advance)
    return "tokens", splits


def _write_split(
    files: Sequence[DataFile],
    ids: BinaryIO,
    index: BinaryIO,
    tokenizer: Tokenizer,
    field: str,
    bad: BadRecords,
    advance: Advance,
) -> int:
    import numpy as np

    kind = np.dtype(f"<u{tokenizer.id_bytes}")
    end, count = 0, 0
    index.write(np.zeros(1, "<u8").tobytes())
    for file in files:
        for block in texts(file, field, bad, advance):
            for batch in _batches(block):
                flat, lengths = tokenizer.encode(batch)
                if len(flat) and int(flat.max()) > np.iinfo(kind).max:
                    raise ParseError(
                        f"The tokenizer produced the id {flat.max()}, but its vocabulary ends at {tokenizer.vocabulary - 1}.",
                        "A token that its template adds is not in its vocabulary: add it, and save the tokenizer again.",
                    )
                ids.write(flat.astype(kind).data)
                index.write((np.cumsum(lengths) + end).astype("<u8").tobytes())
                end += int(lengths.sum())
                count += len(batch)
    return count


def _batches(block: Sequence[str]) -> Iterator[list[str]]:
    """Yield batches of texts whose ids fit in memory."""
    batch: list[str] = []
    size = 0
    for text in block:
        if batch and size + len(text) > _BATCH_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def id_bytes_of(file: DataFile) -> int:
    """Return the bytes per id of a token file: by its index, or 2 without one, as in the files that nanoGPT writes."""
    index_file = file.path.with_suffix(INDEX_SUFFIX)
    if index_file.is_file():
        count = int(_starts(index_file)[-1])
        return file.bytes // count if count and file.bytes in (2 * count, 4 * count) else _PLAIN_ID_BYTES
    return _PLAIN_ID_BYTES


def count_sequences(index_file: Path) -> int:
    """Return the number of texts in an .idx."""
    return len(_starts(index_file)) - 1


def _starts(index_file: Path) -> "NDArray[np.uint64]":
    """Return where each text begins and the last ends, or raise a ParseError for impossible numbers."""
    import numpy as np

    size = index_file.stat().st_size
    if not size or size % 8:
        raise ParseError(f"{index_file} is truncated: {size} bytes is not a multiple of 8.", "Prepare the variant again.")
    starts = np.memmap(index_file, "<u8", "r")
    if int(starts[0]) or bool((starts[1:] < starts[:-1]).any()):
        raise ParseError(
            f"{index_file} is not a valid index: it starts at {starts[0]} or decreases.", "Prepare the variant again."
        )
    return starts


def token_sequences(file: DataFile, id_bytes: int, piece: int = 0) -> Iterator["NDArray[np.int64]"]:
    """Yield the texts of a .bin, in order, as ids. Without an .idx, its ids are one text: yield pieces of `piece` ids."""
    import numpy as np

    index_file = file.path.with_suffix(INDEX_SUFFIX)
    if not index_file.is_file():
        if not piece:
            raise ResourceError(f"{index_file} is missing.", "Prepare the variant again.")
        yield from _pieces(file, id_bytes, piece)
        return
    starts = _starts(index_file)
    if int(starts[-1]) * id_bytes != file.bytes:
        raise ParseError(f"{file.path} and its {INDEX_SUFFIX} disagree.", "Prepare the variant again.")
    if not int(starts[-1]):
        return
    ids = np.memmap(file.path, f"<u{id_bytes}", "r")
    for start, end in itertools.pairwise(starts):
        yield np.asarray(ids[int(start) : int(end)], np.int64)


def _pieces(file: DataFile, id_bytes: int, piece: int) -> Iterator["NDArray[np.int64]"]:
    import numpy as np

    if file.bytes % id_bytes:
        raise ParseError(
            f"{file.path} is damaged: {file.bytes} bytes are not ids of {id_bytes} bytes each.",
            "Copy it again, or state the size of an id in the metadata of the variant: `dtype: uint16` or `dtype: uint32`.",
        )
    if not file.bytes:
        return
    ids = np.memmap(file.path, f"<u{id_bytes}", "r")
    for start in range(0, len(ids), piece):
        yield np.asarray(ids[start : start + piece], np.int64)
