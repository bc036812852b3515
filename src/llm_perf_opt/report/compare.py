"""A comparison as a Markdown page and as lines for the terminal."""

import math
from collections.abc import Sequence

from llm_perf_opt.analysis.comparison.compare import Comparison, Row
from llm_perf_opt.analysis.comparison.differences import Difference
from llm_perf_opt.analysis.comparison.effects import Effect
from llm_perf_opt.analysis.comparison.figures import ONE_SIDED, POWER_SPREAD, FigureChange, OperatorChange, UsageChange
from llm_perf_opt.analysis.comparison.gates import GateResult
from llm_perf_opt.analysis.comparison.kernels import unlike
from llm_perf_opt.analysis.comparison.statistics import BOUND_LEVEL, LEVEL, RECOMMENDED_RUNS, are_several, is_measured
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.report.compare_kernels import SAME_STEPS, TOP, budget_words, kernel_words, kernels_section
from llm_perf_opt.report.text import columns, escape, gibibytes, milliseconds, reason, signed, table, with_unit

HEADLINE = ("e2e", "ttft", "tpot")
LEVEL_WORDS = f"{LEVEL * 100:g} %"


def signed_percent(share: Maybe[float]) -> str:
    """A change with its sign."""
    return reason(share) if isinstance(share, Missing) else f"{round(share * 100, 2) + 0.0:+.2f} %"  # never −0.00


def verdict_sentences(found: Comparison) -> list[str]:
    """What is said first: the request as a whole, then its two halves."""
    if found.unjudged:
        return [f"No verdict: {found.unjudged.removesuffix('.')}."]
    sentences = []
    for key in HEADLINE:
        row = found.row(key)
        if isinstance(row.effect, Missing):
            sentences.append(f"{row.label}: {row.effect}.")
        else:
            sentences.append(f"{row.label}: {_verdict_words(row.effect)}.")
    return sentences


def cause_sentences(found: Comparison) -> list[str]:
    """Of each stage that really changed, the rows of its budget that changed most; nothing where there are no budgets."""
    if isinstance(found.budget, Missing):
        return []
    sentences = []
    for stage in dict.fromkeys(row.key.partition("/")[0] for row in found.budget):
        about = next((row.effect for row in found.stages if row.key == stage), None)
        if about is None or isinstance(about, Missing) or about.verdict not in ("faster", "slower"):
            continue
        moved = sorted(
            ((row, _moved(row)) for row in found.budget if row.key.startswith(f"{stage}/")), key=lambda pair: -abs(pair[1])
        )
        least = _WORTH_NAMING * sum(abs(by) for _, by in moved)
        named = [_cause(row) for row, by in moved[:_MOST_CAUSES] if by and abs(by) >= least]
        if named:
            steps = found.traced.budget[0] if stage == Stage.DECODE else 0
            part = f", of the {steps} tokens in it" if steps else ""
            sentences.append(f"Why {stage} is {about.verdict}, by the budgets of one trace a side{part}: {'; '.join(named)}.")
    decode = next((row.effect for row in found.stages if row.key == Stage.DECODE), None)
    if unlike(found.traced.budget) and isinstance(decode, Effect) and decode.verdict in ("faster", "slower"):
        sentences.append(f"Why decode is {decode.verdict} is not told: {unlike(found.traced.budget)}. {SAME_STEPS}")
    return sentences


_IN_TURN = f"make {RECOMMENDED_RUNS} runs a side, in turn"
_MOST_CAUSES = 3
_WORTH_NAMING = 0.05
"""Of all that moved in a budget: what is less explains nothing."""


def _moved(row: FigureChange) -> float:
    """By how much a row of a budget changed; a row that one side does not have took no time there."""
    base, new = (0.0 if value == ONE_SIDED else value for value in (row.base, row.new))
    return 0.0 if isinstance(base, Missing) or isinstance(new, Missing) else new - base


def _cause(row: FigureChange) -> str:
    base, new = ("none" if isinstance(value, Missing) else with_unit(value, row.unit) for value in (row.base, row.new))
    return f"{row.label.partition('/')[2]}: {base} → {new}"


