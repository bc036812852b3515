"""Name runs as baselines."""

from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.cli.compare import RUNS_DIR, RunsDir
from llm_perf_opt.cli.completing import complete_run
from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json, verb_group

app = verb_group("baseline", "Name runs as baselines to compare with: `llm-perf compare NAME NEW`.")


@app.command("set")
def set_baseline(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, '.', '_' and '-'.")],
    run: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="A run folder, or several repeats of one configuration.", autocompletion=complete_run),
    ],
    runs_dir: RunsDir = RUNS_DIR,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Name runs as a baseline; an existing baseline of that name is replaced."""
    note_debug(debug)
    from llm_perf_opt.workflows.compare import Baselines, check_baseline

    check_baseline(name, run)
    kept = Baselines(runs_dir)
    baseline = kept.set(name, run)
    if as_json:
        print_json({"name": name, "runs": baseline.runs, "file": str(kept.file)})
    else:
        print(f"{name} → {', '.join(baseline.runs)} (in {kept.file})")


@app.command("list")
def list_baselines(runs_dir: RunsDir = RUNS_DIR, as_json: Json = False, debug: Debug = False) -> None:
    """List the baselines and their runs, and whether each run still exists."""
    note_debug(debug)
    from llm_perf_opt.workflows.compare import Baselines, is_run
    from llm_perf_opt.workspace.data.layout import given_root

    kept = Baselines(given_root(runs_dir, RUNS_DIR, "--runs-dir"))
    rows = [
        {"name": name, "set_at": baseline.set_at, "run": text, "there": is_run(kept.place(text))}
        for name, baseline in sorted(kept.read().items())
        for text in baseline.runs
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print(f"{row['name']}  {row['run']}{'' if row['there'] else '  (gone: no run exists at this path)'}")
    if not rows:
        print(f"No baseline is set in {kept.file}. `llm-perf baseline set NAME RUN` sets one.")


@app.command("remove")
def remove_baseline(
    name: Annotated[str, typer.Argument(metavar="NAME")], runs_dir: RunsDir = RUNS_DIR, debug: Debug = False
) -> None:
    """Remove a baseline; its runs stay."""
    note_debug(debug)
    from llm_perf_opt.workflows.compare import Baselines
    from llm_perf_opt.workspace.data.layout import given_root

    Baselines(given_root(runs_dir, RUNS_DIR, "--runs-dir")).remove(name)
    print(f"{name} removed")
