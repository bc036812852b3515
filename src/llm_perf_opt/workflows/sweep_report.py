"""Reads every run of a sweep and writes its page. A point that cannot be read is a row that says so."""

from collections import Counter
from pathlib import Path

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.sweep_rows import SweepEntry, sweep_rows
from llm_perf_opt.core.errors import CaptureError, LlmPerfError
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, write_whole
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.sweep import SweepReport, sweep_document
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.sweep import hardware_of
from llm_perf_opt.workflows.sweep_folder import SweepFolder, SweepPoint, damage_of


def report_sweep(path: Path) -> tuple[SweepFolder, SweepReport]:
    """Make sweep.html and sweep.md anew."""
    folder = SweepFolder.open(path)
    sweep = folder.read()
    entries = [_entry(folder, point) for point in sweep.points]
    found = SweepReport("/".join(folder.path.parts[-3:]), sweep.created, sweep.command, sweep_rows(entries), str(folder.path))
    document = sweep_document(found)
    write_whole(folder.page_file, render_html(document).encode())
    write_whole(folder.report_file, render_markdown(document).encode())
    return folder, found


def _entry(folder: SweepFolder, point: SweepPoint) -> SweepEntry:
    """As the folder is now: sweep.json says what became of the point, not what became of its run afterwards."""
    run = folder.run(point)
    damage = damage_of(point, run)
    status, why = (point.status, point.why) if damage is None else ("damaged", damage.why)
    analysis = _analysis(run)
    hardware = {} if isinstance(analysis, Missing) else hardware_of(analysis)
    return SweepEntry(point.swept, status, why, point.folder, analysis, _page(folder, point), hardware)


def _page(folder: SweepFolder, point: SweepPoint) -> str:
    """The point's own report; a run that ended early, or was moved away, may have none."""
    run = RunFolder(folder.path / point.folder)
    pages = [page for page in (run.page_file, run.report_file) if point.folder and page.is_file()]
    return pages[0].relative_to(folder.path).as_posix() if pages else ""


def _analysis(run: Maybe[RunReader]) -> Maybe[RunAnalysis]:
    if isinstance(run, Missing):
        return run
    try:
        return analyze(run, traces=False)
    except LlmPerfError as error:  # whatever one point lacks, the others are shown
        return Missing(error.fact)


def shortcoming(found: SweepReport) -> LlmPerfError | None:
    """What a verb ends with where not every point is complete and stands beside the others."""
    lacking = [row for row in found.rows if row.status != "complete" or not row.ranked]
    if not lacking:
        return None
    kinds = Counter(row.status for row in lacking)
    return CaptureError(
        f"{len(lacking)} of {len(found.rows)} points of the sweep are not as they should be: "
        f"{', '.join(f'{status} ({count})' for status, count in kinds.items())}.",
        "Their rows in the report say why.",
    )
