"""Tables for the page: cells with what they are sorted by, and below each table why a value is missing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llm_perf_opt.core.records import Maybe, Missing


@dataclass(frozen=True)
class Cell:
    """One value as it is read."""

    text: str
    order: float | None = None
    """What a column of numbers is sorted by."""
    whole: str = ""
    """The whole of a shortened text."""
    link: str = ""
    """A place beside the page that the text leads to."""
    note: str = ""
    """The mark of the reason, where there is no value."""
    below: str = ""
    """Small print in a line of its own, such as the interval of a figure."""
    is_name: bool = False
    """A name out of a trace: it may be long, and breaks anywhere."""


@dataclass(frozen=True)
class Column:
    """A column's heading; numbers stand on the right."""

    name: str
    number: bool = False


@dataclass
class HtmlTable:
    """Rows of cells. A large one (`tools`) can be sorted and filtered."""

    id: str
    caption: str
    columns: Sequence[Column]
    tools: bool = False
    rows: list[list[Cell]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    foot: str = ""
    """What was left out, if anything."""

    def add(self, *values: Cell | Missing | str) -> None:
        """A row; a missing value becomes n/a with the mark of its reason."""
        if len(values) != len(self.columns):
            raise ValueError(f"{self.id}: {len(values)} cells for {len(self.columns)} columns")
        self.rows.append([self._cell(value) for value in values])

    def _cell(self, value: Cell | Missing | str) -> Cell:
        if isinstance(value, str):
            return Cell(value)
        if isinstance(value, Cell):
            return value
        if value.why not in self.reasons:
            self.reasons.append(value.why)
        return Cell("n/a", note=mark(self.reasons.index(value.why)))

    @property
    def marked_reasons(self) -> list[tuple[str, str]]:
        """Mark and reason of everything that is missing."""
        return [(mark(index), why) for index, why in enumerate(self.reasons)]


def mark(index: int) -> str:
    """a, b, … z, then numbers."""
    return chr(ord("a") + index) if index < 26 else str(index)


def numbers(*names: str) -> list[Column]:
    """Columns of numbers."""
    return [Column(name, number=True) for name in names]


def figure(value: Maybe[float], show: Callable[[float], str]) -> Cell | Missing:
    """A number in words, sorted by what it is."""
    return value if isinstance(value, Missing) else Cell(show(value), float(value))


def name_cell(name: str, short: str | None = None) -> Cell:
    """A name, shortened where it is told so, the whole kept."""
    shown = (short if short is not None else name) or "(no name)"
    return Cell(shown, whole=name if shown != name and name else "", is_name=True)
