"""The result of a run, as `run`, `report` and `exec` print it."""

import sys
from typing import TYPE_CHECKING, Any

from llm_perf_opt.cli.shared import print_json
from llm_perf_opt.core.stages import STAGE_NAMES
from llm_perf_opt.core.terminal import indented

if TYPE_CHECKING:
    from pathlib import Path

    from llm_perf_opt.analysis.run_analysis import RunAnalysis
    from llm_perf_opt.core.records import Maybe, StageTiming
    from llm_perf_opt.core.run_folder import RunFolder
    from llm_perf_opt.workflows.analyze_program import ProgramAnalysis


def outcome(folder: "RunFolder", analysis: "RunAnalysis | None") -> dict[str, Any]:
    """Return the data that `--json` prints."""
    if analysis is None:
        return {"run": str(folder.path), "status": "failed", "stages": {}}
    return {
        "run": str(folder.path),
        "status": "damaged" if analysis.damaged else analysis.manifest.status,
        "why": analysis.damaged.fact if analysis.damaged else analysis.manifest.why,
        "stages": {_stage_key(stage): stage for stage in analysis.stages},
        "metrics": {metric.key: {"unit": metric.unit, "value": metric.value} for metric in analysis.metrics},
        "inputs": analysis.inputs,
        "stability": analysis.stability,
        "warnings": [warning.text for warning in analysis.warnings],
    }


def _stage_key(stage: "StageTiming") -> str:
    """Return the stage's name. A sub-stage is prefixed with its parent, because it may run in several stages."""
    return stage.name if stage.name in STAGE_NAMES else f"{stage.parent}/{stage.name}"


def print_outcome(folder: "RunFolder", analysis: "RunAnalysis | None", images: "Maybe[list[Path]] | None" = None) -> None:
    """Print figures, warnings and the path of the report; `images` are the PNG files, or why there are none."""
    from llm_perf_opt.analysis.metrics import METRICS
    from llm_perf_opt.core.records import Distribution, Missing
    from llm_perf_opt.report.run_tables import what_ran
    from llm_perf_opt.report.text import known_within, with_unit

    if analysis is not None:
        if not isinstance(analysis.timings, Missing):
            print(what_ran(analysis.timings))
        for note in analysis.inputs:
            print(f"- {note.text}")
        shown = {metric.key for metric in METRICS if metric.headline}
        for metric in analysis.metrics:
            if isinstance(metric.value, Distribution) and metric.key in shown:
                value = metric.value
                words = f"{with_unit(value.median, metric.unit)}  ({known_within(value, metric.unit)})"
                print(f"{metric.label:<32} {words}")
        for warning in analysis.warnings:
            print("warning:", indented(warning.text))
    if isinstance(images, Missing) and folder.waterfall_file.exists():
        print(f"images: SVG only, PNG n/a: {images.why}")
    written = next((path for path in (folder.page_file, folder.report_file) if path.exists()), None)
    if written:
        print(f"report: {written}")
    else:
        print(f"run: {folder.path}")


def print_program(folder: "RunFolder", found: "ProgramAnalysis", as_json: bool) -> None:
    """Print the result of `llm-perf exec`."""
    from llm_perf_opt.core.records import Missing
    from llm_perf_opt.report.markdown import render_markdown
    from llm_perf_opt.report.terminal import render_text
    from llm_perf_opt.workflows.analyze_program import program_document

    output = found.output if isinstance(found.output, Missing) else str(folder.path / found.output.file)
    if as_json:
        values = {"passes": found.manifest.passes, "kernels": found.kernels, "regions": found.regions, "output": output}
        print_json({"run": str(folder.path), "status": found.manifest.status, **values})
        return
    document = program_document(found)
    print(render_text(document) if sys.stdout.isatty() else render_markdown(document))
    print(f"output: {output}")
    print(f"report: {folder.report_file}")
