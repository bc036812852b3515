"""The tokens and logits of a search: what each change did to them."""

from collections.abc import Sequence

from llm_perf_opt.analysis.tuning.logits import (
    MOST_MAX_GROWTH,
    MOST_RMS_GROWTH,
    LogitCheck,
    difference_words,
)
from llm_perf_opt.analysis.tuning.records import Step
from llm_perf_opt.analysis.tuning.tokens import agreement_words
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.units import counted
from llm_perf_opt.report.document import Block, Cell, Column, Paragraph, Table, Unavailable, cell, count_cell, numbers
from llm_perf_opt.report.text import significant

_ALL_EQUAL = Missing("all tokens are equal")


def tokens_text(step: Step) -> str:
    """Return what a change did to the tokens, for a cell."""
    if step.same_tokens:
        return "the same"
    if isinstance(step.logits, LogitCheck):
        return _tied(step.logits) if step.ties else difference_words(step.logits)
    if step.agreement is not None:
        return agreement_words(step.agreement)
    return step.tokens_why or "not compared"


def _tied(found: LogitCheck) -> str:
    """Return the count; the errors are in the table of logits."""
    other = found.compared - found.equal_to_base
    return f"{found.equal_to_base:,} of {found.compared:,} equal, {counted(other, 'tie')}"


def logit_blocks(steps: Sequence[Step]) -> list[Block]:
    """Return the table of logits, or why there is none."""
    compared = [(step, step.logits) for step in steps if isinstance(step.logits, LogitCheck)]
    if not compared:
        why = next(
            (one.logits.why for one in steps if one.logits and not isinstance(one.logits, LogitCheck)), "no change was run"
        )
        return [Unavailable("Logits:", why)]
    table = Table(
        "logits-table",
        "Logits of each change while the tokens of the base are fed to it",
        [
            Column("change"),
            *numbers(
                "tokens", "other tokens", "largest margin", "error, rms", "error, largest", "from base, rms", "from base, largest"
            ),
        ],
    )
    for step, found in compared:
        table.add(
            " ".join(step.change), count_cell(found.compared), count_cell(found.compared - found.equal_to_base),
            _margin(found),
            _error(found, "rms"), _error(found, "max"),
            cell(found.rms_difference, _number), cell(found.max_difference, _number),
        )  # fmt: skip
    first = compared[0][1]
    table.foot = (
        f"Over {first.values:,} recorded logits of {first.compared:,} new tokens. Error: the distance from the same weights in "
        "fp32, in brackets that of the configuration before. Margin: how far the token of the configuration before is ahead of "
        "the other one in fp32, in brackets the largest error of the base at that token; two tokens are tied if their margin is "
        "at most that."
    )
    return [Paragraph(_RULE), table]


_RULE = (
    "A change that does not alter the precision may choose another token only if the two are tied within the rounding error of "
    f"the base, and its error may be at most {significant(MOST_RMS_GROWTH, 3)} × (rms) and {significant(MOST_MAX_GROWTH, 2)} × "
    "(largest, at each token) the one before."
)


def _margin(found: LogitCheck) -> Cell | Missing:
    if found.largest_margin is None or found.rounding is None:
        return _ALL_EQUAL
    return Cell(_number(found.largest_margin), found.largest_margin, below=f"({_number(found.rounding)})")


def _number(value: float) -> str:
    return significant(value, 3)


def _error(found: LogitCheck, field: str) -> Cell | Missing:
    if found.error is None or found.error_before is None:
        return Missing(found.fp32_why)
    now, before = getattr(found.error, field), getattr(found.error_before, field)
    return Cell(_number(now), now, below=f"({_number(before)})")
