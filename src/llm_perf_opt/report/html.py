"""Render a document as one self-contained HTML file. It fetches nothing, and names in it cannot become markup or script.

Its content security policy allows only the scripts written here, identified by their hashes.
"""

import base64
import hashlib
import importlib.resources
import json
import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from llm_perf_opt import __version__
from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.terminal import visible
from llm_perf_opt.report.document import Cell, Chart, Document, Drawings, Table
from llm_perf_opt.report.text import capitalized, code_parts

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_WITHOUT_SCRIPT = 50
"""Rows of a large table that the page shows without its script."""
MOST_BYTES = 8_000_000
"""The largest page that tests accept; browsers and mail can still handle it."""


_HALVES = re.compile("[\ud800-\udfff]")
_STILL = "Charts are static, and some are missing, because plotly was not installed when this page was written."


def _as_text(value: Any) -> Any:
    """Return a value for a template with control characters made visible; markup of the templates is unchanged."""
    from markupsafe import Markup

    return value if not isinstance(value, str) or isinstance(value, Markup) else visible(value)


def _prose(text: str) -> Any:
    """Return a sentence as markup: what stands between backticks is code."""
    from markupsafe import Markup, escape

    pieces = code_parts(visible(text))
    return Markup("").join(Markup("<code>{}</code>").format(piece) if code else escape(piece) for piece, code in pieces)


def render_html(document: Document) -> str:
    """Return the document as HTML."""
    environment = _environment()
    charts = {block.id: block.figure for section in document.sections for block in section.blocks if isinstance(block, Chart)}
    library = _plotly() if charts else ""
    if charts and not library:
        document = replace(document, notice=f"{document.notice} {_STILL}".strip())
    script = _template("page.js")
    rows = {table.id: _rows(table.shown) for table in document.tables if table.facets}
    drawn = any(isinstance(block, Drawings) for section in document.sections for block in section.blocks)
    more = _template("rows.js") if rows or drawn else ""
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; script-src "
        + " ".join(f"'{_hash(text)}'" for text in (library, script, more) if text)
    )
    made: str = environment.get_template("page.html.j2").render(
        page=document,
        made_by=f"llm-perf {__version__}",
        policy=policy,
        style=_template("page.css"),
        library=library,
        script=script,
        charts=script_data(charts),
        rows=script_data(rows),
        more=more,
        most_without_script=MOST_WITHOUT_SCRIPT,
    )
    return made


def _rows(table: Table) -> dict[str, Any]:
    """Return the rows of a large table as data for the script of the page: a cell is its text, or all that it shows."""
    names = [column.name for column in table.columns]
    return {
        "columns": [[column.name, column.number] for column in table.columns],
        "facets": [names.index(name) for name in table.facets if name in names],
        "rows": [[_cell(cell) for cell in row] for row in table.rows],
    }


def _cell(cell: Cell) -> Any:
    text = visible(cell.text)
    if cell.order is None and not (cell.link or cell.below or cell.whole):
        return text
    return [text, cell.order, cell.link and f"./{_quoted(cell.link)}", visible(cell.below), visible(cell.whole)]


def _quoted(path: str) -> str:
    """Return a path for a link; a name need not be UTF-8."""
    return quote(path.encode(errors="surrogateescape"))


@cache
def _environment() -> "Environment":
    """Return the environment; compiling the template takes longer than rendering it, so it is cached."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ResourceError("jinja2 is not installed, so no HTML page can be written.", "pip install jinja2") from error
    made = Environment(
        loader=PackageLoader("llm_perf_opt", "report/templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, finalize=_as_text,
    )  # fmt: skip
    made.filters["quoted"] = _quoted
    made.filters["capitalized"] = capitalized
    made.filters["prose"] = _prose
    return made


def script_data(value: Any) -> str:
    """Return JSON for a script element, escaped so that it cannot end the element or start a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


@cache
def _plotly() -> str:
    """Return plotly.min.js of the installed package; empty if it is not installed."""
    try:
        import plotly

        file = importlib.resources.files(plotly).joinpath("package_data").joinpath("plotly.min.js")
        return _one_script(file.read_text(encoding="utf-8"))
    except (ImportError, FileNotFoundError):
        return ""


@cache
def _template(name: str) -> str:
    file = importlib.resources.files("llm_perf_opt").joinpath("report").joinpath("templates").joinpath(name)
    return _one_script(file.read_text(encoding="utf-8"))


def _one_script(text: str) -> str:
    """Return a script as browsers read it, so that its hash matches. Raise ValueError if it would end its element."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    for end in ("</script", "</style", "<!--"):
        if end in text.lower():
            raise ValueError(f"the script contains {end!r} and cannot be put into a page")
    return text


@cache
def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
