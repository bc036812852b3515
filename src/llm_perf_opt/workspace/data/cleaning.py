"""The transform `cleaned`: texts in one form of Unicode, without control characters, empty texts and exact duplicates."""

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from llm_perf_opt.core.inside import make_folder, open_new
from llm_perf_opt.workspace.data.conversion import renamed
from llm_perf_opt.workspace.data.formats import DataFile, Format
from llm_perf_opt.workspace.data.inventory import Advance
from llm_perf_opt.workspace.data.lines import BadRecords
from llm_perf_opt.workspace.data.record_streams import TEXT_FIELD, objects

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RULES = (
    "Unicode NFC",
    "line ends as \\n; in a .txt, where each line is a record, as a space",
    "no control characters or byte order marks",
    "no white space at the end of a line or around the text",
    "at most one blank line in a row",
    "no empty texts",
    "no exact duplicates",
)
"""What `clean_text` and `write_cleaned` do, as recorded in the metadata."""
EMPTY, DUPLICATE = "empty", "duplicate"
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff]")
_LINE_ENDS = re.compile("\r\n?")
_TRAILING = re.compile(r"(?<![^\S\n])[^\S\n]+(?=\n|$)")
"""From the first white space on: otherwise the time is quadratic in a long run of spaces inside a line."""
_BLANK = re.compile(r"\n{3,}")
_JOINED = re.compile(r"\n+")
_DIGEST_BYTES = 16
_HELD = 500_000


def clean_text(text: str) -> str:
    """Return the text by the rules; empty if nothing is left."""
    text = _CONTROLS.sub("", _LINE_ENDS.sub("\n", unicodedata.normalize("NFC", text)))
    return _BLANK.sub("\n\n", _TRAILING.sub("", text)).strip()


def write_cleaned(
    files: Sequence[DataFile], out: Path, text_field: str, bad: BadRecords, advance: Advance
) -> tuple[Format, dict[str, int], dict[str, int]]:
    """Write each file with cleaned texts and otherwise unchanged fields. Return format, splits and what was left out, by reason.

    Of equal texts, the first is kept, whichever file or split it is in.
    """
    kind: Format = "txt" if files[0].format == "txt" else "jsonl"
    field = TEXT_FIELD if kind == "txt" else text_field
    splits: dict[str, int] = dict.fromkeys((file.split for file in files), 0)
    left_out = {EMPTY: 0, DUPLICATE: 0}
    seen = Seen()
    for file, name in renamed(files, kind).items():
        make_folder(out, (out / name).parent)
        with open_new(out, out / name) as target:
            for record in _with_texts(file, field, bad, advance):
                text = clean_text(record[field])
                text = _JOINED.sub(" ", text) if kind == "txt" else text  # a lone \r inside a line became \n
                if not text or not seen.add(text):
                    left_out[DUPLICATE if text else EMPTY] += 1
                    continue
                line = text.encode() if kind == "txt" else msgspec.json.encode({**record, field: text}, enc_hook=str)
                target.write(line + b"\n")
                splits[file.split] += 1
    return kind, splits, left_out


def _with_texts(file: DataFile, field: str, bad: BadRecords, advance: Advance) -> Iterator[dict[str, Any]]:
    number = 0
    for block in objects(file, bad, advance):
        for record in block:
            number += 1
            if isinstance(record.get(field), str):
                yield record
            else:
                known = ", ".join(map(str, record))[:200]
                bad.note(f"{file.name}, record {number}", f"no text in the field {field!r} (it has: {known})")


class Seen:
    """The texts so far, as digests: 16 bytes per text, in a sorted array that grows with the number of texts."""

    def __init__(self) -> None:
        self._recent: set[bytes] = set()
        self._sorted: NDArray[np.bytes_] | None = None

    def add(self, text: str) -> bool:
        """Add a text and return whether it is new."""
        digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest in self._recent or self._is_old(digest):
            return False
        self._recent.add(digest)
        if len(self._recent) >= _HELD:
            self._merge()
        return True

    def _is_old(self, digest: bytes) -> bool:
        if self._sorted is None:
            return False
        place = int(self._sorted.searchsorted(digest))
        return place < len(self._sorted) and bytes(self._sorted[place]) == digest.rstrip(b"\0")

    def _merge(self) -> None:
        import numpy as np

        recent = np.array(list(self._recent), dtype=f"S{_DIGEST_BYTES}")
        self._sorted = np.sort(recent if self._sorted is None else np.concatenate([self._sorted, recent]))
        self._recent = set()
