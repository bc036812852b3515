"""The page of a comparison, read as a renderer does: the verdict first, hostile names as text."""

import re
from dataclasses import replace
from typing import Any

import msgspec

from builders import HOSTILE_NAMES, clean_timings, iteration, operator, run_analysis, torch_pass
from llm_perf_opt.analysis.comparison.compare import Comparison, Side, compare, gate_names
from llm_perf_opt.analysis.comparison.effects import Judgement
from llm_perf_opt.analysis.comparison.figures import ComparedFigure
from llm_perf_opt.analysis.comparison.gates import NO_REMEDY, parse_gates
from llm_perf_opt.analysis.comparison.kernels import ComparedKernel
from llm_perf_opt.analysis.comparison.statistics import ACCELERATOR_SPREAD
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.records import Iteration, MemoryPeaks, Missing
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.report.compare_document import comparison_text
from llm_perf_opt.report.text import signed_percent
from markdown_reader import read, uneven_tables
from rendered import comparison_html, comparison_page

MS = 1_000_000
ON_ACCELERATOR = Judgement(process_spread=ACCELERATOR_SPREAD)


def repeats(slower: float) -> list[Iteration]:
    return [iteration(round((100 + index % 3 * 0.1) * MS * slower), [round(10 * MS * slower)] * 3) for index in range(10)]


def compared_run(slower: float) -> RunAnalysis:
    return replace(run_analysis(timings=clean_timings(repeats(slower))), telemetry=Missing("nobody watched"))


def compared(slower: float = 1.1, judgement: Judgement = ON_ACCELERATOR, **more: Any) -> Comparison:
    base = compared_run(1.0)
    new = replace(base, timings=clean_timings(repeats(slower)), run="baseline/tiny/new", **more)
    gates = parse_gates(["tpot=3%", "e2e=50%", "energy=1%"], gate_names())
    return compare(Side((base,)), Side((new,)), gates=gates, judgement=judgement)


def test_the_verdict_stands_first() -> None:
    source = comparison_page(compared())
    page = read(source)
    assert source.index("End to end: new is slower (+10.0") < source.index("## Metrics and stages")
    assert uneven_tables(source) == []
    for heading in ("Verdict", "Cautions", "Metrics and stages", "Kernels", "What differs", "Not compared", "How to read it"):
        assert page.section(heading), heading
    metrics = next(rows for rows in page.tables if rows[0][0] == "metric")
    assert metrics[0] == ["metric", "base", "new", "change, 98 % interval", "verdict", "repeats"]
    assert metrics[1][0] == "Time to first token (TTFT)"
    assert metrics[1][4:] == ["slower", "10 / 10"]
    gates = next(rows for rows in page.tables if rows[0][0] == "gate")
    assert [row[1] for row in gates[1:]] == ["regression", "pass", "cannot tell"]
    assert "nan" not in source.split()


def test_no_change_is_said_as_such() -> None:
    assert "End to end: not distinguishable (+0.00 %" in comparison_page(compared(1.0))
    assert "End to end: new is faster (-10.0" in comparison_text(compared(0.9))


def test_the_terminal_says_why_memory_and_energy_are_not_compared() -> None:
    """As the page does: a row that is left out without a word reads as one that was never asked for."""
    base = replace(compared_run(1.0), telemetry=Missing("samples.jsonl cannot be read: line 3"))
    new = replace(base, run="b", timings=clean_timings(repeats(1.1)))
    lines = comparison_text(compare(Side((base,)), Side((new,)), judgement=ON_ACCELERATOR)).splitlines()
    assert "memory.allocated, memory.reserved, memory.device: n/a: the run is on the CPU" in lines
    assert "energy.counter, energy.power: n/a: samples.jsonl cannot be read: line 3" in lines


