"""Budget and findings of a run as the pages show them."""

from collections.abc import Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.records import Maybe, Missing
from llm_perf_opt.report.chart_data import Waterfall, coarse_waterfalls


@dataclass(frozen=True)
class FindingView:
    """One finding in words."""

    claim: str
    detail: str


def budget_of(analysis: RunAnalysis) -> Maybe[tuple[Waterfall, ...]]:
    """A waterfall per stage."""
    return coarse_waterfalls(analysis.efficiency)


def findings_of(analysis: RunAnalysis) -> Maybe[Sequence[FindingView]]:
    """What to change, the largest saving first."""
    return Missing("findings were not derived for this run")
