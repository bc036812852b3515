"""Render a document as plain text for a terminal of 100 columns."""

import re
import textwrap
from collections.abc import Sequence

from llm_perf_opt.core.terminal import one_line, visible
from llm_perf_opt.report.document import Block, Cards, Cell, Chart, Code, Document, Items, Table, Unavailable

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
        return "\n".join(_wrapped(f"{card.name}: {card.value} {card.detail}") for card in block.cards)
    if isinstance(block, Chart):
        return "\n".join(_wrapped(f"- {note}", "  ") for note in block.notes)
    return _wrapped(block.text)


def table_text(table: Table) -> str:
    """Return a table as text: caption, aligned columns, reasons of missing values, footnote."""
    rows = [[_text(cell) for cell in row] for row in table.body]
    named = [place for place in range(len(table.columns)) if any(row[place].is_name for row in table.body)]
    header = [one_line(column.name) for column in table.columns]
    _fit(header, rows, named)
    align = "".join("r" if column.number else "l" for column in table.columns)
    lines = [_wrapped(table.caption), columns(header, rows, align)]
    lines += [_wrapped(f"n/a ({letter}): {why}", "  ") for letter, why in table.marked_reasons]
    return "\n".join(line for line in (*lines, _wrapped(table.foot)) if line)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Return aligned columns, two spaces apart, with each cell on one line."""
    head, *body = [[one_line(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[index]) for row in (head, *body)) for index in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if letter == "r" else cell.ljust(width)
            for cell, width, letter in zip(cells, widths, align, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(head), *[line(row) for row in body]])


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
