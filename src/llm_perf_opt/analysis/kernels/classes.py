"""The class of every kernel of a trace, by its name: each distinct name is looked at once."""

import functools
import re
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.kernels.class_rules import RULES, KernelClass
from llm_perf_opt.events import Trace, UInt8, WorkKind

__all__ = ["CLASSES", "MOST_NAMES", "ClassShare", "KernelClass", "class_of_work", "class_shares", "classify"]

CLASSES = tuple(KernelClass)
"""A class's number in columns is its place here."""

MOST_NAMES = 100_000
"""Different names of kernels in a trace; a model's run has some hundreds. Of more, no class is told."""
_COMPILED = [(re.compile(pattern, re.IGNORECASE), kind) for pattern, kind, _ in RULES]


@functools.lru_cache(maxsize=2 * MOST_NAMES)
def classify(name: str) -> KernelClass:
    """What a kernel of this name computes; `other` where no rule knows it."""
    return next((kind for pattern, kind in _COMPILED if pattern.search(name)), KernelClass.OTHER)


@dataclass(frozen=True)
class ClassShare:
    """All kernels of one class."""

    kind: KernelClass
    calls: int
    total_ns: int
    share: float
    """Of the summed kernel time. That of `other` is what the rules do not know."""


def class_of_work(trace: Trace) -> UInt8:
    """Per row of device work: the place of its class in CLASSES. Copies and memsets are copies whatever they are called."""
    names, number = np.unique(trace.work.name, return_inverse=True)
    if len(names) > MOST_NAMES:
        return np.full(len(trace.work), CLASSES.index(KernelClass.OTHER), np.uint8)
    of_name = np.array([CLASSES.index(classify(trace.name_of(int(name)))) for name in names], np.uint8)
    found = of_name[number.reshape(-1)] if len(names) else np.empty(0, np.uint8)
    found[trace.work.kind != WorkKind.KERNEL] = CLASSES.index(KernelClass.COPY)
    return found


def class_shares(trace: Trace, class_of: UInt8 | None = None) -> tuple[ClassShare, ...]:
    """Kernel time by class, the largest first; copies and memsets by the runtime are not kernels and stand apart."""
    of_work = class_of_work(trace) if class_of is None else class_of
    kernel = trace.work.kind == WorkKind.KERNEL
    duration = (trace.work.end_ns - trace.work.start_ns)[kernel]
    total = int(duration.sum())
    rows = []
    for number, kind in enumerate(CLASSES):
        mine = of_work[kernel] == number
        time = int(duration[mine].sum())
        if mine.any():
            rows.append(ClassShare(kind, int(mine.sum()), time, time / total if total else 0.0))
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.kind)))