def test_one_run_a_side_on_a_cpu_says_why_there_is_no_verdict() -> None:
    found = compared(2.0, Judgement())
    source = comparison_page(found)
    assert "End to end: not distinguishable (+100.00 %; too few runs to measure how much processes differ)" in source
    assert next(rows for rows in read(source).tables if rows[0][0] == "metric")[1][3:5] == [
        "+100.00 % (unknown)",
        "not distinguishable",
    ]
    assert "so there is no interval and no verdict" in source
    assert "cannot tell: tpot: worse by 100.00 %, 3.00 % tolerated: too few runs" in comparison_text(found)
    assert "To decide: 3 runs per side" in comparison_text(found)
    html = comparison_html(found)
    assert "interval unknown" in html
    assert msgspec.json.decode(msgspec.json.encode(found))["metrics"][0]["effect"]["interval"]["why"]


def test_too_few_repeats_show_their_medians_all_the_same() -> None:
    few = clean_timings(repeats(1.1)[:3])
    base = run_analysis(timings=clean_timings(repeats(1.0)[:3]))
    gates = parse_gates(["tpot=3%"], gate_names())
    found = compare(Side((base,)), Side((replace(base, timings=few, run="new"),)), gates=gates, judgement=ON_ACCELERATOR)
    row = next(rows for rows in read(comparison_page(found)).tables if rows[0][0] == "metric")[1]
    assert row[1:] == ["100.1 ms", "110.1 ms", "+10.00 % (unknown)", "not distinguishable", "3 / 3"]
    text = comparison_text(found)
    assert "110.1 ms" in text
    assert "has 3 repeats; an interval needs 6 (runtime.min_repeats). To decide: at least 6 repeats in each run" in text
    assert "110.1 ms" in comparison_html(found)


def test_a_pair_never_reads_as_the_same_name_twice() -> None:
    """Two kernels that differ where a long name is cut, on both pages; the page in a browser names both, not the first alone."""
    long = "void elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::%s>(at::Base&)::{lambda(int)#1}>(int)"
    functor = "BinaryFunctor<c10::BFloat16, c10::%s, c10::BFloat16, MulFunctor<float> > "
    base, new = (ComparedKernel(long % (functor % kind), "decode", "elementwise", 4, 100) for kind in ("BFloat16", "Half"))
    run, other = (compared_run(1.0), replace(compared_run(1.1), run="baseline/tiny/new"))
    found = compare(Side((run,), [base]), Side((other,), [new]))
    (cell,) = [row[4] for rows in read(comparison_page(found)).tables for row in rows if "elementwise" in row]
    one, arrow, second = cell.partition(" → ")
    assert arrow
    assert one != second
    assert ("BFloat16,BFloat16,BF" in one, "BFloat16,Half,BF" in second) == (True, True)
    html = comparison_html(found)
    table = html[html.index('<table id="matched-kernels"') :]
    assert "BFloat16,Half,BF" in table[: table.index("</table>")]


def test_ids_of_the_page_are_unique_and_kernels_show_their_numbers_first() -> None:
    kernels = [ComparedKernel("a_kernel", "decode", "gemm", 4, 100)]
    base = run_analysis(timings=clean_timings(repeats(1.0)))
    new = replace(base, run="baseline/tiny/new")
    budget = [ComparedFigure("decode/floor, per token", "ns", MS)]
    html = comparison_html(compare(Side((base,), kernels, budget, budget), Side((new,), kernels, budget, budget)))
    ids = re.findall(r'<(?:section|div|table|h2|main|p|ul|figure)[^>]* id="([^"]+)"', html)
    assert {"kernels", "matched-kernels", "budget", "budget-rows", "metrics", "metrics-rows"} <= set(ids)
    assert len(ids) == len(set(ids))
    kernel_table = html[html.index('<table id="matched-kernels"') :]
    headings = re.findall(r"<th [^>]*>([^<]+)</th>", kernel_table[: kernel_table.index("</thead>")])
    assert headings[:5] == ["stage", "difference", "base", "new", "kernel"]
    assert '<td class="name">a_kernel</td>' in kernel_table


def test_several_runs_a_side_say_which_one_is_looked_into() -> None:
    runs = [
        replace(run_analysis(timings=clean_timings(repeats(slower))), run=f"runs/{slower}") for slower in (1.0, 1.1, 1.2, 2.0)
    ]
    found = compare(Side(tuple(runs[:3]), typical=1), Side((runs[3],)))
    for page in (comparison_page(found), comparison_html(found)):
        assert "Base: runs/1.1. New: runs/2.0." in page
    assert "nearest the median of the side" not in comparison_page(compared())


