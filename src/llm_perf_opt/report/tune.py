"""The page of a search: the staircase from the first to the last configuration, what was rejected, the final command."""

import shlex
from collections.abc import Sequence

from llm_perf_opt.analysis.tuning.calibration import COVERAGE, FEWEST, calibration_rows
from llm_perf_opt.analysis.tuning.goals import GOALS
from llm_perf_opt.analysis.tuning.records import ALREADY, StageDistance, Step, TuneResult
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.secrets import shown_command
from llm_perf_opt.core.units import durations, percentage
from llm_perf_opt.report.document import (
    Block,
    Card,
    Cards,
    Cell,
    Chart,
    Code,
    Column,
    Document,
    Image,
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
    when_known,
)
from llm_perf_opt.report.findings import changed_command, is_single_run
from llm_perf_opt.report.text import capitalized, duration, percent, signed_percent, significant, times
from llm_perf_opt.report.tune_charts import calibration_chart, staircase_chart
from llm_perf_opt.report.tune_tokens import logit_blocks, tokens_text

_CHANGE = (Column("change"), Column("finding or lever"))
_NOTHING_REJECTED = ("Nothing was tried.", "Every change that was tried was kept.")
_NO_PREDICTION = Missing("no finding predicts it")
_NO_INTERVAL = Missing("no interval: it was not judged")
_NO_ROOFLINE = Missing("the roofline time of this run is unknown")


