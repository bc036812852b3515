"""The fingerprint of a file: every change of its content changes it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.errors import ParseError
from llm_perf_opt.parsers import fingerprint as module
from llm_perf_opt.parsers.fingerprint import BLOCK_BYTES, fingerprint


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fingerprint") / "file"


def of(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    return fingerprint(file)


BYTES = st.binary(max_size=200)


@given(BYTES, BYTES)
def test_different_contents_differ_and_the_same_agree(file: Path, one: bytes, other: bytes) -> None:
    assert (of(file, one) == of(file, other)) == (one == other)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 3 * BLOCK_BYTES), st.integers(1, 255))
def test_no_single_byte_changes_unseen(file: Path, content: bytes, place: int, by: int) -> None:
    large = bytearray((content * (3 * BLOCK_BYTES // len(content) + 1))[: 3 * BLOCK_BYTES - 5])
    place %= len(large)
    before = of(file, bytes(large))
    large[place] ^= by
    assert of(file, bytes(large)) != before


def test_zeros_at_the_end_and_blocks_that_change_places_are_seen(file: Path) -> None:
    assert len({of(file, bytes(count)) for count in (0, 1, 7, 8, 9, BLOCK_BYTES, BLOCK_BYTES + 1)}) == 7
    one, two = b"a" * BLOCK_BYTES, b"b" * BLOCK_BYTES
    assert len({of(file, one + two), of(file, two + one), of(file, one + one), of(file, two + two)}) == 4
    assert of(file, b"12345678abcdefgh") != of(file, b"abcdefgh12345678")


def test_it_is_the_same_on_every_machine(file: Path) -> None:
    """Computed here in plain integers from its description."""
    content = bytes(range(256)) * 5000 + b"tail"
    number = 0
    for start in range(0, len(content), BLOCK_BYTES):
        block = content[start : start + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
        words = [int.from_bytes(block[at : at + 8], "little") for at in range(0, BLOCK_BYTES, 8)]
        total = sum(word * factor for word, factor in zip(words, factors(len(words)), strict=True))
        number = (number * 0x9E3779B97F4A7C15 + total) % 2**64
    assert of(file, content) == f"{len(content):x}-{number:016x}"
    assert all(int(factor) % 2 for factor in module._factors()[:1000])


def factors(count: int) -> list[int]:
    found = []
    for number in range(1, count + 1):
        x = number * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        found.append((x ^ (x >> 31)) | 1)
    return found


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="gone"):
        fingerprint(tmp_path / "gone")
