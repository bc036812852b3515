"""Matches the kernels of two runs by role, so that a renamed, retuned or replaced kernel still finds its counterpart."""

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from llm_perf_opt.analysis.kernels.names import normal_name
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.stages import Stage

T = TypeVar("T")
Both = tuple[int, int]


@dataclass(frozen=True)
class TracedSteps:
    """Decode steps of both sides; 0: unknown."""

    budget: Both = (0, 0)
    """In the traces behind the budgets."""
    kernels: Both = (0, 0)
    """In the timelines behind kernels and counters."""
    request: Both = (0, 0)
    """In a request."""


NOT_TRACED = TracedSteps()


def unequal_steps(steps: Both) -> str:
    """Return why decode figures per token are not comparable; empty if they are."""
    if 0 in steps or steps[0] == steps[1]:
        return ""
    return f"the traces contain {steps[0]} decode steps on one side and {steps[1]} on the other, so the contexts differ"


def without_unequal_decode(rows: Maybe[Sequence[T]], steps: Both, stage_of: Callable[[T], str]) -> Maybe[Sequence[T]]:
    """Return the rows, without those of decode if the two traces contain different numbers of steps."""
    if isinstance(rows, Missing) or not unequal_steps(steps):
        return rows
    return [row for row in rows if stage_of(row) != Stage.DECODE]


How = Literal["same name", "same role"]

MOST_CALL_RATIO = 1.5
"""Counterparts are called about equally often; beyond this ratio, kernels are not matched."""
NAME_WEIGHT, ORDER_WEIGHT = 2.0, 0.1
"""Weights relative to the logarithm of the call ratio. Names say more than the order by time, which a change may move."""
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[A-Za-z]+")
_MOST_WORDS = 300
"""Words of a name that are compared. Real names have fewer; the cost grows quadratically."""


@dataclass(frozen=True)
class ComparedKernel:
    """A kernel of a stage; in decode, per token. The kernels of both sides are in the same kind of order."""

    name: str
    """As in the trace. Tools spell names differently, so normalized names are compared."""
    stage: str
    role: str
    """Its class: gemm, attention, norm …"""
    calls: float
    """May be fractional: a kernel that runs in one of eight steps has 0.125 calls per token."""
    time_ns: int
    """Total time of all calls."""


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
class KernelMatch:
    """Every kernel of both sides, once."""

    pairs: tuple[KernelPair, ...]
    """Largest difference of time first."""
    appeared: tuple[ComparedKernel, ...]
    """Kernels that only the new side has, longest first."""
    vanished: tuple[ComparedKernel, ...]
    """Kernels that only the base has."""


def match_kernels(base: Sequence[ComparedKernel], new: Sequence[ComparedKernel]) -> KernelMatch:
    """Pair kernels: first by equal name, then, within a stage and class, those whose names differ only in numbers (tiles, vector
    widths), then those with similar names, call counts and positions."""
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
    base: Sequence[ComparedKernel], new: Sequence[ComparedKernel], base_left: Sequence[int], new_left: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the most likely counterparts among kernels without an equal name, most likely first."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in new_left:
        groups[new[index].stage, new[index].role].append(index)
    positions_base, positions_new = _positions(base, base_left), _positions(new, new_left)
    candidates = []
    for one in base_left:
        for other in groups.get((base[one].stage, base[one].role), ()):
            ratio = _call_ratio(base[one].calls, new[other].calls)
            if ratio <= MOST_CALL_RATIO:
                names = normal_name(base[one].name), normal_name(new[other].name)
                apart = abs(positions_base[one] - positions_new[other])
                cost = math.log(ratio) + ORDER_WEIGHT * apart + NAME_WEIGHT * _name_distance(*names)
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


def _positions(rows: Sequence[ComparedKernel], indices: Sequence[int]) -> dict[int, float]:
    """Return the position of each kernel, 0 to 1, among the unpaired ones of its stage, class and call count."""
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for index in indices:
        groups[rows[index].stage, rows[index].role, round(rows[index].calls)].append(index)
    return {index: place / max(1, len(group) - 1) for group in groups.values() for place, index in enumerate(group)}


def _call_ratio(one: float, other: float) -> float:
    least, most = sorted((one, other))
    return most / least if least else math.inf


def _differ_in_numbers(one: str, other: str) -> bool:
    """Return whether two names differ only in numbers: the same kernel with other tuning."""
    return _NUMBER.sub("0", one) == _NUMBER.sub("0", other)


def _name_distance(one: str, other: str) -> float:
    """Return 0 for names with the same words, 1 for names that share none. Template arguments count as words."""
    pieces = _WORD if not _differ_in_numbers(one, other) else _NUMBER  # a number shared by different names says nothing
    words = [pieces.findall(name)[:_MOST_WORDS] for name in (one, other)]
    return 1 - difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).ratio()


def _pair(base: ComparedKernel, new: ComparedKernel, how: How) -> KernelPair:
    return KernelPair(
        base.stage, base.role, base.name, new.name, how, base.calls, new.calls, base.time_ns, new.time_ns
    )  # fmt: skip


def _alone(rows: Sequence[ComparedKernel], indices: Sequence[int] | set[int]) -> tuple[ComparedKernel, ...]:
    return tuple(sorted((rows[index] for index in indices), key=lambda kernel: (-kernel.time_ns, kernel.stage, kernel.name)))
