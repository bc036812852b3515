"""Labels in traces: the dialects that engines label stages in, and labels that are neither stages nor modules."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.trace.attribution import MODULE_LABEL, outermost_of_its_name
from llm_perf_opt.analysis.trace.document import LabelLine
from llm_perf_opt.analysis.trace.intervals import distinct, matching, sums
from llm_perf_opt.analysis.trace.stage_instances import DECODE_STEP, PREFILL, TraceStages
from llm_perf_opt.config.runtimes import all_traits, by_step
from llm_perf_opt.core.stages import MIXED_STEP, STAGE_NAMES, STEP
from llm_perf_opt.traces.events import NO_NAME, Int64, RangeKind, Trace, WorkKind, different_pairs
from llm_perf_opt.traces.nesting import lanes_of, nest
from llm_perf_opt.traces.projection import NONE, launching_calls, through


@dataclass(frozen=True)
class Dialect:
    """How one source of traces labels its stages."""

    name: str
    stage_of: Callable[[str], str | None]
    """Return the stage of a label, or None if it is not a stage."""
    our_domain_only: bool = False
    """Whether only labels in this tool's NVTX domain count, because names such as `decode` are common."""


_OWN, _PROFILER = "labels", "profiler_step"
_PROFILER_STEP = re.compile(r"ProfilerStep\s*#\d+")
"""The label that torch.profiler puts around each step of its schedule."""
_SGLANG_STEP = re.compile(r"step\[(\w+)(?: .*)?\]")
_ATOM_STEP = re.compile(r"(prefill|decode)\[.*\]")
_SGLANG_MODES = {
    "EXTEND": PREFILL,
    "PREFILL": PREFILL,
    "SPLIT_PREFILL": PREFILL,
    "DLLM_EXTEND": PREFILL,
    "DECODE": DECODE_STEP,
    "TARGET_VERIFY": DECODE_STEP,
    "MIXED": MIXED_STEP,
}
"""Other modes (steps of a draft model, idle steps) are plain steps."""


def _own(label: str) -> str | None:
    return label if label in STAGE_NAMES else None


def _sglang(label: str) -> str | None:
    found = _SGLANG_STEP.fullmatch(label)
    return _SGLANG_MODES.get(found[1].upper(), STEP) if found else None


def _atom(label: str) -> str | None:
    found = _ATOM_STEP.fullmatch(label)
    return {"prefill": PREFILL, "decode": DECODE_STEP}[found[1]] if found else None


_OTHER_ENGINES = (Dialect("sglang", _sglang), Dialect("atom", _atom))
"""Engines whose traces are supported without a runtime."""


def dialects() -> Iterator[Dialect]:
    """Yield every dialect in the order they are tried, the most informative first. Runtimes are imported only if reached."""
    yield Dialect(_OWN, _own, our_domain_only=True)
    labels = [[Dialect(label.name, label.stage_of) for label in runtime.labels] for runtime in all_traits()]
    yield from (first for first, *_ in filter(None, labels))
    yield from _OTHER_ENGINES
    yield from (other for _, *others in filter(None, labels) for other in others)
    yield Dialect(_PROFILER, by_step(_PROFILER_STEP.pattern))


def is_engines(dialect: str) -> bool:
    """Return whether this is a dialect of a serving engine, whose settings are not this tool's."""
    return dialect not in (_OWN, _PROFILER) and any(dialect == known.name for known in dialects())


def label_lines(trace: Trace, stages: TraceStages) -> list[LabelLine]:
    """Return each label by name and domain, longest kernel time first.

    A label owns the kernels launched while it was open on the launching thread; one inside another of its name counts once.
    The kernels of NVTX start/end ranges are unknown, because these may end on another thread.
    """
    rows, number, names = _labels(trace, stages)
    if not len(rows):
        return []
    ranges = trace.ranges.rows(rows)
    nested = ranges.kind == RangeKind.PUSH_POP
    lane, call_lane = lanes_of((ranges.process, ranges.thread), (trace.calls.process, trace.calls.thread))
    lane = np.where(nested, lane, -1 - np.arange(len(rows)))  # a separate lane without launches
    nesting = nest(ranges.start_ns, ranges.end_ns, lane, overlapping=True)
    outer = outermost_of_its_name(nesting.parent, number, np.arange(len(rows)))
    wall = sums(number[outer], (ranges.end_ns - ranges.start_ns)[outer], len(names))
    calls = np.bincount(number, minlength=len(names))
    kernels, kernel_ns = _launched(trace, nesting.innermost(trace.calls.start_ns, call_lane), nesting.parent, number, outer)
    known = np.bincount(number[nested], minlength=len(names)) > 0
    found = [
        LabelLine(
            name,
            int(calls[place]),
            int(wall[place]),
            int(kernels[place]) if known[place] else None,
            int(kernel_ns[place]) if known[place] else None,
        )
        for place, name in enumerate(names)
    ]
    return sorted(found, key=lambda line: (-(line.kernel_ns or 0), -line.wall_ns, line.name))


def _labels(trace: Trace, stages: TraceStages) -> tuple[Int64, Int64, list[str]]:
    """Return the ranges that are neither stages nor modules, the index of their name, and the names with their domain."""
    ranges = trace.ranges
    marks = np.zeros(len(ranges), np.bool_)
    marks[stages.instances.range[stages.instances.range != NONE]] = True
    stage_names = distinct(ranges.name[marks].astype(np.int64), len(trace.names))
    others = matching(trace, ranges.name, MODULE_LABEL.fullmatch) | matching(trace, ranges.name, _PROFILER_STEP.fullmatch)
    rows = np.flatnonzero(~marks & ~others & ~np.isin(ranges.name, stage_names))
    domain, name = (column[rows].astype(np.int64) for column in (ranges.domain, ranges.name))
    domains, labels = different_pairs(domain, name)
    width = len(trace.names) + 1
    number = np.searchsorted(domains * width + labels, domain * width + name)  # both in the order of the pairs
    names = [
        trace.name_of(label) if domain == NO_NAME else f"{trace.name_of(domain)}@{trace.name_of(label)}"
        for domain, label in zip(domains.tolist(), labels.tolist(), strict=True)
    ]
    return rows, number, names


def _launched(
    trace: Trace, of_call: Int64, parent: Int64, number: Int64, outer: "np.typing.NDArray[np.bool_]"
) -> tuple[Int64, Int64]:
    """Return the kernels launched in each label and their time, from the innermost label around each launch outward."""
    names = int(number.max()) + 1
    count, time = np.zeros(names, np.int64), np.zeros(names, np.int64)
    owner = through(launching_calls(trace), of_call)
    mine = np.flatnonzero((owner != NONE) & (trace.work.kind == WorkKind.KERNEL))
    at, duration = owner[mine], (trace.work.end_ns - trace.work.start_ns)[mine]
    while len(at):
        counted = outer[at]
        count += np.bincount(number[at[counted]], minlength=names)
        time += sums(number[at[counted]], duration[counted], names)
        above = parent[at]
        at, duration = above[above != NONE], duration[above != NONE]
    return count, time
