"""Find the stages and steps of any trace: from labels, otherwise from the repeating sequence of kernels.

The dialects of `labels` are tried in order; the first whose labels own device work is used. Without labels, and inside a
decode whose steps have no labels, `kernel_sequence` finds the steps. The result has the method and its coverage of the device
time.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.kernels.classes import CLASSES, class_of_work
from llm_perf_opt.analysis.trace.intervals import distinct, group_spans
from llm_perf_opt.analysis.trace.kernel_sequence import Repetition, find_repetition, find_steps
from llm_perf_opt.analysis.trace.labels import Dialect, dialects
from llm_perf_opt.analysis.trace.stage_instances import DECODE, DECODE_STEP, PREFILL, PROFILE, Instances, TraceStages, coverage_of
from llm_perf_opt.core.stages import DOMAIN, MIXED_STEP, STAGE_NAMES, STEP
from llm_perf_opt.traces.events import Int64, Trace, different
from llm_perf_opt.traces.nesting import lanes_of, nest
from llm_perf_opt.traces.projection import NONE, launching_calls, nearest_marked, through

_ORDER = (*STAGE_NAMES, MIXED_STEP, STEP)
"""Stages in display order."""
SEQUENCED_STEPS = "steps by kernel sequence"
"""Follows the name of a dialect that labels a decode but not its steps."""
MOST_DECODES = 1000
"""Steps are searched in at most so many decodes, which takes a millisecond each; with more, in none."""


def find_stages(trace: Trace, call_of_work: Int64 | None = None) -> TraceStages:
    """Return the stages of a trace by the first method that finds device work in them."""
    calls = launching_calls(trace) if call_of_work is None else call_of_work
    fallback: TraceStages | None = None
    for dialect in dialects():
        found = _from_labels(trace, calls, dialect)
        if found is None:
            continue
        informative = found.names != (PROFILE,)  # a `profile` label around everything does not separate stages
        if informative and ((found.of_work != NONE).any() or not len(trace.work)):
            return found
        fallback = fallback or found
    return _from_kernels(trace) or fallback or _nothing(trace)


def _from_labels(trace: Trace, call_of_work: Int64, dialect: Dialect) -> TraceStages | None:
    mine = np.flatnonzero(_in_our_domain(trace)) if dialect.our_domain_only else np.arange(len(trace.ranges))
    stage_of = {int(index): dialect.stage_of(trace.name_of(int(index))) for index in different(trace.ranges.name[mine])}
    names = tuple(name for name in _ORDER if name in stage_of.values())
    if not names:
        return None
    stage = np.full(len(trace.names) + 1, NONE, np.int64)  # the last entry is for NO_NAME
    for index, name in stage_of.items():
        stage[index] = names.index(name) if name else NONE
    of_range = stage[trace.ranges.name]
    rows = mine[of_range[mine] != NONE]
    instances, of_work = _instances(trace, call_of_work, rows, of_range[rows])
    if DECODE_STEP in names and DECODE not in names:
        names, instances, of_work = _with_decodes(trace, names, instances, of_work)
    why = f"{len(rows)} labels such as '{trace.name_of(int(trace.ranges.name[rows[-1]]))}'"
    method = dialect.name
    if DECODE in names and DECODE_STEP not in names:
        found = _with_steps(trace, call_of_work, names, instances, of_work)
        if found is None:
            why += "; decode has no step labels and its kernels show no steps, so there are no figures per token"
        else:
            names, instances, of_work, steps = found
            method, why = f"{method}, {SEQUENCED_STEPS}", f"{why}; steps of decode by {steps}"
    return _stages(trace, method, why, names, instances, of_work)


def _with_steps(
    trace: Trace, call_of_work: Int64, names: tuple[str, ...], instances: Instances, of_work: Int64
) -> tuple[tuple[str, ...], Instances, Int64, str] | None:
    """Add the steps of every decode from the sequence of its kernels; None if a decode shows no steps.

    A step is from the launch of its first kernel to that of the next step's, and owns what was launched in between.
    """
    began = through(call_of_work, trace.calls.start_ns)
    by_owner = np.argsort(of_work, kind="stable")
    bounds = np.searchsorted(of_work[by_owner], np.arange(len(instances) + 1))
    of_work = of_work.copy()
    whys: list[str] = []
    first: list[int] = []
    last: list[int] = []
    parent: list[int] = []
    decodes = np.flatnonzero(instances.stage == names.index(DECODE)).tolist()
    for decode in decodes if len(decodes) <= MOST_DECODES else []:
        rows = by_owner[bounds[decode] : bounds[decode + 1]]
        if not len(rows):
            continue
        found = find_steps(trace, rows)
        if found is None or (np.diff(began[found[0]]) <= 0).any():
            return None
        starts, mine = began[found[0]], rows[began[rows] >= began[found[0][0]]]
        of_work[mine] = len(instances) + len(parent) + np.searchsorted(starts, began[mine], side="right") - 1
        whys.append(found[1])
        first += starts.tolist()
        last += [*starts[1:].tolist(), int(instances.end_ns[decode])]
        parent += [decode] * len(starts)
    if not parent:
        return None
    steps = Instances(
        stage=np.full(len(parent), len(names), np.int32),
        start_ns=np.array(first, np.int64),
        end_ns=np.array(last, np.int64),
        parent=np.array(parent, np.int64),
        range=np.full(len(parent), NONE, np.int64),
    )
    joined, of_work = _sorted(_joined(instances, steps), of_work)
    more = f", and the same in {len(whys) - 1} more decodes" if len(whys) > 1 else ""
    return (*names, DECODE_STEP), joined, of_work, whys[0] + more


def _in_our_domain(trace: Trace) -> npt.NDArray[np.bool_]:
    ours = np.array([name == DOMAIN for name in trace.names] + [True], np.bool_)  # the last entry is for NO_NAME
    return np.asarray(ours[trace.ranges.domain])


def _instances(trace: Trace, call_of_work: Int64, rows: Int64, stage: Int64) -> tuple[Instances, Int64]:
    """Return the labeled ranges as instances, and the innermost one around the launch of each row of work."""
    ranges, calls = trace.ranges, trace.calls
    lane, call_lane = lanes_of((ranges.process[rows], ranges.thread[rows]), (calls.process, calls.thread))
    nesting = nest(ranges.start_ns[rows], ranges.end_ns[rows], lane)
    double = _inside_its_own(nesting.parent, stage)
    if double.any():
        return _instances(trace, call_of_work, rows[~double], stage[~double])
    launching = distinct(call_of_work, len(calls))
    of_call = np.full(len(calls), NONE, np.int64)
    of_call[launching] = nesting.innermost(calls.start_ns[launching], call_lane[launching])
    order = np.lexsort((-ranges.end_ns[rows], ranges.start_ns[rows]))
    place = np.empty(len(rows), np.int64)
    place[order] = np.arange(len(rows))
    instances = Instances(
        stage=stage[order].astype(np.int32),
        start_ns=ranges.start_ns[rows][order],
        end_ns=ranges.end_ns[rows][order],
        parent=through(nesting.parent[order], place),
        range=rows[order],
    )
    return instances, through(through(call_of_work, of_call), place)


def _inside_its_own(parent: Int64, stage: Int64) -> npt.NDArray[np.bool_]:
    """Return which labels are inside another of their stage: one set twice, as NVTX and record_function, counts once."""
    double = np.zeros(len(parent), np.bool_)
    for number in different(stage):
        mine = stage == number
        double |= mine & (through(parent, nearest_marked(parent, mine)) != NONE)
    return double


def _with_decodes(
    trace: Trace, names: tuple[str, ...], instances: Instances, of_work: Int64
) -> tuple[tuple[str, ...], Instances, Int64]:
    """Put each unbroken run of decode steps of a thread into a `decode`, as in this tool's labels."""
    ranges = trace.ranges
    lane = lanes_of((ranges.process[instances.range], ranges.thread[instances.range]))[0]
    outer = np.flatnonzero(instances.parent == NONE)  # inner instances of a step do not end a run
    order = outer[np.argsort(lane[outer], kind="stable")]
    in_run = instances.stage[order] == names.index(DECODE_STEP)
    begins = in_run & np.append(True, ~in_run[:-1] | (lane[order][1:] != lane[order][:-1]))
    run = np.full(len(instances), NONE, np.int64)
    run[order[in_run]] = np.cumsum(begins)[in_run] - 1
    runs = int(begins.sum())
    members = np.flatnonzero(run != NONE)
    first, last = group_spans(run[members], instances.start_ns[members], instances.end_ns[members], runs)
    every = (*names, DECODE)
    decodes = Instances(
        np.full(runs, len(names), np.int32), first, last, np.full(runs, NONE, np.int64), np.full(runs, NONE, np.int64)
    )
    parent = np.where(run == NONE, instances.parent, run + len(instances))
    joined, of_work = _sorted(_joined(_reparented(instances, parent), decodes), of_work)
    return every, joined, of_work


