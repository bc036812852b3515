"""The class of every kernel of a trace, by its name: each distinct name is looked at once."""

import functools
import re
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.kernels.class_rules import RULES, KernelClass
from llm_perf_opt.analysis.kernels.names import LONGEST
from llm_perf_opt.events import Int32, Int64, Trace, UInt8, WorkKind

__all__ = ["CLASSES", "ClassShare", "KernelClass", "class_of_work", "class_shares", "classify", "within_reason"]

CLASSES = tuple(KernelClass)
"""A class's number in columns is its place here."""

MOST_NAMES, MOST_CHARACTERS = 100_000, 4_000_000
"""The most different kernel names in a trace, and their characters; a model has hundreds. Above that, none is classified."""


def _lower(pattern: str) -> str:
    """A pattern for names in lower case, which are searched four times as fast as names whose case is ignored."""
    return re.sub(r"\\.|[A-Z]", lambda found: found[0] if found[0].startswith("\\") else found[0].lower(), pattern)


_COMPILED = [(re.compile(_lower(pattern)), kind) for pattern, kind, _ in RULES]


@functools.lru_cache(maxsize=2 * MOST_NAMES)
def classify(name: str) -> KernelClass:
    """What a kernel of this name computes; `other` where no rule knows it, or the name is longer than any compiler's."""
    if len(name) > LONGEST:
        return KernelClass.OTHER
    lower = name.lower()
    return next((kind for pattern, kind in _COMPILED if pattern.search(lower)), KernelClass.OTHER)


def within_reason(trace: Trace, names: Int64 | Int32) -> bool:
    """Whether these different names of kernels can be those of a program."""
    if len(names) > MOST_NAMES:
        return False
    return sum(len(trace.name_of(name)) for name in names.tolist()) <= MOST_CHARACTERS


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
    if not within_reason(trace, names):
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
