"""The points of a sweep side by side."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import MS
from llm_perf_opt.analysis.stats import summarise
from llm_perf_opt.analysis.sweep_rows import SweepEntry, SweepRow, not_told_apart, pareto_front, sweep_rows, swept_keys
from llm_perf_opt.records import Missing
from pages import sweep_entries


def test_rows_carry_figures_floors_and_what_binds_them() -> None:
    rows = sweep_rows(sweep_entries())
    assert [row.values["runtime.batch_size"] for row in rows] == ["1", "2", "4", "8", "16"]
    assert rows[0].median("tpot") == 11 * MS
    assert rows[3].median("decode_rate") == pytest.approx(8 / 0.018)
    assert not isinstance(rows[0].floor_ns, Missing)
    assert not isinstance(rows[0].times_floor, Missing)
    assert rows[0].times_floor == pytest.approx(11 * MS / rows[0].floor_ns, rel=1e-6)
    assert rows[3].floor_rate == pytest.approx(8e9 / rows[3].floor_ns)  # type: ignore[operator]
    assert rows[0].decode_bound == "near neither limit"
    assert swept_keys(rows) == ["runtime.batch_size"]


def test_a_failed_point_is_a_row_with_its_reason() -> None:
    failed = sweep_rows(sweep_entries("out of memory"))[-1]
    assert (failed.status, failed.why) == ("failed", "out of memory")
    assert failed.median("tpot") == Missing("out of memory")
    assert failed.floor_rate == Missing("out of memory")
    assert failed.label == "batch_size 16"


def test_a_run_without_timings_says_why() -> None:
    entry = sweep_entries()[0]
    assert not isinstance(entry.analysis, Missing)
    why = Missing("the clean pass is failed")
    broken = replace(entry.analysis, timings=why, metrics=(), efficiency=why)
    (row,) = sweep_rows([replace(entry, analysis=broken)])
    assert row.median("ttft") == why
    assert row.batch == why


def test_a_swept_choice_without_a_value_is_kept() -> None:
    (row,) = sweep_rows([SweepEntry(("model=a=b", "flag"), "pending", "", "", Missing("not run"))])
    assert row.values == {"model": "a=b", "flag": ""}


def _row(number: int, tpot: float, rate: float) -> SweepRow:
    none = Missing("none")
    figures = {"tpot": summarise([tpot]), "decode_rate": summarise([rate])}
    return SweepRow(number, {}, "complete", "", "", dict(figures), none, none, none, none, none, 0)


def _spread(number: int, tpot: float, rate: float, half: float) -> SweepRow:
    """Ten repeats within `half` (a share) of the medians."""
    shares = [1 - half, *[1 - half / 2] * 4, *[1 + half / 2] * 4, 1 + half]
    none = Missing("none")
    figures = {
        "tpot": summarise([tpot * share for share in shares]),
        "decode_rate": summarise([rate * share for share in shares]),
    }
    return SweepRow(number, {}, "complete", "", "", dict(figures), none, none, none, none, none, 0)


def test_points_whose_intervals_overlap_are_not_told_apart_and_stay_on_the_front() -> None:
    places = [(20.4, 49), (20.8, 192), (18.0, 3550)]
    noisy = [_spread(number, *place, 0.3) for number, place in enumerate(places)]
    assert [row.number for row in not_told_apart(noisy, "tpot")] == [2, 0, 1]
    assert [row.number for row in not_told_apart(noisy, "decode_rate", most=True)] == [2]
    assert {row.number for row in pareto_front(noisy)} == {0, 1, 2}, "none is faster beyond the intervals"
    quiet = [_spread(number, *place, 0.01) for number, place in enumerate(places)]
    assert [row.number for row in not_told_apart(quiet, "tpot")] == [2]
    assert [row.number for row in pareto_front(quiet)] == [2]
    assert not_told_apart([], "tpot") == []


def test_too_few_repeats_for_an_interval_reach_from_the_least_to_the_most() -> None:
    row = _row(0, 1.0, 1.0)
    few = replace(row, metrics={"tpot": summarise([1.0, 2.0, 4.0])})
    reach = few.reach("tpot")
    assert reach is not None
    assert (reach.low, reach.median, reach.high) == (1.0, 2.0, 4.0)
    assert few.repeats == 3
    assert few.reach("ttft") is None
    assert sweep_rows(sweep_entries("no memory"))[-1].repeats == Missing("no memory")


points = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=12)


@given(points)
def test_the_front_is_what_no_other_beats(places: list[tuple[int, int]]) -> None:
    rows = [_row(number, float(tpot), float(rate)) for number, (tpot, rate) in enumerate(places)]
    found = {places[row.number] for row in pareto_front(rows)}

    def beaten(one: tuple[int, int]) -> bool:
        return any(other != one and other[0] <= one[0] and other[1] >= one[1] for other in places)

    assert found == {place for place in places if not beaten(place)}