def test_a_real_change_is_explained_by_what_moved_in_the_budget() -> None:
    base = run_analysis(timings=clean_timings(repeats(1.0)))
    before = [
        ComparedFigure("decode/launch gaps, per token", "ns", 8 * MS),
        ComparedFigure("decode/host, per token", "ns", MS),
        ComparedFigure("decode/floor, per token", "ns", MS),
    ]
    after = [
        ComparedFigure("decode/launch gaps, per token", "ns", 2 * MS),
        before[2],
        ComparedFigure("decode/sync, per token", "ns", 2 * MS),
    ]

    def told(slower: float) -> Comparison:
        new = replace(base, timings=clean_timings(repeats(slower)), run="baseline/tiny/new")
        return compare(Side((base,), budget=before), Side((new,), budget=after), judgement=ON_ACCELERATOR)

    why = (
        "Why decode is faster, from the budgets of one trace per side: launch gaps, per token: 8.000 ms → 2.000 ms; "
        "sync, per token: none → 2.000 ms; host, per token: 1.000 ms → none."
    )
    assert why in comparison_text(told(0.9))
    assert "Why decode is faster" in comparison_page(told(0.9))
    assert "Why decode is faster" in comparison_html(told(0.9))
    assert "Why decode" not in comparison_text(told(1.0)), "what did not change needs no cause"
    gates = next(rows for rows in read(comparison_page(compared())).tables if rows[0][0] == "gate")
    assert gates[3][3] == f"{NO_REMEDY.why}."


def test_hostile_names_are_text() -> None:
    base = run_analysis(timings=clean_timings(repeats(1.0)), torch=torch_pass(operators=tuple(map(operator, HOSTILE_NAMES))))
    other = torch_pass(operators=tuple(operator(f"{name}x") for name in HOSTILE_NAMES))
    config = {f"key{number}": name for number, name in enumerate(HOSTILE_NAMES)}
    warned = tuple(RunWarning(WarningId.THROTTLED, name) for name in HOSTILE_NAMES)
    new = replace(base, torch=other, run=HOSTILE_NAMES[0], config=config, warnings=warned)
    kernels = [ComparedKernel(name, name, name, 1, 1) for name in HOSTILE_NAMES]
    source = comparison_page(compare(Side((base,), kernels), Side((new,), [replace(one, name="y") for one in kernels])))
    page = read(source)
    assert uneven_tables(source) == []
    assert not set(page.markup) - {"code_inline", "strong"}
    assert "<script>alert(1)</script>" in page.text
    text = comparison_text(compare(Side((base,)), Side((new,))))
    assert "\x07" not in text


def test_as_data_every_part_is_there() -> None:
    data = msgspec.json.decode(msgspec.json.encode(compared()))
    assert {"metrics", "stages", "settings", "facts", "gates", "cautions", "memory", "kernels"} <= set(data)
    assert data["metrics"][0]["effect"]["verdict"] == "slower"
    assert data["kernels"]["why"]


def test_the_chart_says_for_each_row_which_way_is_better() -> None:
    html = comparison_html(compared())
    assert "Decode throughput →" in html or "Decode throughput \\u2192" in html
    assert "Time to first token (TTFT) ←" in html or "Time to first token (TTFT) \\u2190" in html
    assert "An arrow shows which direction is better" in html


def test_memory_and_energy_show_the_interval_that_their_gates_decide_by() -> None:
    base = run_analysis(timings=clean_timings(repeats(1.0)))
    found = compare(Side((base,)), Side((replace(base, run="new"),)), gates=parse_gates(["memory.process=1%"], gate_names()))
    rows = {row[0]: row for rows in read(comparison_page(found)).tables for row in rows if len(row) == 6}
    resident = rows["Peak memory of the process on the host"]
    assert resident[3:5] == ["+0.00 % (-6.37 to +6.80 %)", "not distinguishable"]
    assert "-6.37 to +6.80 %" in comparison_text(found)
    assert "-6.37 to +6.80 %" in comparison_html(found)
    assert found.gates[0].outcome == "cannot tell"


