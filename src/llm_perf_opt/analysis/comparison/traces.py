"""What two traces can be held against each other for: of decode they hold the first steps only, each so many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llm_perf_opt.records import Maybe, Missing
from llm_perf_opt.stages import Stage

T = TypeVar("T")
Both = tuple[int, int]


@dataclass(frozen=True)
class TracedSteps:
    """Decode steps of both sides; 0: not known."""

    budget: Both = (0, 0)
    """In the traces that the budgets are of."""
    kernels: Both = (0, 0)
    """In the timelines that kernels and counters are of."""
    request: Both = (0, 0)
    """In a request."""


NOT_TRACED = TracedSteps()


def unlike(steps: Both) -> str:
    """Why figures of decode, though per token, are not of the same work; empty where they are."""
    if 0 in steps or steps[0] == steps[1]:
        return ""
    return f"the traces hold {steps[0]} decode steps on one side and {steps[1]} on the other, so other contexts"


def of_the_same_steps(rows: Maybe[Sequence[T]], steps: Both, stage_of: Callable[[T], str]) -> Maybe[Sequence[T]]:
    """The rows, without those of decode where the two traces hold different numbers of its steps."""
    if isinstance(rows, Missing) or not unlike(steps):
        return rows
    return [row for row in rows if stage_of(row) != Stage.DECODE]
