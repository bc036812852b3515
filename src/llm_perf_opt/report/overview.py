"""The first screen of a run: reasons to be careful, key figures, where the time goes; and the summary for a terminal."""

import shlex
import textwrap

from llm_perf_opt.analysis.limits.binding import UNKNOWN, shown_verdict
from llm_perf_opt.analysis.limits.efficiency import StageEfficiency
from llm_perf_opt.analysis.metrics import METRICS
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.core.units import durations
from llm_perf_opt.core.warnings import WarningId
from llm_perf_opt.report.chart_data import OTHER, Use, Waterfall, budget_of
from llm_perf_opt.report.charts import color_of
from llm_perf_opt.report.document import Advice, Banner, Block, Card, Cards, Item, Paragraph, Share, StackedBar
from llm_perf_opt.report.findings import TRUST, advice_cards, banner_items, changes, findings_of, source_of
from llm_perf_opt.report.run_tables import what_ran
from llm_perf_opt.report.terminal import aligned, effect_words
from llm_perf_opt.report.text import duration, known, known_within, percent, significant, then, with_unit

_BANNER_WARNINGS = (WarningId.IMPLAUSIBLE, WarningId.RUN_INCOMPLETE, WarningId.TIMES_UNREADABLE)
"""Warnings that are shown above everything else; the others have a section of their own."""
MOST_SHARES = 8
"""Most segments of a bar; the table of the budget has all rows."""
TERMINAL_ROWS = 5
TERMINAL_WIDTH = 80


# --- blocks of the page -----------------------------------------------------------------------------------------------------


def overview_blocks(analysis: RunAnalysis) -> list[Block]:
    """Return the first blocks of a report."""
    return [*_careful(analysis), *_figures(analysis), *known(stage_bars(analysis), [])]


def _careful(analysis: RunAnalysis) -> list[Block]:
    """Return what to know before reading a figure, and how many other warnings there are."""
    urgent = [warning for warning in analysis.warnings if warning.id in _BANNER_WARNINGS]
    shown = [warning for warning in urgent if warning.id != WarningId.RUN_INCOMPLETE]  # which is the notice of the page
    items = [*[Item("", warning.text) for warning in shown], *banner_items(known(findings_of(analysis), ()))]
    rest = len(analysis.warnings) - len(urgent)
    pointer = f"See {rest} {'warnings' if rest > 1 else 'warning'} below." if rest else ""
    if not items:
        return [Paragraph(pointer, "pointer")] if pointer else []
    return [Banner([*items[:-1], items[-1]._replace(text=f"{items[-1].text} {pointer}".strip())])]


def _figures(analysis: RunAnalysis) -> list[Block]:
    cards = []
    for definition in METRICS:
        metric = analysis.metric(definition.key)
        if metric is None or not definition.headline:
            continue
        value = metric.value
        if isinstance(value, Missing):
            cards.append(Card(metric.label, "n/a", value.why))
        else:
            timed = definition.stage is not None and metric.unit == "ns"
            stage = str(definition.stage)
            whole = next((data.whole for data in known(budget_of(analysis), ()) if data.stage == stage), "")
            far = ", ".join(filter(None, (distance_words(analysis, stage), whole))) if timed else ""
            cards.append(Card(metric.label, with_unit(value.median, metric.unit), known_within(value, metric.unit), far))
    return [Cards(cards)] if cards else []


def stage_bars(analysis: RunAnalysis) -> Maybe[list[StackedBar]]:
    """Return where the time of each stage goes."""
    return then(budget_of(analysis), lambda found: [_bar(analysis, number, data) for number, data in enumerate(found)])


def _bar(analysis: RunAnalysis, number: int, data: Waterfall) -> StackedBar:
    uses = data.largest(MOST_SHARES)
    drawn = sum(use.ns for use in uses if use.ns > 0) or 1
    shares = [
        Share(use.label, duration(use.ns), _percent(use, data), max(use.ns, 0) / drawn, color_of(use.color), _within(use))
        for use in uses
    ]
    return StackedBar(f"bar-{number}", data.title, stage_words(analysis, data), shares)


def _percent(use: Use, data: Waterfall) -> str:
    return percent(use.ns / data.total_ns) if data.total_ns else "n/a"


def _within(use: Use) -> str:
    return "" if use.low_ns is None or use.high_ns is None else durations(use.low_ns, use.high_ns, 3)


def stage_words(analysis: RunAnalysis, data: Waterfall) -> str:
    """Return the share of a stage in a request, the distance of its budget from the roofline, and what bounds it."""
    far = "" if data.times_roofline is None else f"{significant(data.times_roofline, 3)} × roofline"
    found, timed = _efficiency(analysis, data.stage), analysis.stage(data.stage)
    verdict = "" if found is None or found.verdict == UNKNOWN else shown_verdict(found.verdict)
    share = f"{percent(timed.share, 0)} of a request" if timed else ""
    return ", ".join(text for text in (share, far, verdict) if text)


