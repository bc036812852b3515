"""The steps of a trace without labels: a decode loop launches the same kernels again and again.

On the stream with the most kernel time, kernels are read as a sequence of names. A name whose occurrences lie a constant number
of kernels apart marks a period; a step is one period. Of the names that do, a sampling kernel is preferred (it runs once per
token), then the longest period (a kernel of every layer repeats within a step too; it breaks its rhythm at each step's end, and
these breaks are a marker of their own). Periods that launch what most do, or nearly so, are steps; a step begins where the device
usually waits longest within the period, as a host does its own work between steps. What stands before a run of steps and computes
is its prefill. A period with one attention and no sampling is a layer, not a step: a trace of one prefill shows no steps.
"""

from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.kernels.classes import KernelClass, classify
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.trace.intervals import sums
from llm_perf_opt.traces.events import Int64, Trace, WorkKind, different
from llm_perf_opt.traces.health import within_reason
from llm_perf_opt.traces.nesting import lanes_of, numbered

LEAST_STEPS = 3
"""Fewer repetitions than this are no rhythm."""
LEAST_PERIOD = 2
LEAST_COVERAGE = 0.5
"""Share of the stream's kernels that the periods must cover: the rhythm of one prefill's layers is not the trace's."""
REGULAR = 0.6
"""Share of the distances between a marker's occurrences that must be the usual one."""
NEARLY = 0.1
"""A step may be longer or shorter than the usual by this share: now and then a step launches something more."""

OTHER_KERNELS = 0.2
"""Share of a step's kernels that may have another name than usual: as the context grows, other variants are chosen."""

Stretch = tuple[int, int]
"""From the start of its first work (ns) to that of the first work after it."""


@dataclass(frozen=True)
class Repetition:
    """Runs of steps, and what stands before them."""

    device: int
    period: int
    """Kernels per step, usually."""
    runs: tuple[tuple[Stretch, ...], ...]
    heads: tuple[Stretch, ...]
    why: str


@dataclass(frozen=True)
class _Marker:
    name: int
    positions: Int64
    period: int
    sampling: bool


def find_repetition(trace: Trace) -> Repetition | None:
    """The steps of the busiest stream, or None where nothing repeats."""
    rows, device = _busiest_stream(trace)
    names = trace.work.name[rows].astype(np.int64)
    marker = _best_marker(trace, names)
    if marker is None:
        return None
    starts, ends = trace.work.start_ns[rows], trace.work.end_ns[rows]
    lead = _lead(marker, starts, ends)
    runs = _runs(marker, lead, names)
    if not runs or _is_layer(trace, names[slice(*runs[0][0])]):
        return None
    moments = np.append(starts, ends[-1] + 1)
    heads = [head for head in _heads(runs) if _computes(trace, names[head[0] : head[1]])]
    return Repetition(
        device=device,
        period=marker.period,
        runs=tuple(tuple((int(moments[low]), int(moments[high])) for low, high in run) for run in runs),
        heads=tuple((int(moments[low]), int(moments[high])) for low, high in heads),
        why=_why(trace, marker, sum(len(run) for run in runs)),
    )


def find_steps(trace: Trace, rows: Int64) -> tuple[Int64, str] | None:
    """Inside one decode, whose device work is `rows`: the first kernel of each step, and the evidence; None where unclear.

    A decode that is a single step shows a rhythm too, that of its layers. So a step must choose a token, what lies outside the
    steps must hold no matrix product (the head of a single step would), and be less than half a step: then their number is right.
    """
    kernels, _ = _busiest_stream(trace, rows)
    names = trace.work.name[kernels].astype(np.int64)
    marker = _best_marker(trace, names)
    if marker is None:
        return None
    first, last = int(marker.positions[0]), int(marker.positions[-1])
    # A decode begins with its first step and ends with its last, unless something is prepared before, or done after.
    anchored = (first % marker.period, (last - len(names)) % marker.period)
    for lead in (*anchored, _lead(marker, trace.work.start_ns[kernels], trace.work.end_ns[kernels])):
        steps = [step for run in _runs(marker, lead, names) for step in run]
        if steps and _are_steps(trace, names, steps, marker.period):
            return kernels[[low for low, _ in steps]], _why(trace, marker, len(steps))
    return None


