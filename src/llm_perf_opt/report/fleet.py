"""The page of a folder of runs: what the last commit changed, the best runs, a metric over commits, and every run."""

from collections.abc import Mapping, Sequence

from llm_perf_opt.analysis.fleet import (
    ORDER,
    UNKNOWN,
    Best,
    ChangedMetric,
    Fleet,
    FleetRun,
    Point,
    Reading,
    Series,
    SeriesChange,
    settings_words,
)
from llm_perf_opt.analysis.metrics import MetricDefinition, metric_named
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.units import counted, durations
from llm_perf_opt.report.document import (
    Block,
    Card,
    Cards,
    Cell,
    Column,
    Document,
    Drawing,
    Drawings,
    Item,
    Items,
    Paragraph,
    Section,
    Table,
    Unavailable,
    bullets,
    cell,
    count_cell,
    numbers,
)
from llm_perf_opt.report.fleet_charts import starts_above_zero, trend_svg
from llm_perf_opt.report.text import grouped, known, percent, signed_percent, significant, then, with_unit

MOST_DRAWN = 100
"""Series that get a chart."""
_LONGEST_WHY = 80
_CHANGED = ("slower", "faster", "not distinguishable", "not judged", "n/a")
_POOLED = (
    "Runs are pooled only if they ran the same model (architecture, dtype, random or real weights), the same workload (batch, "
    "prompts, new tokens) on the same kind of machine and number of devices, with the same settings."
)


def fleet_document(found: Fleet) -> Document:
    """Return the whole page."""
    sections = [
        Section("summary", "Summary", _summary(found)),
        Section("regressions", "What the last commit changed", changes_blocks(found)),
        Section("best", "Best runs", best_blocks(found)),
        Section("trend", "Over commits", trend_blocks(found)),
        Section("runs", "All runs", [_runs_table(found)]),
        Section("definitions", "Definitions", [Items(_definitions(found))]),
    ]
    folder = f"the folder {found.folder}"
    shown = f"{grouped(len(found.runs))} of {grouped(found.found)} runs in {folder}"
    subtitle = f"{shown} match {' '.join(found.filters)}." if found.filters else f"{counted(found.found, 'run')} in {folder}."
    return Document("Overview of runs", subtitle, "", sections)


def _summary(found: Fleet) -> list[Block]:
    ranked = [run for run in found.runs if run.is_ranked]
    verdicts = [row.change.metric(found.key).verdict for row in found.changes]
    metric = metric_named(found.key)
    cards = [
        Card("Runs", grouped(len(found.runs)), f"{grouped(len(ranked))} ranked"),
        Card("Models", grouped(len({run.same_model for run in ranked})), "by architecture, dtype and weights"),
        Card("Hardware", grouped(len({run.on for run in ranked})), "devices and their number"),
        Card("Commits", grouped(len({run.commit for run in ranked if run.commit})), f"{len(found.series)} series"),
        Card(f"Slower, {metric.key}", str(verdicts.count("slower")), f"of {len(verdicts)} series with two commits"),
    ]
    reasons = sorted(found.unranked.items(), key=lambda pair: (-pair[1], pair[0]))
    left_out = "; ".join(f"{reason} ({grouped(count)})" for reason, count in reasons)
    notes = [f"In no ranking, trend or comparison: {left_out}."] if left_out else []
    return [Cards(cards), *([bullets(notes, "warnings")] if notes else [])]


# --- what the last commit changed ---------------------------------------------------------------------------------------


def changes_blocks(found: Fleet) -> list[Block]:
    """Return a row per series: its newest commit compared with the one before, with every caution."""
    if not found.changes:
        return [Unavailable("Changes:", "no series has runs of two commits without uncommitted changes")]
    metric = metric_named(found.key)
    rows = sorted(found.changes, key=lambda row: _rank(row, metric))
    columns = [
        Column("#", number=True), Column("verdict"), Column("series"), Column("base commit"), Column("new commit"),
        *numbers("runs", "base", "new", "change", "cautions"),
    ]  # fmt: skip
    caption = f"{metric.label}: the newest commit of each series compared with the one before it"
    table = Table("changes-table", caption, columns, tools=True, foot=_changes_foot(found))
    for number, row in enumerate(rows, start=1):
        change = row.change.metric(found.key)
        values = [_amount(value, change.words, metric) for value in (change.base, change.new)]
        table.add(
            Cell(str(number), number), change.verdict, row.series.name,
            row.change.base_commit[:10], row.change.new_commit[:10],
            f"{len(row.change.base_runs)} / {len(row.change.new_runs)}", *values, _change_cell(change),
            count_cell(len(row.change.cautions)),
        )  # fmt: skip
    explained = [
        _explained(number, row, found.key)
        for number, row in enumerate(rows, start=1)
        if _needs_words(row.change.metric(found.key))
    ]
    rest = len(rows) - len(explained)
    more = f"Not distinguishable: {rest} more; --regressions --json has their reasons and cautions."
    return [table, *([Items(explained)] if explained else []), *([Paragraph(more)] if rest else [])]


