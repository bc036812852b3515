"""The still images that lie beside the Markdown pages of a run."""

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.chart_data import roofline
from llm_perf_opt.report.run_budget import budget_of


def images(analysis: RunAnalysis) -> str:
    """A line for each image that the run has."""
    lines = []
    if not isinstance(budget_of(analysis), Missing):
        lines.append("![Where the time goes](waterfall.svg)\n")
    if not isinstance(roofline(analysis.efficiency, analysis.kernels), Missing):
        lines.append("![Roofline](roofline.svg)\n")
    return "\n".join(lines)
