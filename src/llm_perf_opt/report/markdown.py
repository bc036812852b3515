"""Render a document as Markdown. Text is escaped, so that nothing in it can become markup."""

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.terminal import one_line, visible
from llm_perf_opt.report.document import (
    Advice,
    AdviceCards,
    Banner,
    Block,
    Cell,
    Chart,
    Code,
    Document,
    Drawings,
    Items,
    Paragraph,
    StackedBar,
    Table,
    Unavailable,
)
from llm_perf_opt.report.text import capitalized

_ESCAPED = str.maketrans({char: f"\\{char}" for char in "\\`*[]<>|#~$!&"})
_EDGE_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BLOCK_START = re.compile(r"^(\d{0,9})([-+=.)])(?=\s|[-=]|$)")
"""Matches what would start a list or underline a heading."""


def escape(name: str) -> str:
    """Return a text as literal Markdown on one line."""
    return _EDGE_UNDERSCORE.sub(r"\\_", one_line(name).translate(_ESCAPED))


def reason(missing: Missing) -> str:
    """Return `n/a:` and the reason, which may quote anything, such as the output of a tool."""
    return escape(str(missing))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> str:
    """Return a table of cells that are already Markdown; `align` has l or r per column. An empty table says `none`."""
    marks = {"l": "---", "r": "---:"}
    align = align or "l" * len(header)
    body = rows or [["none", *[""] * (len(header) - 1)]]
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(marks[letter] for letter in align) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join(lines) + "\n"


def render_markdown(document: Document) -> str:
    """Return the document as a Markdown page."""
    parts = [f"# {escape(document.title)}", _line(document.subtitle), _strong(document.notice)]
    images: set[str] = set()
    for section in document.sections:
        parts.append(f"## {escape(section.title)}" if section.title else "")
        for block in section.blocks:
            parts += _block(block, images)
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block, images: set[str]) -> list[str]:
    if isinstance(block, Paragraph):
        return [f"### {escape(block.text)}" if block.kind == "heading" else _line(block.text)]
    if isinstance(block, Items):
        return [_items(block)]
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Code):
        return [_fence(block.text)]
    if isinstance(block, Unavailable):
        return [f"{_strong(block.what)} n/a: {escape(block.why)}"]
    if isinstance(block, Chart):
        return _chart(block, images)
    if isinstance(block, Drawings):
        return [f"Charts, only in the HTML page: {escape(block.caption)}.", _list((_line(note) for note in block.notes), "*")]
    if isinstance(block, StackedBar):
        return _bar(block)
    if isinstance(block, AdviceCards):
        return [part for number, card in enumerate(block.cards, 1) for part in _advice(number, card)]
    if isinstance(block, Banner):
        return [_items(Items(block.items))]
    cards = [
        f"{_strong(card.name)} {escape(', '.join(filter(None, (card.value, card.distance))))} {escape(_bracketed(card.detail))}"
        for card in block.cards
    ]
    return [_list((card.strip() for card in cards), "*")]


def _fence(text: str) -> str:
    shown = visible(text).replace("```", "` ` `")
    return f"```\n{shown}\n```"


def _bar(block: StackedBar) -> list[str]:
    parts = [f"{share.label}: {share.time}, {share.percent} {_bracketed(share.within)}" for share in block.shares]
    return [f"{_strong(block.title)} {escape(block.detail)}".strip(), _list((_line(part) for part in parts), "*")]


def _advice(number: int, card: Advice) -> list[str]:
    return [
        f"### {number}. {escape(card.title)}",
        _strong(capitalized(f"{card.effect} {_bracketed(card.within)}")) + (f"; {escape(card.request)}" if card.request else ""),
        _line(card.evidence),
        f"{_strong('Tried:')} {escape(card.tried)}" if card.tried else "",
        _fence(card.command) if card.command else _line(card.change),
        _list([*[_line(detail) for detail in card.details], f"rule: {escape(card.id)}"]) if card.details else "",
    ]


def _items(block: Items) -> str:
    lines = []
    for number, item in enumerate(block.items, 1):
        begin = f"{number}. " if block.ordered else "- "
        text = escape(item.text).strip() if item.head else _line(item.text)
        lines.append(begin + f"{_strong(item.head)} {text}".strip())
        lines += [" " * len(begin) + f"- {_line(detail)}" for detail in item.details]
    return "\n".join(lines)


def _chart(chart: Chart, images: set[str]) -> list[str]:
    """Return a chart as its image; an image with several charts is linked once."""
    if chart.image is None:
        shown = [f"Chart, only in the HTML page: {escape(chart.caption)}."]
    else:
        shown = [] if chart.image.file in images else [f"![{escape(chart.image.title)}]({chart.image.file})"]
        images.add(chart.image.file)
    return [*shown, _list((_line(note) for note in chart.notes), "*")]


def _table(block: Table) -> list[str]:
    block = block.shown
    align = "".join("r" if column.number else "l" for column in block.columns)
    header = [escape(column.name) for column in block.columns]
    made = table(header, [[_cell(cell) for cell in row] for row in block.body], align)
    reasons = _list([
        *[f"n/a ({letter}): {escape(why)}" for letter, why in block.marked_reasons],
        *[_line(text) for text in block.dropped],
    ])  # fmt: skip
    return [_strong(block.caption), made.rstrip("\n"), reasons, _line(block.foot)]


def _cell(cell: Cell) -> str:
    note = f" ({cell.note})" if cell.note else ""
    shown = f"[{escape(cell.text)}](./{quote(cell.link, errors='replace')})" if cell.link else escape(cell.text)
    return "&nbsp;&nbsp;" * cell.indent + f"{shown}{note} {escape(cell.below)}".strip()


def _list(lines: Iterable[str], bullet: str = "-") -> str:
    """Return a list; two adjacent lists need different bullets to stay separate."""
    return "\n".join(f"{bullet} {line}" for line in lines)


def _line(text: str) -> str:
    """Return text for the start of a line, escaped so that it does not start a list."""
    return _BLOCK_START.sub(r"\1\\\2", escape(text).strip())


def _strong(text: str) -> str:
    shown = escape(text).strip()
    return f"**{shown}**" if shown else ""


def _bracketed(text: str) -> str:
    return f"({text})" if text else ""
