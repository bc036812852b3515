"""The report of a comparison: verdict, changes with their intervals, budgets, kernels, differences."""

from collections.abc import Sequence

from llm_perf_opt.analysis.comparison.compare import Comparison, Row
from llm_perf_opt.analysis.comparison.differences import Difference
from llm_perf_opt.analysis.comparison.effects import Effect
from llm_perf_opt.analysis.comparison.figures import FigureChange, OperatorChange, UsageChange
from llm_perf_opt.analysis.comparison.gates import GateResult
from llm_perf_opt.analysis.comparison.kernels import ComparedKernel, KernelMatch, KernelPair
from llm_perf_opt.analysis.kernels.names import short_name, short_names
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.report.charts import BLUE, GRAY, ORANGE, Figure, label, time_unit
from llm_perf_opt.report.compare import (
    LEVEL_WORDS,
    USAGE_WORDS,
    cause_sentences,
    figure_words,
    gate_line,
    interval_words,
    left_out,
    looked_into_words,
    method_words,
    needed_words,
    stage_words,
    traced_words,
    verdict_sentences,
)
from llm_perf_opt.report.document import (
    Block,
    Cell,
    Chart,
    Column,
    Document,
    Paragraph,
    Section,
    Table,
    Unavailable,
    bullets,
    cell,
    count_cell,
    name_cell,
    numbers,
    when_known,
)
from llm_perf_opt.report.terminal import table_text
from llm_perf_opt.report.text import duration, known, mean_count, missing, signed, signed_percent, then

NAME_WIDTH = 72
"""Most characters of a kernel name in a table."""
_KERNELS_TITLE = "Kernels on both sides, matched by name or by role; decode per token"


def comparison_document(found: Comparison) -> Document:
    """Return the whole report."""
    sides = f"base: {', '.join(found.base_runs)}; new: {', '.join(found.new_runs)}"
    experiment = f". Experiment: {', '.join(found.experiment)}" if found.experiment else ""
    failed = [gate_line(result) for result in found.gates if result.outcome == "regression"]
    failed += verdict_sentences(found) if found.unjudged else []
    kernels = _note(traced_words(found.traced.kernels, found.traced.request))
    budget = [*map(Paragraph, looked_into_words(found)), *_note(traced_words(found.traced.budget, found.traced.request))]
    usage = changes_table("memory", (*found.memory, *found.energy))
    counters = when_known("Counters:", found.counters, lambda rows: [_figures("counters", rows)])
    sections = [
        Section("verdict", "Verdict", _verdict(found)),
        Section("metrics", "Metrics and stages", _metrics(found)),
        Section("budget", "Budgets", [*budget, *when_known("Budgets:", found.budget, _budget)]),
        Section("kernels", "Kernels", [*kernels, *when_known("Kernels:", found.kernels, _kernels)]),
        Section("operators", "Operators", [*_note(found.unseen), *when_known("Operators:", found.operators, _operators)]),
        Section("figures", "Memory, energy and counters", [usage, Paragraph(USAGE_WORDS), *counters]),
        Section("differences", "What differs", _all_differences(found)),
        Section("left-out", "Not compared", [bullets(left_out(found) or ["Nothing."])]),
        Section("method", "How to read it", [Paragraph(method_words(found))]),
    ]
    return Document("Comparison", sides + experiment, "; ".join(failed), sections)


def comparison_text(found: Comparison) -> str:
    """Return verdicts, changes, differences and gates for the terminal."""
    rows: list[Row | UsageChange] = [*found.metrics, *found.stages, *found.memory, *found.energy]
    compared = [row for row in rows if known(row.effect, None) is not None]
    lost: dict[str, list[str]] = {}
    for key, why in missing((row.key, row.effect) for row in rows):
        lost.setdefault(why, []).append(key)
    lines = [f"{', '.join(keys)}: n/a: {why}" for why, keys in lost.items()]
    lines += ["", *[f"setting {row.key}: {row.base} → {row.new}" for row in found.settings]]
    lines += [f"environment {row.key}: {row.base} → {row.new}" for row in found.environment]
    lines += [f"caution: {text}" for text in found.cautions]
    lines += [f"gate {gate_line(result)}" for result in found.gates]
    first = [*verdict_sentences(found), *cause_sentences(found), ""]
    return "\n".join([*map(one_line, first), table_text(changes_table("", compared)), *map(one_line, lines)]).rstrip() + "\n"


def _note(text: str) -> list[Block]:
    return [Paragraph(text)] if text else []