def distance_words(analysis: RunAnalysis, name: str) -> str:
    """Return how far a stage is from the roofline at the best known peaks; empty if that is unknown."""
    found = _efficiency(analysis, name)
    if found is None or isinstance(found.distance, Missing):
        return ""
    return f"{significant(found.distance.times, 3)} × roofline"


def _efficiency(analysis: RunAnalysis, name: str) -> StageEfficiency | None:
    stages = known(then(analysis.efficiency, lambda found: found.stages), ())
    return next((stage for stage in stages if stage.stage == name), None)


# --- the terminal -------------------------------------------------------------------------------------------------------------


def overview_text(analysis: RunAnalysis) -> str:
    """Return what ran, the key figures, where the time goes and the first change, in at most 80 columns.

    Only a command may be longer, because a broken line cannot be copied.
    """
    parts = [_what(analysis), _figure_lines(analysis), _time_lines(analysis), _change_lines(analysis)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _what(analysis: RunAnalysis) -> list[str]:
    return [] if isinstance(analysis.timings, Missing) else _wrapped(what_ran(analysis.timings), 4)


def _figure_lines(analysis: RunAnalysis) -> list[str]:
    rows = []
    for block in _figures(analysis):
        if isinstance(block, Cards):
            rows += [[card.name, card.value, card.distance or f"({card.detail})"] for card in block.cards if card.value != "n/a"]
    return [_cut(line) for line in aligned(rows, "lrl")] if rows else []


def _time_lines(analysis: RunAnalysis) -> list[str]:
    """Return the largest rows of the budget of the stage that takes most of a request."""
    found = budget_of(analysis)
    if isinstance(found, Missing):
        return _wrapped(f"Where the time goes: n/a: {found.why}")
    data = max(found, key=lambda one: _share_of_request(analysis, one.stage))
    words = stage_words(analysis, data)
    uses = sorted(data.largest(TERMINAL_ROWS), key=lambda use: (use.color == OTHER, -abs(use.ns)))
    rows = [[_percent(use, data), duration(use.ns), use.label] for use in uses]
    lines = [_cut(f"  {line}") for line in aligned(rows, "rrl")]
    return [*_wrapped(f"Where the time goes: {data.title}{f' ({words})' if words else ''}"), *lines]


def _share_of_request(analysis: RunAnalysis, name: str) -> float:
    timed = analysis.stage(name)
    return timed.share if timed else 0.0


def _change_lines(analysis: RunAnalysis) -> list[str]:
    """Return the first change and how to try it; reasons to distrust the figures follow."""
    found = findings_of(analysis)
    if isinstance(found, Missing):
        return _wrapped(f"What to change first: n/a: {found.why}")
    trust = [finding.title or finding.headline for finding in found if finding.kind == TRUST]
    notes = [line for title in trust for line in _wrapped(f"Note: {title.rstrip('.')}.", 2)]
    listed = advice_cards(changes(found), source_of(analysis)).cards
    if not listed:
        return ["What to change first: no rule found anything above its threshold.", *notes]
    more = len(listed) - 1
    rest = [f"{more} more finding{'s are' if more > 1 else ' is'} in the report."] if more else []
    return [*_first(listed[0]), *rest, *notes]


def _first(card: Advice) -> list[str]:
    lines = _wrapped(f"What to change first: {card.title}", 2)
    lines += [f"  {line}" for line in _wrapped(f"{effect_words(card)}; {card.request}", 2, TERMINAL_WIDTH - 2)]
    if card.command:
        return [*lines, f"  {one_line(card.command)}"]
    return [*lines, *[f"  {line}" for line in _wrapped(card.change, 2, TERMINAL_WIDTH - 2)]]


def next_command(analysis: RunAnalysis, folder: str) -> str:
    """Return the command that tries the findings, or lists them if none is a setting; empty if there are none."""
    listed = changes(known(findings_of(analysis), ()))
    verify = " --verify" if any(finding.overrides for finding in listed) else ""
    return f"llm-perf advise {shlex.quote(folder)}{verify}" if listed else ""


def _cut(line: str) -> str:
    """Return a row of a table, which is not wrapped; an ellipsis shows that it was too long."""
    return line if len(line) <= TERMINAL_WIDTH else f"{line[: TERMINAL_WIDTH - 1]}…"


def _wrapped(text: str, most: int = 3, width: int = TERMINAL_WIDTH) -> list[str]:
    """Return a text in at most `most` lines; a longer one is cut."""
    return textwrap.wrap(one_line(text), width, max_lines=most, placeholder=" …", break_long_words=False, break_on_hyphens=False)
