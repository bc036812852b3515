"""Ceilings as a table for the terminal."""

from datetime import datetime, timedelta

from llm_perf_opt.core.machine_records import CeilingRow, FoundCeilings
from llm_perf_opt.core.records import Distribution, Missing
from llm_perf_opt.core.units import BYTE_RATE, FLOP_RATE, TIME, Scale, in_unit, scale_of
from llm_perf_opt.report.text import percent

_HEADER = ("quantity", "median", "95 % interval", "IQR", "n", "how")
_SCALES = {"FLOP/s": FLOP_RATE, "B/s": BYTE_RATE, "ns": TIME}


def age_s(found: FoundCeilings, now: datetime) -> float:
    """How long ago the ceilings were taken; a clock that was set back makes nothing negative."""
    return max(0.0, (now - datetime.fromisoformat(found.ceilings.taken)).total_seconds())


def ceilings_text(found: FoundCeilings, now: datetime) -> str:
    """Device, age and conditions, the table, and what did not go as it should."""
    ceilings = found.ceilings
    driver = "" if isinstance(ceilings.driver, Missing) else f", driver {ceilings.driver}"
    source = f"kept from {_age(age_s(found, now))} ago; --refresh measures anew" if found.cached else "measured now"
    lines = [
        f"{ceilings.device_name} ({ceilings.device_kind}, {ceilings.device_id}){driver}, torch {ceilings.torch_version}",
        f"{source} ({ceilings.taken}, in {ceilings.seconds:.1f} s)",
        *(f"- {condition}" for condition in ceilings.conditions),
        "",
        *_table([_cells(row) for row in ceilings.rows]),
        "",
        "IQR: the middle half of the samples, in percent of the median. Intervals are of the median.",
    ]
    if not isinstance(found.cache_file, Missing):
        lines.append(f"kept in {found.cache_file}")
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines) + "\n"


def ceilings_json(found: FoundCeilings, now: datetime) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "cached": found.cached,
        "age_s": age_s(found, now),
        "cache_file": found.cache_file,
        "notes": found.notes,
        "ceilings": found.ceilings,
    }


def _cells(row: CeilingRow) -> tuple[str, ...]:
    if isinstance(row.value, Missing):
        return (row.label, str(row.value))
    scale = scale_of(row.value.median, _SCALES[row.unit])
    how = f"{row.how} [{row.conditions}]" if row.conditions else row.how
    value = row.value
    spread = percent(value.iqr / value.median) if value.median else "n/a"
    return (row.label, f"{in_unit(value.median, scale)} {scale[1]}", _interval(value, scale), spread, str(value.n), how)


def _interval(value: Distribution, scale: Scale) -> str:
    if isinstance(value.ci_low, Missing) or isinstance(value.ci_high, Missing):
        return str(value.ci_low)
    return f"{in_unit(value.ci_low, scale)} – {in_unit(value.ci_high, scale)}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell; the reason of a missing value runs on."""
    full = [_HEADER, *(row for row in rows if len(row) == len(_HEADER))]
    first = max(len(row[0]) for row in (*full, *rows))
    widths = [first, *(max(len(row[column]) for row in full) for column in range(1, len(_HEADER) - 1))]
    lines = []
    for row in (_HEADER, *rows):
        if len(row) < len(_HEADER):
            lines.append(f"{row[0]:<{first}}  {row[1]}")
            continue
        middle = "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:], strict=True))
        lines.append(f"{row[0]:<{first}}  {middle}  {row[-1]}")
    return lines


def _age(seconds: float) -> str:
    whole = timedelta(seconds=round(seconds))
    if whole >= timedelta(days=1):
        return f"{whole.days} day{'s' if whole.days > 1 else ''}"
    for size, unit in ((3600, "h"), (60, "min")):
        if whole.seconds >= size:
            return f"{whole.seconds // size} {unit}"
    return f"{whole.seconds} s"
