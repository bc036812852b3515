"""Reports as text, rendered as the workflows write them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from llm_perf_opt.analysis.comparison.compare import Comparison
from llm_perf_opt.analysis.regions.records import RegionReport
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.machine_records import FoundCeilings, Telemetry
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.ceilings import ceilings_document
from llm_perf_opt.report.compare_document import comparison_document
from llm_perf_opt.report.document import Block, Document, Section
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.kernel_tables import all_kernels
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.regions import regions_document
from llm_perf_opt.report.run_document import operators_document, run_document
from llm_perf_opt.report.stakeholder import summary_document
from llm_perf_opt.report.sweep import SweepReport, sweep_document
from llm_perf_opt.report.terminal import render_text

NONE = Missing("none was taken")


def run_page(analysis: RunAnalysis, samples: Maybe[Telemetry] = NONE, regions: Maybe[RegionReport] = NONE) -> str:
    """report.html"""
    return render_html(run_document(analysis, samples, regions))


def report(analysis: RunAnalysis, samples: Maybe[Telemetry] = NONE, regions: Maybe[RegionReport] = NONE) -> str:
    """report.md"""
    return render_markdown(run_document(analysis, samples, regions))


def stakeholder_summary(analysis: RunAnalysis) -> str:
    """stakeholder_summary.md"""
    return render_markdown(summary_document(analysis))


def operators_page(analysis: RunAnalysis) -> str:
    """operators.md"""
    return render_markdown(operators_document(analysis))


def kernels_page(*parts: Any) -> str:
    """kernels.md"""
    return render_markdown(all_kernels(*parts))


def regions_page(found: RegionReport) -> str:
    """regions.md"""
    return render_markdown(regions_document(found))


def comparison_page(found: Comparison) -> str:
    """compare --markdown"""
    return render_markdown(comparison_document(found))


def comparison_html(found: Comparison) -> str:
    """compare --out FILE.html"""
    return render_html(comparison_document(found))


def sweep_page(found: SweepReport) -> str:
    """sweep.html"""
    return render_html(sweep_document(found))


def sweep_markdown(found: SweepReport) -> str:
    """sweep.md"""
    return render_markdown(sweep_document(found))


def ceilings_text(found: FoundCeilings, now: datetime) -> str:
    """llm-perf ceilings"""
    return render_text(ceilings_document(found, now))


def markdown_of(blocks: Sequence[Block]) -> str:
    """Blocks alone, as Markdown below a heading."""
    return render_markdown(Document("x", "", "", [Section("x", "", blocks)]))
