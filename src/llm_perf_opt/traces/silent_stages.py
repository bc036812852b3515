"""Check stages of a GPU run that contain no work: whether the recording lost it, or there was none.

A label around host work alone is harmless. A step without launches that is as long as the others is not: its time is recorded
but its work is lost, so every number per token would be wrong.
"""

from collections.abc import Collection, Iterator

import numpy as np

from llm_perf_opt.core.stages import Stage
from llm_perf_opt.traces.events import Bool, Int64, Trace, TraceProblem, WorkKind, different
from llm_perf_opt.traces.projection import NONE, Projection, graph_launches, kernel_launches, own_stage, step_of_work

WORKING_STAGES = (Stage.PREFILL, Stage.DECODE, Stage.DECODE_STEP)
"""Stages that always run kernels on a GPU."""
CUT_SHORT = "Record again with an nsys that is as new as the CUDA runtime, and check its log for importer errors."
_AS_LONG = 0.5
"""Share of the median length of the ranges of a stage with work: a range of this length had work too."""
_FEW_KERNELS = 0.5
"""Share of the kernels of the median step: with fewer, and no calls afterwards, the recording ended inside the step."""
_LEAST_SIBLINGS = 2
"""Steps with work, besides the last, that are needed to know how many kernels a step has."""
_IDLE = "These ranges contain only host work, or are labels without launches. Their numbers are left out."
_AHEAD = "Its numbers are left out; each other step contains the launches of the next one."
_WAITS_UNTIL = 0.9
"""Share of the last step: a program that waits has calls up to here; a recording that lost the work of the step has none."""
_ELSEWHERE = "Set the ranges on the thread that launches, or use the numbers of the whole trace."


def silent_stages(trace: Trace, projection: Projection, expected: Collection[str] = ()) -> Iterator[TraceProblem]:
    """Yield problems for stages without launches or with few: the recording lost work, or another thread launched it.

    `expected` are the ranges of our own runner, which launches in each of its stages.
    """
    if not (trace.work.kind == WorkKind.KERNEL).any():
        return
    stage = own_stage(trace, WORKING_STAGES)
    has_work = _ranges_with_work(projection)
    silent = np.flatnonzero((stage != NONE) & ~has_work)
    if len(silent):
        yield from _silent(trace, projection, silent, stage, has_work, expected)
    yield from _ended_inside_a_step(trace, projection, stage, has_work)


def _silent(
    trace: Trace, projection: Projection, silent: Int64, stage: Int64, has_work: Bool, expected: Collection[str]
) -> Iterator[TraceProblem]:
    launched, elsewhere = _launched_meanwhile(trace, projection, silent)
    waits = _only_waits(trace, silent, stage) & ~launched & ~elsewhere
    without = silent[~launched & ~elsewhere & ~waits]
    if len(without):
        lost = _work_was_lost(trace, without, stage, has_work, expected)
        fact = f"{_counts(without, stage)} contain no kernel and no launch"
        yield TraceProblem("ranges_without_kernels", fact, lost, CUT_SHORT if lost else _IDLE)
    if waits.any():
        fact = f"{_counts(silent[waits], stage)}, the last, only waits: its work was launched one step ahead"
        yield TraceProblem("launched_ahead", fact, fatal=False, remedy=_AHEAD)
    if (launched | elsewhere).any():
        fact = (
            f"{_counts(silent[launched | elsewhere], stage)} contain no kernel: another thread or process launched their kernels"
        )
        yield TraceProblem("launched_elsewhere", fact, fatal=False, remedy=_ELSEWHERE)


def _only_waits(trace: Trace, rows: Int64, stage: Int64) -> Bool:
    """Return, per range, whether it is the last decode step of its process and calls were recorded almost to its end."""
    start, end, process = trace.ranges.start_ns, trace.ranges.end_ns, trace.ranges.process
    is_step = stage == WORKING_STAGES.index(Stage.DECODE_STEP)
    found = np.zeros(len(rows), np.bool_)
    for pid in different(process[rows[is_step[rows]]]).tolist():
        last = int(start[is_step & (process == pid)].max())
        mine = np.flatnonzero(is_step[rows] & (process[rows] == pid) & (start[rows] == last))
        ended = np.sort(trace.calls.end_ns[(trace.calls.process == pid) & (trace.calls.start_ns >= last)])
        if not len(mine) or not len(ended):
            continue
        at = np.searchsorted(ended, end[rows[mine]], side="right") - 1
        until = _WAITS_UNTIL * (end[rows[mine]] - last)
        found[mine] = (at >= 0) & (ended[np.maximum(at, 0)] - last >= until)
    return found


def _counts(rows: Int64, stage: Int64) -> str:
    return ", ".join(
        f"{np.count_nonzero(stage[rows] == place):,} of {np.count_nonzero(stage == place):,} {name}"
        for place, name in enumerate(WORKING_STAGES)
        if (stage[rows] == place).any()
    )


