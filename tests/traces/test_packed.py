"""Unpacking: formats, truncated files, and bounded memory."""

import gzip
import io
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest

from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError
from llm_perf_opt.core.proportion import RATIO_COUNTS_FROM_BYTES
from llm_perf_opt.traces import packed
from llm_perf_opt.traces.packed import LIMIT_VARIABLE, PackedFile, is_gzip, unpack
from writing import full_disk

CONTENT = b"".join(b"line %d of many\n" % number for number in range(50_000))


def unpacked(path: Path, size: int = 4096) -> tuple[bytes, bool]:
    with PackedFile(path) as file:
        pieces = []
        while piece := file.read(size):
            assert len(piece) <= size
            pieces.append(piece)
        return b"".join(pieces), file.cut_short


def drained(path: Path) -> None:
    """Read everything and discard it."""
    with PackedFile(path) as file:
        while file.read(1 << 16):
            pass


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def overwritten(data: bytes) -> bytes:
    """Return the same with some bytes in the middle replaced."""
    return data[: len(data) // 2] + b"\xff" * 50 + data[len(data) // 2 + 50 :]


@pytest.mark.parametrize(
    "data",
    [
        CONTENT,
        gzip.compress(CONTENT, mtime=0),
        gzip.compress(CONTENT[:1000]) + gzip.compress(b"") + gzip.compress(CONTENT[1000:]),
        gzip.compress(CONTENT) + b"\0" * 512,
        gzip.compress(CONTENT) + b"x" * (2 * packed._READ_BYTES),  # padding of more than is read at once
        zipped({"trace.json": CONTENT}),
        zipped({"trace.json": CONTENT, "__MACOSX/._trace.json": b"x", "folder/": b""}),
        zipped({"trace.json": CONTENT}, zipfile.ZIP_LZMA),
        zipped({"trace.json": CONTENT}, zipfile.ZIP_BZIP2),
        zipped({"trace.json": CONTENT}, zipfile.ZIP_STORED),
    ],
)
@pytest.mark.parametrize("size", [100, 4096, 1 << 20])
def test_bytes_come_back_whatever_the_packing(tmp_path: Path, data: bytes, size: int) -> None:
    path = tmp_path / "any.name"
    path.write_bytes(data)
    assert unpacked(path, size) == (CONTENT, False)


def test_a_gzip_file_cut_short_gives_what_is_whole(tmp_path: Path) -> None:
    data = gzip.compress(CONTENT)
    for cut in (12, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.gz").write_bytes(data[:cut])
        found, cut_short = unpacked(tmp_path / "cut.gz")
        assert cut_short
        assert CONTENT.startswith(found)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(CONTENT)[:50] + b"\xff" * 50 + gzip.compress(CONTENT)[100:], "damaged"),
        (gzip.compress(CONTENT)[:-8] + b"\0" * 8, "damaged"),  # a wrong checksum
        (zipped({"a": b"1", "b": b"2"}), "contains 2 files"),
        (zipped({}), "begins with PK"),
        (zipped({"a": CONTENT})[:-40], "cannot be opened"),
        (overwritten(zipped({"a": CONTENT}, zipfile.ZIP_STORED)), "damaged"),
        (overwritten(zipped({"a": CONTENT})), "damaged"),
        (overwritten(zipped({"a": CONTENT}, zipfile.ZIP_BZIP2)), "damaged"),
        (overwritten(zipped({"a": CONTENT}, zipfile.ZIP_LZMA)), "damaged"),
        (b"PK\x03\x04" + b"\xff" * 100, "cannot be opened"),
    ],
)
def test_damaged_archives_are_called_that(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(data)
    if words == "begins with PK":  # an empty zip has another first word and is left to the reader of JSON
        assert unpacked(path)[0] == data
        return
    with pytest.raises(ParseError, match=words):
        unpacked(path)


def bomb(path: Path, megabytes: int) -> None:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    with path.open("wb") as out:
        for _ in range(megabytes):
            out.write(squeeze.compress(b" " * (1 << 20)))
        out.write(squeeze.flush())


@pytest.mark.slow
def test_a_bomb_is_refused_by_its_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb(tmp_path / "bomb.gz", 100)
    with pytest.raises(ParseError, match="times its size") as caught:
        unpacked(tmp_path / "bomb.gz", 1 << 20)
    assert LIMIT_VARIABLE in caught.value.remedy
    (tmp_path / "bomb.zip").write_bytes(zipped({"a": bytes(100 << 20)}))
    with pytest.raises(ParseError, match="times its size"):
        unpacked(tmp_path / "bomb.zip", 1 << 20)
    monkeypatch.setenv(LIMIT_VARIABLE, "1")  # who names a size may have it
    assert len(unpacked(tmp_path / "bomb.gz", 1 << 20)[0]) == 100 << 20


def test_the_size_has_a_limit_that_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "big.gz").write_bytes(gzip.compress(CONTENT))
    monkeypatch.setattr(packed, "DEFAULT_LIMIT_GB", 1e-5)
    with pytest.raises(ParseError, match="unpacks to more than"):
        unpacked(tmp_path / "big.gz")
    monkeypatch.setenv(LIMIT_VARIABLE, "2")
    assert unpacked(tmp_path / "big.gz")[0] == CONTENT


