"""Compare two runs, or several repeats of each."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llm_perf_opt.cli.completing import complete_side
from llm_perf_opt.cli.shared import Debug, Json, note_debug, page_kind, print_json, write_page
from llm_perf_opt.core.errors import ConfigError

if TYPE_CHECKING:
    from llm_perf_opt.analysis.comparison.compare import Comparison
    from llm_perf_opt.analysis.comparison.planning import ComparisonPlan
    from llm_perf_opt.analysis.comparison.serving import ServingComparison
    from llm_perf_opt.report.document import Document

    Found = Comparison | ServingComparison

RUNS_DIR = Path("runs")
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="The folder with the runs and baselines.json.")]
Gates = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC=TOLERANCE", help="Exit with 1 if the metric is worse by more than this: tpot=3%. May be repeated."
    ),
]
Experiment = Annotated[list[str] | None, typer.Option(metavar="KEY", help="A setting that differs on purpose. May be repeated.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="Compare even if this differs: hardware, model or workload. May be repeated."),
]
Smallest = Annotated[
    float,
    typer.Option(
        min=0, max=100, metavar="PERCENT", help="The smallest change that gets a verdict; gates have their own tolerance."
    ),
]
ProcessSpread = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=100,
        metavar="PERCENT",
        help="Standard deviation of times between processes, used if there are too few runs to measure it. Default: 1 on an "
        "accelerator, 20 on a quiet CPU; on a busy CPU, there is no default.",
    ),
]
PlanInstead = Annotated[
    bool,
    typer.Option("--plan", help="Print how many runs are needed, from the pilot runs named: compare --plan RUN [RUN]..."),
]
ToFind = Annotated[str | None, typer.Option("--effect", metavar="PERCENT", help="With --plan: the change to find. Default: 5%.")]
Power = Annotated[str | None, typer.Option(metavar="PERCENT", help="With --plan: the chance of finding it. Default: 90%.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="With --plan: repeats per run. Default: as in the pilot runs.")]


def compare(
    base: Annotated[
        str | None,
        typer.Argument(metavar="BASE", help="Runs, baselines or patterns, separated by commas.", autocompletion=complete_side),
    ] = None,
    new: Annotated[str | None, typer.Argument(metavar="NEW", help="Same as BASE.", autocompletion=complete_side)] = None,
    further: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="With --plan: more pilot runs.")] = None,
    more_base: Annotated[list[str] | None, typer.Option("--base", help="A run of the base side. May be repeated.")] = None,
    more_new: Annotated[list[str] | None, typer.Option("--new", help="A run of the new side. May be repeated.")] = None,
    gate: Gates = None,
    experiment: Experiment = None,
    allow: Allow = None,
    smallest: Smallest = 1.0,
    process_spread: ProcessSpread = None,
    plan: PlanInstead = False,
    find: ToFind = None,
    power: Power = None,
    repeats: Repeats = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the whole page as Markdown.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result to this file: .html, .md or .json.")] = None,
    runs_dir: RunsDir = RUNS_DIR,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what changed from BASE to NEW, and whether the change is real.

    The verdict is faster or slower if the 98 % interval of the change excludes zero. Use three runs per side, and
    alternate the sides. With one run, the spread between processes is assumed. With two, it is measured only roughly
    (on a quiet CPU it is still assumed). On a busy CPU, fewer than three runs get no verdict. There is also no verdict
    if the machine changed its speed during the runs and that explains the difference.

    With --plan, nothing is compared: from one or more runs of one configuration, it prints how many runs per side find a
    change of a size (--effect) with a chance (--power), how long they take, and the commands that make them.

    With --gate, the exit code is 0 if every gate passes, 1 on a regression, and 2 if a gate is inconclusive or the runs are
    not comparable. Without --gate it is 0. If a run is damaged, it is 5.
    """
    note_debug(debug)
    if as_json and markdown:
        raise ConfigError("--json and --markdown both write to standard output.", "Use one of them, or write a file with --out.")
    kind = page_kind(out)
    sides = _words(base, more_base), _words(new, more_new)
    from llm_perf_opt.analysis.comparison.effects import Judgement
    from llm_perf_opt.analysis.comparison.gates import exit_code
    from llm_perf_opt.workflows.compare import compare_runs
    from llm_perf_opt.workflows.compare_plan import plan_comparison
    from llm_perf_opt.workspace.data.layout import given_root

    judgement = Judgement(smallest / 100, None if process_spread is None else process_spread / 100)
    runs_dir = given_root(runs_dir, RUNS_DIR, "--runs-dir")
    if plan:
        _check_only_planned(gate=gate, experiment=experiment, allow=allow)
        pilots = [*sides[0], *sides[1], *(further or [])]
        asked = _share("--effect", find or "5%"), _share("--power", power or "90%")
        _print_plan(plan_comparison(pilots, runs_dir, *asked, repeats, judgement), as_json, markdown, out, kind)
        return
    _check_not_planned(further, effect=find, power=power, repeats=repeats)
    found = compare_runs(
        *sides,
        runs_dir,
        experiment=experiment or (),
        allow=allow or (),
        gates=gate or (),
        judgement=judgement,
    )
    if out is not None:
        write_page(out, kind, found, lambda: _document(found))
    if as_json:
        print_json(found)
    else:
        sys.stdout.write(_shown(found, markdown))
    if found.gates:
        raise typer.Exit(exit_code(found.gates))


def _check_only_planned(**given: list[str] | None) -> None:
    """Reject options that a plan has no use for."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"--{name} does not apply to --plan: nothing is compared.", "Leave it out.")


def _check_not_planned(further: list[str] | None, **given: str | int | None) -> None:
    """Reject what only a plan takes."""
    if further:
        raise ConfigError(
            f"{further[0]} is a third run, but there are two sides.",
            "Separate the runs of a side by commas, or name them with --base and --new. A plan takes any number: --plan.",
        )
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name} applies only to --plan.", f"Add --plan, or leave out --{name}.")


def _share(option: str, text: str) -> float:
    """Return the share of `5%` or `0.05`."""
    number, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{option} {text!r} is not a share.", f"Write {option} 5% or {option} 0.05.")
    return value


def _print_plan(found: "ComparisonPlan", as_json: bool, markdown: bool, out: Path | None, kind: str) -> None:
    from llm_perf_opt.report.compare_plan import plan_document
    from llm_perf_opt.report.markdown import render_markdown
    from llm_perf_opt.report.terminal import render_text

    if out is not None:
        write_page(out, kind, found, lambda: plan_document(found))
    if as_json:
        print_json(found)
    else:
        sys.stdout.write(render_markdown(plan_document(found)) if markdown else render_text(plan_document(found)) + "\n")


def _shown(found: "Found", markdown: bool) -> str:
    from llm_perf_opt.analysis.comparison.compare import Comparison
    from llm_perf_opt.report.compare_document import comparison_text
    from llm_perf_opt.report.markdown import render_markdown
    from llm_perf_opt.report.terminal import render_text

    if markdown:
        return render_markdown(_document(found))
    return comparison_text(found) if isinstance(found, Comparison) else render_text(_document(found)) + "\n"


def _document(found: "Found") -> "Document":
    from llm_perf_opt.analysis.comparison.compare import Comparison
    from llm_perf_opt.report.compare_document import comparison_document
    from llm_perf_opt.report.compare_serving import serving_comparison_document

    return comparison_document(found) if isinstance(found, Comparison) else serving_comparison_document(found)


def _words(first: str | None, more: list[str] | None) -> list[str]:
    return [*([first] if first else []), *(more or [])]
