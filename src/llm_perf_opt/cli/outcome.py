"""The result of a run, as `run`, `report`, `exec`, `import` and `serve` print it."""

from typing import TYPE_CHECKING, Any

from llm_perf_opt.cli.shared import print_json
from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.core.run_status import status_of
from llm_perf_opt.core.stages import STAGE_NAMES, Stage
from llm_perf_opt.core.terminal import indented

if TYPE_CHECKING:
    from pathlib import Path

    from llm_perf_opt.analysis.run_analysis import RunAnalysis
    from llm_perf_opt.analysis.serving.serving_analysis import ServingAnalysis
    from llm_perf_opt.core.records import Maybe, StageTiming
    from llm_perf_opt.core.run_folder import RunFolder
    from llm_perf_opt.workflows.analyze_program import ProgramAnalysis


def outcome(folder: "RunFolder", analysis: "RunAnalysis | None") -> dict[str, Any]:
    """Return the data that `--json` prints."""
    if analysis is None:
        return {"run": str(folder.path), "status": _status(folder), "stages": {}}
    return {
        "run": str(folder.path),
        "status": status_of(analysis.damaged) if analysis.damaged else analysis.manifest.status,
        "why": analysis.damaged.fact if analysis.damaged else analysis.manifest.why,
        "stages": {_stage_key(stage): stage for stage in analysis.stages},
        "metrics": {
            metric.key: {"unit": metric.unit, "value": metric.value, **_steps(analysis, metric.key)}
            for metric in analysis.metrics
        },
        "inputs": analysis.inputs,
        "stability": analysis.stability,
        "warnings": [warning.text for warning in analysis.warnings],
    }


def _steps(analysis: "RunAnalysis", key: str) -> dict[str, int]:
    """Return how many decode steps a metric covers; empty for one that is not a mean over them."""
    from llm_perf_opt.analysis.metrics import METRICS
    from llm_perf_opt.core.records import Missing

    of_decode = any(metric.key == key and metric.stage is Stage.DECODE for metric in METRICS)
    return {"steps": analysis.timings.workload.decode_steps} if of_decode and not isinstance(analysis.timings, Missing) else {}


def _status(folder: "RunFolder") -> str:
    """Return the status of a run without a report: the run may be complete, and its report interrupted."""
    try:
        return folder.manifest().status
    except LlmPerfError:
        return "failed"


def _stage_key(stage: "StageTiming") -> str:
    """Return the stage's name. A sub-stage is prefixed with its parent, because it may run in several stages."""
    return stage.name if stage.name in STAGE_NAMES else f"{stage.parent}/{stage.name}"


def print_outcome(folder: "RunFolder", analysis: "RunAnalysis | None", images: "Maybe[list[Path]] | None" = None) -> None:
    """Print inputs and warnings, then a summary of one screen that ends with the report and what to do next.

    `images` are the PNG files, or why there are none.
    """
    from llm_perf_opt.analysis.run_analysis import InputKind
    from llm_perf_opt.core.records import Missing
    from llm_perf_opt.report.overview import next_command, overview_text

    for note in analysis.inputs if analysis else ():
        if note.kind is not InputKind.OWN_SETTINGS:  # printed before the run
            print(f"- {note.text}")
    for warning in analysis.warnings if analysis else ():
        print("warning:", indented(warning.text))
    if isinstance(images, Missing) and folder.waterfall_file.exists():
        print(f"images: SVG only, PNG n/a: {images.why}")
    summary = overview_text(analysis) if analysis else ""
    if summary:
        print(f"\n{summary}\n")
    written = next((path for path in (folder.page_file, folder.report_file) if path.exists()), None)
    print(f"report: {written}" if written else f"run: {folder.path}")
    suggestion = next_command(analysis, str(folder.path)) if analysis else ""
    if suggestion:
        print(f"next:   {suggestion}")


def print_program(folder: "RunFolder", found: "ProgramAnalysis", as_json: bool) -> None:
    """Print the result of `llm-perf exec`; report.html and report.md have the same."""
    from llm_perf_opt.core.records import Missing
    from llm_perf_opt.report.terminal import render_text
    from llm_perf_opt.workflows.analyze_program import program_document

    output = found.output if isinstance(found.output, Missing) else str(folder.path / found.output.file)
    if as_json:
        values = {"passes": found.manifest.passes, "kernels": found.kernels, "regions": found.regions, "output": output}
        print_json({"run": str(folder.path), "status": found.manifest.status, **values})
        return
    document = program_document(found)
    print(render_text(document))
    print(f"output: {output}")
    print(f"report: {folder.page_file}")


def print_serving(folder: "RunFolder", found: "ServingAnalysis", as_json: bool) -> None:
    """Print the result of a run under load."""
    from llm_perf_opt.report.serving_document import overview_document
    from llm_perf_opt.report.terminal import render_text

    if as_json:
        values = {
            "server": found.server,
            "slo": found.slo,
            "knee": found.knee,
            "points": found.points,
            "problems": found.problems,
        }
        print_json({"run": str(folder.path), "status": found.manifest.status, "why": found.manifest.why, **values})
        return
    print(render_text(overview_document(found)))
    for problem in found.problems:
        print(f"problem: {problem}")
    print(f"report: {folder.page_file}")