def final_command(command: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the command that runs the best configuration: that of the base, with the changes.

    It is empty if the base was not made by the command of a single run, such as a point of a sweep.
    """
    if overrides:
        return shlex.split(changed_command(overrides, command))
    return list(command) if is_single_run(command) else []


def step_line(step: Step) -> str:
    """Return a step on one line, for the terminal while the search runs."""
    return f"{'kept' if step.kept else 'rejected'}: {' '.join(step.change)}: {step.why}"


def tune_document(found: TuneResult, name: str) -> Document:
    """Return the page."""
    kept = found.kept
    notice = "" if found.confirmed or not kept else _unconfirmed(found)
    rejected = [step for step in found.steps if not step.kept]
    subtitle = (
        f"Objective: {found.objective}. Changes: {len(found.steps)} tried, {len(kept)} kept. {duration(found.spent_s * 1e9)} of "
        f"{duration(found.budget_s * 1e9)} were spent. {capitalized(found.why)}."
    )
    sections = [
        Section("result", "Result", [_cards(found), *_words(found), *_constraints(found), *_best(found)]),
        Section("steps", "Steps", [*_staircase(found), _steps(found)] if kept else [Paragraph("No change was kept.")]),
        Section("rejected", "Rejected", [_rejected(rejected) if rejected else Paragraph(_NOTHING_REJECTED[bool(kept)])]),
        Section("tokens", "Tokens and logits", logit_blocks(found.steps)),
        Section("not-tried", "Not tried", _not_tried(found)),
        Section("calibration", "Predictions against measurements", _calibration(found)),
        Section("method", "How it was decided", [_method(found)]),
    ]
    if found.notes:
        sections.append(Section("notes", "Notes on the base", [bullets(found.notes)]))
    return Document(f"Search {name}", subtitle, notice, sections)


def _summary(found: TuneResult) -> str:
    """Return the result in a sentence or two."""
    kept, decision = found.kept, found.confirmation
    if not found.steps:
        needed = f" A comparison needs {found.runs_per_side} runs of each side." if found.ending == "budget" else ""
        return f"No change was tried: {found.why}.{needed}"
    if not found.overrides:
        return "No configuration was found that is better than the base."
    changes = "; ".join(f"{' '.join(step.change)}{_share(step)}" for step in kept)
    if decision is None or decision.before is None or decision.after is None or decision.change is None:
        return f"Kept so far: {changes}."
    goal = GOALS[decision.goal]
    lossy, same = any(step.lossy for step in kept), all(step.same_tokens for step in kept)
    tokens = " The output may differ: a kept change is lossy." if lossy else " The tokens are the same." if same else ""
    return (
        f"{goal.name} went from {goal.text(decision.before)} to {goal.text(decision.after)} "
        f"({signed_percent(decision.change)}) with {len(kept)} change{'s' if len(kept) > 1 else ''}: {changes}.{tokens}"
    )


def _share(step: Step) -> str:
    return "" if step.decision is None or step.decision.change is None else f" ({signed_percent(step.decision.change)})"


def _words(found: TuneResult) -> list[Block]:
    """Return the result in words, and what the gain is based on if fresh runs were not finished."""
    basis = [Paragraph(f"What this is based on: {found.confirmed_why}.")] if _by_its_step(found) else []
    return [Paragraph(_summary(found)), *basis]


def _by_its_step(found: TuneResult) -> bool:
    """Return whether the claim is the comparison of the only step."""
    return bool(found.confirmed and found.kept) and found.confirmation == found.kept[-1].decision


def _unconfirmed(found: TuneResult) -> str:
    if found.confirmed is None:
        return f"The gain is not confirmed by fresh runs: {found.confirmed_why}."
    return f"Fresh runs did not confirm the gain, so the base is reported as the best: {found.confirmed_why}."


def _cards(found: TuneResult) -> Cards:
    goal = GOALS[found.objective]
    base = "n/a" if found.base_value is None else goal.text(found.base_value)
    recorded = "" if found.recorded_value is None else f"; the run recorded {goal.text(found.recorded_value)}"
    name = "Base, measured again" if found.remeasured else "Base"
    cards = [Card(name, base, f"{found.objective}{recorded}", _distance(found.base_distance))]
    decision = found.confirmation
    if decision is not None and decision.after is not None and decision.before is not None and decision.change is not None:
        interval = "" if decision.low is None or decision.high is None else _interval_words(decision.low, decision.high)
        last = found.kept[-1].distance if found.kept and decision.goal == found.objective else None
        claimed = GOALS[decision.goal]
        words = claimed.name if decision.goal == found.objective else f"{claimed.name}; base {claimed.text(decision.before)}"
        fresh = "in the runs of its step" if _by_its_step(found) else "in fresh runs"
        cards.append(Card(f"Best, {fresh}", claimed.text(decision.after), words, _distance(last)))
        cards.append(Card("Change", signed_percent(decision.change), interval))
    elif found.kept and found.confirmed is None:
        step = found.kept[-1]
        if step.decision is not None and step.decision.after is not None and step.goal == found.objective:
            cards.append(Card("Best so far", goal.text(step.decision.after), "not confirmed", _distance(step.distance)))
    return Cards(cards)


def _interval_words(low: float, high: float) -> str:
    return f"98 % interval {percentage(low, 1, signed=True)} to {percentage(high, 1, signed=True)}"


def _distance(found: StageDistance | None) -> str:
    return "" if found is None else f"{times(found.times)} roofline"


def _constraints(found: TuneResult) -> list[Block]:
    if not found.constraints:
        return []
    table = Table("constraints", "Constraints", [Column("constraint"), Column("base"), Column("best"), Column("met")])
    for line in found.constraints:
        table.add(line.text, line.base, line.best, "yes" if line.met else "no")
    return [table]


def _best(found: TuneResult) -> list[Block]:
    if not found.overrides:
        return _command(found)
    table = Table("diff", "What differs from the base", [Column("setting"), Column("base"), Column("best")])
    for key, base, best in found.diff:
        table.add(key, base, best)
    return [
        Paragraph("The best configuration:"),
        *_command(found),
        table,
        Paragraph(f"Its run: {found.best}. The base: {found.base}."),
    ]


def _command(found: TuneResult) -> list[Block]:
    if found.command:
        return [Code(shown_command(found.command))]
    return [
        Unavailable(
            "Command:",
            f"the base was not made by a command of one run; config.yaml in {found.best} has all settings",
        )
    ]


def _staircase(found: TuneResult) -> list[Block]:
    caption = "From the base to the best configuration: measured with 98 % intervals, predicted with its interval, roofline time"
    drawn = staircase_chart(found)
    return when_known(
        "Staircase:",
        drawn,
        lambda chart: [Chart("staircase", caption, chart[0], chart[1], image=Image("Steps", "staircase.svg"))],
    )


def _steps(found: TuneResult) -> Table:
    caption = "Kept changes, each on top of the one before; a step is compared with the configuration directly before it"
    figures = numbers("predicted", "measured", "before", "change", "× roofline")
    table = Table("steps-table", caption, [*_CHANGE, *figures, Column("tokens")])
    for step in found.kept:
        table.add(
            " ".join(step.change), _source(step), _predicted(step), _time(step.measured_ns, step), _time(step.before_ns, step),
            _change(step), cell(_NO_ROOFLINE if step.distance is None else step.distance.times, times), tokens_text(step),
        )  # fmt: skip
    if len(found.steps) > 1:
        table.foot = "The gains of single steps are likely too large, because the best of several changes was chosen."
    return table


def _source(step: Step) -> str:
    return f"{step.source}{' (lossy)' if step.lossy else ''}{'' if step.goal == 'tpot' else f', for {step.goal}'}"


def _predicted(step: Step) -> Cell | Missing:
    found = step.predicted
    if found is None:
        return _NO_PREDICTION
    below = durations(found.low_ns, found.high_ns, 3)
    return Cell(
        duration(found.expected_ns), found.expected_ns, below=f"({below}{f', {found.trials} trials' if found.trials else ''})"
    )


def _time(ns: int | None, step: Step) -> Cell | Missing:
    if ns is not None:
        return Cell(duration(ns), ns)
    decision = step.decision
    if decision is None or decision.after is None:
        return Missing("it was not measured")
    return Cell(GOALS[step.goal].text(decision.after), decision.after)


def _change(step: Step) -> Cell | Missing:
    found = step.decision
    if found is None or found.change is None:
        return _NO_INTERVAL
    below = (
        ""
        if found.low is None or found.high is None
        else f"({percentage(found.low, 1, signed=True)} to {percentage(found.high, 1, signed=True)})"
    )
    return Cell(signed_percent(found.change), found.change, below=below)


def _rejected(steps: Sequence[Step]) -> Table:
    columns = [*_CHANGE, *numbers("predicted", "measured"), Column("why")]
    table = Table("rejected-table", "What was tried and not kept", columns)
    for step in steps:
        table.add(" ".join(step.change), _source(step), _predicted(step), _time(step.measured_ns, step), step.why)
    return table


def _not_tried(found: TuneResult) -> list[Block]:
    if not found.not_tried:
        return [Paragraph("Nothing was left out.")]
    table = Table("not-tried-table", "Changes that were left out", [*_CHANGE, Column("why")])
    for one in found.not_tried:
        if one.why != ALREADY:
            table.add(" ".join(one.change), one.source, one.why)
    same = [" ".join(one.change) for one in found.not_tried if one.why == ALREADY]
    has = [Paragraph(f"Settings that the configuration already had: {', '.join(same)}.")] if same else []
    return [*([table] if table.rows else []), *has]


def _calibration(found: TuneResult) -> list[Block]:
    rows = calibration_rows(found.calibration)
    if not rows:
        return [Unavailable("Calibration:", "no finding was tried on this kind of device yet")]
    figures = numbers("trials", "median error", "largest error", "measured / predicted saving")
    caption = f"Error of predicted times on {found.device}, over all trials of this user"
    table = Table("calibration-table", caption, [Column("finding"), *figures, Column("interval of the saving")])
    for row in rows:
        few = Missing(f"fewer than {FEWEST} trials: the interval of the finding itself is used")
        bounds: Maybe[str] = (
            few
            if row.low_ratio is None or row.high_ratio is None
            else f"× {significant(row.low_ratio, 3)} to {significant(row.high_ratio, 3)}"
        )
        table.add(
            row.finding, count_cell(row.n), cell(row.median_error, signed_percent), cell(row.worst_error, signed_percent),
            cell(row.median_ratio, times), cell(bounds),
        )  # fmt: skip
    table.foot = (
        "Times of the stage that the finding is about, over its traced steps, as in `advise --verify`; the steps above show the "
        "objective of the whole request. A positive error: the prediction was too slow. Intervals are meant to contain "
        f"{percent(COVERAGE)} of new trials."
    )
    caption = "Predicted against measured time of each trial; on the line, the prediction is exact"
    drawn = calibration_chart(found.calibration)
    return [*when_known("Chart:", drawn, lambda chart: [Chart("calibration-chart", caption, chart)]), table]


def _method(found: TuneResult) -> Items:
    runs = f"{found.runs_per_side} run{'s' if found.runs_per_side > 1 else ''}"
    return Items([Item(head, text.format(runs=runs)) for head, text in _METHOD])


_METHOD = (
    (
        "Order:",
        "findings of the current configuration, by predicted saving and confidence (independent ones together if the budget is "
        "short); then levers without a prediction, one by one; then pairs of changes that did not help alone.",
    ),
    (
        "Decision:",
        "`compare` judges a change once, over {runs} of each side that alternate, with its checks for drift and for different "
        "work. The first run of a change can only reject it.",
    ),
    (
        "Tokens:",
        "a change that does not alter the precision must produce the tokens of the base, except for ties within rounding; with "
        "--tokens exact, without exception. If they cannot be compared, it is rejected.",
    ),
    (
        "Many looks:",
        "several changes are tried, so a change may be kept by chance. The gain that is claimed is therefore measured again in "
        "fresh runs of the base and the best configuration, which no step was decided with, and judged once. If it does not "
        "hold, the base is reported as the best. If only one change was tried and the budget ends before all fresh runs are "
        "made, nothing was chosen: its own comparison is the claim, unless the fresh runs that were made show no gain.",
    ),
)
