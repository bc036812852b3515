"""Print the views of `llm-perf runs` over many runs, and write their page."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.cli.shared import print_json
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.host import without_garbage_collection
from llm_perf_opt.core.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_perf_opt.analysis.fleet import Fleet, FleetRun
    from llm_perf_opt.workflows.fleet import Filters

_ROWS = 20
_WORTH_A_NOTE = 200
"""Runs that take more than a second to read."""
PAGE = "index.html"
_LONGEST_WHY = 60
_MOST_NAMED = 10


def show_fleet(
    folder: Path,
    filters: "Filters",
    views: set[str],
    *,
    html: str | None,
    metric: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Show the runs that match, or the views of them."""
    from llm_perf_opt.workflows.fleet import DEFAULT_METRIC, check_metric, find_fleet, view_fleet

    key = check_metric(metric or DEFAULT_METRIC)
    if metric and not views:
        raise ConfigError("--metric alone has no effect.", "Add --best, --trend, --regressions or --html.")
    if limit is not None and views:
        raise ConfigError("--limit restricts the list only.", "Omit it, or narrow the runs with --model, --hardware or --since.")
    page = None if html is None else _page(folder, html)
    index, runs = find_fleet(folder, filters, _note)
    if index.unkept:
        print(
            f"The index of the runs could not be kept, so the next command reads all runs again: {index.unkept}", file=sys.stderr
        )
    if not views:
        _print_runs(runs, len(index.runs), folder, _ROWS if limit is None else limit, as_json)
        return
    _print_unreadable([entry.run for entry in index.runs.values()])
    found = view_fleet(index, runs, key, filters, compared=bool(views & {"regressions", "html"}), page=page)
    if page is not None:
        _write_page(found, page)
    if as_json:
        print_json(_as_data(found, views))
    elif views - {"html"}:
        sys.stdout.write(_text(found, views))
    if page is not None:
        print(f"{counted(len(runs), 'run')}: {page}", file=sys.stderr if as_json else sys.stdout)


def _print_unreadable(runs: "Sequence[FleetRun]") -> None:
    """Name the runs that no view shows because they cannot be read."""
    from llm_perf_opt.core.run_status import UNREADABLE

    unread = [run for run in runs if run.status == UNREADABLE]
    for run in unread[:_MOST_NAMED]:
        print(f"warning: {run.path} is not readable: {run.why}", file=sys.stderr)
    if len(unread) > _MOST_NAMED:
        more = len(unread) - _MOST_NAMED
        print(f"warning: {counted(more, 'more run')} {'is' if more == 1 else 'are'} not readable.", file=sys.stderr)


def _note(runs: int) -> None:
    if runs >= _WORTH_A_NOTE:
        print(f"Reading {runs} new or changed runs; later commands take their facts from an index.", file=sys.stderr)


def _page(folder: Path, html: str) -> Path:
    page = Path(html) if html else folder / PAGE
    if page.is_dir():
        raise ConfigError(f"--html {page} is a folder.", f"Name a file: --html={page / PAGE}.")
    if page.exists() and not _is_own(page):
        raise ConfigError(f"{page} exists and was not written by llm-perf.", "Remove it, or name another file: --html FILE.html.")
    return page


def _is_own(page: Path) -> bool:
    from llm_perf_opt.core.user_files import open_ordinary

    with open_ordinary(page) as file:
        return b'<meta name="generator" content="llm-perf ' in file.read(4096)


def _write_page(found: "Fleet", page: Path) -> None:
    from llm_perf_opt.core.run_folder import write_whole
    from llm_perf_opt.report.fleet import fleet_document
    from llm_perf_opt.report.html import render_html

    with without_garbage_collection():
        content = render_html(fleet_document(found)).encode()
    write_whole(page.parent, page, content)


def _text(found: "Fleet", views: set[str]) -> str:
    from llm_perf_opt.report.document import Document, Section
    from llm_perf_opt.report.fleet import best_blocks, changes_blocks, trend_blocks
    from llm_perf_opt.report.terminal import render_text

    sections = [
        Section(name, title, blocks(found))
        for name, title, blocks in (
            ("best", "Best runs", best_blocks),
            ("trend", "Over commits", trend_blocks),
            ("regressions", "What the last commit changed", changes_blocks),
        )
        if name in views
    ]
    return render_text(Document(f"Runs in {found.folder}", f"{len(found.runs)} of {found.found} runs.", "", sections)) + "\n"


def _as_data(found: "Fleet", views: set[str]) -> dict[str, Any]:
    """Return the views as JSON: `regressions` has every comparison, with its verdict."""
    chosen: dict[str, Any] = {"metric": found.key, "runs": len(found.runs), "unranked": found.unranked}
    if views & {"best", "html"}:
        chosen["best"] = found.best
    if views & {"trend", "html"}:
        chosen["trend"] = [
            {"series": series.name, "points": [_point(point) for point in series.points]} for series in found.series
        ]
    if views & {"regressions", "html"}:
        chosen["regressions"] = [
            {"series": row.series.name, "verdict": row.change.metric(found.key).verdict, "comparison": row.change}
            for row in found.changes
        ]
    return chosen


def _point(point: Any) -> dict[str, Any]:
    plain = {name: getattr(point, name) for name in ("commit", "version", "is_clean", "first", "value", "low", "high")}
    return {**plain, "runs": [run.path for run in point.runs]}


def _print_runs(runs: "Sequence[FleetRun]", found: int, folder: Path, most: int, as_json: bool) -> None:
    from llm_perf_opt.report.terminal import columns
    from llm_perf_opt.report.text import duration, known, then

    shown = list(runs[:most] if most else runs)
    if as_json:
        print_json(shown)
        return
    header = (
        "created",
        "status",
        "model",
        "weights",
        "runtime",
        "hardware",
        "batch × prompt + new",
        "TTFT",
        "TPOT",
        "commit",
        "path",
        "",
    )

    def time(run: "FleetRun", key: str) -> str:
        return known(then(run.reading(key), lambda reading: duration(reading.median)), "n/a")

    rows = [
        [
            run.created[:19].replace("T", " "), run.status, run.model, run.weights, run.runtime or run.kind, run.on, run.workload,
            time(run, "ttft"), time(run, "tpot"), run.version, run.path, _short(run.unranked),
        ]
        for run in shown
    ]  # fmt: skip
    if rows:
        print(columns(header, rows, "lllllllrrlll"))
    if len(shown) < len(runs):
        print(f"{len(shown)} of {len(runs)} shown; --limit 0 shows all.", file=sys.stderr)
    elif not rows:
        print(f"No run in {folder} matches ({found} in all).", file=sys.stderr)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_WHY else f"{text[: _LONGEST_WHY - 1].rstrip()}…"
