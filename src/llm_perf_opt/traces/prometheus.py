"""Read metrics in the Prometheus text format, such as the output of the DCGM exporter.

https://prometheus.io/docs/instrumenting/exposition_formats/ defines the format.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.user_files import open_ordinary
from llm_perf_opt.core.value_limits import number_in

MOST_BYTES = 4 * 2**20
MOST_LINE_CHARS = 2**20
MOST_SERIES = 2000
"""Limits of one file; the DCGM exporter writes about 30 series per GPU."""

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"[^"\\]*(?:\\.[^"\\]*)*"'
# Two neighbouring `\s*` would try every split of a run of spaces, so a character always stands between them.
_LABELS = rf"\{{\s*(?:({_LABEL}(?:\s*,\s*{_LABEL})*)\s*)?(?:,\s*)?\}}"
_SAMPLE = re.compile(rf"({_NAME})(?:\s*{_LABELS}\s*|\s+)(\S+)(?:\s+-?\d+)?")
_TYPE = re.compile(rf"#\s*TYPE\s+({_NAME})\s+(counter|gauge|histogram|summary|untyped)")


@dataclass(frozen=True)
class PrometheusText:
    """The content of one file."""

    series: dict[str, float]
    """`NAME{labels}` → value. Values that are not finite, or beyond what 64 bits hold, are left out."""
    kinds: dict[str, str] = field(default_factory=dict)
    """NAME → counter, gauge, …, as far as the file says."""
    note: str = ""
    """What was left out; empty if nothing."""


def read_prometheus(path: Path) -> PrometheusText:
    """Return the series of a file, or raise a ParseError. Lines that are not samples are counted in the note."""
    try:
        with open_ordinary(path) as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    if len(content) > MOST_BYTES:
        raise ParseError(f"{path} is larger than {MOST_BYTES // 2**20} MiB.", "Write one scrape to the file, not many.")
    found = parse_prometheus(content.decode(errors="replace"))
    if not found.series:
        raise ParseError(
            f"{path} contains no metric in the Prometheus text format.",
            "Save the response of an exporter's /metrics as this file.",
        )
    return found


def parse_prometheus(text: str) -> PrometheusText:
    """Return the series of a text."""
    series: dict[str, float] = {}
    kinds: dict[str, str] = {}
    odd = more = 0
    for line in map(str.strip, text.splitlines()):
        if line.startswith("#") or not line:
            declared = _TYPE.fullmatch(line)
            if declared:
                kinds[declared[1]] = declared[2]
            continue
        sample = _SAMPLE.fullmatch(line) if len(line) <= MOST_LINE_CHARS else None  # a match takes 150 bytes per character
        value = _number(sample[3]) if sample else None
        if sample is None or value is None:
            odd += 1
        elif len(series) >= MOST_SERIES:
            more += 1
        elif number_in(value) is not None:
            series[f"{sample[1]}{{{sample[2]}}}" if sample[2] else sample[1]] = value
    notes = [f"{odd} lines are not samples"] if odd else []
    notes += [f"only the first {MOST_SERIES} of {MOST_SERIES + more} series are kept"] if more else []
    return PrometheusText(series, kinds, "; ".join(notes))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
