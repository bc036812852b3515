"""The points of a sweep and their ranking."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import MS, manifest
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.analysis.sweep import (
    Interval,
    PointFacts,
    SweepEntry,
    SweepRow,
    front_line,
    indistinguishable,
    pareto_front,
    sweep_rows,
    swept_keys,
)
from llm_perf_opt.core.errors import ImplausibleError
from llm_perf_opt.core.records import Missing, PassRecord
from llm_perf_opt.report.sweep_charts import parameter_chart, tradeoff_chart
from pages import sweep_entries


def test_rows_have_metrics_roofline_times_and_verdicts() -> None:
    rows = sweep_rows(sweep_entries())
    assert [row.values["runtime.batch_size"] for row in rows] == ["1", "2", "4", "8", "16"]
    assert rows[0].median("tpot") == 11 * MS
    assert rows[3].median("decode_rate") == pytest.approx(8 / 0.018)
    assert not isinstance(rows[0].roofline_ns, Missing)
    assert not isinstance(rows[0].times_floor, Missing)
    assert rows[0].times_floor == pytest.approx(11 * MS / rows[0].roofline_ns, rel=1e-6)
    assert rows[3].roofline_rate == pytest.approx(8e9 / rows[3].roofline_ns)  # type: ignore[operator]
    assert rows[0].decode_bound == "near neither limit"
    assert swept_keys(rows) == ["runtime.batch_size"]


def test_a_failed_point_is_a_row_with_its_reason() -> None:
    failed = sweep_rows(sweep_entries("out of memory"))[-1]
    assert (failed.status, failed.why) == ("failed", "out of memory")
    assert failed.median("tpot") == Missing("out of memory")
    assert failed.roofline_rate == Missing("out of memory")
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
    figures = {"tpot": summarize([tpot]), "decode_rate": summarize([rate])}
    return SweepRow(number, {}, "complete", "", "", dict(figures), none, none, none, none, none, 0)


def _spread(number: int, tpot: float, rate: float, half: float) -> SweepRow:
    """Ten repeats within `half` (a share) of the medians."""
    shares = [1 - half, *[1 - half / 2] * 4, *[1 + half / 2] * 4, 1 + half]
    none = Missing("none")
    figures = {
        "tpot": summarize([tpot * share for share in shares]),
        "decode_rate": summarize([rate * share for share in shares]),
    }
    return SweepRow(number, {}, "complete", "", "", dict(figures), none, none, none, none, none, 0)


def test_points_with_overlapping_intervals_tie_and_clearly_worse_points_are_beaten() -> None:
    places = [(20.4, 49), (20.8, 192), (18.0, 3550)]
    noisy = [_spread(number, *place, 0.3) for number, place in enumerate(places)]
    assert [row.number for row in indistinguishable(noisy, "tpot")] == [2, 0, 1]
    assert [row.number for row in indistinguishable(noisy, "decode_rate", most=True)] == [2]
    assert [row.number for row in pareto_front(noisy)] == [2], "no slower, as far as is known, and surely more throughput"
    quiet = [_spread(number, *place, 0.01) for number, place in enumerate(places)]
    assert [row.number for row in indistinguishable(quiet, "tpot")] == [2]
    assert [row.number for row in pareto_front(quiet)] == [2]
    assert indistinguishable([], "tpot") == []


def test_too_few_repeats_for_an_interval_give_minimum_and_maximum() -> None:
    row = _row(0, 1.0, 1.0)
    few = replace(row, metrics={"tpot": summarize([1.0, 2.0, 4.0])})
    interval = few.interval("tpot")
    assert interval is not None
    assert (interval.low, interval.median, interval.high) == (1.0, 2.0, 4.0)
    assert few.repeats == 3
    assert few.interval("ttft") is None
    assert sweep_rows(sweep_entries("no memory"))[-1].repeats == Missing("no memory")


points = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=12)


@given(points)
def test_the_front_is_what_no_other_beats(places: list[tuple[int, int]]) -> None:
    rows = [_row(number, float(tpot), float(rate)) for number, (tpot, rate) in enumerate(places)]
    found = {places[row.number] for row in pareto_front(rows)}

    def beaten(one: tuple[int, int]) -> bool:
        return any(other != one and other[0] <= one[0] and other[1] >= one[1] for other in places)

    assert found == {place for place in places if not beaten(place)}


samples = st.lists(st.integers(10, 99), min_size=1, max_size=12)
measured = st.lists(st.tuples(st.sampled_from([1, 2, 4, 16, 64]), samples), min_size=1, max_size=10)


def _measured(places: list[tuple[int, list[int]]]) -> list[SweepRow]:
    """As they are measured: decode throughput is the batch over TPOT."""
    none = Missing("none")
    return [
        SweepRow(
            number, {}, "complete", "", "",
            {"tpot": summarize([float(one) for one in tpots]), "decode_rate": summarize([batch / one for one in tpots])},
            none, none, none, none, none, 0,
        )
        for number, (batch, tpots) in enumerate(places)
    ]  # fmt: skip


def _known(row: SweepRow, key: str) -> Interval:
    interval = row.interval(key)
    assert interval is not None
    return interval


@given(measured)
def test_the_front_is_never_empty_and_contains_no_clearly_worse_point(places: list[tuple[int, list[int]]]) -> None:
    rows = _measured(places)
    front = pareto_front(rows)
    assert front
    on_it = {row.number for row in front}

    def surely(one: SweepRow, other: SweepRow) -> tuple[bool, bool]:
        """Whether one is surely better than the other: in TPOT, in throughput."""
        time, rate, time2, rate2 = (_known(row, key) for row in (one, other) for key in ("tpot", "decode_rate"))
        return time.high < time2.low, rate.low > rate2.high

    for row in rows:
        beaten = False
        for other in rows:
            (faster, more), (slower, less) = surely(other, row), surely(row, other)
            assert not (faster and more and row.number in on_it), "surely worse in both"
            beaten = beaten or (faster and not less) or (more and not slower)
        assert (row.number in on_it) == (not beaten)


@given(measured)
def test_the_line_goes_up_to_the_right_and_joins_the_ends_of_the_front(places: list[tuple[int, list[int]]]) -> None:
    front = pareto_front(_measured(places))
    line = front_line(front)
    assert line[0] is front[0]
    assert {row.number for row in line} <= {row.number for row in front}
    for key in ("tpot", "decode_rate"):
        values = [_known(row, key).median for row in line]
        assert values == sorted(values)


def test_implausible_and_incomplete_points_are_not_ranked() -> None:
    """The fastest is implausible, the next failed, the next is partial because of an implausible figure."""
    entries = sweep_entries()[:4]
    names = ["impossible", "failed", "partial", "complete"]
    fastest = entries[0].analysis
    assert not isinstance(fastest, Missing)
    impossible = ImplausibleError("MBU of decode is 1107.8%.", "Check the clock.")
    entries[0] = replace(entries[0], analysis=replace(fastest, impossible=impossible))
    entries[1] = replace(entries[1], status="failed", why="interrupted")
    entries[2] = replace(entries[2], status="partial", why="130 % of the bandwidth")
    rows = sweep_rows(entries)
    assert [row.status for row in rows] == names
    assert rows[0].why == "MBU of decode is 1107.8%. Check the clock."
    assert [row.ranked for row in rows] == [False, False, False, True]
    assert [row.number for row in pareto_front(rows)] == [3]
    assert [row.number for row in indistinguishable(rows, "tpot")] == [3]
    chart = tradeoff_chart(rows, pareto_front(rows))
    scaling = parameter_chart(rows, "runtime.batch_size")
    assert not isinstance(chart, Missing)
    assert not isinstance(scaling, Missing)
    assert {x for trace in chart["data"] for x in trace["x"]} == {18}
    assert {x for trace in scaling["data"] for x in trace["x"]} == {8}


def test_where_another_pass_failed_the_unprofiled_figures_still_count() -> None:
    entry = sweep_entries()[0]
    assert not isinstance(entry.analysis, Missing)
    passes = (PassRecord("clean", "complete"), PassRecord("nsys", "failed"))
    partial = replace(entry.analysis, manifest=manifest(status="partial", passes=passes))
    (row,) = sweep_rows([replace(entry, status="partial", why="nsys failed", analysis=partial)])
    assert (row.status, row.ranked) == ("partial", True)
    started = replace(partial, manifest=manifest(status="partial", passes=(PassRecord("clean", "failed"),)))
    (row,) = sweep_rows([replace(entry, status="partial", why="killed", analysis=started)])
    assert not row.ranked


def test_a_point_on_other_hardware_is_named_and_not_ranked() -> None:
    card = {"device_name": "NVIDIA H200", "gpu.name": "NVIDIA H200", "cpu.name": "a"}
    other = {"device_name": "a processor", "cpu.name": "b"}
    entries = sweep_entries()[:4]
    mixed = [replace(entry, hardware=other if number == 0 else card) for number, entry in enumerate(entries)]
    rows = sweep_rows(mixed)
    assert [row.status for row in rows] == ["other hardware", *["complete"] * 3]
    assert "device_name is a processor (most points: NVIDIA H200)" in rows[0].why
    assert 0 not in {row.number for row in (*pareto_front(rows), *indistinguishable(rows, "tpot"))}
    assert all(row.ranked for row in sweep_rows([replace(entry, hardware=card) for entry in entries]))
    unknown = [replace(entry, hardware={} if number == 0 else card) for number, entry in enumerate(entries)]
    assert all(row.ranked for row in sweep_rows(unknown)), "unknown facts do not count as different"
    halves = sweep_rows([replace(entry, hardware=card if number < 2 else other) for number, entry in enumerate(entries)])
    assert [row.ranked for row in halves] == [True, True, False, False], "of two halves the first"
    failed = [replace(mixed[0], status="failed", why="x"), *mixed[1:2], replace(mixed[2], hardware=other)]
    assert [row.ranked for row in sweep_rows(failed)] == [False, True, False], "what failed has no say"


def test_a_device_that_is_swept_over_may_differ() -> None:
    entries = sweep_entries()[:2]
    swept = [
        replace(entry, swept=(f"hardware.device={name}",), hardware={"device": name, "gpu.name": name, "cpu.name": "a"})
        for entry, name in zip(entries, ("cpu", "cuda"), strict=True)
    ]
    assert all(row.ranked for row in sweep_rows(swept))
    elsewhere = replace(swept[1], hardware={"device": "cuda", "cpu.name": "b"})
    assert [row.ranked for row in sweep_rows([swept[0], elsewhere])] == [True, False], "the machine may not"


@pytest.mark.parametrize("key", ["hardware.threads", "hardware.cpus", "hardware.cpu_threads"])
def test_threads_and_cpus_that_are_swept_over_may_differ(key: str) -> None:
    swept = [
        replace(entry, swept=(f"{key}={n}",), hardware={"threads": str(n), "cpus": f"0-{n}", "cpu.name": "a"})
        for n, entry in enumerate(sweep_entries()[:2], start=1)
    ]
    assert all(row.ranked for row in sweep_rows(swept))
    batches = [replace(one, swept=("runtime.batch_size=1",)) for one in swept]
    assert [row.ranked for row in sweep_rows(batches)] == [True, False]


def _of_workload(number: int, tpot: float, batch: int = 1, **changes: Any) -> SweepRow:
    """Ten repeats that are all alike; the rate follows from the batch and the time."""
    figures = {"tpot": summarize([tpot * MS] * 10), "decode_rate": summarize([batch * 1e3 / tpot] * 10)}
    did = PointFacts("a GPU", "", "m", 1000, "bf16", "eager", "512", 64, {})
    row = _row(number, tpot, 1.0)
    return replace(row, metrics=dict(figures), batch=batch, ran=replace(did, **changes), values={"point": str(number)})


def test_points_of_another_workload_beat_none() -> None:
    """A shorter prompt, fewer tokens or a smaller model is quicker at other work."""
    long = _of_workload(0, 9.0)
    others = [
        _of_workload(1, 5.0, prompt_tokens="16"),
        _of_workload(2, 5.0, new_tokens=8),
        _of_workload(3, 5.0, model="n"),
        _of_workload(4, 5.0, parameters=10),
    ]
    assert [row.number for row in pareto_front([long, *others])] == [1, 2, 3, 4, 0]
    slower = _of_workload(5, 10.0)
    assert [row.number for row in pareto_front([long, slower])] == [0]
    chart = tradeoff_chart([long, others[0]], pareto_front([long, others[0]]))
    assert not isinstance(chart, Missing)
    lines = [trace for trace in chart["data"] if trace["mode"] == "lines"]
    assert [len(line["x"]) for line in lines] == [1, 1], "no line joins points that are not compared"
