"""Reads Markdown as a renderer does, so that tests see what a reader would see."""

from dataclasses import dataclass, field

from markdown_it import MarkdownIt
from markdown_it.token import Token

_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_PLAIN = {"text", "text_special", "softbreak"}


@dataclass
class Page:
    """A page's headings, tables and the markup found in its text."""

    headings: list[str] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)
    """Each a list of rows of cells, the header first."""
    fences: list[str] = field(default_factory=list)
    text: str = ""
    markup: list[str] = field(default_factory=list)
    """Kinds of inline markup used anywhere: strong, link, html_inline, image of FILE …"""

    def section(self, heading: str) -> bool:
        """Whether the page has this heading."""
        return heading in self.headings


def read(source: str) -> Page:
    """The page a renderer would make of `source`."""
    page = Page()
    previous: Token | None = None
    for token in _PARSER.parse(source):
        if token.type == "table_open":
            page.tables.append([])
        elif token.type == "tr_open":
            page.tables[-1].append([])
        elif token.type == "inline":
            text = plain(token, page.markup)
            page.text += text + "\n"
            if previous is not None and previous.type == "heading_open":
                page.headings.append(text)
            if previous is not None and previous.type in ("th_open", "td_open"):
                page.tables[-1][-1].append(text)
        elif token.type == "fence":
            page.fences.append(token.content)
        elif token.type in ("html_block", "code_block", "blockquote_open", "hr"):
            page.markup.append(token.type)
        previous = token
    return page


def plain(inline: Token, markup: list[str] | None = None) -> str:
    """The text of an inline token; kinds of markup in it are added to `markup`."""
    text = ""
    for child in inline.children or []:
        text += "\n" if child.type == "softbreak" else child.content
        if child.type not in _PLAIN and markup is not None:
            kind = child.type.removesuffix("_open").removesuffix("_close")
            markup.append(f"image of {child.attrs['src']}" if kind == "image" else kind)
    return text


def inline_text(source: str) -> tuple[str, list[str]]:
    """What a line of text reads as, and the markup found in it."""
    markup: list[str] = []
    (token,) = _PARSER.parseInline(source)
    return plain(token, markup), markup


def uneven_tables(source: str) -> list[str]:
    """Lines of tables whose number of cells differs from the row of dashes: a renderer would drop or invent cells."""
    uneven, wanted = [], 0
    for line in source.splitlines():
        if not line.startswith("|"):
            wanted = 0
            continue
        bars = _bars(line)
        wanted = wanted or bars
        if bars != wanted:
            uneven.append(line)
    return uneven


def _bars(line: str) -> int:
    count, escaped = 0, False
    for char in line:
        count += char == "|" and not escaped
        escaped = char == "\\" and not escaped
    return count
