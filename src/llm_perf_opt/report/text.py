"""Numbers and tables as text. A missing value shows its reason; names are data and cannot become markup."""

import re
from collections.abc import Sequence

from llm_perf_opt.core.records import Distribution, Drift, Maybe, Missing
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.core.units import BYTE_RATE, FLOP_RATE, SHARE, duration, durations, scaled
from llm_perf_opt.core.units import significant as significant

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


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """A Markdown table; `align` holds l or r per column. A table without rows says so."""
    marks = {"l": "---", "r": "---:"}
    align = align or "l" * len(header)
    body = rows or [["none", *[""] * (len(header) - 1)]]
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(marks[letter] for letter in align) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join(lines) + "\n"


def milliseconds(ns: Maybe[float]) -> str:
    """Nanoseconds in the unit that suits them."""
    return reason(ns) if isinstance(ns, Missing) else duration(ns)


def signed(ns: float) -> str:
    """A difference of two times, with its sign."""
    return f"{'+' if ns > 0 else ''}{duration(ns)}"


def flops_per_s(rate: float) -> str:
    """A rate of computing: 12.34 TFLOP/s, 62.10 MFLOP/s."""
    return scaled(rate, FLOP_RATE)


def bytes_per_s(rate: float) -> str:
    """A rate of moving."""
    return scaled(rate, BYTE_RATE)


def fine_percent(share: float) -> str:
    """A share with three significant digits, however small."""
    return scaled(share, SHARE, 3)


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
    if unit == "ns":
        return durations(value.ci_low, value.ci_high, around_ns=value.median)
    return f"{significant(value.ci_low)} – {significant(value.ci_high)}"


def known_within(value: Distribution, unit: str) -> str:
    """What a median is known within: its 95 % interval, or the range of the values where they are too few for one."""
    if not isinstance(value.ci_low, Missing):
        return f"95 %: {interval(value, unit)}, n = {value.n}"
    if value.n == 1:
        return "one value"
    ends = value.minimum, value.maximum
    words = durations(*ends, around_ns=value.median) if unit == "ns" else " – ".join(map(significant, ends))
    return f"range of {value.n} values: {words}"


def bounds(value: Distribution, unit: str) -> str:
    """A cell for the interval of a median; of few values their range."""
    return known_within(value, unit) if isinstance(value.ci_low, Missing) and value.n > 1 else interval(value, unit)


def growth(found: Drift) -> str:
    """How a decode step's time grows with the context; a slope that may be none, or is below zero, is no figure."""
    contexts = f"from context {found.first_context} to {found.last_context}"
    if isinstance(found.ci_low, Missing) or isinstance(found.ci_high, Missing):
        return f"not known {contexts}: {found.ci_low.why if isinstance(found.ci_low, Missing) else found.ci_high}"
    if min(found.ci_low, found.ns_per_token) <= 0:
        return f"no growth measurable {contexts}"
    return (
        f"{duration(found.ns_per_token)} per cached token (95 % interval {durations(found.ci_low, found.ci_high)}), "
        f"{found.share:+.1%} {contexts}"
    )


def spread(value: Distribution, unit: str) -> str:
    """The interquartile range."""
    return with_unit(value.iqr, unit)


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
