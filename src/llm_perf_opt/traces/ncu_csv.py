"""Nsight Compute's CSV → `CounterReport`.

`read_ncu` reads the raw page (`--import F --page raw --csv --print-units base`): a column per counter, units in the second row.
`read_ncu_details` reads the details page: a row per counter, with rounded values, and labels instead of names unless
`--print-metric-name name` was given. Both read the layouts of 2022 to 2025.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.machine_records import CountedKernel, CounterProblem, CounterReport
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.traces.ncu_values import SMALLER, Decimal, Lines, Locale, Messages, Unit, number, opened, ranges, size, unit

MOST_VALUES = 3_000_000
"""Counter values in one report."""
MOST_COLUMNS = 50_000
UNKNOWN = -1
"""A process, device or stream that is not in the report."""
NO_SIZE = (0, 0, 0)
"""A launch whose grid or block is not in the report."""

_NAME, _METRIC = "Kernel Name", "Metric Name"
_IDENTITY = frozenset(
    {
        *("ID", "Process ID", "Process Name", "Host Name", _NAME, "Kernel Time", "Context", "Stream", "Block Size", "Grid Size"),
        *("Device", "CC", "Section Name", "Body Item Label", _METRIC, "Metric Unit", "Metric Value", "Rule Name", "Rule Type"),
        *("Rule Description", "Estimated Speedup Type", "Estimated Speedup", "Device Name", "API Call ID"),
    }
)
_ATTRIBUTE = "device__attribute_"
_EXPORT = "Export the report again: ncu --import F --page raw --csv --print-units base."


def read_ncu(path: Path) -> CounterReport:
    """Return every kernel of a raw page with its counters in base units. Damage is a ParseError or a problem of the report."""
    decimal = _decimal(path, details=False)
    messages = Messages()
    with opened(path) as file:
        lines = Lines(file, path, messages)
        table = _header(lines, path, messages)
        if table is None:
            return _without_table(path, messages)
        if _METRIC in table.at:
            raise ParseError(f"{path} is the details page.", _EXPORT)
        report = _wide(iter(lines), table, decimal, path)
    return _report(report, messages, decimal)


def read_ncu_details(path: Path) -> CounterReport:
    """Return the same for a details page, whose values are rounded. Two values with one label get the name of their section."""
    decimal = _decimal(path, details=True)
    messages = Messages()
    with opened(path) as file:
        lines = Lines(file, path, messages)
        table = _header(lines, path, messages)
        if table is None:
            return _without_table(path, messages)
        if not {_METRIC, "Metric Value"} <= table.at.keys():
            raise ParseError(f"{path} is not the details page.", _EXPORT)
        report = _long(iter(lines), table, decimal, path)
    return _report(report, messages, decimal)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """The positions of the columns."""

    header: Sequence[str]
    at: dict[str, int]
    pushed: int | None
    """The column of push/pop ranges."""
    started: int | None
    """The column of start/end ranges."""

    @property
    def counters(self) -> list[tuple[int, str]]:
        """The columns of the raw page with a counter; the first of two with the same name."""
        taken = {self.pushed, self.started}
        return [
            (index, name)
            for name, index in self.at.items()
            if name and name not in _IDENTITY and index not in taken and not name.startswith(_ATTRIBUTE)
        ]

    def cell(self, row: Sequence[str], name: str) -> str:
        index = self.at.get(name, len(row))
        return row[index].strip() if index < len(row) else ""


@dataclass
class _Read:
    """The result so far."""

    kernels: list[CountedKernel] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)
    problems: list[CounterProblem] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    values: int = 0
    damaged: int = 0

    def count(self, more: int, path: Path) -> None:
        self.values += more
        if self.values > MOST_VALUES:
            raise ParseError(f"{path} contains more than {MOST_VALUES:,} values.", SMALLER)


def _header(lines: Lines, path: Path, messages: Messages) -> _Table | None:
    """Return the columns of the header record, or None if ncu printed messages and no table."""
    for row in lines:
        names = [cell.strip() for cell in row]
        if _NAME in names and "ID" in names:
            if len(names) > MOST_COLUMNS:
                raise ParseError(f"{path} has {len(names):,} columns.", SMALLER)
            lines.table_found()
            at: dict[str, int] = {}
            for index, name in enumerate(names):
                at.setdefault(name, index)
            return _Table(names, at, _column(names, "Push/Pop_Range"), _column(names, "Start/Stop_Range"))
    if messages:
        return None
    raise ParseError(f"{path} has no table of Nsight Compute: no header contains {_NAME!r}.", _EXPORT)


def _column(names: Sequence[str], part: str) -> int | None:
    return next((index for index, name in enumerate(names) if part in name), None)


def _decimal(path: Path, *, details: bool) -> Maybe[Decimal]:
    """Return the decimal separator of a file, from all its cells: a single cell may be ambiguous."""
    locale = Locale()
    messages = Messages()
    with opened(path) as file:
        lines = Lines(file, path, messages)
        table = _header(lines, path, messages)
        if table is not None:
            taken = [table.at["Metric Value"]] if details and "Metric Value" in table.at else []
            taken = taken if details else [index for index, _ in table.counters]
            for row in lines:
                locale.look(row[index] for index in taken if index < len(row))
    return locale.decimal


def _wide(lines: Iterator[list[str]], table: _Table, decimal: Maybe[Decimal], path: Path) -> _Read:
    read = _Read()
    counters = table.counters
    first = next(lines, None)
    if first is None:
        return read
    has_units = not table.cell(first, "ID") and not table.cell(first, _NAME)
    scales = {name: unit(first[index] if has_units and index < len(first) else "") for index, name in counters}
    if not has_units:
        read.problems.append(CounterProblem("no_units", f"{path.name} has no row of units after its header.", True, _EXPORT))
        _wide_row(first, table, counters, scales, decimal, read)
    for row in lines:
        read.count(len(counters), path)
        _wide_row(row, table, counters, scales, decimal, read)
    known = set().union(*(kernel.counters for kernel in read.kernels))
    read.units = {name: scale.name for name, scale in scales.items() if name in known}
    return read


def _wide_row(
    row: list[str],
    table: _Table,
    counters: Sequence[tuple[int, str]],
    scales: dict[str, Unit],
    decimal: Maybe[Decimal],
    read: _Read,
) -> None:
    if not row:
        return
    if len(row) != len(table.header):
        read.damaged += 1
        return
    values: dict[str, Maybe[float]] = {}
    for index, name in counters:
        value = number(row[index], decimal)
        if value is None or (isinstance(value, Missing) and not row[index].strip() and "." not in name):
            continue  # not a counter: text, or an attribute that was not set
        values[name] = value if isinstance(value, Missing) else value * scales[name].factor
    kernel = _kernel(row, table, values)
    if kernel is None:
        read.damaged += 1
        return
    read.kernels.append(kernel)
    if not read.facts:
        read.facts = _facts(row, table)


def _long(lines: Iterator[list[str]], table: _Table, decimal: Maybe[Decimal], path: Path) -> _Read:
    read = _Read()
    found: dict[tuple[str, str], CountedKernel] = {}
    for row in lines:
        if not row:
            continue
        metric = table.cell(row, _METRIC)
        key = (table.cell(row, "ID"), table.cell(row, "Process ID"))
        if key not in found:
            kernel = _kernel(row, table, {})
            if kernel is None:
                read.damaged += 1
                continue
            found[key] = kernel
            read.facts = read.facts or _facts(row, table)
        if metric:
            read.count(1, path)
            _long_value(row, metric, table, decimal, found[key], read)
    read.kernels = list(found.values())
    return read


def _long_value(row: list[str], metric: str, table: _Table, decimal: Maybe[Decimal], kernel: CountedKernel, read: _Read) -> None:
    if len(row) <= table.at["Metric Value"]:
        read.damaged += 1
        return
    value = number(table.cell(row, "Metric Value"), decimal)
    if value is None:
        return
    scale = unit(table.cell(row, "Metric Unit"))
    if not isinstance(value, Missing):
        value *= scale.factor
    if kernel.counters.get(metric, value) != value:
        metric = f"{table.cell(row, 'Section Name')}: {metric}"
    kernel.counters.setdefault(metric, value)
    read.units.setdefault(metric, scale.name)


def _kernel(row: Sequence[str], table: _Table, values: dict[str, Maybe[float]]) -> CountedKernel | None:
    """Return the launch of a row, or None if its identity is damaged."""
    name = table.cell(row, _NAME)
    grid = _launch_size(row, table, "Grid Size", "grid", values)
    block = _launch_size(row, table, "Block Size", "block", values)
    identity = [_whole(table.cell(row, column)) for column in ("ID", "Process ID", "Device", "Stream")]
    if not name or grid is None or block is None or None in identity or not table.cell(row, "ID"):
        return None
    _, process, device, stream = (UNKNOWN if number is None else number for number in identity)
    started = ranges(row[table.started]) if table.started is not None and table.started < len(row) else ()
    pushed = ranges(row[table.pushed]) if table.pushed is not None and table.pushed < len(row) else ()
    return CountedKernel(name, process, device, stream, grid, block, started + pushed, values)


def _whole(cell: str) -> int | None:
    """Return the number of a process or device, UNKNOWN if the column is missing, or None if it is damaged."""
    if not cell:
        return UNKNOWN
    return int(cell) if cell.isascii() and cell.isdigit() and len(cell) <= 18 else None


def _launch_size(
    row: Sequence[str], table: _Table, column: str, kind: str, values: dict[str, Maybe[float]]
) -> tuple[int, int, int] | None:
    """Return a launch size from its column, or from the counters of an older ncu without that column."""
    if column in table.at:
        return size(table.cell(row, column))
    axes = [values.get(f"launch__{kind}_dim_{axis}") for axis in "xyz"]
    known = [int(value) for value in axes if isinstance(value, float)]
    if len(known) == 3:
        return known[0], known[1], known[2]
    whole = values.get(f"launch__{kind}_size")
    return (int(whole), 1, 1) if isinstance(whole, float) else NO_SIZE


def _facts(row: Sequence[str], table: _Table) -> dict[str, str]:
    """Return what the report states about the machine."""
    names = {"process": "Process Name", "compute_capability": "CC", "device_name": f"{_ATTRIBUTE}display_name"}
    return {key: value for key, column in names.items() if (value := table.cell(row, column))}


# --- problems ---------------------------------------------------------------------------------------------------------


def _without_table(path: Path, messages: Messages) -> CounterReport:
    problems = tuple(messages.problems())
    if not any(problem.fatal for problem in problems):
        problems += (_no_kernels(),)
    return CounterReport((), {}, problems)


def _no_kernels() -> CounterProblem:
    return CounterProblem(
        "no_kernels", "The report contains no kernel.", True, "Check the NVTX and kernel filters of the ncu pass."
    )


def _report(read: _Read, messages: Messages, decimal: Maybe[Decimal]) -> CounterReport:
    problems = [*messages.problems(), *read.problems]
    if not read.kernels and not any(problem.id == "no_kernels" for problem in problems):
        problems.append(_no_kernels())
    if read.damaged:
        what = f"{read.damaged} rows of the table are damaged or truncated and left out; {len(read.kernels)} kernels were read."
        problems.append(CounterProblem("damaged_rows", what, False, _EXPORT))
    if isinstance(decimal, Missing):
        problems.append(CounterProblem("locale", f"Numbers cannot be read: {decimal.why}.", True, "Run ncu with LC_ALL=C."))
    problems += _missing_counters(read.kernels)
    return CounterReport(tuple(read.kernels), read.units, tuple(problems), read.facts)


def _missing_counters(kernels: Sequence[CountedKernel]) -> Iterator[CounterProblem]:
    """Yield problems for counters without values: ncu reports n/a and success for an unknown name that contains a dot."""
    seen: dict[str, int] = {}
    lost: dict[str, int] = {}
    for kernel in kernels:
        for name, value in kernel.counters.items():
            if "." in name:
                seen[name] = seen.get(name, 0) + 1
                if isinstance(value, Missing):
                    lost[name] = lost.get(name, 0) + 1
    if not lost:
        return
    always = [name for name in lost if lost[name] == seen[name]]
    sometimes = [f"{name} ({count} of {seen[name]} kernels)" for name, count in lost.items() if count < seen[name]]
    remedy = "Check the names: llm-perf metrics check NAME --chip CHIP."
    if always:
        fatal = len(always) == len(seen)
        yield CounterProblem("counters_missing", f"These counters have no value in any kernel: {_listed(always)}.", fatal, remedy)
    if sometimes:
        yield CounterProblem(
            "counters_partly_missing", f"These counters have no value in some kernels: {_listed(sometimes)}.", False, remedy
        )


def _listed(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