@pytest.mark.parametrize("value", ["many", "-1", "0", "nan"])
def test_a_limit_that_is_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setenv(LIMIT_VARIABLE, value)
    with pytest.raises(ConfigError, match="is not a size"):
        unpacked(tmp_path / "file")


def test_a_file_is_unpacked_to_disk_whole_or_refused(tmp_path: Path) -> None:
    path, out = tmp_path / "report.gz", tmp_path / "out"
    path.write_bytes(gzip.compress(CONTENT))
    assert is_gzip(path)
    unpack(path, out)
    assert out.read_bytes() == CONTENT
    assert not is_gzip(out)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ParseError, match="truncated gzip file"):
        unpack(path, out)


def test_a_full_disk_is_not_taken_for_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.gz"
    path.write_bytes(gzip.compress(CONTENT * 20))
    full_disk(monkeypatch, "unpacked")
    with pytest.raises(ResourceError, match="cannot be unpacked into"):
        unpack(path, tmp_path / "unpacked")


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_member_may_end_anywhere_in_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    first, second = gzip.compress(CONTENT[:1000]), gzip.compress(CONTENT[1000:])
    monkeypatch.setattr(packed, "_READ_BYTES", len(first) + left)  # so many bytes of the second come with the first
    path = tmp_path / "trace.json.gz"
    path.write_bytes(first + second)
    assert unpacked(path) == (CONTENT, False)


def test_many_gzip_members_are_read_where_each_holds_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one call reads the bytes of all of them."""
    monkeypatch.setattr(packed, "_MANY_MEMBERS", 100)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(b"".join(gzip.compress(CONTENT[at : at + 300]) for at in range(0, len(CONTENT), 300)))
    assert unpacked(path, len(CONTENT)) == (CONTENT, False)
    path.write_bytes(b"".join(gzip.compress(CONTENT[at : at + 1]) for at in range(1000)))
    with pytest.raises(ParseError, match="more than 100 members"):
        unpacked(path, len(CONTENT))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_gives_no_more_at_once_than_is_asked_for(tmp_path: Path, method: int) -> None:
    path = tmp_path / "bomb.zip"
    path.write_bytes(zipped({"a": bytes(RATIO_COUNTS_FROM_BYTES + (1 << 20))}, method))
    tracemalloc.start()
    try:
        with pytest.raises(ParseError, match="times its size"):
            drained(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20  # LZMA looks back at 8 MiB


def test_a_zip_of_enormous_demands_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.zip"
    data = zipped({"a": CONTENT}, zipfile.ZIP_LZMA)
    at = data.index(b"\x05\x00\x5d") + 3  # behind the length and the first of the properties: the size of the dictionary
    path.write_bytes(data[:at] + (1 << 30).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ParseError, match="1,024 MiB of memory"):
        unpacked(path)
    path.write_bytes(zipped({f"{number:02000}": b"" for number in range(600)}))
    with pytest.raises(ParseError, match="table of contents"):
        unpacked(path)