def test_what_repeats_to_the_byte_is_called_exact_and_the_same() -> None:
    peaks = MemoryPeaks(2**30, 2**31, Missing("not told"), 2**30)
    base = run_analysis(timings=clean_timings(repeats(1.0), memory=peaks))
    found = compare(Side((base,)), Side((replace(base, run="new"),)))
    rows = {row[0]: row for rows in read(comparison_page(found)).tables for row in rows if len(row) == 6}
    assert rows["Peak memory of tensors"][1:5] == ["1.00 GiB", "1.00 GiB", "+0.00 % (exact)", "the same"]


def test_no_change_never_has_a_minus_sign() -> None:
    assert [signed_percent(share) for share in (-1e-9, 0.0, -0.0001, 0.0001)] == ["+0.00 %", "+0.00 %", "-0.01 %", "+0.01 %"]


def test_a_figure_that_one_side_has_is_shown_although_it_cannot_be_compared() -> None:
    peaks = MemoryPeaks(2**30, 2**31, Missing("not told"), 2**30)
    base = run_analysis(timings=clean_timings(repeats(1.0), memory=peaks))
    without = replace(
        base, run="new", timings=clean_timings(repeats(1.0), memory=replace(peaks, allocated_bytes=Missing("no GPU")))
    )
    found = compare(Side((base,)), Side((without,)))
    rows = {row[0]: row for rows in read(comparison_page(found)).tables for row in rows if len(row) == 6}
    base_side, *others = rows["Peak memory of tensors"][1:5]
    assert base_side == "1.00 GiB"
    assert len(set(others)) == 1
    assert f"{others[0]}: no GPU" in read(comparison_page(found)).text
    html = comparison_html(found)
    line = html[html.index("<td>Peak memory of tensors") : html.index("Peak memory of the allocator")]
    assert "1.00 GiB" in line


def switching(switched: int, by: float = 1.07, moved: float = 1.0) -> RunAnalysis:
    """A run of thirty repeats whose last ones take longer, up to a third of a percent of noise."""
    factors = [(by if index >= 30 - switched else moved) * (1 + index % 3 * 0.003) for index in range(30)]
    return run_analysis(timings=clean_timings([iteration(round(100 * MS * one), [round(10 * MS * one)] * 3) for one in factors]))


def test_a_machine_that_moved_is_said_wherever_a_verdict_is_missed() -> None:
    """In the terminal, on both pages and as data; with what to do. Two repeats at the other level are too few for a shift."""
    gates = parse_gates(["tpot=3%"], gate_names())
    for switched, said in ((2, "repeats 29 to 30 of base ran at the level of new"), (10, "speed changed by 7.")):
        base, new = switching(switched), replace(switching(30), run="baseline/tiny/new")
        found = compare(Side((base,)), Side((new,)), gates=gates, judgement=ON_ACCELERATOR)
        for shown in (comparison_text(found), comparison_page(found), comparison_html(found)):
            assert said in shown
            assert "make 3 runs per side and alternate the sides" in shown
        assert "gate cannot tell: tpot" in comparison_text(found)
        effect = next(row["effect"] for row in msgspec.json.decode(msgspec.json.encode(found))["metrics"] if row["key"] == "e2e")
        assert (effect["rival"] or {}).get("movement") == ("level shift" if switched == 2 else None)
        assert effect["base_stability"][0]["movement"] == ("steady" if switched == 2 else "level shift")
    assert "explains the difference better than a change of the program" in comparison_page(found)


def test_what_a_run_warns_of_is_a_caution_of_the_comparison() -> None:
    drift = RunWarning(WarningId.SPEED_CHANGED, "End to end: repeats drift by +4.0 % from first to last.")
    warned = replace(compared_run(1.0), warnings=(drift,))
    found = compare(Side((warned,)), Side((replace(compared_run(1.0), run="new"),)), judgement=ON_ACCELERATOR)
    assert "caution: base, baseline/tiny/2026-01-02_03-04-05: End to end: repeats drift by +4.0 %" in comparison_text(found)
