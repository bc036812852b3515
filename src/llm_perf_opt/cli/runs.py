"""List runs and sweeps, and remove or compress old ones."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json
from llm_perf_opt.core.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_perf_opt.core.records import Maybe
    from llm_perf_opt.workflows.housekeeping import Cleanup, Step
    from llm_perf_opt.workflows.run_listing import Listed, Listing

_ROWS = 20


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder with the runs, at any depth.")] = Path("runs"),
    model: Annotated[str | None, typer.Option(help="Only runs of this model.")] = None,
    experiment: Annotated[str | None, typer.Option(help="Only runs of this experiment.")] = None,
    status: Annotated[str | None, typer.Option(help="Only runs with this status: complete, partial, failed or damaged.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Maximum number of rows of the list; 0 for all. Default: 20.")] = None,
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
    """List runs and sweeps, newest first; or remove or compress some of them. A damaged run is listed with the reason."""
    note_debug(debug)
    from llm_perf_opt.workflows.run_listing import find_runs, list_runs

    if keep is None and older_than is None and not compress:
        if yes or sweeps:
            raise ConfigError(
                f"{'--yes' if yes else '--sweeps'} alone has no effect.", "Add --keep N, --older-than 30d or --compress."
            )
        most = _ROWS if limit is None else limit
        _print_listing(list_runs(folder, model=model, experiment=experiment, status=status, limit=most), folder, as_json)
        return
    if limit is not None:
        raise ConfigError(
            f"--limit {limit} restricts the list only, not what is removed or compressed.", "Omit it, or use --keep N."
        )
    if compress and sweeps:
        raise ConfigError("--sweeps has no effect with --compress, which includes the runs of sweeps.", "Omit --sweeps.")
    from llm_perf_opt.workflows.housekeeping import Cleanup, parse_age

    request = Cleanup(keep, None if older_than is None else parse_age(older_than), compress, sweeps)
    rows, _ = find_runs(folder, model=model, experiment=experiment, status=status)
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