def _joined(first: Instances, second: Instances) -> Instances:
    columns = {name: np.concatenate([column, second.columns()[name]]) for name, column in first.columns().items()}
    return Instances(**columns)


def _reparented(instances: Instances, parent: Int64) -> Instances:
    return Instances(**{**instances.columns(), "parent": parent})


def _sorted(instances: Instances, of_work: Int64) -> tuple[Instances, Int64]:
    """Sort by start, outer instances first, and update references."""
    depth = (instances.parent != NONE).astype(np.int64)
    order = np.lexsort((depth, -instances.end_ns, instances.start_ns))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    moved = instances.rows(order)
    return _reparented(moved, through(moved.parent, place)), through(of_work, place)


def _from_kernels(trace: Trace) -> TraceStages | None:
    found = find_repetition(trace)
    if found is None:
        return None
    names = (PREFILL, DECODE, DECODE_STEP) if found.heads else (DECODE, DECODE_STEP)
    instances, of_work = _sorted(*_windows(trace, found, names))
    devices = len(different(trace.work.device))
    where = f", only on device {found.device} of {devices}" if devices > 1 else ""
    return _stages(trace, "kernel sequence", found.why + where, names, instances, of_work)


def _windows(trace: Trace, found: Repetition, names: tuple[str, ...]) -> tuple[Instances, Int64]:
    """Return instances from intervals of device work: heads are prefills, runs of steps decodes; each owns its window."""
    stretches = [*((PREFILL, NONE, head) for head in found.heads)]
    for run in found.runs:
        decode = len(stretches)
        stretches.append((DECODE, NONE, (run[0][0], run[-1][1])))
        stretches += [(DECODE_STEP, decode, step) for step in run]
    work = trace.work
    on_device = np.flatnonzero(work.device == found.device)
    order = on_device[np.argsort(work.start_ns[on_device], kind="stable")]
    starts = work.start_ns[order]
    of_work = np.full(len(work), NONE, np.int64)
    start, end = [], []
    for index, (_, _, (first, last)) in enumerate(stretches):
        low, high = np.searchsorted(starts, first), np.searchsorted(starts, last)
        of_work[order[low:high]] = index
        start.append(first)
        end.append(int(work.end_ns[order[low:high]].max(initial=first)))
    instances = Instances(
        stage=np.array([names.index(name) for name, _, _ in stretches], np.int32),
        start_ns=np.array(start, np.int64),
        end_ns=np.array(end, np.int64),
        parent=np.array([parent for _, parent, _ in stretches], np.int64),
        range=np.full(len(stretches), NONE, np.int64),
    )
    return instances, of_work


