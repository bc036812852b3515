"""The figures behind the charts."""

import json
import math
from dataclasses import replace

import pytest

from builders import HOSTILE_NAMES, MS, clean_timings, cpu_sample, in_a_row, iteration, run_analysis, telemetry
from llm_perf_opt.analysis.sweep import SweepRow, pareto_front, sweep_rows
from llm_perf_opt.core.records import Distribution, Missing
from llm_perf_opt.report.chart_data import Point, RoofLine, Roofline, Use, Waterfall, budget_of, coarse_waterfalls, roofline
from llm_perf_opt.report.charts import (
    MOST_READINGS,
    icicle_chart,
    label,
    roofline_chart,
    steps_chart,
    telemetry_chart,
    waterfall_chart,
    wrapped,
)
from llm_perf_opt.report.document import Advice, AdviceCards
from llm_perf_opt.report.findings import finding_blocks, findings_of
from llm_perf_opt.report.svg import roofline_svg
from llm_perf_opt.report.sweep_charts import parameter_chart, tradeoff_chart
from pages import full_analysis, readings, sweep_entries


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_label_has_no_markup(name: str) -> None:
    shown = label(name)
    assert "<" not in shown
    assert ">" not in shown
    assert "\n" not in shown


def test_long_labels_break_between_words() -> None:
    assert wrapped("the least work at the best known limits", 20) == "the least work at<br>the best known<br>limits"


def test_a_waterfall_ends_at_the_measured_time() -> None:
    figure = waterfall_chart(Waterfall("decode", "decode", (Use("a", 3 * MS), Use("b", 7 * MS))))
    (trace,) = figure["data"]
    assert trace["base"] == [0, 3, 0]
    assert trace["x"] == [3, 7, 10]
    assert trace["text"] == ["3.000 ms · 30.0 %", "7.000 ms · 70.0 %", "10.00 ms"]


def test_a_small_share_is_not_called_none() -> None:
    figure = waterfall_chart(Waterfall("decode", "decode", (Use("a", 1), Use("b", 100 * MS))))
    assert "< 0.1 %" in figure["data"][0]["text"][0]


def test_a_budget_is_shown_per_token_and_sums_to_the_time() -> None:
    found = budget_of(full_analysis())
    assert not isinstance(found, Missing)
    (budget,) = found
    assert budget.total_ns == 10 * MS
    assert "10.00 ms per token" in budget.title


def test_without_a_trace_the_budget_is_floor_and_rest() -> None:
    analysis = run_analysis()
    found = coarse_waterfalls(analysis.efficiency)
    assert not isinstance(found, Missing)
    for one in found:
        stage = analysis.stage(one.stage)
        assert stage is not None
        assert one.total_ns == round(stage.time_ns.median)
    shown = budget_of(analysis)
    assert not isinstance(shown, Missing)
    assert all("No more detail" in one.notes[0] for one in shown)


def test_without_a_trace_and_without_peaks_the_missing_trace_is_the_reason() -> None:
    skipped = Missing("the torch pass was skipped: the run ended before this pass")
    shown = budget_of(run_analysis(trace=skipped, efficiency=Missing("no peak is known to compare with")))
    assert isinstance(shown, Missing)
    assert shown == skipped
    nothing = replace(run_analysis(trace=skipped, efficiency=Missing("no iteration was measured")), stages=())
    assert budget_of(nothing) == Missing("no iteration was measured")


def test_findings_say_what_they_save_and_what_to_try() -> None:
    found = findings_of(full_analysis())
    assert not isinstance(found, Missing)
    cards = finding_blocks(found)[0]
    assert isinstance(cards, AdviceCards)
    assert cards.cards[0] == Advice(
        id="f0",
        title="Finding 0: one.",
        effect="saves about 9.00 ms per token",
        within="0 – 9.00 ms",
        request="high confidence",
        change="one",
        details=["There is more to it.", "one", "high confidence: one"],
    )


def test_the_roofline_has_stages_parts_and_counted_kernels() -> None:
    analysis = full_analysis()
    data = roofline(analysis.efficiency, analysis.kernels)
    assert not isinstance(data, Missing)
    assert {point.kind for point in data.points} == {"stage", "component", "kernel"}
    for point in data.points:
        top = max(min(point.flops_per_byte * (roof.bandwidth_bytes_per_s or 0), roof.peak_flops_per_s) for roof in data.roofs)
        if point.kind == "kernel":
            assert point.flops_per_s < 1.05 * top, f"{point.name} is above the roof"
    assert any("kernels of decode" in text for text in data.left_out)
    json.dumps(roofline_chart(data), allow_nan=False)


def test_without_limits_there_is_no_roofline() -> None:
    assert isinstance(roofline(Missing("an unknown device"), Missing("none")), Missing)


def test_steps_are_medians_over_the_context() -> None:
    timings = clean_timings([iteration(steps_ns=(1 * MS, 4 * MS)), iteration(steps_ns=(3 * MS, 4 * MS)), *in_a_row(0)])
    figure = steps_chart(timings)
    assert not isinstance(figure, Missing)
    line = figure["data"][1]
    assert line["x"] == [11, 12]
    assert line["y"] == [2, 4]


def test_one_token_has_no_steps() -> None:
    assert isinstance(steps_chart(clean_timings([iteration(steps_ns=())])), Missing)


def test_an_icicle_has_one_root_and_exact_sums() -> None:
    figure = icicle_chart([(("prefill",), 3), (("decode",), 7), (("decode", "mlp"), 7), (("decode", "mlp", "none"), 0)], "time")
    assert not isinstance(figure, Missing)
    (trace,) = figure["data"]
    assert trace["parents"].count("") == 1
    assert trace["values"] == [10, 3, 7, 7]
    assert trace["labels"][0] == "time: 10 ns", "the box around all says how much there is"
    assert isinstance(icicle_chart([(("a",), 0)], "time"), Missing)


