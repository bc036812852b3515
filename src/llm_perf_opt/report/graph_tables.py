"""Tables of a trace about CUDA graphs: components by the structure of the layers, captured graphs, owners from another trace."""

from collections.abc import Sequence

from llm_perf_opt.analysis.trace.document import BorrowedLine, BorrowedTable, CaptureTable, ComponentTable, TraceAnalysis
from llm_perf_opt.core.records import Maybe
from llm_perf_opt.report.document import Block, Column, Table, Unavailable, cell, count_cell, name_cell, numbers
from llm_perf_opt.report.text import duration, known, percent, then

STRUCTURE = (
    "Kernels are assigned by the order of attention, products and norms in each step; other: outside the components "
    "(copies, positions, sampling); unknown: the order does not show the component."
)
"""How components of kernels without labels were found."""


_FEW = 0.01
"""Share of the device time without an operator that is not worth a sentence."""


def without_operator(trace: Maybe[TraceAnalysis]) -> str:
    """Return a sentence on the device time that CUDA graphs launch and no operator; empty if there is little or none."""
    return known(then(trace, _without_operator), "")


def _without_operator(trace: TraceAnalysis) -> str:
    without = 1 - sum(row.share for row in trace.operators)
    graphs = any(stage.launches and stage.kernels and stage.kernels > stage.launches for stage in trace.stages)
    if not trace.operators or not graphs or without < _FEW:
        return ""
    return (
        f" {percent(without)} of the device time belongs to no operator, because CUDA graphs launch it: the operators divide the "
        "rest. The components of the model include the graphs."
    )


def structure_tables(found: ComponentTable | None) -> list[Block]:
    """Return the components of each stage, and why kernels of a stage have none."""
    if found is None:
        return []
    blocks: list[Block] = []
    for stage, evidence in found.evidence.items():
        share = found.coverage[stage]
        covered = "" if share is None else f"; {percent(share)} of the kernel time has a component"
        caption = f"Components of {stage}, by the structure of its layers ({evidence}{covered})"
        table = Table(f"structure-{stage}", caption, [Column("component"), *numbers("kernels", "time", "share")])
        for row in found.rows:
            if row.stage == stage:
                table.add(row.name, count_cell(row.kernels), cell(row.kernel_ns, duration), cell(row.share, percent))
        blocks.append(table)
        table.foot = STRUCTURE if stage == list(found.evidence)[-1] else ""
    return [*blocks, *(Unavailable(f"Components of {stage}:", why) for stage, why in found.why.items())]


def capture_tables(found: CaptureTable | None, top: int) -> list[Block]:
    """Return the captured graphs, and the operators of their nodes."""
    if found is None:
        return []
    graphs, nodes = (sum(getattr(line, name) for line in found.captures) for name in ("graphs", "nodes"))
    caption = f"Captured CUDA graphs: {graphs:,} with {nodes:,} nodes, which run when a graph is replayed"
    table = Table("captures", caption, [Column("label"), *numbers("graphs", "nodes", "host time, profiled")])
    for line in found.captures[:top]:
        table.add(
            name_cell(line.label or "(none)"), count_cell(line.graphs), count_cell(line.nodes), cell(line.wall_ns, duration)
        )
    known = sum(found.operators.values())
    caption = f"Operators of the captured nodes: {known:,} of {nodes:,} nodes have one"
    operators = Table("captured-operators", caption, [Column("operator"), *numbers("nodes", "share")])
    for name, count in list(found.operators.items())[:top]:
        operators.add(name_cell(name), count_cell(count), cell(count / nodes, percent))
    return [table, *([operators] if found.operators else [])]


def borrowed_tables(found: BorrowedTable | None, top: int) -> list[Block]:
    """Return modules and operators taken from another trace, with the share that each rule attributes."""
    if found is None:
        return []
    shares = ", ".join(f"{rule} {percent(share)}" for rule, share in found.coverage.items() if share)
    words = f"from {found.source}; share of the kernel time by rule: {shares}"
    parts = (("module", found.rows), ("operator", found.operators))
    return [_borrowed(what, rows[:top], f"{what.capitalize()}s {words}") for what, rows in parts if rows or what == "module"]


def _borrowed(what: str, rows: Sequence[BorrowedLine], caption: str) -> Table:
    table = Table(f"borrowed-{what}s", caption, [Column(what), *numbers("kernels", "self", "share")])
    for row in rows:
        table.add(name_cell(row.name), count_cell(row.kernels), cell(row.self_ns, duration), cell(row.share, percent))
    return table
