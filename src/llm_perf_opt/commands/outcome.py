"""What a run came to, as `run` and `report` end with it."""

from typing import TYPE_CHECKING, Any

from llm_perf_opt.commands.shared import print_json
from llm_perf_opt.stages import STAGE_NAMES

if TYPE_CHECKING:
    from pathlib import Path

    from llm_perf_opt.analyse_program import ProgramAnalysis
    from llm_perf_opt.analysis.run_analysis import RunAnalysis
    from llm_perf_opt.records import Maybe, StageTiming
    from llm_perf_opt.run_folder import RunFolder


def outcome(folder: "RunFolder", analysis: "RunAnalysis | None") -> dict[str, Any]:
    """What `--json` ends with."""
    if analysis is None:
        return {"run": str(folder.path), "status": "failed", "stages": {}}
    return {
        "run": str(folder.path),
        "status": "damaged" if analysis.damaged else analysis.manifest.status,
        "why": analysis.damaged.fact if analysis.damaged else analysis.manifest.why,
        "stages": {_stage_key(stage): stage for stage in analysis.stages},
        "metrics": {metric.key: {"unit": metric.unit, "value": metric.value} for metric in analysis.metrics},
        "stability": analysis.stability,
        "warnings": analysis.warnings,
    }


def _stage_key(stage: "StageTiming") -> str:
    """The stage's name; a sub-stage's with its parent's before it, since it may run in several."""
    return stage.name if stage.name in STAGE_NAMES else f"{stage.parent}/{stage.name}"


def print_outcome(folder: "RunFolder", analysis: "RunAnalysis | None", images: "Maybe[list[Path]] | None" = None) -> None:
    """The figures of the request, the warnings, and where the report lies; `images` are the PNG files, or why there are none."""
    from llm_perf_opt.records import Distribution, Missing
    from llm_perf_opt.report.text import interval, with_unit

    if analysis is not None:
        for metric in analysis.metrics:
            if isinstance(metric.value, Distribution) and metric.key in ("ttft", "tpot", "e2e", "decode_rate"):
                value = metric.value
                shown = f"{with_unit(value.median, metric.unit)}  (95 %: {interval(value, metric.unit)}, n={value.n})"
                print(f"{metric.label:<32} {shown}")
        for warning in analysis.warnings:
            print(f"warning: {warning}")
    if isinstance(images, Missing) and folder.waterfall_file.exists():
        print(f"images: SVG only, PNG n/a: {images.why}")
    written = next((path for path in (folder.page_file, folder.report_file) if path.exists()), None)
    if written:
        print(f"report: {written}")
    else:
        print(f"run: {folder.path}")


def print_program(folder: "RunFolder", found: "ProgramAnalysis", as_json: bool) -> None:
    """What a user's own program came to, as `exec` and `report` end with it."""
    from llm_perf_opt.analyse_program import program_page

    if as_json:
        print_json({"run": str(folder.path), "status": found.manifest.status, "kernels": found.kernels, "regions": found.regions})
        return
    print(program_page(found))
    print(f"report: {folder.report_file}")