def _nothing(trace: Trace) -> TraceStages:
    why = f"no stage labels and no {'repeating sequence of kernels' if len(trace.work) else 'device work'}"
    return _stages(trace, "none", why, (), Instances.none(), np.full(len(trace.work), NONE, np.int64))


def _stages(trace: Trace, method: str, why: str, names: tuple[str, ...], instances: Instances, of_work: Int64) -> TraceStages:
    listed = tuple(name for name in _ORDER if name in names)
    stage = np.array([listed.index(name) for name in names], np.int32)[instances.stage] if names else instances.stage
    covered = coverage_of(of_work, trace.work.end_ns - trace.work.start_ns)
    return TraceStages(method, why, listed, Instances(**{**instances.columns(), "stage": stage}), of_work, covered)


def stage_columns(trace: Trace, stages: TraceStages | None = None) -> dict[str, dict[str, Any]]:
    """Return table → column → values. `stage` is the innermost one, `step` the step's index in the trace; NULL for none."""
    found = find_stages(trace) if stages is None else stages
    names = np.array([*found.names, None], object)
    stage = names[through(found.of_work, found.instances.stage.astype(np.int64))]
    classes = np.array([kind.value for kind in CLASSES], object)[class_of_work(trace)]
    return {"kernels": {"stage": stage, "step": _steps(found, len(trace.work)), "class": classes}}


def _steps(stages: TraceStages, rows: int) -> Any:
    if stages.step_stage is None:
        return np.full(rows, None, object)
    instance = stages.of_stage(stages.step_stage)
    steps = stages.rows_of(stages.step_stage)
    place = np.full(len(stages.instances) + 1, None, object)  # the last entry is for -1
    place[steps] = list(range(len(steps)))
    place[NONE] = None
    return place[instance]