def _needs_words(change: ChangedMetric) -> bool:
    """Return whether a row is explained: every one with a verdict, and every one without an interval."""
    return change.verdict != "not distinguishable" or change.low is None


def _rank(row: SeriesChange, metric: MetricDefinition) -> tuple[int, float, str]:
    """Return the sort key: regressions first, the largest first."""
    change = row.change.metric(metric.key)
    size = abs(change.change) if change.change is not None else 0.0
    return _CHANGED.index(change.verdict) if change.verdict in _CHANGED else len(_CHANGED), -size, row.series.name


def _amount(value: float | None, why: str, metric: MetricDefinition) -> Cell | Missing:
    return Missing(why) if value is None else cell(value, lambda amount: with_unit(amount, metric.unit))


def _change_cell(change: ChangedMetric) -> Cell | Missing:
    if change.change is None:
        return Missing(change.words)
    ends = "" if change.low is None or change.high is None else f"{signed_percent(change.low)} to {signed_percent(change.high)}"
    return Cell(signed_percent(change.change), change.change, below=ends)


def _explained(number: int, row: SeriesChange, key: str) -> Item:
    """Return the verdict in words, and everything that a reader must know before trusting it."""
    change = row.change
    details = [*change.cautions]
    if change.environment:
        details.append(f"Also different: {'; '.join(change.environment)}.")
    details.append(f"Base: {', '.join(change.base_runs)}. New: {', '.join(change.new_runs)}.")
    text = f"No verdict: {change.unjudged}" if change.unjudged else change.metric(key).words
    return Item(f"{number}. {row.series.name}:", text, details)


def _changes_foot(found: Fleet) -> str:
    level = found.changes[0].change.level
    chance = percent(1 - level, 0)
    return (
        f"Verdicts are those of `llm-perf compare`, without the traces of the runs; intervals are at {percent(level, 0)}. "
        f"Comparisons made: {len(found.changes)}. Of comparisons without any change, {chance} may get a verdict by chance, "
        "and more if the machine changed its speed between the commits. "
        f"Runs with uncommitted changes are not compared. {ORDER}"
    )


# --- the best runs --------------------------------------------------------------------------------------------------------


def best_blocks(found: Fleet) -> list[Block]:
    """Return the best run of each model, workload and hardware."""
    metric = metric_named(found.key)
    if not found.best:
        return [Unavailable("Best runs:", f"no ranked run has {metric.key}")]
    columns = [
        Column("run"), Column("model"), Column("hardware"), Column("batch × prompt + new"),
        *numbers(metric.key, "runs", "as good"), Column("weights"), Column("dtype"), Column("runtime"), Column("settings"),
        Column("commit"),
    ]  # fmt: skip
    direction = "highest" if metric.higher_is_better else "lowest"
    foot = (
        "As good: other runs whose 95 % interval overlaps with that of the best. Over all settings and commits, runs with "
        "uncommitted changes included; partial, failed and impossible runs are not ranked. Settings: those of the best in which "
        "the runs that it was chosen from differ."
    )
    table = Table("best-table", f"{metric.label}: the run with the {direction} median", columns, tools=True, foot=foot)
    for row in found.best:
        table.add(*_best_cells(row, metric, found))
    return [table]


def _best_cells(row: Best, metric: MetricDefinition, found: Fleet) -> list[Cell | str]:
    run = row.run
    return [
        _run_cell(run, found), run.model, run.on, run.workload,
        _reading_cell(row.reading, metric), count_cell(row.runs), count_cell(row.close),
        run.weights or UNKNOWN, run.dtype, run.runtime, _settings_cell(row.settings), run.version or UNKNOWN,
    ]  # fmt: skip


def _settings_cell(settings: Mapping[str, str] | None) -> Cell:
    if settings is None:
        return Cell(UNKNOWN)
    shown, every = ", ".join(settings_words(settings)), ", ".join(f"{key}={value}" for key, value in settings.items())
    return Cell(shown, whole=every if shown != every else "")


