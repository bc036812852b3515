"""Search for a faster configuration."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llm_perf_opt.cli.completing import complete_goal, complete_objective, complete_token_rule, complete_tuned
from llm_perf_opt.cli.shared import Debug, Json, Quiet, command_line, note_debug, print_json, raise_if
from llm_perf_opt.core.errors import ConfigError

if TYPE_CHECKING:
    from llm_perf_opt.analysis.tuning.records import Step
    from llm_perf_opt.profiling.passes import Listener
    from llm_perf_opt.workflows.tune_folder import TuneFolder, TuneOptions

_DEFAULT_BUDGET = "30m"
_TokenRule = Annotated[
    str,
    typer.Option(
        help="same: a change that does not alter the precision must produce the tokens of the base, except for ties within "
        "rounding. exact: every token. any: not checked.",
        autocompletion=complete_token_rule,
    ),
]
_MaxLogitDiff = Annotated[
    float | None,
    typer.Option(
        "--max-logit-diff",
        metavar="X",
        help="Also try changes of precision, and reject those that change a logit by more than this.",
    ),
]


def tune(
    start: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN | KEY=VALUE…",
            help="A run folder, or the settings of a run that is measured first: model=qwen2_5_1_5b.",
            autocompletion=complete_tuned,
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="What to improve: tpot, ttft, throughput or energy.", autocompletion=complete_objective)
    ] = "tpot",
    constraint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC<LIMIT",
            help="What the result must meet: 'ttft<50ms', 'memory<20GB', 'throughput>100'; of ttft, tpot, latency, throughput, "
            "memory, energy. May be repeated.",
            autocompletion=complete_goal,
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"Time for the whole search: 90s, 20m, 1h. Default: {_DEFAULT_BUDGET}.")
    ] = None,
    tokens: _TokenRule = "same",
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Also try changes of precision: dtype, quantization. Their tokens may differ.")
    ] = False,
    max_logit_diff: _MaxLogitDiff = None,
    lever: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,VALUE", help="Another setting to try, with its values. May be repeated."),
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Try at most this many findings of each run.")] = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", min=1, help="Try at most this many changes.")] = None,
    runs: Annotated[
        int | None, typer.Option(min=1, max=30, help="Runs per side of a decision. Default: 3 on a CPU, 2 on a GPU.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the last search of RUN.")] = False,
    config_dir: Annotated[Path | None, typer.Option(help="A folder with your own options.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Search for a faster configuration of a run: change, measure, keep what holds, repeat.

    The findings of the run are tried first, the most promising first, then levers without a prediction. A change is kept
    if `compare` calls it faster over several alternating runs, the tokens are the same, and every constraint is met. At
    the end, fresh runs confirm the gain. Each trial is an ordinary run. Ctrl-C keeps the best configuration so far.
    """
    note_debug(debug)
    from llm_perf_opt.analysis.tuning.goals import parse_budget
    from llm_perf_opt.cli.progress import progress_for
    from llm_perf_opt.workflows.tune_folder import TuneOptions

    words = start or []
    options = TuneOptions(
        objective, tuple(constraint or ()), parse_budget(budget or _DEFAULT_BUDGET), tokens, allow_lossy, top, max_steps, runs,
        tuple(lever or ()), max_logit_diff,
    )  # fmt: skip
    if resume and options != TuneOptions(budget_s=options.budget_s):
        raise ConfigError("--resume uses the options of the search.", "Only --budget may be given with it.")
    with progress_for(quiet) as progress:
        folder, code = _folder(words, options, config_dir, progress, resume=resume, budget=budget)
        print(f"search: {folder.path}", file=sys.stderr)
        try:
            _search(folder, progress, code, quiet=quiet, as_json=as_json)
        finally:
            folder.close()


def _folder(
    words: list[str], options: "TuneOptions", config_dir: Path | None, progress: "Listener", *, resume: bool, budget: str | None
) -> "tuple[TuneFolder, list[str]]":
    """Return the folder of a new or a resumed search, and the settings that can run code, as typed; others are measured first."""
    from llm_perf_opt.config.code_settings import may_run_code
    from llm_perf_opt.config.composition import compose
    from llm_perf_opt.workflows import tune as work
    from llm_perf_opt.workflows.tune_options import check_options

    runs = [word for word in words if "=" not in word or Path(word).exists()]
    settings = not runs
    if len(runs) > 1:
        raise ConfigError(f"`tune` takes one run, but {len(runs)} were given: {', '.join(runs)}.", "Tune one after the other.")
    code = [word for word in words if word not in runs]
    if runs and not all(map(may_run_code, code)):
        raise ConfigError(f"{runs[0]} is a run; its settings cannot be changed here.", "Give a run alone, or settings alone.")
    if config_dir is not None and not settings:
        raise ConfigError("--config-dir has no effect on a run, which has its own configuration.", "Leave it out.")
    if resume:
        if settings:
            raise ConfigError("--resume needs the run that was tuned.", "Write `llm-perf tune RUN --resume`.")
        return work.resume(Path(runs[0]), options.budget_s if budget else None), code
    check_options(options)
    if not settings:
        return work.begin(Path(runs[0]), options, command_line(), code=code), code
    options_of_run = [] if config_dir is None else ["--config-dir", str(config_dir)]
    command = ["llm-perf", "run", *words, *options_of_run]
    base, seconds = work.measure_base(words, config_dir, command, progress, options)
    code = [str(one) for one in compose(words, config_dir).code]
    return work.begin(base, options, command_line(), fresh=True, spent_s=seconds, code=code), code


def _search(folder: "TuneFolder", progress: "Listener", code: list[str], *, quiet: bool, as_json: bool) -> None:
    from llm_perf_opt.analysis.tuning.records import tune_json
    from llm_perf_opt.report.terminal import render_text
    from llm_perf_opt.report.tune import step_line, tune_document
    from llm_perf_opt.workflows.tune import tune as search

    def show(step: "Step") -> None:
        if not quiet:
            print(step_line(step), file=sys.stderr)

    found, interrupted = search(folder, progress, on_step=show, code=code)
    if as_json:
        print_json(tune_json(found))
    else:
        sys.stdout.write(render_text(tune_document(found, folder.path.name)) + f"\nreport: {folder.page_file}\n")
    raise_if(interrupted)
    if not found.constraints_met:
        raise typer.Exit(1)
