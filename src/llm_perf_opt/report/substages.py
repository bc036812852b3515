"""Below the table of stages: what the sub-stages of prefill, or of a decode step, take of it."""

from collections.abc import Iterator, Sequence

from llm_perf_opt.core.records import StageTiming
from llm_perf_opt.core.stages import STAGE_NAMES
from llm_perf_opt.report.text import escape, milliseconds, percent, table


def substage_notes(stages: Sequence[StageTiming]) -> str:
    """One note for each stage that has sub-stages; empty where none has."""
    notes = [_note(stage, list(_below(stage, stages))) for stage in stages if stage.name in STAGE_NAMES]
    return "".join(notes)


def _below(stage: StageTiming, stages: Sequence[StageTiming]) -> Iterator[StageTiming]:
    """The rows that follow a stage until the next stage: its sub-stages and theirs."""
    after = stages[stages.index(stage) + 1 :]
    for row in after:
        if row.name in STAGE_NAMES:
            return
        yield row


def _note(stage: StageTiming, below: Sequence[StageTiming]) -> str:
    if not below:
        return ""
    whole = stage.time_ns.median
    per_run = [row.time_ns.median * row.per_iteration / stage.per_iteration for row in below]
    rows = [
        [
            "&nbsp;&nbsp;" * (row.depth - stage.depth - 1) + escape(row.name),
            f"{row.per_iteration / stage.per_iteration:g}",
            milliseconds(time),
            percent(time / whole),
        ]
        for row, time in zip(below, per_run, strict=True)
    ]
    direct = sum(time for row, time in zip(below, per_run, strict=True) if row.depth == stage.depth + 1)
    rows.append(["the rest", "", milliseconds(max(0.0, whole - direct)), percent(max(0.0, 1 - direct / whole))])
    header = ["sub-stage", "forwards", "together, of medians", f"share of {stage.name}"]
    title = (
        f"Note on {stage.name}: its sub-stages, those inside another below it. Medians are taken one by one and need not add up."
    )
    return f"\n{title}\n\n{table(header, rows, 'lrrr')}"
