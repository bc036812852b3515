"""Arrays of any length: elements as lines, for any chunk boundaries; damage is named with its record."""

import json
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.workspace.data import json_arrays
from llm_perf_opt.workspace.data.formats import DataFile
from llm_perf_opt.workspace.data.inventory import ignore
from llm_perf_opt.workspace.data.json_arrays import element_blocks, is_array
from llm_perf_opt.workspace.data.lines import BadRecords
from llm_perf_opt.workspace.data.record_streams import count_records, texts

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def elements(path: Path) -> list[bytes]:
    found: list[bytes] = []
    for first, block in element_blocks(path, ignore):
        assert first == len(found) + 1
        found += [line for line in block if line is not None]
    return found


@settings(deadline=None)
@given(st.lists(VALUES, max_size=6), st.sampled_from([None, 1]), st.integers(1, 40), st.booleans())
def test_elements_do_not_depend_on_chunks_or_layout(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], indent: int | None, chunk: int, ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=ascii_only), encoding="utf-8")
    with mock.patch.object(json_arrays, "BLOCK_BYTES", chunk):
        found = elements(path)
    assert [json.loads(line) for line in found] == values
    assert not any(b"\n" in line for line in found)
    assert is_array(path)


def test_what_is_an_array(tmp_path: Path) -> None:
    for content, expected in ((b' \n\t[{"a": 1}]', True), (b"\xef\xbb\xbf[1]", True), (b'{"a": 1}\n', False), (b"", False)):
        (tmp_path / "a.json").write_bytes(content)
        assert is_array(tmp_path / "a.json") is expected
    (tmp_path / "a.json").write_bytes(b" " * 10_000 + b"[1]")
    assert is_array(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("content", "record"),
    [
        (b'[{"text": "a"}, {"text": "b"', 2),
        (b'[{"text": "a"}', 1),
        (b'[{"text": "a"},]', 2),
        (b'[{"text": "a"} {"text": "b"}]', 1),
        (b'[{"text": "a"}] [', 1),
        (b"[" * 100_000, 1),
        (b'[{"text": "a\nb"}]', 1),
        (b"[1" + b"1" * 5000 + b"]", 1),
    ],
)
def test_damage_is_named_with_its_record(tmp_path: Path, content: bytes, record: int) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ParseError, match=rf"a\.json, record {record}:") as caught:
        elements(tmp_path / "a.json")
    assert ".jsonl" in caught.value.remedy


def test_an_element_too_long_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_arrays, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "a.json").write_bytes(b'["' + b"x" * (4 << 20) + b'"]')
    with pytest.raises(ParseError, match="longer than 1 MiB"):
        elements(tmp_path / "a.json")


def test_mixed_elements_are_bad_records_one_by_one(tmp_path: Path) -> None:
    mixed = b'[{"text": "a"}, 7, {"text": NaN}, {"id": 1}, {"text": "\xff"}, {"text": "\\ud800"}, [1], null,\n{\n"text":\n"b"}]'
    (tmp_path / "a.json").write_bytes(mixed)
    file = DataFile("a.json", tmp_path / "a.json", "json", "all")
    bad = BadRecords(skip=True)
    assert [text for block in texts(file, "text", bad, ignore) for text in block] == ["a", "b"]
    assert bad.count == 7
    assert [line.split(":")[0] for line in bad.first] == [f"a.json, record {number}" for number in range(2, 9)]
    with pytest.raises(ParseError, match="record 2: not a JSON object"):
        list(texts(file, "text", BadRecords(skip=False), ignore))


def test_memory_is_that_of_a_block_however_long_the_array_is(tmp_path: Path) -> None:
    record = json.dumps({"text": "x" * 4000})
    with (tmp_path / "a.json").open("w") as out:
        out.write("[" + ",\n".join([record] * 8000) + "]")
    tracemalloc.start()
    assert count_records(DataFile("a.json", tmp_path / "a.json", "json", "all"), ignore) == 8000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (tmp_path / "a.json").stat().st_size / 3
