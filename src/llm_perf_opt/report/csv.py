"""Tables as CSV. A missing value is an empty cell; the reports show the reason."""

import csv
import io
from dataclasses import fields
from typing import Any

from llm_perf_opt.core.machine_records import CpuSample, GpuSample, Telemetry
from llm_perf_opt.core.records import Missing, OperatorRow
from llm_perf_opt.core.terminal import one_line

_FORMULA_STARTS = ("=", "+", "-", "@")


def operators_csv(rows: tuple[OperatorRow, ...]) -> str:
    """Return ops.csv: a row per operator."""
    names = [field.name for field in fields(OperatorRow)]
    return _csv(names, [[getattr(row, name) for name in names] for row in rows])


def telemetry_csv(telemetry: Telemetry) -> str:
    """Return nvml.csv: a row per reading, of the GPU or of the host."""
    gpu = [field.name for field in fields(GpuSample) if field.name != "at_ns"]
    cpu = [field.name for field in fields(CpuSample) if field.name != "at_ns"]
    samples: list[GpuSample | CpuSample] = sorted([*telemetry.gpu, *telemetry.cpu], key=lambda sample: sample.at_ns)
    rows = [[sample.at_ns, *[getattr(sample, name, None) for name in (*gpu, *cpu)]] for sample in samples]
    return _csv(["at_ns", *gpu, *cpu], rows)


def rows_csv(header: list[str], rows: list[list[Any]]) -> str:
    """Return the rows of a query as CSV."""
    return _csv([str(_cell(name)) for name in header], rows)


def _csv(header: list[str], rows: list[list[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Return a cell; text is put on one line, and a quote keeps spreadsheets from running it as a formula."""
    if value is None or isinstance(value, Missing):
        return ""
    if not isinstance(value, str):
        return value
    text = one_line(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA_STARTS) else text
