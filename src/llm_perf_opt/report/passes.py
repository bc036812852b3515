"""What became of each pass, and what it cost the program it watched."""

from llm_perf_opt.analysis.overhead import PassOverhead
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.config.passes import sees_stages
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.html_tables import Cell, Column, HtmlTable, figure, numbers
from llm_perf_opt.report.reasons import Reasons
from llm_perf_opt.report.text import (
    escape,
    significant,
    table,
)


def passes_section(analysis: RunAnalysis) -> str:
    """Status, time taken, and overhead: the stages' time in the pass over their unprofiled time."""
    reasons = Reasons()
    measured = {entry.name: entry for entry in analysis.overheads}
    rows = []
    for entry in analysis.manifest.passes:
        seconds = f"{entry.seconds:.1f} s" if entry.seconds is not None else f"n/a: {entry.status}"
        tool = escape(entry.tool_version)
        note = escape(f"{entry.why} {entry.remedy}".strip())
        rows.append([entry.name, entry.status, tool, seconds, *_cells(entry.name, measured.get(entry.name), reasons), note])
    header = ["pass", "status", "tool", "took", "prefill, × unprofiled", "decode, × unprofiled", "note"]
    notes = [
        "",
        "Times are the unprofiled pass's. Another pass's overhead says how far its own clock is from them: kernels keep their "
        "duration under torch.profiler and Nsight Systems, the gaps between them do not; Nsight Compute replays every kernel "
        "it counts.\n",
        *[f"{escape(entry.own_words)}\n" for entry in analysis.overheads if entry.own],
        *reasons.lines(),
    ]
    return "## Passes\n\n" + table(header, rows, "lllrrrl") + "\n".join(notes) + "\n"


def _cells(name: str, found: PassOverhead | None, reasons: Reasons) -> list[str]:
    if not sees_stages(name):
        return ["", ""]
    if found is None:
        missing = Missing("the pass did not time its stages")
        return [reasons.cell(missing), reasons.cell(missing)]
    return [reasons.cell(_times(value)) for value in (found.prefill, found.decode)]


def _times(value: Maybe[float]) -> Maybe[str]:
    return value if isinstance(value, Missing) else f"× {significant(value, 3)}"


def passes_table(analysis: RunAnalysis) -> HtmlTable:
    """What became of each pass."""
    columns = [
        Column("pass"),
        Column("status"),
        Column("tool"),
        *numbers("took", "prefill, × unprofiled", "decode, × unprofiled"),
        Column("note"),
    ]
    table = HtmlTable("passes", "Passes", columns)
    measured = {entry.name: entry for entry in analysis.overheads}
    for entry in analysis.manifest.passes:
        seconds = (
            Missing(f"the pass is {entry.status}") if entry.seconds is None else Cell(f"{entry.seconds:.1f} s", entry.seconds)
        )
        over = measured.get(entry.name)
        none = Missing("the pass is the reference, runs beside it, or did not time its stages")
        prefill, decode = (over.prefill, over.decode) if over else (none, none)
        table.add(
            entry.name,
            entry.status,
            entry.tool_version,
            seconds,
            figure(prefill, _factor),
            figure(decode, _factor),
            f"{entry.why} {entry.remedy}".strip(),
        )
    table.foot = " ".join(entry.own_words for entry in analysis.overheads if entry.own)
    return table


def _factor(times: float) -> str:
    return significant(times, 3)