def _why(trace: Trace, marker: _Marker, periods: int) -> str:
    return f"{periods} periods of {marker.period} kernels, by '{short_name(trace.name_of(marker.name), 60)}'"


def _are_steps(trace: Trace, names: Int64, steps: list[tuple[int, int]], period: int) -> bool:
    """Whether the periods make up the whole decode, each chooses a token, and the last holds no product that others do not."""
    outside = np.ones(len(names), np.bool_)
    for low, high in steps:
        outside[low:high] = False
    if 2 * np.count_nonzero(outside) >= period or _computes(trace, names[outside]):
        return False
    first, last = ([classify(trace.name_of(int(name))) for name in names[low:high]] for low, high in (steps[0], steps[-1]))
    products = (KernelClass.GEMM, KernelClass.GEMV)
    return KernelClass.SAMPLING in first and sum(kind in products for kind in last) <= sum(kind in products for kind in first)


def _busiest_stream(trace: Trace, among: Int64 | None = None) -> tuple[Int64, int]:
    """The kernels of the stream with the most kernel time, in the order of their start, and its device."""
    work = trace.work
    every = np.arange(len(work)) if among is None else among
    kernels = every[work.kind[every] == WorkKind.KERNEL]
    if not len(kernels):
        return kernels, 0
    number = numbered(lanes_of((work.device[kernels].astype(np.int64), work.stream[kernels]))[0])
    time = sums(number, work.end_ns[kernels] - work.start_ns[kernels], int(number.max()) + 1)
    rows = kernels[number == int(time.argmax())]
    return rows[np.argsort(work.start_ns[rows], kind="stable")], int(work.device[rows[0]])


def _best_marker(trace: Trace, names: Int64) -> _Marker | None:
    """The name that marks the beginning of periods best; None where none does, or there are too few kernels to tell."""
    if len(names) < LEAST_STEPS * LEAST_PERIOD:
        return None
    distinct = different(names)
    if not within_reason(trace, distinct):
        return None
    place = np.argsort(names, kind="stable")
    name = np.searchsorted(distinct, names[place])
    found = []
    for off_beat, (of, at) in enumerate(((name, place), _off_beat(name, place, len(distinct)))):
        period, regular = _usual_distances(of, at, len(distinct))
        count = np.bincount(of, minlength=len(distinct))
        marks = (count >= LEAST_STEPS) & (period >= LEAST_PERIOD) & (regular >= REGULAR * (count - 1))
        for number in np.flatnonzero(marks & (regular * period >= LEAST_COVERAGE * len(names))).tolist():
            sampling = classify(trace.name_of(int(distinct[number]))) is KernelClass.SAMPLING
            if not (sampling and off_beat):
                found.append((not sampling, -int(period[number]), -int(count[number]), number, off_beat))
    if not found:
        return None
    not_sampling, period_, _, number, off_beat = min(found)
    of, at = _off_beat(name, place, len(distinct)) if off_beat else (name, place)
    return _Marker(int(distinct[number]), at[of == number], -period_, not not_sampling)


def _usual_distances(name: Int64, place: Int64, names: int) -> tuple[Int64, Int64]:
    """Per name the most frequent distance between its places, of several the shortest, and how often it occurs; else 0 and 0.

    Places are given name by name, in order. All names at once: there may be as many as places.
    """
    usual, often = np.zeros((2, names), np.int64)
    follows = name[1:] == name[:-1]
    width = int(place.max(initial=0)) + 1
    pairs, count = _runs_of(np.sort((name[1:] * width + np.diff(place))[follows]))
    of, distance = pairs // width, pairs % width
    order = np.lexsort((-distance, count, of))  # of each name the last is the one
    usual[of[order]], often[of[order]] = distance[order], count[order]
    return usual, often


def _runs_of(ranked: Int64) -> tuple[Int64, Int64]:
    """The different values of a column in order, and how often each occurs."""
    first = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1])[: len(ranked)])
    return ranked[first], np.diff(first, append=len(ranked))


def _off_beat(name: Int64, place: Int64, names: int) -> tuple[Int64, Int64]:
    """Occurrences that come clearly too late or too early: a kernel of every layer shows the steps by these."""
    usual, _ = _usual_distances(name, place, names)
    often = np.bincount(name, minlength=names) >= LEAST_STEPS
    of = name[1:]
    late = (of == name[:-1]) & often[of] & (np.abs(np.diff(place) - usual[of]) > NEARLY * usual[of])
    return of[late], place[1:][late]


