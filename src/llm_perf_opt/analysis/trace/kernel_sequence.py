"""Find the steps of a trace without labels: a decode loop launches the same kernels again and again.

The kernels of the stream with the most kernel time are a sequence of names. A name that occurs at a constant distance marks a
period, and a step is one period. A sampling kernel is preferred as marker, because it runs once per token; then the longest
period. (A kernel of every layer also repeats within a step; the irregular distances at each step's end are a second marker.)
Periods with about the usual kernels are steps. A step begins where the device usually waits longest within the period, because
the host has other work between steps. Kernels before a run of steps are its prefill if they compute. A period with one
attention kernel and no sampling is a layer, not a step, so a trace of one prefill has no steps.
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
"""Fewer repetitions do not count as steps."""
LEAST_PERIOD = 2
LEAST_COVERAGE = 0.5
"""Share of the stream's kernels that the periods must cover, so that the layers of one prefill do not count as steps."""
REGULAR = 0.6
"""Share of the distances between a marker's occurrences that must equal the most frequent one."""
NEARLY = 0.1
"""Share by which a step may be longer or shorter than usual, because some steps launch additional kernels."""

OTHER_KERNELS = 0.2
"""Share of a step's kernels that may have a different name than usual, because variants change as the context grows."""

Stretch = tuple[int, int]
"""From the start of its first work to the start of the first work after it, in ns."""


@dataclass(frozen=True)
class Repetition:
    """Runs of steps, and the prefill before each."""

    device: int
    period: int
    """Usual number of kernels per step."""
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
    """Return the steps of the busiest stream, or None if nothing repeats."""
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
    """Return the first kernel of each step of a decode with device work `rows`, and the evidence; None if unclear.

    The layers of a single step also repeat. Therefore a step must sample a token, and the kernels outside the steps must be
    less than half a step and have no matrix product, which the LM head of a single step would have.
    """
    kernels, _ = _busiest_stream(trace, rows)
    names = trace.work.name[kernels].astype(np.int64)
    marker = _best_marker(trace, names)
    if marker is None:
        return None
    first, last = int(marker.positions[0]), int(marker.positions[-1])
    # A decode usually begins with its first step and ends with its last; otherwise something runs before or after them.
    anchored = (first % marker.period, (last - len(names)) % marker.period)
    for lead in (*anchored, _lead(marker, trace.work.start_ns[kernels], trace.work.end_ns[kernels])):
        steps = [step for run in _runs(marker, lead, names) for step in run]
        if steps and _are_steps(trace, names, steps, marker.period):
            return kernels[[low for low, _ in steps]], _why(trace, marker, len(steps))
    return None


def _why(trace: Trace, marker: _Marker, periods: int) -> str:
    return f"{periods} periods of {marker.period} kernels, by '{short_name(trace.name_of(marker.name), 60)}'"


def _are_steps(trace: Trace, names: Int64, steps: list[tuple[int, int]], period: int) -> bool:
    """Return whether the periods cover the decode, sample a token, and the last has no more products than the first."""
    outside = np.ones(len(names), np.bool_)
    for low, high in steps:
        outside[low:high] = False
    if 2 * np.count_nonzero(outside) >= period or _computes(trace, names[outside]):
        return False
    first, last = ([classify(trace.name_of(int(name))) for name in names[low:high]] for low, high in (steps[0], steps[-1]))
    products = (KernelClass.GEMM, KernelClass.GEMV)
    return KernelClass.SAMPLING in first and sum(kind in products for kind in last) <= sum(kind in products for kind in first)


def _busiest_stream(trace: Trace, among: Int64 | None = None) -> tuple[Int64, int]:
    """Return the kernels of the stream with the most kernel time, sorted by start, and its device."""
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
    """Return the name that best marks periods; None if no name does or there are too few kernels."""
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
    """Return each name's most frequent distance (the shortest on a tie) and its count; 0 and 0 if there is none.

    `place` is sorted by name and position. All names are processed at once, because there may be as many as places.
    """
    usual, often = np.zeros((2, names), np.int64)
    follows = name[1:] == name[:-1]
    width = int(place.max(initial=0)) + 1
    pairs, count = _runs_of(np.sort((name[1:] * width + np.diff(place))[follows]))
    of, distance = pairs // width, pairs % width
    order = np.lexsort((-distance, count, of))  # the last entry of each name wins
    usual[of[order]], often[of[order]] = distance[order], count[order]
    return usual, often


