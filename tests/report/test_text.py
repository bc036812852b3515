"""Numbers and tables as text: what a renderer makes of them is what was meant."""

import ast
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders import HOSTILE_NAMES
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.core.units import byte_count
from llm_perf_opt.report import text as text_module
from llm_perf_opt.report.markdown import escape, reason, table
from llm_perf_opt.report.terminal import columns
from llm_perf_opt.report.text import (
    count,
    duration,
    interval,
    known,
    known_within,
    memory_size,
    missing,
    percent,
    present,
    significant,
    then,
    with_unit,
    words,
)
from markdown_reader import inline_text, read, uneven_tables

WHY = Missing("the driver | said <b>no</b>\nand # more")
WHY_SHOWN = "n/a: the driver | said <b>no</b> and # more"


# --- names are data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_hostile_name_reads_as_itself(name: str) -> None:
    assert inline_text(f"x{escape(name)}x") == (f"x{one_line(name)}x", [])


@settings(deadline=None, max_examples=50)
@given(st.one_of(st.text(), st.text(alphabet="\\`*_[]()<>|#~$!&;=+-.a1 \n\t", max_size=20)))
@example("[a](b)")
@example("<a href='x'>")
@example("&copy;")
@example("_a_ __b__ a_b _")
@example("\\")
@example("![a]: b")
def test_any_name_reads_as_itself(name: str) -> None:
    shown, markup = inline_text(f"x {escape(name)} x")
    assert markup == []
    assert shown == f"x {one_line(name)} x"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(alphabet="\\`|<>*a \n-:", max_size=8), min_size=1, max_size=3))
def test_any_name_stays_in_its_cell(names: list[str]) -> None:
    source = table(["x"] * len(names), [[f"({escape(name)})" for name in names]])
    assert uneven_tables(source) == []
    assert read(source).tables == [[["x"] * len(names), [f"({one_line(name)})" for name in names]]]


def test_names_of_operators_keep_their_usual_look() -> None:
    assert escape("aten::_scaled_dot_product") == r"aten::\_scaled_dot_product"
    assert escape("void gemm_kernel(float)") == "void gemm_kernel(float)"


# --- missing values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shown",
    [reason(WHY), escape(words(WHY, duration)), escape(words(then(WHY, duration)))],
)
def test_a_missing_value_shows_its_reason_as_text_on_one_line(shown: str) -> None:
    assert inline_text(shown) == (WHY_SHOWN, [])
    assert uneven_tables(table(["a", "b"], [[shown, "x"]])) == []


def test_a_missing_interval_shows_its_reason() -> None:
    assert interval(summarize([1, 2, 3]), "ns") == Missing("3 values; a 95 % interval of the median needs 6")


def test_what_is_missing_stays_missing() -> None:
    assert (then(WHY, duration), known(WHY, 3), present([1, WHY, 2])) == (WHY, 3, [1, 2])
    assert missing([("a", WHY), ("b", 1)]) == [("a", WHY.why)]
    assert (then(2, lambda value: value + 1), known(2, 3), words(2)) == (3, 2, "2")


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_table_reads_back() -> None:
    source = table(["stage", "time"], [["prefill", "1 ms"], ["decode", "2 ms"]], "lr")
    assert read(source).tables == [[["stage", "time"], ["prefill", "1 ms"], ["decode", "2 ms"]]]
    assert "|---|---:|" in source


def test_a_table_without_rows_says_so() -> None:
    assert read(table(["a", "b", "c"], [])).tables == [[["a", "b", "c"], ["none", "", ""]]]


def test_a_terminal_table_is_aligned() -> None:
    assert columns(["part", "MB"], [["mlp", "1,000"], ["attention", "5"]], "lr").splitlines() == [
        "part          MB",
        "mlp        1,000",
        "attention      5",
    ]


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (1, "1.000"),
        (12.3456, "12.35"),
        (-12.3456, "-12.35"),
        (1234.5, "1,234"),  # half to even, as Python rounds
        (123_456_789, "123,456,789"),  # no digit before the point is dropped
        (0.00123456, "0.001235"),
        (9.9996, "10.00"),  # not 10.000: rounding moves the point
        (0.99996, "1.000"),
        (999.96, "1,000"),
        (0.00009, "9.000e-05"),
        (1e12, "1.000e+12"),
        (999_999_999, "999,999,999"),
    ],
)
def test_four_significant_digits(value: float, shown: str) -> None:
    assert significant(value) == shown


