"""Limits of the values in a file of a run."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llm_perf_opt.core import value_limits
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.core.run_folder import read_record
from llm_perf_opt.core.value_limits import memory_of

LISTS = ("[]", "{}", "[[]]", "[1]", '{"a":1}', '{"name":""}', '{"ab":"cd"}', '{"a":1,"b":2,"c":3,"d":4,"e":5}')
NUMBERS = ("1", "1000", "1.5", "1e9")
TEXTS = ('""', '"a"', '"ab"', '"я"', '"😀"', '"\\u0444"', '"\\ud83d\\ude00"', f'"{"a" * 2000}😀"', '"%x":1')


@pytest.mark.parametrize("value", [*LISTS, *NUMBERS, *TEXTS])
def test_reading_a_record_stays_below_the_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    limit = 1_000_000
    monkeypatch.setattr(value_limits, "MOST_JSON_MEMORY", limit)
    file = tmp_path / "record.json"

    def peak(count: int) -> int:
        """Return the memory that reading so many values takes."""
        ends, values = ("[]", [value] * count) if "%" not in value else ("{}", [value % n for n in range(count)])
        file.write_text(ends[0] + ",".join(values) + ends[1], encoding="utf-8")
        tracemalloc.start()
        try:
            assert read_record(file, list[PassRecord] if "name" in value else Any)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def largest_count(count: float, growth: float) -> float:
        """Return the largest count that is read, of those from `count` on."""
        while True:
            try:
                assert peak(int(count * growth)) < limit
            except ParseError as error:
                refused.append(error)
                return count
            count *= growth

    refused: list[ParseError] = []
    most = largest_count(largest_count(40, 1.4), 1.05)
    assert peak(int(most)) > limit / 12
    assert "the limit is 1 MB" in str(refused[0])
    assert "shorter prompts" in str(refused[0].remedy)


def test_the_prompts_of_a_large_batch_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"ids": [[100_000 + n for n in range(1000)]] * 300}))
    assert read_record(file, dict[str, Any])["ids"][299][999] == 100_999


def test_checking_long_numbers_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text('{"x": 1234567890123456789, "y": [' + "{}," * 99_999 + "{}]}")
    tracemalloc.start()
    try:
        assert read_record(file, msgspec.defstruct("Few", [("x", int)])) is not None
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_the_memory_of_a_value_includes_all_values_in_it() -> None:
    assert memory_of(["x" * 1000, {"a": "y" * 500}]) > 1500
    assert memory_of(1) < 100