def _verdict_words(effect: Effect) -> str:
    if isinstance(effect.interval, Missing):
        return f"not distinguishable ({signed_percent(effect.change)}; {effect.interval.why})"
    about = f"{signed_percent(effect.change)}, {LEVEL_WORDS}: {_interval(effect)}"
    if effect.verdict != "not distinguishable":
        return f"new is {effect.verdict} ({about})"
    if effect.rival is not None:
        return f"not distinguishable ({about}; the machine changed its speed: {effect.rival.words}; {_IN_TURN})"
    if effect.uncertainty.moved and effect.interval.has_zero:
        by = math.expm1(effect.uncertainty.moved)
        return f"not distinguishable ({about}; the machine changed its speed by {by:.1%} during a run; {_IN_TURN})"
    if effect.uncertainty.restless:
        return f"not distinguishable ({about}; repeats scatter by {effect.uncertainty.scatter:.1%}, much for so few runs a side)"
    if not effect.interval.has_zero:
        return f"not distinguishable ({about}; smaller than the smallest change worth a verdict)"
    return f"not distinguishable ({about})"


def _interval(effect: Effect) -> str:
    """The ends, or that they are unknown: why stands in the sentences before and among the cautions."""
    found = effect.interval
    if isinstance(found, Missing):
        return "unknown"
    return "exact" if effect.exact else f"{found.low * 100:+.2f} to {found.high * 100:+.2f} %"


def gate_line(result: GateResult) -> str:
    """A gate's outcome in a line, with what would let it be told."""
    line = f"{result.outcome}: {result.gate.asked}: {result.why}"
    if result.outcome != "cannot tell":
        return line
    return f"{line}. " + (f"{result.needed.why}." if isinstance(result.needed, Missing) else f"To tell: {result.needed}.")


def comparison_text(found: Comparison) -> str:
    """For the terminal: verdicts, metrics, differences, gates."""
    lines = [*verdict_sentences(found), *cause_sentences(found), ""]
    rows: list[Row | UsageChange] = [*found.metrics, *found.stages, *found.memory, *found.energy]
    body = [row_cells(row) for row in rows if not isinstance(row.effect, Missing)]
    said = [f"{row.key}: {row.effect}" for row in (*found.metrics, *found.stages) if isinstance(row.effect, Missing)]
    said += _lacking_usage((*found.memory, *found.energy))
    said.append("")
    said += [f"setting {row.key}: {row.base} → {row.new}" for row in found.settings]
    said += [f"environment {row.key}: {row.base} → {row.new}" for row in found.environment]
    said += [f"caution: {text}" for text in found.cautions]
    said += [f"gate {gate_line(result)}" for result in found.gates]
    parts = [*map(one_line, lines), columns(_HEADER, body, _ALIGN), *map(one_line, said)]
    return "\n".join(parts).rstrip() + "\n"


def _lacking_usage(rows: Sequence[UsageChange]) -> list[str]:
    """Memory and energy that could not be compared, a line for each reason: several often lack for the same."""
    keys: dict[str, list[str]] = {}
    for row in rows:
        if isinstance(row.effect, Missing):
            keys.setdefault(str(row.effect), []).append(row.key)
    return [f"{', '.join(members)}: {why}" for why, members in keys.items()]


def comparison_page(found: Comparison) -> str:
    """The whole page; the verdict stands first."""
    sections = [
        "# Comparison\n\n"
        + "".join(f"- {escape(sentence)}\n" for sentence in (*verdict_sentences(found), *cause_sentences(found))),
        _sides(found),
        _gates(found.gates),
        _cautions(found.cautions),
        "## Metrics\n\n" + _rows(found.metrics),
        "## Stages\n\n" + _rows(found.stages) + f"\n{escape(stage_words(found.stages))}\n",
        _differences("Settings that differ", found.settings),
        _differences("Hardware, model and workload that differ", found.facts),
        _differences("Environment that differs", found.environment),
        "## Memory and energy\n\n" + _rows((*found.memory, *found.energy)) + f"\n{escape(USAGE_WORDS)}\n",
        _operators(found.operators, found.unseen),
        kernels_section(found.kernels, kernel_words(found)),
        _figure_section("Budget", found.budget, budget_words(found)),
        _figure_section("Counters", found.counters, kernel_words(found)),
        _left_out(found),
        f"## How to read it\n\n{method_words(found)}\n",
    ]
    return "\n".join(section for section in sections if section)


