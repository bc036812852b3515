"""Compressed data: the same records as plain ones; damage, bombs and missing packages have names."""

import gzip
import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from dataset_builders import RECORDS, added
from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.workspace.data import compressed
from llm_perf_opt.workspace.data.formats import SUFFIXES, DataFile, Format, data_files
from llm_perf_opt.workspace.data.inventory import files_below, ignore
from llm_perf_opt.workspace.data.lines import BadRecords
from llm_perf_opt.workspace.data.named_transforms import Preparation
from llm_perf_opt.workspace.data.preparing import prepare
from llm_perf_opt.workspace.data.record_streams import count_records, objects

LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
ARRAY = json.dumps(RECORDS, indent=1).encode()


def zstd(content: bytes) -> bytes:
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, "zstd") as out:
        out.write(content)
    return bytes(packed.getvalue())


def read(path: Path, kind: Format) -> list[dict[str, object]]:
    file = DataFile(path.name, path, kind, "all")
    return [record for block in objects(file, BadRecords(skip=False), ignore) for record in block]


@pytest.mark.parametrize(
    ("name", "content"),
    {
        "a.jsonl": LINES,
        "a.jsonl.gz": gzip.compress(LINES),
        "a.jsonl.zst": zstd(LINES),
        "a.json": ARRAY,
        "a.json.gz": gzip.compress(ARRAY),
        "a.json.zst": zstd(ARRAY),
        "c4-train.00000-of-01024.json.gz": gzip.compress(LINES),
        "two.jsonl.gz": gzip.compress(LINES[:500]) + gzip.compress(LINES[500:]),
        "two.jsonl.zst": zstd(LINES[:500]) + zstd(LINES[500:]),
    }.items(),
)
def test_every_kind_of_file_has_the_same_records(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    (file,) = data_files(files_below(tmp_path), tmp_path)
    assert read(file.path, file.format) == RECORDS
    advanced: list[int] = []
    assert count_records(file, advanced.append) == len(RECORDS)
    assert sum(advanced) == len(content), "progress counts bytes on disk"
    assert file.split == ("train" if "train" in name else "all")
    assert file.stem == name.split(".json")[0]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_damage_is_an_error_of_ours(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    packed = gzip.compress(LINES) if suffix.endswith("gz") else zstd(LINES)
    for content in (packed[:-20], packed[: len(packed) // 2], b"plain text\n", packed[:50] + b"\0" * 20 + packed[70:], b""):
        path.write_bytes(content)
        if not content:
            continue
        with pytest.raises(ParseError):
            read(path, "jsonl")


@pytest.mark.parametrize("suffix", [".txt.gz", ".txt.zst"])
def test_a_bomb_is_refused_and_long_lines_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(compressed, "STREAM_RATIO_COUNTS_FROM_BYTES", 1 << 20)
    content = b"\0" * (8 << 20)
    (tmp_path / f"a{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("gz") else zstd(content))
    with pytest.raises(ParseError, match="more than 200 times its size"):
        count_records(DataFile("a", tmp_path / f"a{suffix}", "txt", "all"), ignore)


def test_without_a_decoder_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    with pytest.raises(ResourceError, match="Zstandard") as caught:
        read(tmp_path / "a.jsonl.zst", "jsonl")
    assert "llm-perf-opt[datasets]" in caught.value.remedy


def test_utf_16_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n', encoding="utf-16")
    with pytest.raises(ParseError, match="UTF-16"):
        read(tmp_path / "a.jsonl", "jsonl")


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a.jsonl", "dataset_infos.json"], "jsonl"),
        (["a.jsonl", "notes.json"], "jsonl"),
        (["a.json", "LICENSE.txt"], "json"),
        (["a.parquet", "x.json", "y.txt"], "parquet"),
        (["a.txt"], "txt"),
        (["a.JSON.GZ"], "json"),
    ],
)
def test_a_description_next_to_the_data_is_not_data(tmp_path: Path, names: list[str], chosen: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert {file.format for file in data_files(files_below(tmp_path), tmp_path)} == {chosen}


def test_every_transform_reads_compressed_sources_alike(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.jsonl").write_bytes(LINES)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "train.jsonl.zst").write_bytes(zstd(LINES))
    for asked in (
        {"num_samples": 7},
        {"tokenizer": "bytes"},
        {"to": "parquet"},
        {"to": "txt"},
        {"clean": True},
        {"split": "train"},
    ):
        made = []
        for source in ("plain", "packed"):
            name = f"{source}-{next(iter(asked))}-{next(iter(asked.values()))}".lower()
            folder, _ = added(tmp_path, tmp_path / source, name)
            made.append(prepare(folder, Preparation("v", **asked)).content_sha256)
        assert made[0] == made[1], asked


def test_every_suffix_has_a_plain_form() -> None:
    for suffix, kind in SUFFIXES.items():
        plain = suffix.removesuffix(".gz").removesuffix(".zst")
        assert SUFFIXES[plain] == kind
