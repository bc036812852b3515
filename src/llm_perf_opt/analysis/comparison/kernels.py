"""Kernels of two runs matched by role, so that one which was renamed, retuned or replaced still meets its counterpart."""

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from llm_perf_opt.analysis.kernels.names import normal_name
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.stages import Stage

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


How = Literal["same name", "same role"]

MOST_CALL_RATIO = 1.5
"""Kernels of one role are called about as often: beyond this they are not counterparts."""
NAME_WEIGHT, ORDER_WEIGHT = 2.0, 0.1
"""Beside the logarithm of the ratio of calls. Names tell more than the order: that is of time, and a change moves it."""
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[A-Za-z]+")
_MOST_WORDS = 300
"""Of a name that are held against another's; a real one has fewer, and comparing takes their product."""


class MatchableKernel(Protocol):
    """What matching needs of a kernel in one stage; the rows of both sides stand in an order of one kind."""

    @property
    def name(self) -> str:
        """As the trace has it: each tool has a spelling of its own, so names are held against each other in normal form."""

    @property
    def stage(self) -> str:
        """The stage that launched it."""

    @property
    def role(self) -> str:
        """Its class: gemm, attention, norm …"""

    @property
    def calls(self) -> float:
        """Launches in the stage; per token in decode, so they need not be whole."""

    @property
    def time_ns(self) -> int:
        """All of them together."""


@dataclass(frozen=True)
class KernelPair:
    """A kernel and its counterpart."""

    stage: str
    role: str
    base_name: str
    new_name: str
    how: How
    base_calls: float
    new_calls: float
    base_ns: int
    new_ns: int


@dataclass(frozen=True)
class LoneKernel:
    """A kernel that only one side has."""

    stage: str
    role: str
    name: str
    calls: float
    time_ns: int


@dataclass(frozen=True)
class KernelMatch:
    """Every kernel of both sides, once."""

    pairs: tuple[KernelPair, ...]
    """Largest difference of time first."""
    appeared: tuple[LoneKernel, ...]
    vanished: tuple[LoneKernel, ...]


def match_kernels(base: Sequence[MatchableKernel], new: Sequence[MatchableKernel]) -> KernelMatch:
    """Pair kernels: first those of one name, then, in each stage and class, those whose names differ in numbers alone (tiles,
    vector widths), then those with like names, call counts and places in the order."""
    pairs: list[KernelPair] = []
    by_name: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in reversed(range(len(new))):
        by_name[new[index].stage, normal_name(new[index].name)].append(index)
    free_new = set(range(len(new)))
    left: list[int] = []
    for index, row in enumerate(base):
        namesakes = by_name[row.stage, normal_name(row.name)]
        if not namesakes:
            left.append(index)
            continue
        found = namesakes.pop()
        free_new.discard(found)
        pairs.append(_pair(row, new[found], "same name"))
    for one, other in _by_role(base, new, left, sorted(free_new)):
        left.remove(one)
        free_new.discard(other)
        pairs.append(_pair(base[one], new[other], "same role"))
    return KernelMatch(
        pairs=tuple(sorted(pairs, key=lambda pair: -abs(pair.new_ns - pair.base_ns))),
        appeared=_alone(new, free_new),
        vanished=_alone(base, left),
    )


def _by_role(
    base: Sequence[MatchableKernel], new: Sequence[MatchableKernel], base_left: Sequence[int], new_left: Sequence[int]
) -> list[tuple[int, int]]:
    """The likeliest counterparts among what no name paired, the surest first."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in new_left:
        groups[new[index].stage, new[index].role].append(index)
    places_base, places_new = _places(base, base_left), _places(new, new_left)
    candidates = []
    for one in base_left:
        for other in groups.get((base[one].stage, base[one].role), ()):
            ratio = _call_ratio(base[one].calls, new[other].calls)
            if ratio <= MOST_CALL_RATIO:
                names = normal_name(base[one].name), normal_name(new[other].name)
                apart = abs(places_base[one] - places_new[other])
                cost = math.log(ratio) + ORDER_WEIGHT * apart + NAME_WEIGHT * _unlike(*names)
                candidates.append((not _differ_in_numbers(*names), cost, one, other))
    taken_base: set[int] = set()
    taken_new: set[int] = set()
    chosen = []
    for *_, one, other in sorted(candidates):
        if one not in taken_base and other not in taken_new:
            taken_base.add(one)
            taken_new.add(other)
            chosen.append((one, other))
    return chosen


def _places(rows: Sequence[MatchableKernel], indices: Sequence[int]) -> dict[int, float]:
    """Where each stands among the unpaired of its stage, class and call count, 0 to 1."""
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for index in indices:
        groups[rows[index].stage, rows[index].role, round(rows[index].calls)].append(index)
    return {index: place / max(1, len(group) - 1) for group in groups.values() for place, index in enumerate(group)}


def _call_ratio(one: float, other: float) -> float:
    least, most = sorted((one, other))
    return most / least if least else math.inf


def _differ_in_numbers(one: str, other: str) -> bool:
    """Whether two names are the same but for numbers: one kernel, tuned anew."""
    return _NUMBER.sub("0", one) == _NUMBER.sub("0", other)


def _unlike(one: str, other: str) -> float:
    """0 for names of the same words, 1 for ones that share none; template arguments often are all that tells kernels apart."""
    pieces = _WORD if not _differ_in_numbers(one, other) else _NUMBER  # a lone number that two names share says nothing
    words = [pieces.findall(name)[:_MOST_WORDS] for name in (one, other)]
    return 1 - difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).ratio()


def _pair(base: MatchableKernel, new: MatchableKernel, how: How) -> KernelPair:
    return KernelPair(
        base.stage, base.role, base.name, new.name, how, base.calls, new.calls, base.time_ns, new.time_ns
    )  # fmt: skip


def _alone(rows: Sequence[MatchableKernel], indices: Sequence[int] | set[int]) -> tuple[LoneKernel, ...]:
    found = [LoneKernel(row.stage, row.role, row.name, row.calls, row.time_ns) for row in (rows[index] for index in indices)]
    return tuple(sorted(found, key=lambda kernel: (-kernel.time_ns, kernel.stage, kernel.name)))
