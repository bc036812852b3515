"""Metrics of exporters in the Prometheus text format."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.prometheus import MOST_BYTES, MOST_LINE_CHARS, MOST_SERIES, parse_prometheus, read_prometheus

DCGM = """# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-1",modelName="NVIDIA H200",Hostname="a, b} \\"c\\""} 1980
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0"} 1.5e+09 1395066363000
up 1
rate { } +Inf
"""


def test_what_the_dcgm_exporter_writes() -> None:
    found = parse_prometheus(DCGM)
    assert found.series == {
        'DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-1",modelName="NVIDIA H200",Hostname="a, b} \\"c\\""}': 1980.0,
        'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0"}': 1.5e9,
        "up": 1.0,
    }
    assert found.kinds == {"DCGM_FI_DEV_SM_CLOCK": "gauge", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "counter"}
    assert found.note == "", "a value that is not finite is a sample, but no figure"


def test_other_lines_and_too_many_series_are_counted() -> None:
    assert parse_prometheus("a 1\n<html>\nb{c} 2\n").note == "2 lines are not samples"
    many = parse_prometheus("\n".join(f"m{number} 1" for number in range(MOST_SERIES + 5)))
    assert (len(many.series), many.note) == (MOST_SERIES, f"only the first {MOST_SERIES} of {MOST_SERIES + 5} series are kept")


@pytest.mark.parametrize(
    ("line", "series"),
    [
        ("foo12", {}),
        ("foo1e3 5", {"foo1e3": 5.0}),
        ("foo\t12", {"foo": 12.0}),
        ('foo{a="b"}12', {'foo{a="b"}': 12.0}),
        ('foo {a="b"} 12', {'foo{a="b"}': 12.0}),
        ("foo{}12", {"foo": 12.0}),
    ],
)
def test_a_value_is_separated_from_the_name(line: str, series: dict[str, float]) -> None:
    assert parse_prometheus(line).series == series


@pytest.mark.parametrize("content", [b"", b"<html></html>", b"\x00\xff", b"a " + b"1" * (MOST_BYTES + 1)])
def test_a_file_without_metrics_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics").write_bytes(content)
    with pytest.raises(ParseError, match="metrics"):
        read_prometheus(tmp_path / "metrics")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="cannot be read"):
        read_prometheus(tmp_path / "absent")


HOSTILE = {
    "spaces": "a{" + " " * 1_000_000 + "x",
    "labels": "a{" + 'a="" , ' * 140_000 + "x",
    "escapes": 'a{a="' + "\\\\" * 500_000,
    "value and spaces": "a 1" + " " * 1_000_000 + "x",
    "too long": "a{" + 'a="",' * (MOST_LINE_CHARS // 5) + "} 1",
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_lines_are_read_in_linear_time(line: str) -> None:
    """A pattern that tries every split of a run of spaces would take years for the first of these."""
    assert parse_prometheus(line + "\nb 2").series == {"b": 2.0}


def test_spaces_are_allowed_around_labels() -> None:
    for labels in ("{ }", "{ , }", '{ a = "b" }', '{a="b" , }', '{\ta="b",c="}" ,\td="e" }'):
        assert list(parse_prometheus(f"m {labels} 1 -5").series.values()) == [1.0], labels
    for labels in ("{", "{,,}", '{a="b" c="d"}', '{a="b}', "{a=b}"):
        assert not parse_prometheus(f"m {labels} 1").series, labels


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert all(value == value for value in parse_prometheus(text).series.values())