def _lead(marker: _Marker, starts: Int64, ends: Int64) -> int:
    """How many kernels before the marker its step begins: where the device waits longest, by the median over the periods."""
    reach = np.maximum.accumulate(ends)
    waits = np.append(0, starts[1:] - reach[:-1])
    whole = marker.positions[marker.positions >= marker.period]
    typical = [float(np.median(waits[whole - offset])) for offset in range(marker.period)]
    return int(np.argmax(typical))


def _runs(marker: _Marker, lead: int, names: Int64) -> list[list[tuple[int, int]]]:
    """Steps as (first kernel, first kernel after), those that follow each other in one run."""
    begins = marker.positions - lead
    begins = begins[begins >= 0]
    whole = begins[begins + marker.period <= len(names)]
    if not len(whole):
        return []
    usual = _usual(names[whole[:, None] + np.arange(marker.period)])
    # twice: a prefill has the marker too, and what is cut off at it becomes whole once it is known not to be a step
    for _ in range(2):
        lengths = _step_lengths(begins, marker.period, len(names))
        begins = begins[[_alike(names[begin : begin + length], usual) for begin, length in zip(begins, lengths, strict=True)]]
    runs: list[list[tuple[int, int]]] = []
    for begin, length in zip(begins.tolist(), _step_lengths(begins, marker.period, len(names)).tolist(), strict=True):
        if runs and runs[-1][-1][1] == begin:
            runs[-1].append((begin, begin + length))
        else:
            runs.append([*_earlier(names, usual, runs[-1][-1][1] if runs else 0, begin), (begin, begin + length)])
    return runs if sum(len(run) for run in runs) >= LEAST_STEPS else []


def _step_lengths(begins: Int64, period: int, count: int) -> Int64:
    """Up to the next step; where that is clearly further than a period, something else comes first."""
    lengths = np.diff(np.append(begins, count))
    lengths[lengths > (1 + NEARLY) * period] = period
    return lengths


def _earlier(names: Int64, usual: Int64, low: int, begin: int) -> list[tuple[int, int]]:
    """Steps before the first marked one: the breaks of a layer's rhythm show a step only by the one before it."""
    found: list[tuple[int, int]] = []
    while begin - len(usual) >= low and _alike(names[begin - len(usual) : begin], usual):
        found.append((begin - len(usual), begin))
        begin -= len(usual)
    return found[::-1]


def _usual(steps: Int64) -> Int64:
    """The most frequent row."""
    weights = np.random.default_rng(0).integers(1, 2**62, steps.shape[1], dtype=np.uint64)
    _, first, counts = np.unique((steps.astype(np.uint64) * weights).sum(axis=1), return_index=True, return_counts=True)
    return np.asarray(steps[first[counts.argmax()]])


def _alike(step: Int64, usual: Int64) -> bool:
    """Whether a step launches what steps usually do, in their order where it is as long as they are."""
    if abs(len(step) - len(usual)) > NEARLY * len(usual):
        return False
    if len(step) == len(usual):
        return int((step == usual).sum()) >= (1 - OTHER_KERNELS) * len(usual)
    names, count = np.unique(np.concatenate([step, usual]), return_counts=True)
    mine = np.bincount(np.searchsorted(names, step), minlength=len(names))
    shared = int(np.minimum(mine, count - mine).sum())
    return shared >= (1 - NEARLY) * len(usual)


def _heads(runs: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """What stands before each run."""
    ends = [0, *(run[-1][1] for run in runs[:-1])]
    return [(low, run[0][0]) for low, run in zip(ends, runs, strict=True) if low < run[0][0]]


def _is_layer(trace: Trace, names: Int64) -> bool:
    """Whether the period looks like one layer of a single pass: one attention, and no token is chosen."""
    classes = [classify(trace.name_of(int(name))) for name in names]
    return classes.count(KernelClass.ATTENTION) == 1 and KernelClass.SAMPLING not in classes


def _computes(trace: Trace, names: Int64) -> bool:
    """Whether there is a matrix product or an attention: a prefill has both, a warm-up of the allocator neither."""
    matrix = (KernelClass.GEMM, KernelClass.GEMV, KernelClass.ATTENTION)
    return any(classify(trace.name_of(int(name))) in matrix for name in different(names))
