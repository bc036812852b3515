"""Recorded logits on disk: logits.json with the facts, logits.npz with plain arrays."""

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from llm_perf_opt.core.errors import ParseError, words_of
from llm_perf_opt.core.logit_records import LogitFacts, Logits
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.run_folder import read_record, write_record, write_whole
from llm_perf_opt.core.user_files import read_unpacked

FACTS, ARRAYS = "logits.json", "logits.npz"
_MOST_BYTES = 256 * 1024 * 1024
"""A recording has at most about 20 MB."""
_KINDS = {"fed": np.int64, "chosen": np.int64, "top": np.int32, "common": np.int32, "values": np.float32, "fp32": np.float32}
_DAMAGED = (ValueError, KeyError, OSError, EOFError, OverflowError, RuntimeError, zipfile.BadZipFile, zlib.error)


def write_logits(folder: Path, logits: Logits) -> None:
    """Write a recording into the folder of the unprofiled pass."""
    arrays = {name: getattr(logits, name) for name in _KINDS if not isinstance(getattr(logits, name), Missing)}
    content = io.BytesIO()
    plain: dict[str, Any] = {name: np.ascontiguousarray(array, _KINDS[name]) for name, array in arrays.items()}
    np.savez(content, **plain)
    write_whole(folder, folder / ARRAYS, content.getvalue())
    write_record(folder, folder / FACTS, logits.facts)


def write_no_logits(folder: Path, why: str) -> None:
    """Write why there is no recording."""
    write_record(folder, folder / FACTS, LogitFacts(why=why))


def read_logits(facts_file: Path) -> Maybe[Logits]:
    """Return a recording, or why there is none. Raise ParseError if it is damaged."""
    facts = read_record(facts_file, LogitFacts)
    if facts.why:
        return Missing(facts.why)
    path = facts_file.with_name(ARRAYS)
    try:
        arrays = _arrays(path)
        fp32 = Missing(facts.fp32_why) if facts.fp32_why else arrays["fp32"]
        logits = Logits(facts, **{name: arrays[name] for name in _KINDS if name != "fp32"}, fp32=fp32)
        _check_shapes(logits)
    except _DAMAGED as error:
        raise ParseError(f"{path} cannot be read: {words_of(error)}", "The file is damaged. Run it again.") from error
    return logits


def _arrays(path: Path) -> dict[str, Any]:
    """Return the arrays, none larger than the file may be; numpy's own reader trusts the shapes that a file states."""
    content = read_unpacked(path, _MOST_BYTES)
    found = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(member.file_size for member in archive.infolist()) > _MOST_BYTES:
            raise ValueError("it is too large")
        for name, kind in _KINDS.items():
            if f"{name}.npy" in archive.namelist():
                found[name] = _array(archive.read(f"{name}.npy"), np.dtype(kind))
    return found


def _array(content: bytes, kind: "np.dtype[Any]") -> Any:
    stream = io.BytesIO(content)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array has an unknown version")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype != kind or by_column:
        raise ValueError(f"an array is not of {kind}")
    return np.frombuffer(content, kind, offset=stream.tell()).reshape(shape)


def _check_shapes(logits: Logits) -> None:
    places = (logits.facts.sequences, logits.facts.positions)
    ids = (*places, logits.top.shape[-1] + logits.common.size)
    expected = {"fed": places, "chosen": places, "top": (*places, logits.top.shape[-1]), "values": ids, "fp32": ids}
    for name, shape in expected.items():
        array = getattr(logits, name)
        if not isinstance(array, Missing) and array.shape != shape:
            raise ValueError(f"{name} has the shape {array.shape} instead of {shape}")
    if 0 in ids or logits.common.ndim != 1:
        raise ValueError("it has no logits")
