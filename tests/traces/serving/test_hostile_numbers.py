"""Numbers that nothing measures, in each numeric field of the files of load generators: read as missing, or refused."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command import llm_perf
from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.units import (
    BYTE_RATE,
    BYTES,
    FLOP_RATE,
    SHARE,
    TIME,
    byte_count,
    counted,
    duration,
    durations,
    percentage,
    scaled,
    significant,
)
from llm_perf_opt.core.value_limits import MOST_NUMBER, check_json, number_in
from llm_perf_opt.traces.prometheus import parse_prometheus
from llm_perf_opt.traces.serving.load_file import read_load
from llm_perf_opt.traces.serving.server_files import read_samples
from run_damage import places, value_at, with_value

SERVING = Path(__file__).parents[2] / "fixtures" / "serving"
HUGE = 10**399
RAW = (
    *("1e308", "-1e308", str(HUGE), str(-HUGE), "9" * 5000, str(2**63 - 1), str(-(2**63)), str(2**64)),
    *("NaN", "Infinity", "-Infinity", "-1", "0", "5e-324", "1e300", "4e18"),
)
NUMBERS: tuple[Any, ...] = (
    1e308,
    -1e308,
    HUGE,
    -HUGE,
    math.nan,
    math.inf,
    -math.inf,
    5e-324,
    -1,
    0,
    2**64,
    1.7976931348623157e308,
)


UNITS = (TIME, BYTES, BYTE_RATE, FLOP_RATE, SHARE)


def numeric_places(text: str) -> list[tuple[Any, ...]]:
    """One place of each numeric field."""
    values = json.loads(text)
    found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for place in places(values):
        value = value_at(values, place)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found.setdefault(tuple("#" if isinstance(key, int) else key for key in place), place)
    return list(found.values())


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from numbers_in(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def assert_read_or_refused(path: Path, what: object) -> None:
    with suppress(ParseError, ResourceError):
        for number in (number for load in read_load(path) for number in numbers_in(msgspec.to_builtins(load))):
            assert number_in(number) is not None, (what, number)


@pytest.mark.parametrize("name", ["vllm_bench_serve.json", "guidellm.json"])
def test_in_a_json_file(name: str, tmp_path: Path) -> None:
    text, target = (SERVING / name).read_text(), tmp_path / name
    tried = numeric_places(text)
    assert len(tried) > 30
    every = max(1, len(tried) // 30)  # GuideLLM has thousands of fields, most of them bins of histograms
    for number, place in enumerate([*tried[:40], *tried[40::every]]):
        for raw in RAW[number % 4 :: 4]:
            target.write_text(with_value(text, place, raw))
            assert_read_or_refused(target, (place, raw[:20]))


def test_in_a_line_and_in_the_summary_of_aiperf(tmp_path: Path) -> None:
    records, summary = "profile_export.jsonl", "profile_export_aiperf.json"
    lines, about = (SERVING / records).read_text().splitlines()[:6], (SERVING / summary).read_text()
    for place in numeric_places(lines[3]):
        for raw in RAW:
            changed = [*lines[:3], with_value(lines[3], place, raw), *lines[4:]]
            (tmp_path / records).write_text("\n".join(changed) + "\n")
            assert_read_or_refused(tmp_path / records, (place, raw[:20]))
    (tmp_path / records).write_text("\n".join(lines) + "\n")
    for number, place in enumerate(numeric_places(about)[::4]):
        for raw in RAW[number % 8 :: 8]:
            (tmp_path / summary).write_text(with_value(about, place, raw))
            assert_read_or_refused(tmp_path / records, (place, raw[:20]))


@pytest.mark.parametrize("raw", RAW)
def test_in_metrics_of_a_server(raw: str, tmp_path: Path) -> None:
    series = parse_prometheus(f"vllm:num_requests_running {raw}\nvllm:num_requests_waiting 2\n").series
    assert series["vllm:num_requests_waiting"] == 2
    assert all(number_in(value) is not None for value in series.values())
    file = tmp_path / "samples.jsonl"
    file.write_text(f'{{"at_ns": 5, "series": {{"a": 1, "b": {raw}}}}}\n')
    try:
        (sample,) = read_samples(file)
    except ParseError:
        return
    assert all(number_in(value) is not None for value in sample.series.values())


@pytest.mark.parametrize("raw", ["1e308", "-1e308", str(HUGE), "NaN", "-Infinity"])
@pytest.mark.parametrize("field", ["mean_ttft_ms", "duration", "request_rate", "request_throughput"])
def test_the_commands_end_with_a_documented_code(field: str, raw: str, tmp_path: Path) -> None:
    text = (SERVING / "vllm_bench_serve.json").read_text()
    (tmp_path / "bench.json").write_text(with_value(text, (field,), raw))
    done = llm_perf("import", "bench.json", "--out", tmp_path / "run", "--json", cwd=tmp_path)
    assert done.returncode in (0, 5), (raw, done.stderr)
    assert "bug" not in done.stderr
    if done.returncode:
        return
    for words in (["report", tmp_path / "run"], ["compare", tmp_path / "run", tmp_path / "run"]):
        again = llm_perf(*words, cwd=tmp_path)
        assert again.returncode in (0, 2), again.stderr
        assert "bug" not in again.stderr


@pytest.mark.parametrize("number", NUMBERS)
def test_every_number_has_a_text(number: Any) -> None:
    texts = [significant(number), duration(number), durations(number, 1), durations(1, number), percentage(number)]
    texts += [
        percentage(number, 1, signed=True),
        *(scaled(number, units) for units in (TIME, BYTES, BYTE_RATE, FLOP_RATE, SHARE)),
    ]
    if isinstance(number, int):
        texts += [counted(number, "run"), byte_count(number)]
    assert all(0 < len(text) < 60 for text in texts), texts


@pytest.mark.parametrize(
    ("value", "found"),
    [(1, 1.0), (-2.5, -2.5), (MOST_NUMBER, MOST_NUMBER), (1e19, None), (HUGE, None), (math.nan, None), (True, None), ("1", None)],
)
def test_the_guard_of_numbers(value: Any, found: float | None) -> None:
    assert number_in(value) == found


@pytest.mark.parametrize("raw", ["1e308", "-1e31", "1E+99", "1" + "0" * 40 + ".5", "1" + "0" * 40, "12.5e300"])
def test_a_record_with_a_number_that_nothing_measures_is_refused(raw: str) -> None:
    with pytest.raises(ValueError, match="beyond"):
        check_json(f'{{"a": [1, {raw}]}}'.encode())
    check_json(f'{{"a": "{raw}", "b": 1e29, "c": -12.5e+10, "d": 1e-300, "e": 123456789012345678.5}}'.encode())
