"""Numbers with units: the same in every output, and no exponent for times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.core.units import TIME, counted, duration, durations, percentage
from llm_perf_opt.report.text import bytes_per_s, fine_percent, flops_per_s, signed, with_unit


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (0, "0 ms"),
        (726, "726 ns"),
        (12_400, "12.40 µs"),
        (3_062_000, "3.062 ms"),
        (1_200_000_000, "1.200 s"),
        (999_999, "1.000 ms"),  # what rounds up to the next unit is said in it
        (30.62, "30.62 ns"),
        (0.5, "0.5000 ns"),
        (6.554e-17, "< 0.0001 ns"),
        (-1_183_044.6, "-1.183 ms"),
        (2.5e12, "2,500 s"),
    ],
)
def test_a_time_has_the_unit_that_suits_it(ns: float, shown: str) -> None:
    assert duration(ns) == shown
    assert with_unit(ns, "ns") == shown, "the same in every output"


def test_claims_have_three_digits() -> None:
    assert [duration(ns, 3) for ns in (726, 12_400, 3_062_000, 19_000_000)] == ["726 ns", "12.4 µs", "3.06 ms", "19.0 ms"]


@given(st.floats(-1e15, 1e15))
def test_no_time_has_an_exponent(ns: float) -> None:
    number, unit = duration(ns).rsplit(" ", 1)
    assert "e" not in number
    if not number.startswith((">", "<")):
        assert float(number.replace(",", "")) * {name: size for size, name in TIME}[unit] == pytest.approx(ns, rel=5.1e-4)


def test_two_times_share_a_unit() -> None:
    assert durations(900_000, 1_100_000) == "0.9000 – 1.100 ms"
    assert durations(10, 12) == "10 – 12 ns"


def test_differences_rates_and_shares() -> None:
    assert (signed(1500), signed(-1500), signed(0)) == ("+1.500 µs", "-1.500 µs", "0 ms")
    assert (flops_per_s(6.5e7), flops_per_s(1e15)) == ("65.00 MFLOP/s", "1,000 TFLOP/s")
    assert (bytes_per_s(4.348e12), bytes_per_s(1500)) == ("4,348 GB/s", "1.500 kB/s")
    assert (fine_percent(0.153), fine_percent(0.000123), fine_percent(1e-9)) == ("15.3 %", "0.0123 %", "< 0.0001 %")
    assert (percentage(0.5), percentage(0.0496, 1), percentage(0.04, 1, signed=True)) == ("50 %", "5.0 %", "+4.0 %")


def test_one_thing_has_no_plural() -> None:
    assert [counted(number, "run") for number in (0, 1, 2, 2000)] == ["0 runs", "1 run", "2 runs", "2,000 runs"]


def test_the_ends_of_an_interval_have_the_unit_of_its_middle() -> None:
    assert durations(694.4e6, 1.011e9, around_ns=943e6) == "694.4 – 1,011 ms"
    assert durations(694.4e6, 1.011e9) == "0.6944 – 1.011 s"