@settings(deadline=None, max_examples=50)
@given(st.floats(-1e300, 1e300, allow_subnormal=False), st.integers(2, 6))
def test_rounding_loses_at_most_half_a_digit(value: float, digits: int) -> None:
    shown = float(significant(value, digits).replace(",", ""))
    assert shown == pytest.approx(value, rel=0.5 * 10 ** (1 - digits) * (1 + 1e-9), abs=0)
    if 1e-3 <= abs(value) < 1e8:
        assert "e" not in significant(value, digits)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_number_is_shown_as_what_it_is(value: float) -> None:
    assert significant(value) == str(value)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 k"),
        (1_543_714_304, "1.54 B"),
        (8_030_000_000, "8.03 B"),
        (671_000_000_000, "671 B"),
        (999_999, "1 M"),
        (999_999_999, "1 B"),
        (1_040_000_000_000, "1.04 T"),
    ],
)
def test_counts_as_people_say_them(number: int, shown: str) -> None:
    assert count(number) == shown


@settings(deadline=None)
@given(st.integers(0, 10**14))
def test_no_count_is_said_with_an_exponent(number: int) -> None:
    shown = count(number)
    assert "e" not in shown
    value, _, letter = shown.partition(" ")
    assert float(value) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[letter] == pytest.approx(number, rel=0.006)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (700, "700 B"),
        (2**20, "1.00 MiB"),
        (2**30, "1.00 GiB"),
        (3 * 2**29, "1.50 GiB"),
        (-5 * 2**30, "-5.00 GiB"),  # an operator may free more than it takes
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_bytes_in_the_clearer_unit(size: int, shown: str) -> None:
    assert memory_size(size) == shown


def test_figures_in_their_units() -> None:
    assert duration(12_345_678) == "12.35 ms"
    assert with_unit(2_000_000, "ns") == "2.000 ms"
    assert with_unit(123.45, "tokens/s") == "123.5 tokens/s"
    assert percent(0.1234) == "12.3 %"
    assert percent(0.1234, 0) == "12 %"
    assert [percent(share) for share in (0, 0.0004, 0.0005, -0.1)] == ["0.0 %", "< 0.1 %", "0.1 %", "-10.0 %"]
    ten = summarize([value * 1_000_000 for value in range(1, 11)])
    assert interval(ten, "ns") == "2.000 – 9.000 ms", "second and ninth of ten"
    assert interval(summarize(range(1, 11)), "tokens/s") == "2.000 – 9.000"


ROOMS = Path(text_module.__file__).parents[1]
DRAWN = ("text.py", "svg.py", "fleet_charts.py")
"""The formats themselves, and coordinates of drawings."""


@pytest.mark.parametrize("room", ["report", "workflows", "cli"])
def test_numbers_are_formatted_in_one_place(room: str) -> None:
    found = [
        f"{file.name}:{node.lineno}"
        for file in (ROOMS / room).glob("*.py")
        if file.name not in DRAWN
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FormattedValue) and node.format_spec and ast.unparse(node.format_spec).rstrip("'\"")[-1] in "ef%"
    ]
    assert found == [], "use report/text.py or core/units.py"


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0 bytes"),
        (653, "653 bytes"),
        (26_560, "26.6 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (2_500_000_000, "2.5 GB"),
    ],
)
def test_bytes_are_said_in_the_unit_they_fill(number: int, shown: str) -> None:
    assert byte_count(number) == shown


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([5_000_000], "one value"),
        ([5_000_000, 4_000_000], "range: 4.000 – 5.000 ms, n = 2"),
        ([float(value) * 1_000_000 for value in range(1, 6)], "range: 1.000 – 5.000 ms, n = 5"),
        ([float(value) * 1_000_000 for value in range(1, 7)], "95 %: 1.000 – 6.000 ms, n = 6"),
    ],
)
def test_few_values_have_a_range_and_no_interval(values: list[float], shown: str) -> None:
    assert known_within(summarize(values), "ns") == shown
    assert ("95 %" in shown) is (len(values) >= 6)
