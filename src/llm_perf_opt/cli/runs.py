"""List runs and sweeps, and remove or compress old ones."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from llm_perf_opt.cli.completing import complete_metric, complete_runtime, complete_status
from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.run_status import PLANNED, RUN_STATUSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_perf_opt.core.records import Maybe
    from llm_perf_opt.workflows.housekeeping import Cleanup, Step
    from llm_perf_opt.workflows.run_listing import Listed, Listing

_ROWS = 20


class WithPage(TyperCommand):
    """A verb whose `--html` takes a file or nothing: what follows is its file only if it ends in .html."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--html` without a file as `--html=`, then parse."""
        following = [*args, ""][1:]
        words = [
            "--html=" if word == "--html" and not after.endswith(".html") else word
            for word, after in zip(args, following, strict=True)
        ]
        return super().parse_args(ctx, words)


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder with the runs, at any depth.")] = Path("runs"),
    model: Annotated[str | None, typer.Option(help="Only runs of this model.")] = None,
    experiment: Annotated[str | None, typer.Option(help="Only runs of this experiment.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Only runs on devices whose name contains this, such as h200.")] = None,
    runtime: Annotated[str | None, typer.Option(help="Only runs of this runtime.", autocompletion=complete_runtime)] = None,
    status: Annotated[
        str | None,
        typer.Option(
            help=f"Only runs with this status: {', '.join(map(shlex.quote, RUN_STATUSES))}. Only sweeps: {PLANNED}.",
            autocompletion=complete_status,
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only runs made since then: 2026-01-31, 2026-01-31T12:00 (UTC) or 30d.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC<VALUE", help="Only runs whose median is within this limit: 'tpot<20ms'. May be repeated."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Maximum number of rows of the list; 0 for all. Default: 20.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Show the best run of each model, workload and hardware.")] = False,
    trend: Annotated[bool, typer.Option("--trend", help="Show the metric per commit.")] = False,
    regressions: Annotated[
        bool, typer.Option("--regressions", help="Compare the newest commit of each series with the one before it.")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option(metavar="[FILE.html]", help="Write all of this as one page. Default: index.html in the folder."),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="The metric of these views. Default: tpot.", autocompletion=complete_metric)
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Remove all but the newest N of these runs. Those that stay anyway, such as baselines and sweeps, do not count.",
        ),
    ] = None,
    older_than: Annotated[str | None, typer.Option(metavar="AGE", help="Remove runs older than this: 12h, 30d, 8w.")] = None,
    compress: Annotated[
        bool, typer.Option("--compress", help="Compress raw files instead of removing runs. All commands still read them.")
    ] = False,
    sweeps: Annotated[bool, typer.Option("--sweeps", help="Also remove sweeps, each with all of its runs.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without this, only show what would be done.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List runs and sweeps, newest first; show the best, trends and regressions; or remove or compress some of them."""
    note_debug(debug)
    names = {"model": model, "experiment": experiment, "status": status}
    more = {"hardware": hardware, "runtime": runtime, "since": since, "where": where, "metric": metric}
    views = {"best": best, "trend": trend, "regressions": regressions, "html": html is not None}
    asked = [f"--{name}" for name, value in (*more.items(), *views.items()) if value]
    if keep is not None or older_than is not None or compress:
        if asked:
            raise ConfigError(f"{asked[0]} does not select what is removed or compressed.", "Omit it.")
        _clean_up_chosen(folder, names, (keep, older_than, compress, sweeps, limit), yes=yes, as_json=as_json)
        return
    if yes or sweeps:
        raise ConfigError(
            f"{'--yes' if yes else '--sweeps'} alone has no effect.", "Add --keep N, --older-than 30d or --compress."
        )
    if not asked:
        from llm_perf_opt.workflows.run_listing import list_runs

        _print_listing(list_runs(folder, **names, limit=_ROWS if limit is None else limit), folder, as_json)
        return
    from llm_perf_opt.cli.fleet import show_fleet
    from llm_perf_opt.workflows.fleet import Filters

    filters = Filters(model, experiment, hardware, runtime, status, since, tuple(where or ()))
    show_fleet(
        folder, filters, {name for name, value in views.items() if value}, html=html, metric=metric, limit=limit, as_json=as_json
    )


def _clean_up_chosen(
    folder: Path,
    names: dict[str, str | None],
    how: tuple[int | None, str | None, bool, bool, int | None],
    *,
    yes: bool,
    as_json: bool,
) -> None:
    from llm_perf_opt.workflows.housekeeping import Cleanup, parse_age
    from llm_perf_opt.workflows.run_listing import find_runs

    keep, older_than, compress, sweeps, limit = how
    if limit is not None:
        raise ConfigError(
            f"--limit {limit} restricts the list only, not what is removed or compressed.", "Omit it, or use --keep N."
        )
    if compress and sweeps:
        raise ConfigError("--sweeps has no effect with --compress, which includes the runs of sweeps.", "Omit --sweeps.")
    request = Cleanup(keep, None if older_than is None else parse_age(older_than), compress, sweeps)
    rows, _ = find_runs(folder, **names)
    _clean_up(folder, rows, request, yes=yes, as_json=as_json)


def _clean_up(folder: Path, rows: "Sequence[Listed]", request: "Cleanup", *, yes: bool, as_json: bool) -> None:
    from llm_perf_opt.core.units import byte_count
    from llm_perf_opt.workflows.housekeeping import carry_out, plan_cleanup

    planned = plan_cleanup(folder, rows, request)
    kept = [step for step in planned if step.action == "keep"]
    if not yes:
        if as_json:
            print_json({"dry_run": True, "steps": planned, "failed": []})
            return
        for step in planned:
            print(_step(step, "would "))
        about = "about " if request.compress else ""
        print(f"This would free {about}{byte_count(sum(step.frees for step in planned))}. Nothing was changed; --yes does it.")
        return
    done = carry_out(folder, planned, (lambda _: None) if as_json else lambda step: print(_step(step, ""), flush=True))
    if as_json:
        print_json({"dry_run": False, "steps": [*done.steps, *kept], "failed": done.failed})
    else:
        for step in kept:
            print(_step(step, ""))
        print(f"{len(done.steps)} processed, {byte_count(sum(step.frees for step in done.steps))} freed.")
    if done.failed:
        count = f"{len(done.failed)} run{'' if len(done.failed) == 1 else 's'}"
        raise ResourceError(f"{count} could not be processed: {'; '.join(done.failed[:5])}", "All other runs were processed.")


def _step(step: "Step", would: str) -> str:
    from llm_perf_opt.core.units import byte_count

    created = f"  {step.created[:19].replace('T', ' ')}" if step.created else ""
    why = f"  ({step.why})" if step.why else ""
    if step.action == "keep":
        return f"keep      {step.path}{created}  {byte_count(step.bytes)}{why}"
    done = step.action if would else {"remove": "removed", "compress": "compressed"}[step.action]
    size = byte_count(step.bytes) if step.action == "remove" else f"{byte_count(step.bytes)}, frees {byte_count(step.frees)}"
    return f"{would}{done}  {step.path}{created}  {size}{why}"


def _print_listing(found: "Listing", folder: Path, as_json: bool) -> None:
    from llm_perf_opt.report.terminal import columns

    if as_json:
        print_json(found.rows)
        return
    header = ("created", "status", "model", "weights", "batch × prompt + new", "TTFT", "TPOT", "path", "")
    rows = [
        [
            row.created[:19].replace("T", " "),
            row.status if row.kind == "run" else f"{row.status} sweep",
            row.model,
            row.weights,
            row.workload,
            _time(row.ttft_ns),
            _time(row.tpot_ns),
            row.path,
            row.why or _why_no_time(row),
        ]
        for row in found.rows
    ]
    cut = [row[-1] for row in rows if len(row[-1]) > _LONGEST_WHY]
    for row in rows:
        row[-1] = _line(row[-1])
    if rows:
        print(columns(header, rows, "lllllrrll"))
    if cut:
        print("A reason that ends in … is shown in full with --json and in the run's report.", file=sys.stderr)
    if len(found.rows) < found.matching:
        print(f"{len(found.rows)} of {found.matching} shown; --limit 0 shows all.", file=sys.stderr)
    elif not found.rows:
        print(f"No run in {folder} matches ({found.found} in all).", file=sys.stderr)


_LONGEST_WHY = 100
"""Maximum length of a reason in the list; a tool's message can be many lines long."""


def _line(text: str) -> str:
    return text if len(text) <= _LONGEST_WHY else f"{text[: _LONGEST_WHY - 1].rstrip()}…"


def _why_no_time(row: "Listed") -> str:
    from llm_perf_opt.core.records import Missing

    return next((f"n/a: {value.why}" for value in (row.ttft_ns, row.tpot_ns) if isinstance(value, Missing)), "")


def _time(ns: "Maybe[float] | None") -> str:
    from llm_perf_opt.core.records import Missing
    from llm_perf_opt.report.text import duration

    return "" if ns is None else "n/a" if isinstance(ns, Missing) else duration(ns)
