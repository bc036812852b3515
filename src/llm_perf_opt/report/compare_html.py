"""A comparison as one page: the verdict first, the changes with their intervals, budget against budget, kernels, what differs."""

from collections.abc import Sequence

from llm_perf_opt import __version__
from llm_perf_opt.analysis.comparison.compare import Comparison, Row
from llm_perf_opt.analysis.comparison.differences import Difference
from llm_perf_opt.analysis.comparison.effects import Effect
from llm_perf_opt.analysis.comparison.figures import FigureChange, OperatorChange, UsageChange
from llm_perf_opt.analysis.comparison.kernels import KernelMatch, LoneKernel
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.charts import BLUE, GREY, ORANGE, Figure, label, time_unit
from llm_perf_opt.report.compare import (
    LEVEL_WORDS,
    USAGE_WORDS,
    cause_sentences,
    figure_words,
    gate_line,
    left_out,
    looked_into_words,
    method_words,
    row_cells,
    signed_percent,
    stage_words,
    verdict_sentences,
)
from llm_perf_opt.report.compare_kernels import KERNELS_TITLE, NAME_WIDTH, budget_words, calls_words, kernel_words, pair_words
from llm_perf_opt.report.html_tables import Cell, Column, HtmlTable, name_cell, numbers
from llm_perf_opt.report.page import Absent, Block, Chart, Items, Page, Section, Table, Words, render
from llm_perf_opt.report.text import milliseconds, signed


def comparison_html(found: Comparison) -> str:
    """The whole page."""
    sides = f"base: {', '.join(found.base_runs)}; new: {', '.join(found.new_runs)}"
    meant = f". The experiment: {', '.join(found.experiment)}" if found.experiment else ""
    failed = [gate_line(result) for result in found.gates if result.outcome == "regression"]
    failed += verdict_sentences(found) if found.unjudged else []
    sections = [
        Section("verdict", "Verdict", _verdict(found)),
        Section("metrics", "Metrics and stages", [_changes_chart(found), Table(_rows("metrics", found.metrics)),
                                                  Table(_rows("stages", found.stages)), Words(stage_words(found.stages))]),
        Section("budget", "Budget against budget", [*map(Words, looked_into_words(found)), *_note(budget_words(found)),
                                                     *_budget(found.budget)]),
        Section("kernels", "Kernels", [*_note(kernel_words(found)), *_kernels(found.kernels)]),
        Section("operators", "Operators", _operators(found.operators, found.unseen)),
        Section("figures", "Memory, energy and counters", [Table(_rows("memory", (*found.memory, *found.energy))),
                                                           Words(USAGE_WORDS), *_counters(found.counters)]),
        Section("differences", "What differs", [*_differences("settings", found.settings),
                                                *_differences("hardware, model and workload", found.facts),
                                                *_differences("environment", found.environment)]),
        Section("left-out", "Not compared", [Items([("", text) for text in left_out(found) or ["Nothing."]])]),
        Section("method", "How to read it", [Words(method_words(found))]),
    ]  # fmt: skip
    return render(Page("Comparison", sides + meant, "; ".join(failed), sections, f"llm-perf {__version__}"))


def _note(text: str) -> list[Block]:
    return [Words(text)] if text else []


def _verdict(found: Comparison) -> list[Block]:
    said = ["Not judged: see the top."] if found.unjudged else [*verdict_sentences(found), *cause_sentences(found)]
    blocks: list[Block] = [Items([("", sentence) for sentence in said])]
    if found.gates:
        blocks += [Words("Gates", "heading"), Items([("", gate_line(result)) for result in found.gates])]
    if found.cautions:
        blocks += [Words("Cautions", "heading"), Items([("", text) for text in found.cautions])]
    return blocks


