"""The checksum computed while reading is that of the file."""

import gzip
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.packed import PackedFile
from llm_perf_opt.traces.trace_mark import Checksum, checksum_of


@given(st.lists(st.binary()))
def test_it_does_not_depend_on_the_pieces(pieces: list[bytes]) -> None:
    checksum = Checksum()
    for piece in pieces:
        checksum.add(piece)
    whole = b"".join(pieces)
    assert (checksum.crc, checksum.size) == (zlib.crc32(whole), len(whole))


def test_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(bytes(range(256)) * 9000)
    assert checksum_of(file) == Checksum(zlib.crc32(file.read_bytes()), file.stat().st_size)
    assert str(checksum_of(file)) == f"{2304000:x}-{zlib.crc32(file.read_bytes()):08x}"
    with pytest.raises(ParseError, match="cannot be read"):
        checksum_of(tmp_path / "none.json")


def read_all(path: Path, into: bool) -> Checksum:
    """Return the checksum after all unpacked bytes were read."""
    checksum = Checksum()
    room = memoryview(bytearray(1000))
    with PackedFile(path, checksum) as file:
        while (file.read_into(room) if into else len(file.read(1000))) > 0:
            pass
    return checksum


@pytest.mark.parametrize("into", [False, True])
def test_reading_a_plain_or_gzipped_file_gives_it_in_passing(tmp_path: Path, into: bool) -> None:
    content = bytes(range(256)) * 3000
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content[:1000]) + gzip.compress(content[1000:]))
    for file in (plain, packed):
        assert read_all(file, into) == checksum_of(file)


def test_a_zip_is_not_read_from_front_to_end_and_gives_none(tmp_path: Path) -> None:
    file = tmp_path / "trace.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("trace.json", b"{}" * 1000)
    assert read_all(file, into=False) == Checksum()
