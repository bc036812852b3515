"""A report as data: sections of paragraphs, lists, cards, charts and tables.

It is built once from an analysis; html.py, markdown.py and terminal.py render it, so all of them show the same. Text is plain:
each renderer escapes it for its own format.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from llm_perf_opt.core.records import Maybe, Missing

T = TypeVar("T")

MOST_REASONS = 3
"""A column without any value is dropped if at most this many reasons explain it."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    order: float | None = None
    """The sort key of a number."""
    whole: str = ""
    """The full text, if `text` is shortened."""
    link: str = ""
    """A file next to the page that the text links to."""
    note: str = ""
    """The mark of the reason, if the value is missing."""
    below: str = ""
    """Small print on its own line, such as the interval of a figure."""
    is_name: bool = False
    """Whether it is a name from a trace, which may be long and break anywhere."""
    indent: int = 0
    """Levels of indentation."""


@dataclass(frozen=True)
class Column:
    """The heading of a column; numbers are right-aligned."""

    name: str
    number: bool = False


@dataclass
class Table:
    """A table; with `tools`, it can be sorted and filtered in HTML."""

    id: str
    caption: str
    columns: Sequence[Column]
    tools: bool = False
    rows: list[list[Cell]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    foot: str = ""
    """How to read the table, and what is left out."""
    dropped: list[str] = field(default_factory=list)
    """The columns that `shown` leaves out, with the reasons."""
    facets: Sequence[str] = ()
    """Columns whose values can be selected in HTML. The page then holds the rows as data and shows some of them at a time."""
    block: ClassVar[str] = "table"

    def add(self, *values: Cell | Missing | str) -> None:
        """Append a row; a missing value becomes n/a with the mark of its reason."""
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
    def shown(self) -> "Table":
        """The table as renderers show it: a column in which every value is missing becomes a note with the reasons."""
        lost = self._lost_columns()
        kept = [place for place in range(len(self.columns)) if place not in lost]
        if not lost or len(kept) < 2:
            return self
        rows = [[row[place] for place in kept] for row in self.rows]
        used = {cell.note for row in rows for cell in row if cell.note}
        left = [(letter, why) for letter, why in self.marked_reasons if letter in used]
        marks = {letter: mark(index) for index, (letter, _) in enumerate(left)}
        names: dict[str, list[str]] = {}
        for place, why in lost.items():
            names.setdefault(why, []).append(self.columns[place].name)
        return replace(
            self,
            columns=[self.columns[place] for place in kept],
            rows=[[replace(cell, note=marks[cell.note]) if cell.note else cell for cell in row] for row in rows],
            reasons=[why for _, why in left],
            dropped=[f"{_listed(columns)}: n/a: {why}" for why, columns in names.items()],
        )

    def _lost_columns(self) -> dict[int, str]:
        """Return each column without a value and the reasons; not the first one, and none that needs too many reasons."""
        reasons = dict(self.marked_reasons)
        places = range(1, len(self.columns))
        empty = {
            place
            for place in places
            if any(row[place].note for row in self.rows) and not any(_has_value(row[place]) for row in self.rows)
        }
        found = {}
        for place in sorted(empty):
            marks = [(row[place].note, {row[other].note for other in places if other not in empty}) for row in self.rows]
            own = [letter for letter, elsewhere in marks if letter and letter not in elsewhere]  # not given in the row already
            why = dict.fromkeys(reasons[letter] for letter in own or [letter for letter, _ in marks if letter])
            if len(why) <= MOST_REASONS:
                found[place] = "; ".join(why)
        return found

    @property
    def body(self) -> list[list[Cell]]:
        """The rows; for an empty table, one row that says `none`."""
        return self.rows or [[Cell("none"), *[Cell("")] * (len(self.columns) - 1)]]

    @property
    def marked_reasons(self) -> list[tuple[str, str]]:
        """Mark and reason of each missing value."""
        return [(mark(index), why) for index, why in enumerate(self.reasons)]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `kind` is a class of the style sheet, `heading` a heading inside a section."""

    text: str
    kind: str = ""
    block: ClassVar[str] = "paragraph"


class Item(NamedTuple):
    """An entry of a list, with an optional bold head and details."""

    head: str
    text: str
    details: Sequence[str] = ()


@dataclass(frozen=True)
class Items:
    """A list, numbered if `ordered`."""

    items: Sequence[Item]
    kind: str = ""
    ordered: bool = False
    block: ClassVar[str] = "items"


class Image(NamedTuple):
    """An image file next to the reports."""

    title: str
    file: str


@dataclass(frozen=True)
class Chart:
    """A Plotly figure with a caption; `still` is an SVG for pages where no script runs."""

    id: str
    caption: str
    figure: dict[str, Any]
    still: str = ""
    notes: Sequence[str] = ()
    half: bool = False
    """Whether two charts fit next to each other."""
    image: Image | None = None
    """The file with this chart; several charts may share one."""
    block: ClassVar[str] = "chart"


class Drawing(NamedTuple):
    """A chart as an inline SVG in the colors of the page."""

    title: str
    svg: str


@dataclass(frozen=True)
class Drawings:
    """Charts of the same kind, of which the page shows the selected one."""

    id: str
    caption: str
    drawings: Sequence[Drawing]
    notes: Sequence[str] = ()
    block: ClassVar[str] = "drawings"


@dataclass(frozen=True)
class Code:
    """A command, or the output of a program."""

    text: str
    block: ClassVar[str] = "code"


@dataclass(frozen=True)
class Unavailable:
    """Something that cannot be shown, with the reason."""

    what: str
    why: str
    block: ClassVar[str] = "unavailable"


class Card(NamedTuple):
    """A key figure at the top of a report."""

    name: str
    value: str
    detail: str = ""
    distance: str = ""
    """How far it is from the roofline."""


@dataclass(frozen=True)
class Cards:
    """Key figures next to each other."""

    cards: Sequence[Card]
    block: ClassVar[str] = "cards"


class Share(NamedTuple):
    """One segment of a stacked bar."""

    label: str
    time: str
    percent: str
    size: float
    """Share of the bar's length, from 0 to 1."""
    color: str
    within: str = ""
    """The interval of an estimated time."""


@dataclass(frozen=True)
class StackedBar:
    """Where the time of a stage goes: one bar, and its segments as a legend."""

    id: str
    title: str
    detail: str
    """Distance from the roofline, and what bounds the stage."""
    shares: Sequence[Share]
    block: ClassVar[str] = "bar"

    @property
    def description(self) -> str:
        """The bar in words, for readers who cannot see it."""
        return f"{self.title}: " + ", ".join(f"{share.label} {share.percent}" for share in self.shares)


class Advice(NamedTuple):
    """A finding as a card: what to change, what it saves, and how to do it."""

    id: str
    title: str
    effect: str
    """What the change saves."""
    within: str = ""
    """The interval of that."""
    request: str = ""
    """The saving over a whole request, and the confidence."""
    evidence: str = ""
    """One sentence."""
    tried: str = ""
    """Predicted and measured time, if the change was tried."""
    command: str = ""
    """To copy; empty if the change is not a setting."""
    change: str = ""
    """The change in words, if there is no command."""
    details: Sequence[str] = ()
    """Folded in HTML."""


@dataclass(frozen=True)
class AdviceCards:
    """Findings, the largest saving first."""

    cards: Sequence[Advice]
    block: ClassVar[str] = "advice"


@dataclass(frozen=True)
class Banner:
    """Reasons to be careful with the figures, above everything else; details are folded in HTML."""

    items: Sequence[Item]
    block: ClassVar[str] = "banner"


Block = Paragraph | Items | Chart | Drawings | Table | Code | Unavailable | Cards | StackedBar | AdviceCards | Banner


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; without a title, they continue the section above."""

    id: str
    title: str
    blocks: Sequence[Block] = ()


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str
    notice: str
    """A notice at the top, for example that the run is partial; may be empty."""
    sections: Sequence[Section]

    @property
    def tables(self) -> list[Table]:
        """Every table, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Table)]


