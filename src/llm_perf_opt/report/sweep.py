"""The report of a sweep: every point, latency against throughput, what bounds each point, every swept parameter."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llm_perf_opt.analysis.limits.binding import EVIDENCE, VERDICTS, shown_verdict
from llm_perf_opt.analysis.sweep import (
    PointFacts,
    SweepRow,
    by_workload,
    indistinguishable,
    mixed_models,
    mixed_software,
    pareto_front,
    swept_keys,
)
from llm_perf_opt.core.records import Distribution, Maybe, Missing
from llm_perf_opt.core.secrets import shown_command
from llm_perf_opt.core.units import counted
from llm_perf_opt.report.document import (
    Block,
    Cell,
    Chart,
    Code,
    Column,
    Document,
    Item,
    Items,
    Paragraph,
    Section,
    Table,
    Unavailable,
    bullets,
    cell,
    count_cell,
    numbers,
    when_known,
)
from llm_perf_opt.report.sweep_charts import bar_words, number_of, parameter_chart, tradeoff_chart
from llm_perf_opt.report.text import (
    count,
    duration,
    interval,
    known,
    known_within,
    missing,
    present,
    significant,
    then,
    times,
    words,
)

_MOST_NAMED = 6

_RAN: tuple[tuple[str, Callable[[PointFacts], str]], ...] = (
    ("Device:", lambda ran: ran.device if ran.host in ("", ran.device) else f"{ran.device}, host {ran.host}"),
    (
        "Model:",
        lambda ran: f"{ran.model} ({count(ran.parameters)} parameters, {ran.dtype}{f', {ran.weights}' if ran.weights else ''})",
    ),
    ("Request:", lambda ran: f"{ran.prompt_tokens} prompt tokens, {ran.new_tokens} new tokens"),
    ("Runtime:", lambda ran: ran.how),
    ("Software:", lambda ran: ", ".join(f"{name} {version}" for name, version in ran.software.items()) or "not recorded"),
)


def what_points_ran(rows: Sequence[SweepRow]) -> list[Item]:
    """Return model, device, workload and software; where points differ, with the points each applies to."""
    runs = [(row.number, ran) for row in rows for ran in present([row.ran])]
    found = []
    for head, show in _RAN:
        points: dict[str, list[int]] = {}
        for number, ran in runs:
            points.setdefault(show(ran), []).append(number)
        if len(points) == 1:
            found.append(Item(head, f"{next(iter(points))}."))
        elif points:
            found.append(Item(head, "; ".join(f"{text} ({_point_list(numbers)})" for text, numbers in points.items()) + "."))
    return found


def troubles(rows: Sequence[SweepRow]) -> list[Item]:
    """Return the problems of single points, and of all points together."""
    found = [
        Item(f"Point {row.number} ({row.label}) is {_status(row)}:", row.why or "unknown reason")
        for row in rows
        if row.status != "complete" or not row.ranked
    ]
    ran = present(row.ran for row in rows if row.ranked)
    models = mixed_models(ran, swept_keys(rows))
    if models:
        found.append(
            Item("The points ran different models, although the sweep does not vary the model:", f"{'; '.join(models)}.")
        )
    mixed = mixed_software(ran)
    if mixed:
        found.append(
            Item("The points ran with different software:", f"{'; '.join(mixed)}. This may explain part of a difference.")
        )
    return found


def _status(row: SweepRow) -> str:
    shown = f"on {row.status}" if row.status == "other hardware" else row.status
    return shown if row.ranked else f"{shown} and not ranked"


def headline(rows: Sequence[SweepRow]) -> list[str]:
    """Return how many points are complete, and the best points of each workload."""
    complete = sum(row.status == "complete" for row in rows)
    found = [f"{complete} of {len(rows)} points are complete."]
    workloads = by_workload(rows)
    compared = {workload: members for workload, members in workloads.items() if len(members) > 1 or len(workloads) == 1}
    if len(workloads) > 1 and not compared:
        found.append("No two points have the same workload, so they are not ranked.")
    for workload, members in compared.items():
        found += _best_of(members, f"For {workload}, the" if len(workloads) > 1 else "The")
    return found


def _best_of(rows: Sequence[SweepRow], the: str) -> list[str]:
    """Return the best points of one workload. Times are compared per batch size, because larger batches take longer."""
    batches: dict[str, list[SweepRow]] = {}
    for row in rows:
        batches.setdefault(known(then(row.batch, lambda batch: f"{batch:,}"), "n/a"), []).append(row)
    apart = len(batches) > 1 and any(len(members) > 1 for members in batches.values())
    found = []
    for batch, members in batches.items() if apart else [("", rows)]:
        shortest = indistinguishable(members, "tpot")
        if shortest:
            over = f" at batch {batch}" if apart else f" over batch sizes {', '.join(batches)}" if len(batches) > 1 else ""
            found.append(_best(f"{the} shortest TPOT{over}", shortest, lambda row: words(row.median("tpot"), duration)))
    most = indistinguishable(rows, "decode_rate", most=True)
    if most:
        found.append(_best(f"{the} highest decode throughput", most, _rate_words))
    return found


def _best(what: str, rows: Sequence[SweepRow], show: Callable[[SweepRow], str]) -> str:
    """Return the best point, or all points that are not distinguishable from it."""
    if len(rows) == 1:
        return f"{what} is {show(rows[0])}, at {rows[0].label}."
    named = [f"{row.label} ({show(row)})" for row in rows[:_MOST_NAMED]]
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return f"{what} is shared by {len(rows)} points that cannot be distinguished: {', '.join(named)}{more}."


def _rate_words(row: SweepRow) -> str:
    return known(then(row.median("decode_rate"), lambda rate: f"{significant(rate)} tokens/s"), "")


def _point_list(numbers: Iterable[int]) -> str:
    listed = [str(number) for number in numbers]
    return f"point{'s' if len(listed) > 1 else ''} {', '.join(listed)}"


@dataclass(frozen=True)
class SweepReport:
    """The input of the report."""

    name: str
    created: str
    command: Sequence[str]
    rows: Sequence[SweepRow]
    folder: str
    """The folder of the sweep, for the command that resumes it."""

    @property
    def complete(self) -> int:
        """How many points are complete."""
        return sum(row.status == "complete" for row in self.rows)


_FIGURES = ("end to end", "decode tokens/s", "output tokens/s", "decode roofline time per token", "× roofline")


def sweep_document(found: SweepReport) -> Document:
    """Return the report of the sweep."""
    faulty = sum(row.status != "complete" or not row.ranked for row in found.rows)
    notice = f"{faulty} of {len(found.rows)} points are incomplete or not ranked." if faulty else ""
    over = ", ".join(swept_keys(found.rows)) or "nothing"
    subtitle = f"{counted(len(found.rows), 'point')} over {over}; {found.complete} complete. Started {found.created}."
    wrong = troubles(found.rows)
    summary: list[Block] = [
        Items(what_points_ran(found.rows)),
        *([Items(wrong, "warnings")] if wrong else []),
        bullets(headline(found.rows)),
    ]
    sections = [
        Section("points", "Points", [*summary, _points(found.rows)]),
        Section("tradeoff", "Latency against throughput", _tradeoff(found.rows)),
        Section("bounds", "What bounds each point", [_bounds(found.rows)]),
        Section("parameters", "Swept parameters", _parameters(found.rows)),
        Section("definitions", "Definitions", [Items(_DEFINITIONS)]),
        Section("repeat", "To repeat", [Code(shown_command(found.command)), *_resume(found, len(found.rows) - found.complete)]),
    ]
    return Document(f"Sweep {found.name}", subtitle, notice, sections)


def _resume(found: SweepReport, failed: int) -> list[Block]:
    if not failed:
        return []
    return [
        Paragraph("To run the points that are not complete:"),
        Code(shlex.join(["llm-perf", "run", "--resume", found.folder])),
    ]


_DEFINITIONS = [
    Item("TTFT:", "time to first token; like all times on this page, the median of unprofiled repeats."),
    Item(
        "95 % interval:",
        "of the median, distribution-free, shown in brackets and as error bars. For too few repeats, their range is shown "
        "instead. Points with overlapping intervals or ranges are not distinguishable.",
    ),
    Item("Warnings:", "the number of warnings in the report of the point; they explain why its figures may be wrong."),
    Item("TPOT:", "time per output token, (end-to-end − TTFT) / (new tokens − 1), per sequence."),
    Item("Decode tokens/s:", "batch size / TPOT. Output tokens/s: batch × new tokens / end to end, prefill included."),
    Item(
        "Roofline time:", "the least time of a decode step at the best known peaks; × roofline: the measured time divided by it."
    ),
    Item(
        "Front:",
        "the Pareto front, the points that no other point of the same workload (model, prompt and new tokens) beats. A point "
        "beats another if it is clearly better in TPOT or in decode tokens/s (the intervals do not overlap) and not clearly "
        "worse in the other. A point without both figures is neither on the front nor beaten.",
    ),
    Item(
        "Not ranked:",
        "a point with an implausible figure, whose unprofiled pass is not complete, or that ran on different hardware from most. "
        "Its row is shown, but it is on no chart, not on the front, and never the best.",
    ),
    Item("Decode is, prefill is:", f"what a change must address first, as in the report of the run. {EVIDENCE}"),
    *[Item(f"{shown_verdict(word).capitalize()}:", meaning) for word, meaning in VERDICTS],
]


def _figures(row: SweepRow) -> list[Cell | Missing]:
    return [
        *[_with_interval(row.metrics.get(key, Missing("not measured"))) for key in ("tpot", "ttft")],
        cell(row.median("e2e"), duration),
        *[cell(row.median(key), significant) for key in ("decode_rate", "output_rate")],
        cell(row.roofline_ns, duration),
        cell(row.times_floor, times),
    ]


def _with_interval(value: Maybe[Distribution]) -> Cell | Missing:
    if isinstance(value, Missing):
        return value
    ends = known(interval(value, "ns"), known_within(value, "ns"))
    return Cell(duration(value.median), value.median, below=f"({ends})")


def _standing(row: SweepRow, front: set[int]) -> Maybe[str]:
    """Return whether a point is on the front; one without TPOT or throughput is neither on it nor beaten."""
    if not row.ranked:
        return "not ranked"
    lost = missing((key, row.median(key)) for key in ("tpot", "decode_rate"))
    return Missing(lost[0][1]) if lost else "yes" if row.number in front else "no"


def _heads(rows: Sequence[SweepRow]) -> list[Column]:
    """Return columns for the number and the swept values, named by the last word of each key where that is unique."""
    keys = swept_keys(rows)
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return [
        Column("#", number=True),
        *[Column(short if last.count(short) == 1 else key) for key, short in zip(keys, last, strict=True)],
    ]


def _names(row: SweepRow, keys: Sequence[str]) -> list[Cell]:
    return [Cell(str(row.number), row.number, link=row.page), *[_value(row.values.get(key, "")) for key in keys]]


def _points(rows: Sequence[SweepRow]) -> Table:
    columns = [*_heads(rows), Column("status"), Column("front"), *numbers("TPOT", "TTFT", *_FIGURES[:3])]
    caption = "Every point; its number links to its report. In brackets: the 95 % interval or, with too few repeats, their range"
    made = Table("points-table", caption, columns, tools=True)
    front = {row.number for row in pareto_front(rows)}
    for row in rows:
        made.add(*_names(row, swept_keys(rows)), row.status, _standing(row, front), *_figures(row)[:5])
    return made


def _bounds(rows: Sequence[SweepRow]) -> Table:
    columns = [*_heads(rows), Column("decode is"), Column("prefill is"), *numbers(*_FIGURES[3:], "repeats", "warnings")]
    caption = "What a change to each point must address first, and how far it is from its roofline time"
    made = Table("bounds-table", caption, columns)
    for row in rows:
        bounds = [then(bound, shown_verdict) for bound in (row.decode_bound, row.prefill_bound)]
        made.add(
            *_names(row, swept_keys(rows)), *bounds, *_figures(row)[5:],
            cell(row.repeats), count_cell(row.warnings),
        )  # fmt: skip
    return made


def _value(text: str) -> Cell:
    return Cell(text, number_of(text))


def _tradeoff(rows: Sequence[SweepRow]) -> list[Block]:
    caption = (
        f"TPOT against decode throughput; bars: {bar_words(rows)}; rings: the Pareto front, points that no other point beats; "
        "the marker shows what bounds decode"
    )
    left_out = sum(not row.ranked for row in rows)
    notes = [f"{left_out} of {len(rows)} points are not ranked and not shown."] if left_out else []
    drawn = tradeoff_chart(rows, pareto_front(rows))
    return when_known("Latency against throughput:", drawn, lambda chart: [Chart("tradeoff-chart", caption, chart, notes=notes)])


def _parameters(rows: Sequence[SweepRow]) -> list[Block]:
    blocks: list[Block] = []
    for number, key in enumerate(swept_keys(rows)):
        caption = f"Over {key}; bars: {bar_words(rows)}; dashed: the value at the roofline time"
        blocks += when_known(f"Over {key}:", parameter_chart(rows, key), partial(_parameter, number, caption))
    return blocks or [Unavailable("Swept parameters:", "nothing differs between the points")]


def _parameter(number: int, caption: str, chart: dict[str, Any]) -> list[Block]:
    return [Chart(f"parameter-{number}", caption, chart)]
