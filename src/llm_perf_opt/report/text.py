"""Numbers and tables as text. A missing value shows its reason; names are data and cannot become markup."""

import math
import re
from collections.abc import Sequence

from llm_perf_opt.records import Distribution, Maybe, Missing
from llm_perf_opt.terminal import one_line

_ESCAPED = str.maketrans({char: f"\\{char}" for char in "\\`*[]<>|#~$!&"})
_EDGE_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def escape(name: str) -> str:
    """A name from a trace, a model or a dataset as literal Markdown text on one line."""
    return _EDGE_UNDERSCORE.sub(r"\\_", one_line(name).translate(_ESCAPED))


def reason(missing: Missing) -> str:
    """Why a value is not there, as text: a reason may quote anything, a tool's whole output included."""
    return escape(str(missing))


def count(number: int) -> str:
    """A large count as people say it."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:  # what rounds up to the next unit is said in it
            return f"{number / size:.3g} {letter}"
    return str(number)


def byte_count(number: int) -> str:
    """Bytes on a disk in the unit in which they are read: never 0.0 of a larger one."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= 0.99995 * size:  # what rounds up to the next unit is said in it
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """A Markdown table; `align` holds l or r per column. A table without rows says so."""
    marks = {"l": "---", "r": "---:"}
    align = align or "l" * len(header)
    body = rows or [["none", *[""] * (len(header) - 1)]]
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(marks[letter] for letter in align) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join(lines) + "\n"


def significant(value: float, digits: int = 4) -> str:
    """A number with `digits` significant digits and no exponent in the range people read."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.9996 has one digit more before the point than it seems
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def milliseconds(ns: Maybe[float]) -> str:
    """Nanoseconds shown as milliseconds."""
    return reason(ns) if isinstance(ns, Missing) else f"{significant(ns / 1e6)} ms"


def gibibytes(count: Maybe[int]) -> str:
    """Bytes shown as GiB, or MiB where that is clearer."""
    if isinstance(count, Missing):
        return reason(count)
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"


def with_unit(value: Maybe[float], unit: str) -> str:
    """A figure in its metric's unit."""
    if isinstance(value, Missing):
        return reason(value)
    return milliseconds(value) if unit == "ns" else f"{significant(value)} {unit}"


def percent(share: Maybe[float], digits: int = 1) -> str:
    """A share shown in percent."""
    return reason(share) if isinstance(share, Missing) else f"{share * 100:.{digits}f} %"


def share_words(share: float) -> str:
    """A share in percent where a small one must not look like none."""
    return "under 0.1 %" if 0 < abs(share) < 0.0005 else percent(share)


def interval(value: Distribution, unit: str) -> str:
    """The 95 % interval of a median."""
    if isinstance(value.ci_low, Missing):
        return reason(value.ci_low)
    if isinstance(value.ci_high, Missing):
        return reason(value.ci_high)
    return f"{_bare(value.ci_low, unit)} – {_bare(value.ci_high, unit)}"


def spread(value: Distribution, unit: str) -> str:
    """The interquartile range."""
    return with_unit(value.iqr, unit)


def _bare(value: float, unit: str) -> str:
    return significant(value / 1e6) if unit == "ns" else significant(value)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A table for the terminal: aligned columns, two spaces apart; each cell stays on its line."""
    head, *body = [[one_line(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[index]) for row in (head, *body)) for index in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if letter == "r" else cell.ljust(width)
            for cell, width, letter in zip(cells, widths, align, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), *[line(row) for row in body]])
