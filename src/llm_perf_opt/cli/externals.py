"""Fetch, update, verify and guard the reference code under third_party/."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json, verb_group
from llm_perf_opt.core.terminal import one_line

if TYPE_CHECKING:
    from llm_perf_opt.workspace.externals.verbs import Done, Row

app = verb_group(
    "externals", "Manage reference code under third_party/, listed in third_party/externals.yaml and pinned to commits."
)

Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Entries of externals.yaml; all by default.")]
Root = Annotated[Path | None, typer.Option(help="The project's folder; by default the git repository of the current directory.")]


@app.command()
def init(
    names: Names = None,
    template: Annotated[bool, typer.Option("--template", help="Write an externals.yaml to fill in, and exit.")] = False,
    root: Root = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch missing entries at their pinned commits, and verify them."""
    note_debug(debug)
    from llm_perf_opt.workspace.externals import verbs
    from llm_perf_opt.workspace.externals.places import Places

    places = Places.find(root)
    if template:
        written = verbs.write_template(places)
        print_json({"written": str(written)}) if as_json else print(f"written: {written}")
        return
    _finish(verbs.init(places, names or (), _log), as_json)


@app.command()
def update(
    names: Names = None,
    to: Annotated[
        str | None, typer.Option(metavar="COMMIT", help="The new commit of one entry; it is written to externals.yaml.")
    ] = None,
    root: Root = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Move entries to their pins in externals.yaml, or one entry to a new commit. Edited entries are rejected."""
    note_debug(debug)
    from llm_perf_opt.workspace.externals import verbs
    from llm_perf_opt.workspace.externals.places import Places

    _finish(verbs.update(Places.find(root), names or (), to, _log), as_json)


@app.command()
def snapshot(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Hub entries of externals.yaml (all by default), or OWNER/NAME.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Pin OWNER/NAME to this commit, and add it to externals.yaml if needed.")
    ] = None,
    root: Root = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Download the source files of Hugging Face repositories: code, configuration, tokenizer and license, never weights."""
    note_debug(debug)
    from llm_perf_opt.workspace.externals import verbs
    from llm_perf_opt.workspace.externals.places import Places

    _finish(verbs.snapshot(Places.find(root), names or (), commit, _log), as_json)


@app.command()
def status(names: Names = None, root: Root = None, as_json: Json = False, debug: Debug = False) -> None:
    """Compare each entry with its pin. Exits with 1 if something differs; warnings do not count."""
    note_debug(debug)
    from llm_perf_opt.workspace.externals import verbs
    from llm_perf_opt.workspace.externals.places import Places

    rows = verbs.status(Places.find(root), names or ())
    if as_json:
        print_json({"externals": rows})
    else:
        _print_status(rows)
    if any(row.state != "ok" for row in rows):
        raise typer.Exit(1)


@app.command()
def guard(
    everything: Annotated[
        bool, typer.Option("--all", help="Check even if nothing under third_party/ is staged, as in CI.")
    ] = False,
    install: Annotated[
        bool, typer.Option("--install", help="Install this as the repository's pre-commit hook, and exit.")
    ] = False,
    root: Root = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check that no staged change edits third_party/ or adds files that externals.yaml does not list. Exits with 1 otherwise."""
    note_debug(debug)
    from llm_perf_opt.workspace.externals import guard as room
    from llm_perf_opt.workspace.externals.places import Places

    places = Places.find(root)
    if install:
        hook = room.install(places, sys.executable)
        print_json({"installed": str(hook)}) if as_json else print(f"installed: {hook}")
        return
    problems = room.guard(places, everything=everything)
    if as_json:
        print_json({"problems": problems})
    for problem in problems if not as_json else ():
        print(f"{one_line(problem.path)}: {one_line(problem.why)}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)


def _log(line: str) -> None:
    print(line, file=sys.stderr)


def _finish(done: "list[Done]", as_json: bool) -> None:
    """Print the results, and exit with the code of the first failure."""
    if as_json:
        print_json({"externals": [_as_json(result) for result in done]})
    for result in done:
        if result.error is not None:
            print(f"error: {one_line(result.error.fact)}", file=sys.stderr)
            print(f"  → {one_line(result.error.remedy)}", file=sys.stderr)
        elif not as_json:
            note = f"  {one_line(result.note)}" if result.note else ""
            print(f"{result.action:<6}  {result.name}  {result.path}  {result.commit[:12]}{note}")
    if not done and not as_json:
        print("nothing is listed in third_party/externals.yaml")
    failed = [result.error for result in done if result.error is not None]
    if failed:
        raise typer.Exit(failed[0].exit_code)


def _as_json(done: "Done") -> dict[str, Any]:
    error = {"fact": done.error.fact, "remedy": done.error.remedy} if done.error else None
    return {"name": done.name, "action": done.action, "path": done.path, "commit": done.commit, "note": done.note, "error": error}


def _print_status(rows: "list[Row]") -> None:
    from llm_perf_opt.report.terminal import columns

    if not rows:
        print("nothing is listed in third_party/externals.yaml")
        return
    cells = [[row.name, row.way, row.pinned[:12], row.state, row.path, row.detail] for row in rows]
    print(columns(["name", "way", "pinned", "state", "path", ""], cells, "llllll"))
    for row in rows:
        for warning in row.warnings:
            print(f"warning: {row.name}: {one_line(warning)}")
