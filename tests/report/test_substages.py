"""Sub-stages below their parents, and what they take of their stage."""

from builders import MS, clean_timings, iteration
from llm_perf_opt.analysis.metrics import stage_timings, substage_parents
from llm_perf_opt.core.records import CleanTimings, Missing, SubstageSpan
from llm_perf_opt.report.document import Table
from llm_perf_opt.report.run_tables import substage_tables


def span(name: str, start_ms: int, length_ms: int, stage: str = "prefill", step: int = -1) -> SubstageSpan:
    return SubstageSpan(name, stage, step, start_ms * MS, length_ms * MS)


def timed(*spans: SubstageSpan) -> CleanTimings:
    """Ten repeats: 100 ms of prefill, three steps of 10 ms."""
    return clean_timings([iteration(steps_ns=(10 * MS,) * 3, substages=spans) for _ in range(10)])


def rows(*spans: SubstageSpan) -> list[tuple[str, str, int]]:
    stages = stage_timings(timed(*spans), Missing("no torch pass"))
    return [(stage.name, stage.parent, stage.depth) for stage in stages]


def test_a_sub_stage_inside_another_stands_below_it() -> None:
    found = rows(span("inner", 10, 5), span("outer", 5, 20), span("beside", 30, 5))
    assert found[1:5] == [("prefill", "profile", 1), ("outer", "prefill", 2), ("inner", "outer", 3), ("beside", "prefill", 2)]


def test_the_same_sub_stages_in_two_stages_have_the_depth_of_each() -> None:
    steps = [span("outer", 100 + 10 * step, 8, "decode_step", step) for step in range(3)]
    inner = [span("inner", 101 + 10 * step, 2, "decode_step", step) for step in range(3)]
    found = rows(span("inner", 10, 5), span("outer", 5, 20), *[one for pair in zip(inner, steps, strict=True) for one in pair])
    assert [row for row in found if row[0] == "inner"] == [("inner", "outer", 3), ("inner", "outer", 4)]


def test_of_two_that_span_the_same_the_one_that_ends_later_is_the_outer() -> None:
    assert substage_parents([span("inner", 5, 5), span("outer", 5, 5)]) == {"inner": "outer", "outer": None}


def test_one_that_lies_in_another_only_sometimes_is_beside_it() -> None:
    assert substage_parents([span("a", 6, 2), span("b", 5, 5), span("a", 20, 2)]) == {"a": None, "b": None}


def test_three_deep() -> None:
    found = substage_parents([span("c", 7, 1), span("b", 6, 3), span("a", 5, 9)])
    assert found == {"c": "b", "b": "a", "a": None}


def cells(table: Table) -> list[tuple[int, list[str]]]:
    return [(row[0].indent, [cell.text for cell in row]) for row in table.rows]


def test_shares_of_the_stage_and_the_rest() -> None:
    spans = (span("tower", 5, 20), span("inner", 30, 4), span("projector", 28, 10))
    (table,) = substage_tables(stage_timings(timed(*spans), Missing("none")))
    assert table.id == "substages-prefill"
    assert cells(table) == [
        (0, ["tower", "1", "20.00 ms", "20.0 %"]),
        (0, ["projector", "1", "10.00 ms", "10.0 %"]),
        (1, ["inner", "1", "4.000 ms", "4.0 %"]),
        (0, ["the rest", "", "70.00 ms", "70.0 %"]),
    ], "what lies inside another is not taken off twice"


def test_a_step_is_shown_per_step() -> None:
    steps = [span("layer", 100 + 10 * step, 4, "decode_step", step) for step in range(3)]
    (table,) = substage_tables(stage_timings(timed(*steps), Missing("none")))
    assert table.columns[-1].name == "share of decode_step"
    assert cells(table)[0] == (0, ["layer", "1", "4.000 ms", "40.0 %"])


def test_without_sub_stages_there_is_no_table() -> None:
    assert substage_tables(stage_timings(timed(), Missing("none"))) == []
