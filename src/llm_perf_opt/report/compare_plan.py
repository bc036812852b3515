"""The page of a planned comparison."""

from llm_perf_opt.analysis.comparison.planning import ComparisonPlan, Forecast, Noise, PlannedMetric
from llm_perf_opt.analysis.comparison.statistics import LEVEL
from llm_perf_opt.core.units import counted, significant
from llm_perf_opt.report.document import (
    Block,
    Code,
    Document,
    Paragraph,
    Section,
    Table,
    bullets,
    count_cell,
    numbers,
    when_known,
)
from llm_perf_opt.report.text import known, percent, present, seconds, signed_percent, words


def plan_document(found: ComparisonPlan) -> Document:
    """Return the whole page."""
    sections = [
        Section("plan", "Plan", _answer(found)),
        *(Section(f"plan-{metric.key}", metric.label, _metric(found, metric)) for metric in found.metrics),
        Section("method", "How to read it", [Paragraph(_METHOD)]),
    ]
    return Document("Plan of a comparison", f"pilots: {', '.join(found.pilots)}", "", sections)


_METHOD = (
    "Power is the chance that a change of this size is called faster or slower, forecast by drawing runs with the noise of the "
    f"pilots and judging them as compare does, at {percent(LEVEL, 0)}; it is right to a few points. The last column but one is "
    "the same if processes differ as much as the pilots leave possible (with 90 % confidence; if their spread is assumed: twice "
    "as much). More repeats per run narrow only the noise inside runs; try --repeats. A machine that drifts or switches between "
    "two speeds while the runs are made needs more runs."
)


def _answer(found: ComparisonPlan) -> list[Block]:
    asked = f"a change of {signed_percent(found.effect, 1)} with a chance of {percent(found.power, 0)}"
    count = known(found.runs, 0)
    if not count:
        return [Paragraph(f"No number of runs can be recommended to find {asked}: {words(found.runs)}."), bullets(found.cautions)]
    lines = [
        f"{counted(count, 'run')} per side, {counted(found.repeats, 'repeat')} each, find {asked} in every metric below with a "
        "forecast.",
        f"Time: about {seconds(found.run_seconds)} per run, {words(found.seconds, seconds)} in all.",
        _at_most(found),
        *found.cautions,
    ]
    commands = when_known("The commands", found.commands, lambda made: [Code("\n".join(made))])
    return [bullets(lines), Paragraph("Make the runs in turn, with your change in those of new:"), *commands]


def _at_most(found: ComparisonPlan) -> str:
    """Return how many runs it takes if processes differ more than the pilots show."""
    forecasts = present(metric.forecast for metric in found.metrics)
    most = present(one.needed_most for one in forecasts)
    needed = f"{max(most)} runs per side" if len(most) == len(forecasts) else "no number of runs that was considered is enough"
    return f"If processes differ as much as the pilots leave possible: {needed}."


def _metric(found: ComparisonPlan, metric: PlannedMetric) -> list[Block]:
    return when_known(
        "The forecast", metric.forecast, lambda known: [Paragraph(_noise_words(known.noise)), _table(found, metric.key, known)]
    )


def _noise_words(noise: Noise) -> str:
    source = "measured" if noise.runs > 1 else "assumed"
    likeness = f", correlated by {significant(noise.likeness, 1)} with the repeat before" if noise.likeness >= 0.1 else ""
    return (
        f"Repeats scatter by {percent(noise.scatter, 2)} inside a run{likeness}. Processes differ by "
        f"{words(noise.process, lambda share: percent(share, 2))} ({source} from {counted(noise.runs, 'pilot')}), at most "
        f"{words(noise.process_most, lambda share: percent(share, 2))}."
    )


def _table(found: ComparisonPlan, key: str, forecast: Forecast) -> Table:
    table = Table(
        f"power-{key}", "", numbers("runs per side", "power", "power at most spread", f"finds with {percent(found.power, 0)}")
    )
    for row in forecast.table:
        table.add(count_cell(row.runs), percent(row.power, 0), percent(row.power_least, 0), percent(row.finds))
    return table
