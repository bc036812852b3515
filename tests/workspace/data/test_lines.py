"""Lines of a file of any size, for any chunk boundaries."""

import gzip
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.workspace.data import lines as lines_module
from llm_perf_opt.workspace.data.inventory import ignore
from llm_perf_opt.workspace.data.lines import BadRecords, line_blocks


def numbered(path: Path) -> dict[int, bytes | None]:
    return {first + index: line for first, block in line_blocks(path, ignore) for index, line in enumerate(block)}


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.integers(1, 9), st.booleans())
def test_lines_do_not_depend_on_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes], chunk: int, end: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes(b"x" + b"\n".join(content) + (b"\n" if end else b""))
    raw = path.read_bytes().split(b"\n")
    expected = [line.removesuffix(b"\r") for line in (raw if raw[-1] else raw[:-1])]
    with mock.patch.object(lines_module, "BLOCK_BYTES", chunk):
        found = numbered(path)
    assert list(found.values()) == expected
    assert list(found) == list(range(1, len(expected) + 1))


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 9))
def test_a_line_too_long_is_left_out_and_the_next_keeps_its_number(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], chunk: int
) -> None:
    path = tmp_path_factory.mktemp("long") / "a.txt"
    path.write_bytes(b"".join(b"x" * length + b"\n" for length in lengths))
    with mock.patch.object(lines_module, "BLOCK_BYTES", chunk), mock.patch.object(lines_module, "MAX_LINE_BYTES", 10):
        found = numbered(path)
    assert list(found.values()) == [b"x" * length if length <= 10 else None for length in lengths]
    assert len(found) == len(lengths)


def test_only_a_newline_ends_a_line_and_a_mark_at_the_beginning_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffa\u2028b\x0bc\r\nd".encode())
    assert list(numbered(tmp_path / "a.txt").values()) == ["a\u2028b\x0bc".encode(), b"d"]


def test_gzip_is_read_and_a_damaged_one_called_that(tmp_path: Path) -> None:
    packed = gzip.compress(b"one\ntwo\n" * 1000)
    (tmp_path / "a.txt.gz").write_bytes(packed)
    told: list[int] = []
    assert sum(len(block) for _, block in line_blocks(tmp_path / "a.txt.gz", told.append)) == 2000
    assert sum(told) == len(packed), "progress counts bytes on disk"
    for damaged in (packed[:-20], packed[:40] + b"\0\0\0" + packed[43:], b"no gzip"):
        (tmp_path / "a.txt.gz").write_bytes(damaged)
        with pytest.raises(ParseError, match="is damaged"):
            numbered(tmp_path / "a.txt.gz")


def test_an_empty_file_has_no_lines_and_a_missing_one_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert numbered(tmp_path / "a.txt") == {}
    with pytest.raises(ResourceError, match="cannot be read"):
        numbered(tmp_path / "b.txt")


def test_bad_records_are_an_error_or_counted_and_the_first_named() -> None:
    with pytest.raises(ParseError, match="f, line 3: why") as caught:
        BadRecords(skip=False).note("f, line 3", "why")
    assert "--skip-bad" in caught.value.remedy
    bad = BadRecords(skip=True)
    for number in range(25):
        bad.note(f"line {number}", "why")
    assert bad.count == 25
    assert bad.first == [f"line {number}: why" for number in range(10)]
