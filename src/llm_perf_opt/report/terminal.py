"""Render a document as plain text for a terminal of 100 columns."""

import re
import textwrap
from collections.abc import Sequence

from llm_perf_opt.core.terminal import one_line, visible
from llm_perf_opt.report.document import (
    Advice,
    AdviceCards,
    Banner,
    Block,
    Cards,
    Cell,
    Chart,
    Code,
    Document,
    Drawings,
    Items,
    StackedBar,
    Table,
    Unavailable,
)

WIDTH = 100
_NARROWEST = 16
"""The least width of a column of names."""
_TAIL = 15
"""Characters kept at the end of a shortened name."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[nµm]?s|%|[kMGT]?(?:B|FLOP)|[KMG]iB)(?!\w))")
_NO_BREAK = "\u00a0"


def render_text(document: Document) -> str:
    """Return the document as text of at most 100 columns, except for wide tables."""
    head = [one_line(document.title), _wrapped(document.subtitle), _wrapped(document.notice)]
    parts = ["\n".join(line for line in head if line) + "\n"]
    for section in document.sections:
        blocks = [text for block in section.blocks if (text := block_text(block))]
        if blocks:
            title = f"{one_line(section.title)}\n" if section.title else ""
            parts.append(title + "\n".join(blocks) + "\n")
    return "\n".join(parts)


def block_text(block: Block) -> str:
    """Return a block as text; for a chart, only its notes."""
    if isinstance(block, Table):
        return table_text(block)
    if isinstance(block, Items):
        return "\n".join(_items(block))
    if isinstance(block, Code):
        return textwrap.indent(visible(block.text), "    ")
    if isinstance(block, Unavailable):
        return _wrapped(f"{block.what} n/a: {block.why}")
    if isinstance(block, Cards):
        return "\n".join(_wrapped(f"{card.name}: {card.value} {card.distance} {card.detail}") for card in block.cards)
    if isinstance(block, StackedBar):
        return _bar(block)
    if isinstance(block, AdviceCards):
        return "\n".join(line for number, card in enumerate(block.cards, 1) for line in _advice(number, card))
    if isinstance(block, Banner):
        return "\n".join(_items(Items(block.items)))
    if isinstance(block, Drawings):
        return ""  # their notes explain marks that only the page has
    if isinstance(block, Chart):
        return "\n".join(_wrapped(f"- {note}", "  ") for note in block.notes)
    return _wrapped(block.text)


def _bar(block: StackedBar) -> str:
    rows = [[share.percent, share.time, f"{share.label} {share.within}".strip()] for share in block.shares]
    return "\n".join([_wrapped(f"{block.title} {block.detail}"), *aligned(rows, "rrl")])


def _joined(card: Advice) -> str:
    return "; ".join(text for text in (effect_words(card), card.request) if text)


def effect_words(card: Advice) -> str:
    """Return what a change saves, with its interval in brackets."""
    return f"{card.effect} ({card.within})" if card.within else card.effect


def _advice(number: int, card: Advice) -> list[str]:
    begin = f"{number}. "
    room = " " * len(begin)
    texts = (f"{begin}{card.title} [{card.id}]", f"{room}{_joined(card)}", f"{room}{card.evidence}")
    lines = [_wrapped(text, room) for text in texts if text.strip()]
    lines += [_wrapped(f"{room}tried: {card.tried}", room)] if card.tried else []
    if card.command:  # on one line, so that it can be copied
        lines.append(f"{room}try: {one_line(card.command)}")
    elif card.change:
        lines.append(_wrapped(f"{room}try: {card.change}", room))
    return [*lines, *[_wrapped(f"{room}· {detail}", f"{room}  ") for detail in card.details]]


def table_text(table: Table) -> str:
    """Return a table as text: caption, aligned columns, reasons of missing values, footnote."""
    table = table.shown
    rows = [[_text(cell) for cell in row] for row in table.body]
    named = [place for place in range(len(table.columns)) if any(row[place].is_name for row in table.body)]
    header = [one_line(column.name) for column in table.columns]
    _fit(header, rows, named)
    align = "".join("r" if column.number else "l" for column in table.columns)
    lines = [_wrapped(table.caption), columns(header, rows, align)]
    lines += [_wrapped(f"n/a ({letter}): {why}", "  ") for letter, why in table.marked_reasons]
    lines += [_wrapped(text, "  ") for text in table.dropped]
    return "\n".join(line for line in (*lines, _wrapped(table.foot)) if line)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Return aligned columns, two spaces apart, with each cell on one line."""
    return "\n".join(aligned([header, *rows], align))


def aligned(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return rows with each cell as wide as its column; `align` has l or r per column."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(align))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if letter == "r" else cell.ljust(width)
            for cell, width, letter in zip(row, widths, align, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return [line(row) for row in cells]


def shortened(name: str, most: int) -> str:
    """Return a name shortened in the middle, because both ends distinguish names."""
    text = one_line(name)
    tail = min(_TAIL, most // 3)
    return text if len(text) <= most else f"{text[: most - tail - 1]}…{text[-tail:]}"


def _fit(header: Sequence[str], rows: list[list[str]], named: Sequence[int]) -> None:
    """Shorten names until the rows fit the terminal."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    too_wide = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    for place in sorted(named, key=lambda place: -widths[place]):
        most = max(_NARROWEST, len(header[place]), widths[place] - max(0, too_wide))
        too_wide -= widths[place] - most
        for row in rows:
            row[place] = shortened(row[place], most)


def _text(cell: Cell) -> str:
    note = f" ({cell.note})" if cell.note else ""
    return "  " * cell.indent + f"{one_line(cell.text)}{note} {one_line(cell.below)}".strip()


def _items(block: Items) -> list[str]:
    lines = []
    for number, item in enumerate(block.items, 1):
        begin = f"{number}. " if block.ordered else "- "
        room = " " * len(begin)
        if item.head and item.details:
            lines += [_wrapped(f"{begin}{item.head}", room), *([_wrapped(f"{room}{item.text}", room)] if item.text else [])]
        else:
            lines.append(_wrapped(f"{begin}{item.head} {item.text}" if item.head else f"{begin}{item.text}", room))
        lines += [_wrapped(f"{room}· {detail}", f"{room}  ") for detail in item.details]
    return lines


def _wrapped(text: str, indent: str = "") -> str:
    """Return lines that fit the terminal; a number and its unit stay together."""
    shown = _BEFORE_UNIT.sub(_NO_BREAK, one_line(text))
    lines = textwrap.wrap(shown, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(_NO_BREAK, " ")
