"""A sweep as one page: every point a row, failed ones with their reason; latency against throughput; every swept parameter."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from llm_perf_opt import __version__
from llm_perf_opt.analysis.sweep_rows import SweepRow, pareto_front, swept_keys
from llm_perf_opt.records import Maybe, Missing
from llm_perf_opt.report.html_tables import Cell, Column, HtmlTable, figure, numbers
from llm_perf_opt.report.page import Absent, Block, Chart, Code, Items, Page, Section, Table, Words, render
from llm_perf_opt.report.reasons import Reasons
from llm_perf_opt.report.sweep_charts import number_of, parameter_chart, tradeoff_chart
from llm_perf_opt.report.text import escape, milliseconds, significant, table


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


_LAST = ("prefill is", "decode is", "on the front", "why not complete")
_FIGURES = ("TTFT", "TPOT", "end to end", "decode tokens/s", "output tokens/s", "decode floor per token", "× floor")


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
    ("TPOT:", "time per output token, (end-to-end − TTFT) / (new tokens − 1), per sequence."),
    ("Decode tokens/s:", "batch size / TPOT. Output tokens/s: batch × new tokens / end to end, prefill included."),
    ("Floor:", "the least time of a decode step on the best limits known; × floor: measured time over it."),
    ("On the front:", "no other point has both a shorter TPOT and more decode tokens/s."),
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
            str(row.number), *[escape(row.values.get(key, "")) for key in keys], row.status, *cells, *bounds,
            "yes" if row.number in front else "", escape(row.why),
        ])  # fmt: skip
    header = [
        "#",
        *[escape(key) for key in keys],
        "status",
        *_FIGURES,
        "prefill is",
        "decode is",
        "on the front",
        "why not complete",
    ]
    align = "r" + "l" * len(keys) + "l" + "r" * len(_FIGURES) + "llll"
    said = [f"- {escape(text)}" for text in _words(found.rows)]
    return "\n".join([f"# Sweep {escape(found.name)}\n", *said, "", table(header, rows, align), *reasons.lines(), ""])


def _words(rows: Sequence[SweepRow]) -> list[str]:
    front = pareto_front(rows)
    complete = sum(row.status == "complete" for row in rows)
    found = [f"{complete} of {len(rows)} points are complete."]
    if front:
        first, last = front[0], front[-1]
        found.append(f"The shortest TPOT is {milliseconds(first.median('tpot'))}, at {first.label}.")
        rate = last.median("decode_rate")
        most = "" if isinstance(rate, Missing) else significant(rate)
        found.append(f"The most decode throughput is {most} tokens/s, at {last.label}.")
    return found


def _figures(row: SweepRow) -> list[Cell | Missing]:
    def rate(value: float) -> str:
        return significant(value)

    return [
        *[figure(row.median(key), milliseconds) for key in ("ttft", "tpot", "e2e")],
        *[figure(row.median(key), rate) for key in ("decode_rate", "output_rate")],
        figure(row.floor_ns, milliseconds),
        figure(row.times_floor, lambda times: significant(times, 3)),
    ]


def _points(rows: Sequence[SweepRow]) -> HtmlTable:
    keys = swept_keys(rows)
    columns = [
        Column("#", number=True), *[Column(key) for key in keys], Column("status"), Column("decode is"), *numbers(*_FIGURES),
        Column("prefill is"), Column("on the front"), Column("warnings", number=True),
    ]  # fmt: skip
    made = HtmlTable(
        "points-table", "Every point of the sweep; its number leads to its own report, where there is one", columns, tools=True
    )
    front = {row.number for row in pareto_front(rows)}
    for row in rows:
        status = f"{row.status}: {row.why}" if row.why else row.status
        made.add(
            Cell(str(row.number), row.number, link=row.page), *[_value(row.values.get(key, "")) for key in keys], status,
            row.decode_bound, *_figures(row), row.prefill_bound, "yes" if row.number in front else "no",
            Cell(str(row.warnings), row.warnings),
        )  # fmt: skip
    return made


def _value(text: str) -> Cell:
    return Cell(text, number_of(text))


def _tradeoff(rows: Sequence[SweepRow]) -> Block:
    chart = tradeoff_chart(rows, pareto_front(rows))
    if isinstance(chart, Missing):
        return Absent("Latency against throughput:", chart.why)
    caption = "TPOT against decode throughput; the line joins the points that no other beats; the mark says what binds decode"
    return Chart("tradeoff-chart", caption, chart)


def _parameters(rows: Sequence[SweepRow]) -> list[Block]:
    blocks: list[Block] = []
    for number, key in enumerate(swept_keys(rows)):
        chart: Maybe[dict[str, object]] = parameter_chart(rows, key)
        if isinstance(chart, Missing):
            blocks.append(Absent(f"Over {key}:", chart.why))
        else:
            blocks.append(Chart(f"parameter-{number}", f"Over {key}; dashed: what the floor would give", chart))
    return blocks or [Absent("Swept parameters:", "nothing differs between the points")]