def test_readings_are_counted_from_the_first_repeat() -> None:
    found = telemetry_chart(readings(), clean_timings())
    assert not isinstance(found, Missing)
    figure, note = found
    assert [trace["name"] for trace in figure["data"]] == ["GPU power", "SM clock", "GPU temperature", "GPU utilization"]
    assert figure["data"][0]["x"][:2] == [0, 0.1]
    assert figure["data"][0]["y"][0] == 300
    assert note == ""


def test_very_many_readings_are_thinned_and_it_is_said() -> None:
    many = telemetry(cpu=[cpu_sample(number * MS) for number in range(2 * MOST_READINGS + 1)])
    found = telemetry_chart(many, clean_timings())
    assert not isinstance(found, Missing)
    figure, note = found
    assert len(figure["data"][0]["x"]) <= MOST_READINGS
    assert note.startswith("The chart shows one of every 3 readings")


def test_the_chart_of_a_sweep_has_the_front_and_the_floor() -> None:
    rows = sweep_rows(sweep_entries())
    tradeoff = tradeoff_chart(rows, pareto_front(rows))
    assert not isinstance(tradeoff, Missing)
    rings, line = tradeoff["data"][:2]
    assert rings["x"] == line["x"] == [11, 12, 14, 18]
    assert (rings["mode"], line["mode"]) == ("markers", "lines")
    scaling = parameter_chart(rows, "runtime.batch_size")
    assert not isinstance(scaling, Missing)
    rates = [trace for trace in scaling["data"] if trace["yaxis"] == "y3"]
    assert [trace["line"].get("dash") for trace in rates] == [None, "dash"]
    assert rates[0]["x"] == [1, 2, 4, 8]
    assert all(floor > rate for floor, rate in zip(rates[1]["y"], rates[0]["y"], strict=True))
    assert "type" not in scaling["layout"]["xaxis"], "1 to 8 can be read on a linear axis"
    assert tradeoff["layout"]["yaxis"]["range"][0] == 0
    assert isinstance(tradeoff_chart(rows[-1:], []), Missing)
    assert isinstance(parameter_chart(rows[-1:], "runtime.batch_size"), Missing)


def test_values_far_apart_stand_on_logarithmic_axes_with_their_own_ticks() -> None:
    entries = sweep_entries()
    far = [replace(entry, swept=(f"runtime.batch_size={4**number}",)) for number, entry in enumerate(entries[:4])]
    rows = [replace(row, metrics={**row.metrics, "decode_rate": scaled(row, 4**row.number)}) for row in sweep_rows(far)]
    scaling = parameter_chart(rows, "runtime.batch_size")
    assert not isinstance(scaling, Missing)
    assert scaling["layout"]["xaxis"]["type"] == "log"
    assert scaling["layout"]["xaxis"]["ticktext"] == ["1", "4", "16", "64"]
    assert scaling["layout"]["yaxis3"]["type"] == "log"
    assert "type" not in scaling["layout"]["yaxis2"], "latencies begin at zero"
    tradeoff = tradeoff_chart(rows, pareto_front(rows))
    assert not isinstance(tradeoff, Missing)
    low, high = tradeoff["layout"]["yaxis"]["range"]
    assert tradeoff["layout"]["yaxis"]["type"] == "log"
    assert all(low < math.log10(y) < high for trace in tradeoff["data"] for y in trace["y"])
    zero = parameter_chart([replace(rows[0], values={"runtime.batch_size": "0"}), rows[3]], "runtime.batch_size")
    assert not isinstance(zero, Missing)
    assert "type" not in zero["layout"]["xaxis"], "zero has no place on a logarithmic axis"


def scaled(row: SweepRow, times: int) -> Distribution:
    found = row.metrics["decode_rate"]
    assert not isinstance(found, Missing)
    return replace(found, median=found.median * times)


def test_the_roofline_says_its_rates_in_whole_units() -> None:
    """A CPU's tiny model reaches megaflops: no axis says so in millionths of a TFLOP/s."""
    points = (Point("stage", "decode", "decode", 0.5, 2e6, MS), Point("stage", "prefill", "prefill", 80.0, 3e11, MS))
    data = Roofline("fp32", (RoofLine("datasheet", 1e12, 1e10),), points)
    axis = roofline_chart(data)["layout"]["yaxis"]
    assert axis["ticktext"] == ["1 MFLOP/s", "10 MFLOP/s", "100 MFLOP/s", "1 GFLOP/s", "10 GFLOP/s", "100 GFLOP/s", "1 TFLOP/s"]
    assert axis["tickvals"] == [10.0**power for power in range(6, 13)]
    assert roofline_chart(data)["data"][1]["y"] == [2e6]
    assert all(tick in roofline_svg(data) for tick in axis["ticktext"])
    assert "2.000 MFLOP/s" in roofline_svg(data)


def test_times_on_an_axis_are_in_the_unit_of_the_longest() -> None:
    figure = waterfall_chart(Waterfall("decode", "decode", (Use("a", 3_000), Use("b", 7_000))))
    assert figure["layout"]["xaxis"]["title"]["text"] == "µs"
    assert figure["data"][0]["x"] == [3, 7, 10]
    long = steps_chart(clean_timings([iteration(steps_ns=[2_000 * MS] * 3)] * 6))
    assert not isinstance(long, Missing)
    assert long["layout"]["yaxis"]["title"]["text"] == "decode step, s"
    assert long["data"][1]["y"] == [2, 2, 2]