def _verdict(found: Comparison) -> list[Block]:
    first = ["No verdict; the reason is at the top."] if found.unjudged else [*verdict_sentences(found), *cause_sentences(found)]
    blocks: list[Block] = [bullets(first)]
    blocks += [_gates(found.gates)] if found.gates else []
    blocks += [Paragraph("Cautions", "heading"), bullets(found.cautions)] if found.cautions else []
    return blocks


def _gates(results: Sequence[GateResult]) -> Table:
    table = Table("gates", "Gates", [Column("gate"), Column("outcome"), Column("why"), Column("to decide")])
    for result in results:
        table.add(result.gate.asked, result.outcome, result.why, needed_words(result))
    return table


# --- metrics ----------------------------------------------------------------------------------------------------------------


def _metrics(found: Comparison) -> list[Block]:
    tables = [changes_table("metrics", found.metrics), changes_table("stages", found.stages)]
    return [_changes_chart(found), *tables, Paragraph(stage_words(found.stages))]


def changes_table(name: str, rows: Sequence[Row | UsageChange]) -> Table:
    """Return each figure on both sides, its change with the interval, and the verdict."""
    columns = [Column("metric"), *numbers("base", "new", f"change, {LEVEL_WORDS} interval"), Column("verdict"), Column("repeats")]
    table = Table(f"{name}-rows", name.capitalize(), columns)
    for row in rows:
        table.add(row.label, *_change_cells(row))
    return table


def _change_cells(row: Row | UsageChange) -> list[Cell | Missing | str]:
    effect = row.effect
    if isinstance(effect, Missing):
        sides = (row.base, row.new) if isinstance(row, UsageChange) else (effect, effect)
        return [*[_figure(value, row.unit) for value in sides], *[effect] * 3]
    return [
        _figure(effect.base, row.unit),
        _figure(effect.new, row.unit),
        Cell(signed_percent(effect.change), effect.change, below=f"({interval_words(effect)})"),
        "the same" if effect.exact and effect.change == 0 else effect.verdict,
        f"{_repeats(effect.base_repeats)} / {_repeats(effect.new_repeats)}",
    ]


def _figure(value: Maybe[float], unit: str) -> Cell | Missing:
    return cell(value, lambda number: figure_words(number, unit))