def _reading_cell(reading: Reading, metric: MetricDefinition) -> Cell:
    between = _between(reading.low, reading.high, reading.median, metric)
    kind = "95 %" if reading.is_interval else "range"
    below = f"({kind}: {between}, n = {reading.repeats})" if reading.repeats > 1 else "(one repeat)"
    return Cell(with_unit(reading.median, metric.unit), reading.median, below=below)


def _between(low: float, high: float, around: float, metric: MetricDefinition) -> str:
    return durations(low, high, around_ns=around) if metric.unit == "ns" else f"{significant(low)} – {significant(high)}"


def _run_cell(run: FleetRun, found: Fleet) -> Cell:
    return Cell(run.path, link=found.links.get(run.path, ""))


# --- over commits ---------------------------------------------------------------------------------------------------------


def trend_blocks(found: Fleet) -> list[Block]:
    """Return charts and a table of the metric over commits."""
    metric = metric_named(found.key)
    shown = [series for series in found.series if len(series.points) > 1]
    if not shown:
        return [Unavailable("Over commits:", "no series has runs of two commits (a run records that of its working folder)")]
    drawn = shown[:MOST_DRAWN]
    notes = ["Rings: runs with uncommitted changes, one each. Bars: the interval of one run, the range of several."]
    if len(shown) > len(drawn):
        notes.append(f"{len(shown) - len(drawn)} more series are only in the table.")
    if any(starts_above_zero(series, metric.key) for series in drawn):
        notes.append("The axis does not start at zero.")
    drawings = [Drawing(series.name, trend_svg(series, metric.key, metric.unit)) for series in drawn]
    return [Drawings("trend-charts", f"{metric.label} over commits:", drawings, notes), _trend_table(shown, metric)]


def _trend_table(shown: Sequence[Series], metric: MetricDefinition) -> Table:
    columns = [Column("series"), Column("commit"), Column("first measured"), *numbers("runs", metric.key)]
    foot = f"Of several runs, the geometric mean of their medians, and in brackets the range of the medians. {ORDER} {_POOLED}"
    table = Table("trend-table", f"{metric.label} per commit", columns, facets=("series",), foot=foot)
    for series in shown:
        for point in series.points:
            table.add(series.name, point.version, _time(point.first), count_cell(len(point.runs)), _point_cell(point, metric))
    return table


def _point_cell(point: Point, metric: MetricDefinition) -> Cell:
    within = _between(point.low, point.high, point.value, metric)
    return Cell(with_unit(point.value, metric.unit), point.value, below=f"({within})")


# --- every run ------------------------------------------------------------------------------------------------------------


def _runs_table(found: Fleet) -> Table:
    metric = metric_named(found.key)
    keys = list(dict.fromkeys(("ttft", "tpot", "decode_rate", metric.key)))
    columns = [
        Column("run"), Column("created"), Column("status"), Column("model"), Column("hardware"), Column("batch × prompt + new"),
        *numbers(*keys), Column("weights"), Column("dtype"), Column("runtime"), Column("commit"),
    ]  # fmt: skip
    facets = ("status", "model", "weights", "runtime", "hardware", "batch × prompt + new")
    table = Table("runs-table", "Every run, newest first; its path links to its report", columns, facets=facets)
    for run in found.runs:
        why = run.unranked or run.why
        table.add(
            _run_cell(run, found), _time(run.created),
            Cell(run.status, below=_short(why), whole=why if len(why) > _LONGEST_WHY else ""), run.model, run.on, run.workload,
            *[_figure(run, metric_named(key)) for key in keys], run.weights, run.dtype, run.runtime or run.kind, run.version,
        )  # fmt: skip
    return table


def _figure(run: FleetRun, metric: MetricDefinition) -> Cell:
    """Return a metric. Thousands of runs have many reasons for a missing one: each is in its own cell."""
    reading = run.reading(metric.key)
    shown = then(reading, lambda found: Cell(with_unit(found.median, metric.unit), found.median))
    return known(shown, Cell("n/a", whole=str(reading)))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_WHY else f"{text[: _LONGEST_WHY - 1].rstrip()}…"


def _time(created: str) -> str:
    return created[:19].replace("T", " ")


def _definitions(found: Fleet) -> list[Item]:
    metric = metric_named(found.key)
    return [
        Item(f"{metric.label}:", metric.definition),
        Item("Series:", _POOLED),
        Item("Commit:", "that of the folder in which the run was started. Two trees with uncommitted changes are never pooled."),
        Item("Ranked:", "a complete run of a model with plausible figures that is not a copy of another run."),
        Item("Slower, faster:", "the interval of the change excludes zero, as in `llm-perf compare`."),
    ]
