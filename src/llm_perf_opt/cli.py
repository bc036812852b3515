"""The verbs. Each parses, calls one module and prints; errors are caught once, in `main`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_perf_opt import __version__
from llm_perf_opt.errors import ConfigError, LlmPerfError
from llm_perf_opt.stages import STAGE_NAMES

if TYPE_CHECKING:
    from llm_perf_opt.analysis.run_analysis import RunAnalysis
    from llm_perf_opt.records import StageTiming
    from llm_perf_opt.run_folder import RunFolder

app = typer.Typer(
    name="llm-perf",
    help="Profile an LLM's inference: where every millisecond goes, how far it is from the limit, what to change first.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Data on standard output as JSON; everything else on standard error.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_debug = False


def _note_debug(debug: bool) -> None:
    global _debug
    _debug = _debug or debug


def _version(asked: bool) -> None:
    if asked:
        print(f"llm-perf {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of every verb."""


@app.command()
def run(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="GROUP=OPTION or KEY=VALUE, as in model=qwen2_5_1_5b runtime.batch_size=4."),
    ] = None,
    config_dir: Annotated[
        Path | None, typer.Option(help="A folder with options of your own: model/mine.yaml, runtime/mine.yaml …")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the resolved configuration and the passes; run nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Profile a model and write a run folder with its report.

    Groups: model, dataset, runtime, hardware, profiling. `llm-perf options` lists what each offers.
    """
    _note_debug(debug)
    from llm_perf_opt.composition import compose

    composed = compose(overrides or [], config_dir)
    if dry_run:
        _print_plan(composed, as_json)
        return
    from llm_perf_opt.capture import capture
    from llm_perf_opt.progress import progress_for

    with progress_for(quiet) as progress:
        folder, error = capture(composed, _command(), progress)
    analysis = _finish(folder, error)
    if as_json:
        _print_json(_outcome(folder, analysis))
    else:
        _print_outcome(folder, analysis)
    _raise(error or (analysis.impossible if analysis else None))


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    peak_tflops: Annotated[
        float | None, typer.Option(help="Dense peak of the run's dtype, in place of the run's own.", min=1e-9)
    ] = None,
    bandwidth_gbs: Annotated[float | None, typer.Option(help="Memory bandwidth, likewise.", min=1e-9)] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make the reports of a run anew, on any machine."""
    _note_debug(debug)
    from llm_perf_opt.analyse import reanalyse

    if (peak_tflops is None) != (bandwidth_gbs is None):
        raise ConfigError("--peak-tflops and --bandwidth-gbs describe a device together.", "Give both.")
    limits = None
    if peak_tflops is not None and bandwidth_gbs is not None:
        limits = {"peak_tflops": peak_tflops, "bandwidth_gbs": bandwidth_gbs}
    folder, analysis = reanalyse(run_folder, limits)
    if as_json:
        _print_json(_outcome(folder, analysis))
    else:
        _print_outcome(folder, analysis)
    _raise(analysis.impossible)


@app.command()
def cost(
    overrides: Annotated[list[str] | None, typer.Argument(help="model=NAME, and model.architecture.FIELD=VALUE.")] = None,
    model_config: Annotated[Path | None, typer.Option(help="A Hugging Face config.json, in place of model=.")] = None,
    batch: Annotated[str, typer.Option(help="Sequences; with --hardware several, as in 1,8,64.")] = "1",
    prompt: Annotated[str, typer.Option(help="Prompt tokens of the prefill.")] = "2048",
    context: Annotated[str, typer.Option(help="Cached tokens of the decode step; with --hardware several.")] = "2048",
    dtype: Annotated[
        str, typer.Option(help="Of the weights: bf16, fp16, fp32, fp8, int8, int4; with --hardware several.")
    ] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="Of the cache.")] = "bf16",
    mla: Annotated[str | None, typer.Option(help="How latent attention runs: expand_once, reexpand, absorb.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Floors on this product: h100_sxm, h200, rtx_4090 …")] = None,
    config_dir: Annotated[Path | None, typer.Option(help="A folder with options of your own.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a model must compute and move, part by part: no GPU, no weights."""
    _note_debug(debug)
    from llm_perf_opt.costing import Asked, answer
    from llm_perf_opt.report.cost import cost_page, what_if_page

    asked = Asked(overrides or [], model_config, config_dir, batch, prompt, context, dtype, kv_dtype, mla, hardware)
    found = answer(asked)
    if as_json:
        _print_json(found.to_json())
        return
    if found.cost:
        print(cost_page(found.cost))
    if found.hardware:
        print(what_if_page(found.rows, found.turning, found.hardware))


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """What is here, what is missing, what that costs, how to get it."""
    _note_debug(debug)
    from dataclasses import asdict

    from llm_perf_opt.profiling.vendor.checks import check_machine

    checks = check_machine()
    if as_json:
        _print_json([asdict(check) for check in checks])
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.status:<8} {check.name:<{width}}  {check.found}")
        for line in (check.costs, check.remedy):
            if line:
                print(f"{'':<8} {'':<{width}}  → {line}")


@app.command()
def ceilings(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    device_index: Annotated[int, typer.Option(min=0, help="Which GPU, counted as the driver counts.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads on the CPU; by default the framework's choice.")] = None,
    budget_s: Annotated[float | None, typer.Option(min=0.05, max=600, help="Seconds to measure; by default about nine.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure anew even where a kept result is there.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what this machine can do at best, in seconds; the result is kept per device, driver and torch version."""
    _note_debug(debug)
    from datetime import datetime, timezone

    from llm_perf_opt.ceilings import find_ceilings
    from llm_perf_opt.progress import progress_for
    from llm_perf_opt.report.ceilings import ceilings_json, ceilings_text

    with progress_for(False) as progress:
        found = find_ceilings(device, device_index, progress, refresh=refresh, threads=threads, budget_s=budget_s)
    now = datetime.now(timezone.utc)
    if as_json:
        _print_json(ceilings_json(found, now))
    else:
        sys.stdout.write(ceilings_text(found, now))


@app.command()
def options(
    config_dir: Annotated[Path | None, typer.Option(help="A folder with options of your own.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the configuration groups and what each offers."""
    _note_debug(debug)
    from llm_perf_opt.composition import group_options

    found = group_options(config_dir)
    if as_json:
        _print_json(found)
        return
    for group, names in found.items():
        print(f"{group:<10} {', '.join(names)}")


# --- printing ---------------------------------------------------------------------------------------------------------


def _finish(folder: "RunFolder", error: LlmPerfError | None) -> "RunAnalysis | None":
    """The reports, also of a run that ended early; a report that fails must not hide why the run did."""
    from llm_perf_opt.analyse import analyse, write_reports

    try:
        analysis = analyse(folder)
        write_reports(folder, analysis)
    except LlmPerfError:
        if error is None:
            raise
        return None
    return analysis


def _raise(error: LlmPerfError | None) -> None:
    if error is not None:
        raise error


def _outcome(folder: "RunFolder", analysis: "RunAnalysis | None") -> dict[str, Any]:
    """What `--json` ends with."""
    if analysis is None:
        return {"run": str(folder.path), "status": "failed", "stages": {}}
    return {
        "run": str(folder.path),
        "status": analysis.manifest.status,
        "why": analysis.manifest.why,
        "stages": {_stage_key(stage): stage for stage in analysis.stages},
        "metrics": {metric.key: {"unit": metric.unit, "value": metric.value} for metric in analysis.metrics},
        "warnings": analysis.warnings,
    }


def _stage_key(stage: "StageTiming") -> str:
    """The stage's name; a sub-stage's with its parent's before it, since it may run in several."""
    return stage.name if stage.name in STAGE_NAMES else f"{stage.parent}/{stage.name}"


def _print_outcome(folder: "RunFolder", analysis: "RunAnalysis | None") -> None:
    from llm_perf_opt.records import Distribution
    from llm_perf_opt.report.text import interval, with_unit

    if analysis is not None:
        for metric in analysis.metrics:
            if isinstance(metric.value, Distribution) and metric.key in ("ttft", "tpot", "e2e", "decode_rate"):
                value = metric.value
                shown = f"{with_unit(value.median, metric.unit)}  (95 %: {interval(value, metric.unit)}, n={value.n})"
                print(f"{metric.label:<32} {shown}")
        for warning in analysis.warnings:
            print(f"warning: {warning}")
    if folder.report_file.exists():
        print(f"report: {folder.report_file}")
    else:
        print(f"run: {folder.path}")


def _print_plan(composed: Any, as_json: bool) -> None:
    from dataclasses import asdict

    from llm_perf_opt.capture import planned_passes
    from llm_perf_opt.composition import config_to_yaml

    passes = planned_passes(composed.config)
    if as_json:
        _print_json({"run_dir": str(composed.run_dir), "passes": passes, "config": asdict(composed.config)})
        return
    print(config_to_yaml(composed.config))
    print(f"# passes: {', '.join(passes)}\n# run folder: {composed.run_dir}")


def _print_json(value: Any) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def _command() -> list[str]:
    return ["llm-perf", *sys.argv[1:]]


def main() -> None:
    """Run a verb; every error of ours ends here, as one message and an exit code."""
    try:
        app(standalone_mode=True)
    except LlmPerfError as error:
        if _debug:
            raise
        print(f"error: {error.fact}", file=sys.stderr)
        if error.remedy:
            print(f"  → {error.remedy}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read us has gone: nothing to say, nobody to say it to
        sys.exit(1)
    except Exception as defect:
        if _debug:
            raise
        print(f"error: {type(defect).__name__}: {' '.join(str(defect).split())[:300]}", file=sys.stderr)
        print("  → This is a defect of llm-perf, or a file somebody edited; --debug shows the traceback.", file=sys.stderr)
        sys.exit(1)