# --- building -----------------------------------------------------------------------------------------------------------


def cell(value: Maybe[T], show: Callable[[T], str] = str, mark: str = "") -> Cell | Missing:
    """Return a cell with a value, sorted by number. A missing value stays missing; its table marks the reason."""
    if isinstance(value, Missing):
        return value
    return Cell(f"{show(value)}{mark}", float(value) if isinstance(value, int | float) else None)


def name_cell(name: str, short: str | None = None) -> Cell:
    """Return a cell with a name, shown as `short` if that is given."""
    shown = (short if short is not None else name) or "(no name)"
    return Cell(shown, whole=name if shown != name and name else "", is_name=True)


def count_cell(number: int) -> Cell:
    """Return a cell with a count."""
    return Cell(f"{number:,}", number)


def numbers(*names: str) -> list[Column]:
    """Return columns of numbers."""
    return [Column(name, number=True) for name in names]


def bullets(texts: Iterable[str], kind: str = "") -> Items:
    """Return a list of plain sentences."""
    return Items([Item("", text) for text in texts], kind)


def when_known(what: str, value: Maybe[T], build: Callable[[T], Sequence[Block]]) -> list[Block]:
    """Return the blocks built from a value; for a missing value, a block with the reason."""
    return [Unavailable(what, value.why)] if isinstance(value, Missing) else list(build(value))


def _listed(names: Sequence[str]) -> str:
    """Return names in a list; some contain commas (`SM, % of peak`)."""
    return ("; " if any("," in name for name in names) else ", ").join(names)


def _has_value(cell: Cell) -> bool:
    return not cell.note and bool(cell.text or cell.below)


def mark(index: int) -> str:
    """Return the mark of a reason: a, b, … z, then numbers."""
    return chr(ord("a") + index) if index < 26 else str(index)