def _repeats(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{len(counts)} runs, {sum(counts)}"


def _changes_chart(found: Comparison) -> Block:
    """Return every change with its interval, as the ratio of new to base on a logarithmic axis."""
    compared = [(row, row.effect) for row in (*found.metrics, *found.stages) if not isinstance(row.effect, Missing)]
    if not compared:
        return Unavailable("Changes:", "no metric could be compared")
    reaches = [known(then(effect.interval, lambda within: (within.low, within.high)), None) for _, effect in compared]
    above = [None if ends is None else ends[1] - effect.change for ends, (_, effect) in zip(reaches, compared, strict=True)]
    below = [None if ends is None else effect.change - ends[0] for ends, (_, effect) in zip(reaches, compared, strict=True)]
    trace: Figure = {
        "type": "scatter", "mode": "markers", "x": [1 + effect.change for _, effect in compared], "y": list(range(len(compared))),
        "marker": {"size": 10, "color": BLUE},
        "error_x": {"type": "data", "symmetric": False, "color": GRAY, "array": above, "arrayminus": below},
        "hovertext": [_hover(row, effect) for row, effect in compared], "hoverinfo": "text",
    }  # fmt: skip
    layout: Figure = {
        "xaxis": {"type": "log", "title": {"text": "new / base, logarithmic"}},
        "yaxis": {
            "tickvals": list(range(len(compared))), "ticktext": [_named(row) for row, _ in compared], "autorange": "reversed",
            "automargin": True,
        },
        "shapes": [
            {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash", "color": GRAY}}
        ],
        "height": 90 + 32 * len(compared),
    }  # fmt: skip
    unknown = not any(reaches)
    title = f"Change of each metric, {'interval unknown' if unknown else f'with its {LEVEL_WORDS} interval'}"
    notes = ["1: no change. An arrow shows which direction is better."]
    return Chart("changes", title, {"data": [trace], "layout": layout}, notes=notes)


def _hover(row: Row, effect: Effect) -> str:
    sides = [figure_words(value, row.unit) for value in (effect.base, effect.new)]
    shown = " · ".join([*sides, signed_percent(effect.change), interval_words(effect), effect.verdict])
    return f"<b>{label(row.label)}</b><br>{label(shown)}"


def _named(row: Row) -> str:
    """Return the label of a row with an arrow in the better direction: the chart has both rates and times."""
    return f"{label(row.label)} {'→' if row.higher_is_better else '←'}"


# --- budget, kernels, operators ---------------------------------------------------------------------------------------------


def _budget(rows: Sequence[FigureChange]) -> list[Block]:
    blocks: list[Block] = []
    for stage in dict.fromkeys(row.key.partition("/")[0] for row in rows):
        members = [row for row in rows if row.key.partition("/")[0] == stage]
        blocks.append(Chart(f"budget-{stage}", f"Where {stage} goes, base and new", _budget_chart(members), half=True))
    return [*blocks, _figures("budget", rows)]


def _budget_chart(rows: Sequence[FigureChange]) -> Figure:
    names = [label(row.label.partition("/")[2].partition(", per ")[0]) for row in rows]
    sides = {"base": [known(row.base, None) for row in rows], "new": [known(row.new, None) for row in rows]}
    size, unit = time_unit([value for values in sides.values() for value in values if value is not None])
    traces = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": names, "marker": {"color": color},
            "x": [None if value is None else value / size for value in sides[name]],
        }
        for name, color in (("base", ORANGE), ("new", BLUE))
    ]  # fmt: skip
    layout = {
        "barmode": "group", "xaxis": {"title": {"text": unit}}, "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": {"orientation": "h", "y": -0.25}, "height": 120 + 44 * len(rows),
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _figures(name: str, rows: Sequence[FigureChange]) -> Table:
    columns = [Column("figure"), *numbers("base", "new", "change")]
    table = Table(f"{name}-rows", f"{name.capitalize()}, one reading per run", columns)
    for row in rows:
        table.add(row.label, _figure(row.base, row.unit), _figure(row.new, row.unit), cell(row.change, signed_percent))
    return table


def _kernels(match: KernelMatch) -> list[Block]:
    numbered = [*numbers("difference", "base", "new"), Column("kernel"), Column("role"), *numbers("calls, base", "calls, new")]
    table = Table("matched-kernels", _KERNELS_TITLE, [Column("stage"), *numbered], tools=True)
    for pair in match.pairs:
        difference = cell(pair.new_ns - pair.base_ns, signed)
        sides = (cell(pair.base_ns, duration), cell(pair.new_ns, duration))
        calls = (cell(pair.base_calls, mean_count), cell(pair.new_calls, mean_count))
        table.add(pair.stage, difference, *sides, _pair(pair), pair.role, *calls)
    return [table, _alone("appeared", match.appeared), _alone("vanished", match.vanished)]


def _pair(pair: KernelPair) -> Cell:
    """Return the name of the kernel, or both names if they differ."""
    if pair.how == "same name":
        return name_cell(pair.base_name, short_name(pair.base_name, NAME_WIDTH))
    both = short_names(pair.base_name, pair.new_name, NAME_WIDTH)
    return name_cell(f"{pair.base_name} → {pair.new_name}", " → ".join(both))


def _alone(name: str, kernels: Sequence[ComparedKernel]) -> Table:
    columns = [Column("stage"), *numbers("time", "calls"), Column("kernel"), Column("role")]
    table = Table(name, f"Kernels that {name}: {len(kernels)}", columns, tools=len(kernels) > 10)
    for kernel in kernels:
        spent = (cell(kernel.time_ns, duration), cell(kernel.calls, mean_count))
        table.add(kernel.stage, *spent, name_cell(kernel.name, short_name(kernel.name, NAME_WIDTH)), kernel.role)
    return table


def _operators(rows: Sequence[OperatorChange]) -> list[Block]:
    columns = [Column("operator"), *numbers("difference", "base", "new", "calls, base", "calls, new")]
    table = Table("compared-operators", "Self time under torch.profiler, without an interval", columns, tools=True)
    for row in rows:
        table.add(
            name_cell(row.name),
            cell((row.new_ns or 0) - (row.base_ns or 0), signed),
            Cell("appeared", 0) if row.base_ns is None else cell(row.base_ns, duration),
            Cell("vanished", 0) if row.new_ns is None else cell(row.new_ns, duration),
            count_cell(row.base_calls),
            count_cell(row.new_calls),
        )
    return [table]


def _all_differences(found: Comparison) -> list[Block]:
    named = (("settings", found.settings), ("hardware, model and workload", found.facts), ("environment", found.environment))
    return [_differences(name, rows) for name, rows in named]


def _differences(name: str, rows: Sequence[Difference]) -> Block:
    if not rows:
        return Paragraph(f"No difference in {name}.")
    table = Table(name.split(",")[0], f"Differences in {name}", [Column("key"), Column("base"), Column("new")])
    for row in rows:
        table.add(row.key, row.base, row.new)
    return table