_HEADER = ("metric", "base", "new", "change", f"{LEVEL_WORDS} interval", "verdict", "repeats")
_ALIGN = "lrrrrlr"


def row_cells(row: Row | UsageChange) -> list[str]:
    """Label, base, new, change, interval, verdict, repeats; plain text."""
    effect = row.effect
    if isinstance(effect, Missing):
        values = (row.base, row.new) if isinstance(row, UsageChange) else (effect, effect)
        sides = ("n/a" if isinstance(value, Missing) else figure_words(value, row.unit) for value in values)
        return [row.label, *sides, "n/a", "n/a", reason(effect), ""]
    return [
        row.label,
        figure_words(effect.base, row.unit),
        figure_words(effect.new, row.unit),
        signed_percent(effect.change),
        _interval(effect),
        "the same" if effect.exact and effect.change == 0 else effect.verdict,
        f"{_repeats(effect.base_repeats)} / {_repeats(effect.new_repeats)}",
    ]


def _repeats(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{len(counts)} runs, {sum(counts)}"


def _rows(rows: Sequence[Row | UsageChange]) -> str:
    return table(_HEADER, [[escape(row.label), *row_cells(row)[1:]] for row in rows], _ALIGN)


def stage_words(rows: Sequence[Row]) -> str:
    """What the rows of the stages are, where that is not plain."""
    paired = next((row.effect for row in rows if not isinstance(row.effect, Missing) and row.effect.paired_steps), None)
    if paired is None:
        return "decode is all steps of a request, decode_step the median of its single steps."
    return (
        "decode is all steps of a request, decode_step one of them: the median over the steps of each step's median over the "
        f"repeats. It is paired: its change is that of {paired.paired_steps} steps, each against the same step of the other side."
    )


def _sides(found: Comparison) -> str:
    rows = [["base", escape(name)] for name in found.base_runs] + [["new", escape(name)] for name in found.new_runs]
    meant = f"\nThe experiment: {escape(', '.join(found.experiment))}.\n" if found.experiment else ""
    return table(["side", "run"], rows) + meant + "".join(f"\n{escape(text)}\n" for text in looked_into_words(found))


def looked_into_words(found: Comparison) -> list[str]:
    """Of several runs a side, which one the page looks into."""
    if len(found.base_runs) == len(found.new_runs) == 1:
        return []
    base, new = found.looked_into
    return [
        "Operators, kernels, budget and counters are those of one run a side: of the runs that hold most of them, the one whose "
        f"end-to-end time is nearest the side's median. Base: {base}. New: {new}."
    ]


def _gates(results: Sequence[GateResult]) -> str:
    if not results:
        return ""
    rows = [
        [
            escape(result.gate.asked),
            result.outcome,
            escape(result.why),
            _needed(result),
        ]
        for result in results
    ]
    return "## Gates\n\n" + table(["gate", "outcome", "why", "to tell"], rows)


def _needed(result: GateResult) -> str:
    if result.outcome != "cannot tell":
        return ""
    return escape(result.needed.why if isinstance(result.needed, Missing) else result.needed)


def _cautions(texts: Sequence[str]) -> str:
    return "## Cautions\n\n" + "".join(f"- {escape(text)}\n" for text in texts) if texts else ""


def _differences(title: str, rows: Sequence[Difference]) -> str:
    if not rows:
        return f"## {title}\n\nNone.\n"
    return f"## {title}\n\n" + table(
        ["key", "base", "new"], [[escape(row.key), escape(row.base), escape(row.new)] for row in rows]
    )


USAGE_WORDS = (
    "Memory and energy are read once a run. What the allocator and the driver hand out repeats to the byte, so its change is "
    "exact unless runs of one side differ. Energy is the time of the requests times the power of the card: it has the interval "
    f"of that time, and where the runs do not measure it or the sides ran on different cards, {POWER_SPREAD:.0%} of deviation "
    "between their powers on top."
)


def _figures(rows: Sequence[FigureChange]) -> str:
    body = [
        [escape(row.label), _figure(row.base, row.unit), _figure(row.new, row.unit), _change(row)] for row in rows
    ]  # fmt: skip
    return table(["figure, one reading a run", "base", "new", "change"], body, "lrrr")


def _change(row: FigureChange) -> str:
    """The reason stands beside the value that is missing; once is enough."""
    missing = isinstance(row.base, Missing) or isinstance(row.new, Missing)
    return "n/a" if missing else signed_percent(row.change)


def _figure(value: Maybe[float], unit: str) -> str:
    return reason(value) if isinstance(value, Missing) else figure_words(value, unit)


def figure_words(value: float, unit: str) -> str:
    """A figure with its unit."""
    return gibibytes(round(value)) if unit == "bytes" else with_unit(value, unit)


def _operators(rows: Maybe[tuple[OperatorChange, ...]], unseen: str) -> str:
    if isinstance(rows, Missing):
        return f"## Operators\n\n{reason(rows)}\n"
    body = [
        [
            escape(row.name),
            "appeared" if row.base_ns is None else milliseconds(row.base_ns),
            "vanished" if row.new_ns is None else milliseconds(row.new_ns),
            signed((row.new_ns or 0) - (row.base_ns or 0)),
            f"{row.base_calls:,} / {row.new_calls:,}",
        ]
        for row in rows[:TOP]
    ]
    note = f"Self time under torch.profiler, the {len(body)} of {len(rows)} that changed most; without an interval.\n\n"
    note += f"{escape(unseen)}\n\n" if unseen else ""
    return "## Operators\n\n" + note + table(["operator", "base", "new", "difference", "calls"], body, "lrrrr")


def _figure_section(title: str, rows: Maybe[tuple[FigureChange, ...]], traced: str) -> str:
    if isinstance(rows, Missing):
        return f"## {title}\n\n{reason(rows)}\n"
    return f"## {title}\n\n" + (f"{escape(traced)}\n\n" if traced else "") + _figures(rows)


def left_out(found: Comparison) -> list[str]:
    """What could not be compared, and why."""
    rows = [f"{row.label}: {row.effect.why}" for row in (*found.metrics, *found.stages) if isinstance(row.effect, Missing)]
    sections = (
        ("operators", found.operators),
        ("kernels", found.kernels),
        ("budget", found.budget),
        ("counters", found.counters),
    )
    rows += [f"{name}: {value.why}" for name, value in sections if isinstance(value, Missing)]
    decode = (("budget", found.budget, found.traced.budget), ("kernels", found.kernels, found.traced.kernels))
    rows += [
        f"decode in the {name}: {unlike(steps)}"
        for name, value, steps in decode
        if unlike(steps) and not isinstance(value, Missing)
    ]
    rows += [f"{row.label}: {row.change.why}" for row in (*found.memory, *found.energy) if isinstance(row.change, Missing)]
    return rows


def _left_out(found: Comparison) -> str:
    rows = left_out(found)
    return "## Not compared\n\n" + "".join(f"- {escape(text)}\n" for text in rows) if rows else ""


def method_words(found: Comparison) -> str:
    """How the verdicts were come by."""
    return (
        f"A change is that of the medians of unprofiled repeats, with a {LEVEL_WORDS} bootstrap interval, widened where "
        f"neighboring repeats resemble each other. {_between_words(found)} If the sides were made one after the other, and a "
        "drift or a switch of the machine's speed inside the runs explains their difference better than a change of the program, "
        "the interval is widened to include zero. A change is called faster or slower when its "
        f"interval excludes zero and it is at least {found.judgement.smallest:.1%}; of changes that are none, the level lets "
        f"{1 - LEVEL:.0%} be called one. "
        f"A gate passes where the worsening is, with {BOUND_LEVEL:.0%} confidence, within its tolerance, and is a regression "
        "where the whole interval lies beyond it."
    )


def _between_words(found: Comparison) -> str:
    judgement = found.judgement
    runs = len(found.base_runs), len(found.new_runs)
    if is_measured(runs, judgement):
        words = "The spread between processes is measured over the runs of both sides (Student's t over their medians)."
    elif judgement.process_spread is None:
        return "The spread between processes is unknown, so there is no interval and no verdict."
    else:
        words = (
            f"The spread between processes is assumed to be {judgement.process_spread:.1%}, or more where the machine "
            "changed its speed by more during a run, or runs of one side differ by more (with Student's t for so few)."
        )
    if are_several(runs):
        return words
    return f"{words} Where repeats scatter by more than {judgement.restless:.0%}, a change must exceed the range they visit."
