"""Compare the runs of two commits as `llm-perf compare` does, without reading their traces."""

from collections.abc import Sequence
from pathlib import Path

from llm_perf_opt.analysis.comparison.compare import Comparison, Row, compare
from llm_perf_opt.analysis.comparison.statistics import LEVEL
from llm_perf_opt.analysis.fleet import ChangedMetric, CommitChange, FleetRun
from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.compare import verdict_words
from llm_perf_opt.workflows.compare import sides_of

_OWN_COMMIT = "working_folder"


def compare_commits(folder: Path, base: Sequence[FleetRun], new: Sequence[FleetRun]) -> CommitChange:
    """Return the comparison of the runs of two commits; without a verdict if they cannot be compared."""
    made = CommitChange(base[0].commit, new[0].commit, tuple(run.path for run in base), tuple(run.path for run in new))
    paths = [[folder / run.path for run in side] for side in (base, new)]
    try:
        found = compare(*sides_of(paths[0], paths[1], traces=False))
    except (ConfigError, ParseError) as error:  # not comparable, or damaged since
        return CommitChange(made.base_commit, made.new_commit, made.base_runs, made.new_runs, unjudged=error.fact, level=LEVEL)
    return CommitChange(
        made.base_commit,
        made.new_commit,
        made.base_runs,
        made.new_runs,
        tuple(_changed(row) for row in found.metrics),
        found.cautions,
        _environment(found),
        found.unjudged,
        LEVEL,
    )


def _environment(found: Comparison) -> tuple[str, ...]:
    """Return what else differs between the sides, apart from the commit itself."""
    rows = [row for row in found.environment if row.key.partition(".")[0] != _OWN_COMMIT]
    return tuple(f"{row.key}: {row.base} → {row.new}" for row in rows)


def _changed(row: Row) -> ChangedMetric:
    effect = row.effect
    if isinstance(effect, Missing):
        return ChangedMetric(row.key, "n/a", effect.why)
    low, high = (None, None) if isinstance(effect.interval, Missing) else (effect.interval.low, effect.interval.high)
    words = "not judged" if effect.verdict == "not judged" else verdict_words(effect)
    return ChangedMetric(row.key, effect.verdict, words, effect.base, effect.new, effect.change, low, high)