def _changes_chart(found: Comparison) -> Block:
    """Every change with its interval, as a ratio of new to base on a logarithmic axis: twice and half lie equally far from 1."""
    known = [(row, row.effect) for row in (*found.metrics, *found.stages) if not isinstance(row.effect, Missing)]
    if not known:
        return Absent("Changes", "no metric could be compared")
    ratios = [1 + effect.change for _, effect in known]
    reaches = [_reach(effect) for _, effect in known]
    trace: Figure = {
        "type": "scatter", "mode": "markers", "x": ratios, "y": list(range(len(known))), "marker": {"size": 10, "color": BLUE},
        "error_x": {
            "type": "data", "symmetric": False, "color": GREY,
            "array": [reach[1] for reach in reaches],
            "arrayminus": [reach[0] for reach in reaches],
        },
        "hovertext": [f"<b>{label(row.label)}</b><br>{label(' · '.join(row_cells(row)[1:6]))}" for row, _ in known],
        "hoverinfo": "text",
    }  # fmt: skip
    layout: Figure = {
        "xaxis": {"type": "log", "title": {"text": "new / base, logarithmic"}},
        "yaxis": {
            "tickvals": list(range(len(known))), "ticktext": [_named(row) for row, _ in known], "autorange": "reversed",
            "automargin": True,
        },
        "shapes": [
            {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash", "color": GREY}}
        ],
        "height": 90 + 32 * len(known),
    }  # fmt: skip
    unknown = all(isinstance(effect.interval, Missing) for _, effect in known)
    title = f"Change of each metric, {'whose interval is unknown' if unknown else f'with its {LEVEL_WORDS} interval'}"
    return Chart(
        "changes", title, {"data": [trace], "layout": layout}, notes=["1: no change. The arrows say which way is better."]
    )


def _named(row: Row) -> str:
    """A row of the chart with the way that is better: rates and times lie in one picture."""
    return f"{label(row.label)} {'→' if row.higher_is_better else '←'}"


def _reach(effect: Effect) -> tuple[float | None, float | None]:
    """How far the interval reaches below and above the change; nothing is drawn where it is unknown."""
    if isinstance(effect.interval, Missing):
        return None, None
    return effect.change - effect.interval.low, effect.interval.high - effect.change


def _rows(name: str, rows: Sequence[Row | UsageChange]) -> HtmlTable:
    columns = [
        Column("metric"),
        *numbers("base", "new", f"change, {LEVEL_WORDS} interval"),
        Column("verdict"),
        Column("repeats"),
    ]
    made = HtmlTable(f"{name}-rows", name.capitalize(), columns)
    for row in rows:
        if isinstance(row.effect, Missing):
            values = (row.base, row.new) if isinstance(row, UsageChange) else (row.effect, row.effect)
            sides = [one if isinstance(one, Missing) else Cell(figure_words(one, row.unit), one) for one in values]
            made.add(row.label, *sides, *[row.effect] * 3)
        else:
            _, base, new, change, interval, verdict, repeats = row_cells(row)
            sides = [Cell(base, row.effect.base), Cell(new, row.effect.new)]
            made.add(row.label, *sides, Cell(change, row.effect.change, below=interval), verdict, repeats)
    return made


def _budget(rows: Maybe[tuple[FigureChange, ...]]) -> list[Block]:
    if isinstance(rows, Missing):
        return [Absent("Budgets", rows.why)]
    blocks: list[Block] = []
    for stage in dict.fromkeys(row.key.partition("/")[0] for row in rows):
        members = [row for row in rows if row.key.partition("/")[0] == stage]
        blocks.append(Chart(f"budget-{stage}", f"Where {stage} goes, base and new", _budget_chart(members), half=True))
    return [*blocks, Table(_figures("budget", rows))]


def _budget_chart(rows: Sequence[FigureChange]) -> Figure:
    names = [label(row.label.partition("/")[2].partition(", per ")[0]) for row in rows]
    size, unit = time_unit([value for row in rows for value in (row.base, row.new) if not isinstance(value, Missing)])
    traces = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": names, "marker": {"color": color},
            "x": [None if isinstance(value, Missing) else value / size for value in values],
        }
        for name, color, values in (
            ("base", ORANGE, [row.base for row in rows]),
            ("new", BLUE, [row.new for row in rows]),
        )
    ]  # fmt: skip
    layout = {
        "barmode": "group", "xaxis": {"title": {"text": unit}}, "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": {"orientation": "h", "y": -0.25}, "height": 120 + 44 * len(rows),
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _figures(name: str, rows: Sequence[FigureChange]) -> HtmlTable:
    made = HtmlTable(
        f"{name}-rows", f"{name.capitalize()}, one reading a run", [Column("figure"), *numbers("base", "new", "change")]
    )
    for row in rows:
        cells = [
            value if isinstance(value, Missing) else Cell(figure_words(value, row.unit), value) for value in (row.base, row.new)
        ]
        change = row.change if isinstance(row.change, Missing) else Cell(signed_percent(row.change), row.change)
        made.add(row.label, *cells, change)
    return made


def _counters(rows: Maybe[tuple[FigureChange, ...]]) -> list[Block]:
    return [Absent("Counters", rows.why)] if isinstance(rows, Missing) else [Table(_figures("counters", rows))]


def _kernels(match: Maybe[KernelMatch]) -> list[Block]:
    if isinstance(match, Missing):
        return [Absent("Kernels", match.why)]
    columns = [
        Column("stage"),
        *numbers("difference", "base", "new"),
        Column("kernel"),
        Column("role"),
        *numbers("calls, base", "calls, new"),
    ]
    made = HtmlTable("matched-kernels", KERNELS_TITLE, columns, tools=True)
    for pair in match.pairs:
        name = pair.base_name if pair.how == "same name" else f"{pair.base_name} → {pair.new_name}"
        difference = pair.new_ns - pair.base_ns
        made.add(
            pair.stage, Cell(signed(difference), difference), Cell(milliseconds(pair.base_ns), pair.base_ns),
            Cell(milliseconds(pair.new_ns), pair.new_ns), name_cell(name, pair_words(pair)), pair.role,
            Cell(calls_words(pair.base_calls), pair.base_calls), Cell(calls_words(pair.new_calls), pair.new_calls),
        )  # fmt: skip
    return [Table(made), Table(_alone("appeared", match.appeared)), Table(_alone("vanished", match.vanished))]


def _operators(rows: Maybe[tuple[OperatorChange, ...]], unseen: str) -> list[Block]:
    if isinstance(rows, Missing):
        return [Absent("Operators", rows.why)]
    columns = [Column("operator"), *numbers("difference", "base", "new", "calls, base", "calls, new")]
    made = HtmlTable("compared-operators", "Self time under torch.profiler, without an interval", columns, tools=True)
    for row in rows:
        difference = (row.new_ns or 0) - (row.base_ns or 0)
        made.add(
            name_cell(row.name),
            Cell(signed(difference), difference),
            Cell("appeared", 0) if row.base_ns is None else Cell(milliseconds(row.base_ns), row.base_ns),
            Cell("vanished", 0) if row.new_ns is None else Cell(milliseconds(row.new_ns), row.new_ns),
            Cell(f"{row.base_calls:,}", row.base_calls),
            Cell(f"{row.new_calls:,}", row.new_calls),
        )
    return [*([Words(unseen)] if unseen else []), Table(made)]


def _alone(name: str, kernels: Sequence[LoneKernel]) -> HtmlTable:
    columns = [Column("stage"), *numbers("time", "calls"), Column("kernel"), Column("role")]
    made = HtmlTable(name, f"Kernels that {name}: {len(kernels)}", columns, tools=len(kernels) > 10)
    for one in kernels:
        time, calls = Cell(milliseconds(one.time_ns), one.time_ns), Cell(calls_words(one.calls), one.calls)
        made.add(one.stage, time, calls, name_cell(one.name, _short(one.name)), one.role)
    return made


def _short(name: str) -> str:
    return short_name(name, NAME_WIDTH)


def _differences(name: str, rows: Sequence[Difference]) -> list[Block]:
    if not rows:
        return [Words(f"No difference in {name}.")]
    made = HtmlTable(name.split(",")[0], f"Differences in {name}", [Column("key"), Column("base"), Column("new")])
    for row in rows:
        made.add(row.key, row.base, row.new)
    return [Table(made)]
