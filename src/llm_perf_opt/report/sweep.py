"""A sweep as one page: every point a row, failed ones with their reason; latency against throughput; every swept parameter."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from llm_perf_opt import __version__
from llm_perf_opt.analysis.limits.binding import EVIDENCE, VERDICTS
from llm_perf_opt.analysis.sweep_rows import SweepRow, pareto_front, swept_keys
from llm_perf_opt.core.records import Distribution, Maybe, Missing
from llm_perf_opt.report.html_tables import Cell, Column, HtmlTable, figure, numbers
from llm_perf_opt.report.page import Absent, Block, Chart, Code, Items, Page, Section, Table, Words, render
from llm_perf_opt.report.reasons import Reasons
from llm_perf_opt.report.sweep_charts import bar_words, number_of, parameter_chart, tradeoff_chart
from llm_perf_opt.report.sweep_words import headline, troubles, what_points_ran
from llm_perf_opt.report.text import escape, interval, known_within, milliseconds, significant, table


@dataclass(frozen=True)
class SweepReport:
    """What the page is made from."""

    name: str
    created: str
    command: Sequence[str]
    rows: Sequence[SweepRow]
    folder: str
    """Where it lies, for the command that goes on with it."""

    @property
    def complete(self) -> int:
        """Points that ended well."""
        return sum(row.status == "complete" for row in self.rows)


_FIRST = ("warnings", "repeats")
_LAST = ("prefill is", "decode is", "front", "why not complete")
_FIGURES = (
    "TPOT (95 % interval)",
    "TTFT (95 % interval)",
    "end to end",
    "decode tokens/s",
    "output tokens/s",
    "decode floor per token",
    "× floor",
)


def sweep_page(found: SweepReport) -> str:
    """The sweep as one file of HTML."""
    lacking = sum(row.status != "complete" or not row.ranked for row in found.rows)
    notice = f"Not all is well: {lacking} of {len(found.rows)} points are not complete, or not ranked." if lacking else ""
    over = ", ".join(swept_keys(found.rows)) or "nothing"
    subtitle = f"{len(found.rows)} points over {over}; {found.complete} complete. Begun {found.created}."
    wrong = troubles(found.rows)
    summary: list[Block] = [
        Items(what_points_ran(found.rows)),
        *([Items(wrong, "warnings")] if wrong else []),
        Items([("", text) for text in headline(found.rows)]),
    ]
    sections = [
        Section("points", "Points", [*summary, Table(_points(found.rows))]),
        Section("tradeoff", "Latency against throughput", [_tradeoff(found.rows)]),
        Section("bounds", "What binds each point", [Table(_bounds(found.rows))]),
        Section("parameters", "Swept parameters", _parameters(found.rows)),
        Section("definitions", "Definitions", [Items(_DEFINITIONS)]),
        Section("repeat", "To repeat", [Code(shlex.join(found.command)), *_resume(found, len(found.rows) - found.complete)]),
    ]
    return render(Page(f"Sweep {found.name}", subtitle, notice, sections, f"llm-perf {__version__}"))


def _resume(found: SweepReport, failed: int) -> list[Block]:
    if not failed:
        return []
    return [Words("What is not complete is tried again by:"), Code(shlex.join(["llm-perf", "run", "--resume", found.folder]))]


_DEFINITIONS = [
    ("TTFT:", "time to first token; median of unprofiled repeats, as all times here."),
    (
        "95 % interval:",
        "distribution-free, of the median, in brackets and as error bars. Too few repeats have none: then their range, the least "
        "and the most that was measured, stands in its place and is called that. Points whose intervals or ranges overlap are "
        "not told apart by this sweep.",
    ),
    ("Warnings:", "how many the point's own report begins with; they say why its figures may be off."),
    ("TPOT:", "time per output token, (end-to-end − TTFT) / (new tokens − 1), per sequence."),
    ("Decode tokens/s:", "batch size / TPOT. Output tokens/s: batch × new tokens / end to end, prefill included."),
    ("Floor:", "the least time of a decode step on the best limits known; × floor: measured time over it."),
    (
        "Front:",
        "the points that no other of the same workload (model, prompt and new tokens) beats. A point is beaten by one that is "
        "surely better in TPOT or in decode tokens/s (their intervals lie apart) and not surely worse in the other: what may be "
        "noise is no reason to take what is surely worse. A point without the two is neither on it nor beaten.",
    ),
    (
        "Not ranked:",
        "a point with a figure that cannot be true, whose unprofiled pass is not complete, or that ran on other hardware than "
        "most. Its row stands; it is on no chart, not on the front, and not named as the best.",
    ),
    ("Decode is, prefill is:", f"what a change must address first, as the run's own report says. {EVIDENCE}"),
    *[(f"{word.capitalize()}:", meaning) for word, meaning in VERDICTS],
]


def sweep_markdown(found: SweepReport) -> str:
    """The sweep as Markdown."""
    reasons = Reasons()
    keys = swept_keys(found.rows)
    front = {row.number for row in pareto_front(found.rows)}
    rows = []
    for row in found.rows:
        cells = [
            reasons.cell(cell if isinstance(cell, Missing) else f"{cell.text} {cell.below}".strip()) for cell in _figures(row)
        ]
        bounds = [reasons.cell(bound) for bound in (row.prefill_bound, row.decode_bound)]
        rows.append([
            str(row.number), *[escape(row.values.get(key, "")) for key in keys], row.status, str(row.warnings),
            reasons.cell(_text(row.repeats)), *cells, *bounds,
            reasons.cell(_standing(row, front)), escape(row.why),
        ])  # fmt: skip
    header = ["#", *[escape(key) for key in keys], "status", *_FIRST, *_FIGURES, *_LAST]
    align = "r" + "l" * len(keys) + "l" + "r" * (len(_FIRST) + len(_FIGURES)) + "l" * len(_LAST)
    ran = [f"- {head} {escape(text)}" for head, text in what_points_ran(found.rows)]
    wrong = [f"- {escape(head)} {escape(text)}" for head, text in troubles(found.rows)]
    said = [f"- {escape(text)}" for text in headline(found.rows)]
    meant = [f"- {head} {text}" for head, text in _DEFINITIONS]
    if wrong:
        wrong = ["Not all is well:\n", *wrong, ""]
    return "\n".join([
        f"# Sweep {escape(found.name)}\n", *ran, "", *wrong, *said, "", table(header, rows, align),
        *reasons.lines(), "", *meant, "",
    ])  # fmt: skip


def _figures(row: SweepRow) -> list[Cell | Missing]:
    return [
        *[_with_interval(row.metrics.get(key, Missing("it was not measured"))) for key in ("tpot", "ttft")],
        figure(row.median("e2e"), milliseconds),
        *[figure(row.median(key), significant) for key in ("decode_rate", "output_rate")],
        figure(row.floor_ns, milliseconds),
        figure(row.times_floor, lambda times: significant(times, 3)),
    ]


def _with_interval(value: Maybe[Distribution]) -> Cell | Missing:
    if isinstance(value, Missing):
        return value
    ends = known_within(value, "ns") if isinstance(value.ci_low, Missing) else interval(value, "ns")
    return Cell(milliseconds(value.median), value.median, below=f"({ends})")


def _text(value: Maybe[int]) -> Maybe[str]:
    return value if isinstance(value, Missing) else str(value)


def _standing(row: SweepRow, front: set[int]) -> Maybe[str]:
    """Whether it is on the front; a point that lacks what the front is of is neither on it nor beaten."""
    if not row.ranked:
        return "not ranked"
    lacking = next((value for key in ("tpot", "decode_rate") if isinstance(value := row.median(key), Missing)), None)
    return lacking or ("yes" if row.number in front else "no")


def _heads(rows: Sequence[SweepRow]) -> list[Column]:
    """The number and the swept values, by the last word of each key where that is enough."""
    keys = swept_keys(rows)
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return [
        Column("#", number=True),
        *[Column(short if last.count(short) == 1 else key) for key, short in zip(keys, last, strict=True)],
    ]


def _names(row: SweepRow, keys: Sequence[str]) -> list[Cell]:
    return [Cell(str(row.number), row.number, link=row.page), *[_value(row.values.get(key, "")) for key in keys]]


def _points(rows: Sequence[SweepRow]) -> HtmlTable:
    columns = [*_heads(rows), Column("status"), Column("front"), *numbers("TPOT", "TTFT", *_FIGURES[2:5])]
    caption = (
        "Every point of the sweep; its number leads to its own report, where there is one. In brackets: 95 % interval, or the "
        "range of fewer repeats than that needs"
    )
    made = HtmlTable("points-table", caption, columns, tools=True)
    front = {row.number for row in pareto_front(rows)}
    for row in rows:
        made.add(*_names(row, swept_keys(rows)), row.status, _standing(row, front), *_figures(row)[:5])
    return made


def _bounds(rows: Sequence[SweepRow]) -> HtmlTable:
    columns = [*_heads(rows), Column("decode is"), Column("prefill is"), *numbers(*_FIGURES[5:], "repeats", "warnings")]
    made = HtmlTable("bounds-table", "What a change to each point must address first, and how far it is from its limits", columns)
    for row in rows:
        made.add(
            *_names(row, swept_keys(rows)), row.decode_bound, row.prefill_bound, *_figures(row)[5:],
            figure(row.repeats, lambda repeats: f"{repeats:g}"), Cell(str(row.warnings), row.warnings),
        )  # fmt: skip
    return made


def _value(text: str) -> Cell:
    return Cell(text, number_of(text))


def _tradeoff(rows: Sequence[SweepRow]) -> Block:
    chart = tradeoff_chart(rows, pareto_front(rows))
    if isinstance(chart, Missing):
        return Absent("Latency against throughput:", chart.why)
    caption = (
        f"TPOT against decode throughput; bars: {bar_words(rows)}; rings: points that no other beats (the front); the mark says "
        "what binds decode"
    )
    left_out = sum(not row.ranked for row in rows)
    notes = [f"{left_out} of {len(rows)} points are not ranked and not drawn."] if left_out else []
    return Chart("tradeoff-chart", caption, chart, notes=notes)


def _parameters(rows: Sequence[SweepRow]) -> list[Block]:
    blocks: list[Block] = []
    for number, key in enumerate(swept_keys(rows)):
        chart: Maybe[dict[str, object]] = parameter_chart(rows, key)
        if isinstance(chart, Missing):
            blocks.append(Absent(f"Over {key}:", chart.why))
        else:
            blocks.append(
                Chart(f"parameter-{number}", f"Over {key}; bars: {bar_words(rows)}; dashed: what the floor would give", chart)
            )
    return blocks or [Absent("Swept parameters:", "nothing differs between the points")]
