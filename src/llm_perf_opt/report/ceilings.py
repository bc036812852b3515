"""The measured peaks of a device."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from llm_perf_opt.core.machine_records import CeilingRow, Ceilings, FoundCeilings
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import BYTE_RATE, FLOP_RATE, TIME, in_unit, scale_of
from llm_perf_opt.report.document import Cell, Column, Document, Paragraph, Section, Table, bullets, cell, count_cell, numbers
from llm_perf_opt.report.text import bytes_per_s, ends, flops_per_s, known, percent, seconds, then

_SCALES = {"FLOP/s": FLOP_RATE, "B/s": BYTE_RATE, "ns": TIME}
_GPU_ONLY = frozenset({"gemm_tf32", "gemm_fp8", "launch_eager", "launch_graph", "sync", "launch_sync", "item"})
_LINKS = frozenset({"h2d_pinned", "d2h_pinned", "h2d_pageable", "d2h_pageable", "peer_copy", "all_reduce"})
_GROUPS = ("Matrix products", "Bandwidth", "Links", "Number of threads", "Linear layers of the model", "Calls and launches")


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
    foot = "IQR: interquartile range, in percent of the median. The interval is that of the median."
    notes = [foot, *known(kept, []), *[f"note: {note}" for note in found.notes]]
    sections = [
        Section("conditions", "", [bullets(ceilings.conditions)]),
        *(Section(f"peaks-{number}", "", [_table(name, rows)]) for number, (name, rows) in enumerate(_grouped(ceilings))),
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


def _grouped(ceilings: Ceilings) -> list[tuple[str, list[CeilingRow]]]:
    """Return the rows that this kind of device can have, by subject."""
    groups: dict[str, list[CeilingRow]] = {name: [] for name in _GROUPS}
    for row in ceilings.rows:
        if ceilings.device_kind != "cpu" or row.key not in _GPU_ONLY:
            groups[_group(row.key)].append(row)
    return [(name, rows) for name, rows in groups.items() if rows]


def _group(key: str) -> str:
    products, moves, links, threads, model, calls = _GROUPS
    if key in _LINKS:
        return links
    if "model_" in key:
        return model
    if key.startswith("threads_"):
        return threads
    if key.startswith("gemm_"):
        return products
    return moves if key in ("copy", "gemv") or key.startswith("read") else calls


def _table(title: str, rows: Sequence[CeilingRow]) -> Table:
    columns = [Column("quantity"), *numbers("median", "95 % interval", "IQR", "n"), Column("how")]
    table = Table(f"peaks-{title.split()[0].lower()}", title, columns)
    for row in rows:
        table.add(_label(row), *_cells(row))
    return table


def _label(row: CeilingRow) -> str:
    if not row.instructions:
        return row.label
    return f"{row.label} ({row.instructions}{', emulated' if row.native is False else ''})"


def _how(row: CeilingRow) -> str:
    show = flops_per_s if row.key.startswith("model_gemm") else bytes_per_s
    rate = known(then(row.rate, lambda found: f": {show(found)}"), "")
    return f"{row.how}{rate} [{row.conditions}]" if row.conditions else f"{row.how}{rate}"


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
        _how(row),
    ]


def _age(age: float) -> str:
    whole = timedelta(seconds=round(age))
    if whole >= timedelta(days=1):
        return f"{whole.days} day{'s' if whole.days > 1 else ''}"
    for size, unit in ((3600, "h"), (60, "min")):
        if whole.seconds >= size:
            return f"{whole.seconds // size} {unit}"
    return f"{whole.seconds} s"
