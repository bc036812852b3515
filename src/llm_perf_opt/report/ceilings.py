"""The measured peaks of a device."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from llm_perf_opt.core.machine_records import CeilingRow, FoundCeilings
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import BYTE_RATE, FLOP_RATE, TIME, in_unit, scale_of
from llm_perf_opt.report.document import Cell, Column, Document, Paragraph, Section, Table, bullets, cell, count_cell, numbers
from llm_perf_opt.report.text import ends, known, percent, seconds, then

_SCALES = {"FLOP/s": FLOP_RATE, "B/s": BYTE_RATE, "ns": TIME}


def age_s(found: FoundCeilings, now: datetime) -> float:
    """Return the age of the measured peaks in seconds; never negative, even if the clock was set back."""
    return max(0.0, (now - datetime.fromisoformat(found.ceilings.taken)).total_seconds())


def ceilings_document(found: FoundCeilings, now: datetime) -> Document:
    """Return the report: device, age and conditions, the measured peaks, notes."""
    ceilings = found.ceilings
    driver = known(then(ceilings.driver, lambda version: f", driver {version}"), "")
    title = f"{ceilings.device_name} ({ceilings.device_kind}, {ceilings.device_id}){driver}, torch {ceilings.torch_version}"
    source = f"cached {_age(age_s(found, now))} ago; --refresh measures again" if found.cached else "measured now"
    kept = then(found.cache_file, lambda file: [f"cached in {file}"])
    notes = [*known(kept, []), *[f"note: {note}" for note in found.notes]]
    sections = [
        Section("conditions", "", [bullets(ceilings.conditions)]),
        Section("peaks", "", [_table(ceilings.rows)]),
        Section("notes", "", [Paragraph(note) for note in notes]),
    ]
    return Document(title, f"{source} ({ceilings.taken}, in {seconds(ceilings.seconds)})", "", sections)


def ceilings_json(found: FoundCeilings, now: datetime) -> dict[str, object]:
    """Return the data that `--json` prints."""
    return {
        "cached": found.cached,
        "age_s": age_s(found, now),
        "cache_file": found.cache_file,
        "notes": found.notes,
        "ceilings": found.ceilings,
    }


def _table(rows: Sequence[CeilingRow]) -> Table:
    columns = [Column("quantity"), *numbers("median", "95 % interval", "IQR", "n"), Column("how")]
    foot = "IQR: interquartile range, in percent of the median. The interval is that of the median."
    table = Table("peaks-table", "", columns, foot=foot)
    for row in rows:
        table.add(row.label, *_cells(row))
    return table


def _cells(row: CeilingRow) -> list[Cell | Missing | str]:
    value = row.value
    if isinstance(value, Missing):
        return [value] * 5
    scale = scale_of(value.median, _SCALES[row.unit])
    middle: Maybe[float] = value.iqr / value.median if value.median else Missing("the median is zero")
    return [
        cell(value.median, lambda median: f"{in_unit(median, scale)} {scale[1]}"),
        cell(then(ends(value), lambda found: " – ".join(in_unit(end, scale) for end in found))),
        cell(middle, percent),
        count_cell(value.n),
        f"{row.how} [{row.conditions}]" if row.conditions else row.how,
    ]


def _age(age: float) -> str:
    whole = timedelta(seconds=round(age))
    if whole >= timedelta(days=1):
        return f"{whole.days} day{'s' if whole.days > 1 else ''}"
    for size, unit in ((3600, "h"), (60, "min")):
        if whole.seconds >= size:
            return f"{whole.seconds // size} {unit}"
    return f"{whole.seconds} s"