def _runs_of(ranked: Int64) -> tuple[Int64, Int64]:
    """Return the distinct values of a sorted column and their counts."""
    first = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1])[: len(ranked)])
    return ranked[first], np.diff(first, append=len(ranked))


def _off_beat(name: Int64, place: Int64, names: int) -> tuple[Int64, Int64]:
    """Return occurrences at clearly irregular distances, by which a kernel of every layer marks the steps."""
    usual, _ = _usual_distances(name, place, names)
    often = np.bincount(name, minlength=names) >= LEAST_STEPS
    of = name[1:]
    late = (of == name[:-1]) & often[of] & (np.abs(np.diff(place) - usual[of]) > NEARLY * usual[of])
    return of[late], place[1:][late]


def _lead(marker: _Marker, starts: Int64, ends: Int64) -> int:
    """Return how many kernels before the marker its step begins: where the device waits longest, by the median."""
    reach = np.maximum.accumulate(ends)
    waits = np.append(0, starts[1:] - reach[:-1])
    whole = marker.positions[marker.positions >= marker.period]
    typical = [float(np.median(waits[whole - offset])) for offset in range(marker.period)]
    return int(np.argmax(typical))


def _runs(marker: _Marker, lead: int, names: Int64) -> list[list[tuple[int, int]]]:
    """Return runs of consecutive steps as (first kernel, first kernel after)."""
    begins = marker.positions - lead
    begins = begins[begins >= 0]
    whole = begins[begins + marker.period <= len(names)]
    if not len(whole):
        return []
    usual = _usual(names[whole[:, None] + np.arange(marker.period)])
    # twice: a prefill also has the marker, and the step cut off at it becomes whole once the prefill is excluded
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
    """Return the distance to the next step, or a period if the distance is clearly longer."""
    lengths = np.diff(np.append(begins, count))
    lengths[lengths > (1 + NEARLY) * period] = period
    return lengths


def _earlier(names: Int64, usual: Int64, low: int, begin: int) -> list[tuple[int, int]]:
    """Return steps before the first marked one, which irregular distances cannot mark."""
    found: list[tuple[int, int]] = []
    while begin - len(usual) >= low and _alike(names[begin - len(usual) : begin], usual):
        found.append((begin - len(usual), begin))
        begin -= len(usual)
    return found[::-1]


def _usual(steps: Int64) -> Int64:
    """Return the most frequent row."""
    weights = np.random.default_rng(0).integers(1, 2**62, steps.shape[1], dtype=np.uint64)
    _, first, counts = np.unique((steps.astype(np.uint64) * weights).sum(axis=1), return_index=True, return_counts=True)
    return np.asarray(steps[first[counts.argmax()]])


def _alike(step: Int64, usual: Int64) -> bool:
    """Return whether a step launches about the usual kernels, in the same order if it has the usual length."""
    if abs(len(step) - len(usual)) > NEARLY * len(usual):
        return False
    if len(step) == len(usual):
        return int((step == usual).sum()) >= (1 - OTHER_KERNELS) * len(usual)
    names, count = np.unique(np.concatenate([step, usual]), return_counts=True)
    mine = np.bincount(np.searchsorted(names, step), minlength=len(names))
    shared = int(np.minimum(mine, count - mine).sum())
    return shared >= (1 - NEARLY) * len(usual)


def _heads(runs: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the kernels before each run."""
    ends = [0, *(run[-1][1] for run in runs[:-1])]
    return [(low, run[0][0]) for low, run in zip(ends, runs, strict=True) if low < run[0][0]]


def _is_layer(trace: Trace, names: Int64) -> bool:
    """Return whether the period looks like one layer: one attention kernel and no sampling."""
    classes = [classify(trace.name_of(int(name))) for name in names]
    return classes.count(KernelClass.ATTENTION) == 1 and KernelClass.SAMPLING not in classes


def _computes(trace: Trace, names: Int64) -> bool:
    """Return whether there is a matrix product or attention: a prefill has both, an allocator warm-up neither."""
    matrix = (KernelClass.GEMM, KernelClass.GEMV, KernelClass.ATTENTION)
    return any(classify(trace.name_of(int(name))) in matrix for name in different(names))
