"""A sweep as one page: every point a row, failed ones with their reason; latency against throughput; every swept parameter."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_perf_opt import __version__
from llm_perf_opt.analysis.sweep_rows import SweepRow, not_told_apart, pareto_front, swept_keys
from llm_perf_opt.records import Distribution, Maybe, Missing
from llm_perf_opt.report.html_tables import Cell, Column, HtmlTable, figure, numbers
from llm_perf_opt.report.page import Absent, Block, Chart, Code, Items, Page, Section, Table, Words, render
from llm_perf_opt.report.reasons import Reasons
from llm_perf_opt.report.sweep_charts import number_of, parameter_chart, tradeoff_chart
from llm_perf_opt.report.text import escape, interval, milliseconds, significant, table


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
_LAST = ("prefill is", "decode is", "on the front", "why not complete")
_FIGURES = (
    "TPOT, ms (95 % interval)",
    "TTFT, ms (95 % interval)",
    "end to end",
    "decode tokens/s",
    "output tokens/s",
    "decode floor per token",
    "× floor",
)


def sweep_page(found: SweepReport) -> str:
    """The sweep as one file of HTML."""
    failed = len(found.rows) - found.complete
    notice = f"{failed} of {len(found.rows)} points are not complete; their rows say why." if failed else ""
    over = ", ".join(swept_keys(found.rows)) or "nothing"
    subtitle = f"{len(found.rows)} points over {over}; {found.complete} complete. Begun {found.created}."
    sections = [
        Section("points", "Points", [Items([("", text) for text in _words(found.rows)]), Table(_points(found.rows))]),
        Section("tradeoff", "Latency against throughput", [_tradeoff(found.rows)]),
        Section("parameters", "Swept parameters", _parameters(found.rows)),
        Section("definitions", "Definitions", [Items(_DEFINITIONS)]),
        Section("repeat", "To repeat", [Code(shlex.join(found.command)), *_resume(found, failed)]),
    ]  # fmt: skip
    return render(Page(f"Sweep {found.name}", subtitle, notice, sections, f"llm-perf {__version__}"))


def _resume(found: SweepReport, failed: int) -> list[Block]:
    if not failed:
        return []
    return [Words("What is not complete is tried again by:"), Code(shlex.join(["llm-perf", "run", "--resume", found.folder]))]


_DEFINITIONS = [
    ("TTFT:", "time to first token; median of unprofiled repeats, as all times here."),
    (
        "95 % interval:",
        "distribution-free, of the median, in brackets and as error bars. Too few repeats have none: then the least "
        "and the most that was measured are compared. Points whose intervals overlap are not told apart by this sweep.",
    ),
    ("Warnings:", "how many the point's own report begins with; they say why its figures may be off."),
    ("TPOT:", "time per output token, (end-to-end − TTFT) / (new tokens − 1), per sequence."),
    ("Decode tokens/s:", "batch size / TPOT. Output tokens/s: batch × new tokens / end to end, prefill included."),
    ("Floor:", "the least time of a decode step on the best limits known; × floor: measured time over it."),
    ("On the front:", "no other point has both a shorter TPOT and more decode tokens/s, beyond the intervals."),
    ("Bound:", "what a change must address first, as the run's own report says."),
]


def sweep_markdown(found: SweepReport) -> str:
    """The sweep as Markdown."""
    reasons = Reasons()
    keys = swept_keys(found.rows)
    front = {row.number for row in pareto_front(found.rows)}
    rows = []
    for row in found.rows:
        cells = [reasons.cell(cell if isinstance(cell, Missing) else cell.text) for cell in _figures(row)]
        bounds = [reasons.cell(bound) for bound in (row.prefill_bound, row.decode_bound)]
        rows.append([
            str(row.number), *[escape(row.values.get(key, "")) for key in keys], row.status, str(row.warnings),
            reasons.cell(_text(row.repeats)), *cells, *bounds,
            "yes" if row.number in front else "", escape(row.why),
        ])  # fmt: skip
    header = ["#", *[escape(key) for key in keys], "status", *_FIRST, *_FIGURES, *_LAST]
    align = "r" + "l" * len(keys) + "l" + "r" * (len(_FIRST) + len(_FIGURES)) + "l" * len(_LAST)
    said = [f"- {escape(text)}" for text in _words(found.rows)]
    return "\n".join([f"# Sweep {escape(found.name)}\n", *said, "", table(header, rows, align), *reasons.lines(), ""])


def _words(rows: Sequence[SweepRow]) -> list[str]:
    complete = sum(row.status == "complete" for row in rows)
    found = [f"{complete} of {len(rows)} points are complete."]
    shortest = not_told_apart(rows, "tpot")
    if shortest:
        found.append(_best("shortest TPOT", shortest, lambda row: milliseconds(row.median("tpot"))))
    most = not_told_apart(rows, "decode_rate", most=True)
    if most:
        found.append(_best("most decode throughput", most, _rate_words))
    return found


_MOST_NAMED = 6


def _best(what: str, rows: Sequence[SweepRow], words: Callable[[SweepRow], str]) -> str:
    """The best point; where others may be as good, all of them: which is the best is then not known."""
    if len(rows) == 1:
        return f"The {what} is {words(rows[0])}, at {rows[0].label}."
    named = [f"{row.label} ({words(row)})" for row in rows[:_MOST_NAMED]]
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return (
        f"The {what} is one of {len(rows)} points that are not told apart, as their intervals overlap: {', '.join(named)}{more}."
    )


def _rate_words(row: SweepRow) -> str:
    rate = row.median("decode_rate")
    return "" if isinstance(rate, Missing) else f"{significant(rate)} tokens/s"


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
    known = not isinstance(value.ci_low, Missing) and not isinstance(value.ci_high, Missing)
    ends = interval(value, "ns") if known else "no interval"
    return Cell(f"{significant(value.median / 1e6)} ({ends})", value.median)


def _text(value: Maybe[int]) -> Maybe[str]:
    return value if isinstance(value, Missing) else str(value)


def _points(rows: Sequence[SweepRow]) -> HtmlTable:
    keys = swept_keys(rows)
    columns = [
        Column("#", number=True), *[Column(key) for key in keys], Column("status"), *numbers(*_FIRST, *_FIGURES[:2]),
        Column("decode is"), *numbers(*_FIGURES[2:]), Column("prefill is"), Column("on the front"),
    ]  # fmt: skip
    made = HtmlTable(
        "points-table", "Every point of the sweep; its number leads to its own report, where there is one", columns, tools=True
    )
    front = {row.number for row in pareto_front(rows)}
    for row in rows:
        status = f"{row.status}: {row.why}" if row.why else row.status
        figures = _figures(row)
        made.add(
            Cell(str(row.number), row.number, link=row.page), *[_value(row.values.get(key, "")) for key in keys], status,
            Cell(str(row.warnings), row.warnings), figure(row.repeats, lambda count: f"{count:g}"), *figures[:2],
            row.decode_bound, *figures[2:], row.prefill_bound, "yes" if row.number in front else "no",
        )  # fmt: skip
    return made


def _value(text: str) -> Cell:
    return Cell(text, number_of(text))


def _tradeoff(rows: Sequence[SweepRow]) -> Block:
    chart = tradeoff_chart(rows, pareto_front(rows))
    if isinstance(chart, Missing):
        return Absent("Latency against throughput:", chart.why)
    caption = (
        "TPOT against decode throughput; bars: 95 % intervals; rings, joined by the line: points that no other beats "
        "beyond them; the mark says what binds decode"
    )
    return Chart("tradeoff-chart", caption, chart)


def _parameters(rows: Sequence[SweepRow]) -> list[Block]:
    blocks: list[Block] = []
    for number, key in enumerate(swept_keys(rows)):
        chart: Maybe[dict[str, object]] = parameter_chart(rows, key)
        if isinstance(chart, Missing):
            blocks.append(Absent(f"Over {key}:", chart.why))
        else:
            blocks.append(
                Chart(f"parameter-{number}", f"Over {key}; bars: 95 % intervals; dashed: what the floor would give", chart)
            )
    return blocks or [Absent("Swept parameters:", "nothing differs between the points")]
