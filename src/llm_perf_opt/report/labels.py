"""Labels that are no stages and no modules, as tables."""

from collections.abc import Sequence

from llm_perf_opt.analysis.trace.document import LabelLine, TraceAnalysis
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.html_tables import Cell, Column, HtmlTable, figure, name_cell, numbers
from llm_perf_opt.report.text import escape, milliseconds, table

LABEL_HEADER = ("label", "calls", "time", "kernels", "kernel time")
MOST_LABELS = 100
"""Of a page; --json of analyze has them all."""
HELD = (
    "Labels of the program itself (record_function, NVTX) that mark no stage. Time is that of the labels under the profiler; "
    "kernels are those launched while a label was open on the launching thread, inner labels included."
)
_NOT_TOLD = Missing("the range may end on another thread than it began on")


def label_rows(lines: Sequence[LabelLine]) -> list[list[str]]:
    """A row for each label."""
    return [
        [
            line.name,
            f"{line.calls:,}",
            milliseconds(line.wall_ns),
            "n/a" if line.kernels is None else f"{line.kernels:,}",
            "n/a" if line.kernel_ns is None else milliseconds(line.kernel_ns),
        ]
        for line in lines
    ]


def labels_section(trace: Maybe[TraceAnalysis]) -> str:
    """For report.md; empty where there are none."""
    if isinstance(trace, Missing) or not trace.labels:
        return ""
    rows = [[escape(row[0]), *row[1:]] for row in label_rows(trace.labels[:MOST_LABELS])]
    rest = f"\n{len(trace.labels) - len(rows):,} more are not shown.\n" if len(trace.labels) > len(rows) else ""
    return f"## Labels\n\n{HELD}\n\n{table(LABEL_HEADER, rows, 'lrrrr')}{rest}"


def label_html_tables(trace: Maybe[TraceAnalysis]) -> list[HtmlTable]:
    """For report.html; none where there are none."""
    if isinstance(trace, Missing) or not trace.labels:
        return []
    made = HtmlTable("labels", "Labels that mark no stage", [Column(LABEL_HEADER[0]), *numbers(*LABEL_HEADER[1:])], tools=True)
    for line in trace.labels[:MOST_LABELS]:
        made.add(
            name_cell(line.name),
            Cell(f"{line.calls:,}", line.calls),
            figure(line.wall_ns, milliseconds),
            figure(_NOT_TOLD if line.kernels is None else line.kernels, lambda kernels: f"{kernels:,.0f}"),
            figure(_NOT_TOLD if line.kernel_ns is None else line.kernel_ns, milliseconds),
        )
    more = len(trace.labels) - len(made.rows)
    made.foot = HELD + (f" {more:,} more are not shown." if more else "")
    return [made]