def _work_was_lost(trace: Trace, silent: Int64, stage: Int64, has_work: Bool, expected: Collection[str]) -> bool:
    """Return whether a silent range must have had work: all are silent, our runner set it, several at the end, or it is long."""
    if len(silent) == np.count_nonzero(stage != NONE):
        return True
    if any(WORKING_STAGES[place].value in expected for place in different(stage[silent]).tolist()):
        return True
    after = _outside_calls(trace, silent, after=True)
    if any(np.count_nonzero(stage[silent[after]] == place) > 1 for place in range(len(WORKING_STAGES))):
        return True
    length = trace.ranges.end_ns - trace.ranges.start_ns
    before = _outside_calls(trace, silent, after=False)
    for place in different(stage[silent]).tolist():
        mine = stage[silent] == place
        working = length[(stage == place) & has_work]
        rows = silent[mine]
        if np.count_nonzero(mine & before) == 1:
            rows = silent[mine & ~before]  # calls may start to be recorded one step later than labels
        if len(working) and (length[rows] >= _AS_LONG * float(np.median(working))).any():
            return True
    return False


def _outside_calls(trace: Trace, rows: Int64, after: bool) -> Bool:
    """Return, per range, whether it begins after the last recorded call of its process, or else ends before the first."""
    found = np.zeros(len(rows), np.bool_)
    for process in different(trace.ranges.process[rows]).tolist():
        calls = trace.calls.process == process
        mine = trace.ranges.process[rows] == process
        if not calls.any():
            found[mine] = after
        elif after:
            found[mine] = trace.ranges.start_ns[rows[mine]] >= int(trace.calls.end_ns[calls].max())
        else:
            found[mine] = trace.ranges.end_ns[rows[mine]] <= int(trace.calls.start_ns[calls].min())
    return found


def _ended_inside_a_step(trace: Trace, projection: Projection, stage: Int64, has_work: Bool) -> Iterator[TraceProblem]:
    """Yield a problem if the last step with work has few kernels and no calls follow for half a step: the rest was lost."""
    steps = np.flatnonzero((stage == WORKING_STAGES.index(Stage.DECODE_STEP)) & has_work)
    start, end = trace.ranges.start_ns, trace.ranges.end_ns
    kernels: Int64 | None = None
    for process in different(trace.ranges.process[steps]).tolist():
        mine = steps[trace.ranges.process[steps] == process]
        last = mine[np.argmax(start[mine])]
        others = mine[mine != last]
        if len(others) < _LEAST_SIBLINGS:
            continue
        silence_ns = int(end[last]) - int(trace.calls.end_ns[trace.calls.process == process].max())
        if silence_ns < _AS_LONG * float(np.median(end[others] - start[others])):
            continue
        kernels = _kernels_by_range(trace, projection) if kernels is None else kernels
        usual = float(np.median(kernels[others]))
        if kernels[last] < _FEW_KERNELS * usual:
            fact = (
                f"the last decode_step with work has {kernels[last]:,} kernels, the others {usual:,.0f}, and no call follows it"
            )
            yield TraceProblem("ended_inside_a_step", fact, fatal=True, remedy=CUT_SHORT)


def _kernels_by_range(trace: Trace, projection: Projection) -> Int64:
    """Return, per range, the number of kernels launched in it if it is a decode step."""
    step = step_of_work(trace, projection)[trace.work.kind == WorkKind.KERNEL]
    return np.bincount(step[step != NONE], minlength=len(trace.ranges)).astype(np.int64)


def _launched_meanwhile(trace: Trace, projection: Projection, rows: Int64) -> tuple[Bool, Bool]:
    """Return, per range, whether its process launched work on any thread during it, and whether it never launched any."""
    launching = np.zeros(len(trace.calls), np.bool_)
    launching[projection.call_of_work[projection.call_of_work != NONE]] = True
    launching |= kernel_launches(trace) | graph_launches(trace)
    meanwhile = np.zeros(len(rows), np.bool_)
    never = np.zeros(len(rows), np.bool_)
    for process in different(trace.ranges.process[rows]).tolist():
        times = trace.calls.start_ns[launching & (trace.calls.process == process)]
        mine = trace.ranges.process[rows] == process
        first = np.searchsorted(times, trace.ranges.start_ns[rows[mine]])
        meanwhile[mine] = np.searchsorted(times, trace.ranges.end_ns[rows[mine]]) > first
        never[mine] = not len(times)
    return meanwhile, never


def _ranges_with_work(projection: Projection) -> Bool:
    """Return, per range, whether it or a range inside it launched work."""
    has_work = np.zeros(len(projection.parent), np.bool_)
    has_work[projection.range_of_work[projection.range_of_work != NONE]] = True
    rows = np.flatnonzero(has_work)
    while len(rows):
        rows = different(projection.parent[rows])
        rows = rows[rows != NONE]
        rows = rows[~has_work[rows]]
        has_work[rows] = True
    return has_work
