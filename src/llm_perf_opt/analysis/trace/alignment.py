"""Modules for kernels that carry none: those of a CUDA graph or of compiled code, through the eager pass of the same model.

A graph's replay is one launch, so nothing on the host says which module a kernel belongs to. But the eager pass launches largely
the same kernels in the same order, and there the modules are known. The two sequences are laid side by side:

1. **same name**: kernels of a longest common subsequence by name take the module of their partner.
2. **same class**: between two such pairs, if both sides have equally many kernels of a class, these are partners in order
   (another tile size of the same product).
3. **between**: a kernel that stands between two with the same module belongs to it too (fused elementwise work), if the eager
   pass stays in that module between their partners.

The rest has no module, and the share of the time that each rule covers is given: it is the evidence for the whole.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from llm_perf_opt.analysis.kernels.classes import CLASSES, classify
from llm_perf_opt.analysis.trace.projection import NONE
from llm_perf_opt.events import Int64, UInt8


class MatchedBy(IntEnum):
    """The rule that gave a kernel its module."""

    NOTHING = 0
    NAME = 1
    CLASS = 2
    BETWEEN = 3


@dataclass(frozen=True)
class ModuleAlignment:
    """Columns parallel to the kernels that had no module."""

    module: Int64
    """Index as in the eager pass, or -1."""
    partner: Int64
    """Place in the eager sequence, or -1."""
    matched_by: UInt8
    """A MatchedBy."""
    coverage: dict[MatchedBy, float | None]
    """Share of the kernels' time by rule; None where they took no time."""


def align_modules(eager_names: Sequence[str], eager_modules: Int64, names: Sequence[str], duration_ns: Int64) -> ModuleAlignment:
    """Give the kernels `names` (one step, in order) the modules of the eager step's kernels."""
    place = {name: index for index, name in enumerate(dict.fromkeys([*eager_names, *names]))}
    first = np.array([place[name] for name in eager_names], np.int64)
    second = np.array([place[name] for name in names], np.int64)
    partner = common_subsequence(first, second)
    by = np.where(partner == NONE, MatchedBy.NOTHING, MatchedBy.NAME).astype(np.uint8)
    class_of = np.array([CLASSES.index(classify(name)) for name in place], np.int64)
    _pair_classes(class_of[first], class_of[second], partner, by)
    module = np.full(len(second), NONE, np.int64)
    module[partner != NONE] = eager_modules[partner[partner != NONE]]
    by[(partner != NONE) & (module == NONE)] = MatchedBy.NOTHING
    _fill_between(module, by, partner, eager_modules)
    total = int(duration_ns.sum())
    coverage = {rule: int(duration_ns[by == rule].sum()) / total if total else None for rule in MatchedBy}
    return ModuleAlignment(module, partner, by, coverage)


def common_subsequence(first: Int64, second: Int64) -> Int64:
    """Per element of `second`: its partner in `first` in a longest common subsequence, or -1. Memory grows linearly.

    Common heads and tails are taken as they are; the middle is divided in two until it is short (Hirschberg's way), one vector
    operation per row, so two steps of some thousand kernels take well under a second.
    """
    partner = np.full(len(second), NONE, np.int64)
    todo = [(0, len(first), 0, len(second))]
    while todo:
        low, high, left, right = _trimmed(first, second, partner, *todo.pop())
        if low == high or left == right:
            continue
        if high - low == 1:
            found = np.flatnonzero(second[left:right] == first[low])
            if len(found):
                partner[left + found[0]] = low
            continue
        middle = (low + high) // 2
        ahead = _lengths(first[low:middle], second[left:right])
        behind = _lengths(first[middle:high][::-1], second[left:right][::-1])[::-1]
        cut = left + int((ahead + behind).argmax())
        todo += [(low, middle, left, cut), (middle, high, cut, right)]
    return partner


def _trimmed(
    first: Int64, second: Int64, partner: Int64, low: int, high: int, left: int, right: int
) -> tuple[int, int, int, int]:
    """Pair off equal heads and tails: some longest common subsequence always contains them."""
    shorter = min(high - low, right - left)
    differs = np.flatnonzero(first[low : low + shorter] != second[left : left + shorter])
    head = int(differs[0]) if len(differs) else shorter
    partner[left : left + head] = np.arange(low, low + head)
    low, left, shorter = low + head, left + head, shorter - head
    differs = np.flatnonzero(first[high - shorter : high][::-1] != second[right - shorter : right][::-1])
    tail = int(differs[0]) if len(differs) else shorter
    partner[right - tail : right] = np.arange(high - tail, high)
    return low, high - tail, left, right - tail


def _lengths(first: Int64, second: Int64) -> Int64:
    """How long the longest common subsequence of all of `first` with each head of `second` is (0 to all of it)."""
    row = np.zeros(len(second) + 1, np.int64)
    for element in first:
        through = row[:-1] + (second == element)
        row[1:] = np.maximum.accumulate(np.maximum(row[1:], through))
    return row


def _pair_classes(first: Int64, second: Int64, partner: Int64, by: UInt8) -> None:
    """Rule 2, in the stretches between neighbouring pairs."""
    anchors = np.flatnonzero(partner != NONE)
    bounds = [(-1, -1), *zip(partner[anchors].tolist(), anchors.tolist(), strict=True), (len(first), len(second))]
    for (low, left), (high, right) in itertools.pairwise(bounds):
        if high - low < 2 or right - left < 2:
            continue
        theirs, ours = first[low + 1 : high], second[left + 1 : right]
        last = NONE
        for kind in dict.fromkeys(ours.tolist()):
            there, here = np.flatnonzero(theirs == kind), np.flatnonzero(ours == kind)
            # partners must not cross those already made in this stretch
            if len(there) == len(here) and there[0] > last:
                partner[left + 1 + here] = low + 1 + there
                by[left + 1 + here] = MatchedBy.CLASS
                last = int(there[-1])


def _fill_between(module: Int64, by: UInt8, partner: Int64, eager_modules: Int64) -> None:
    """Rule 3. A label that every layer has says nothing of what stands between two of its instances: the eager pass must not
    have been elsewhere meanwhile."""
    known = np.flatnonzero(module != NONE)
    for left, right in zip(known[:-1].tolist(), known[1:].tolist(), strict=True):
        stayed = (eager_modules[partner[left] : partner[right] + 1] == module[left]).all()
        if right - left > 1 and module[left] == module[right] and stayed:
            module[left + 1 : right] = module[left]
            by[left + 1 : right] = MatchedBy.BETWEEN
