"""Stages of a GPU run that hold no work: whether the recording lost it, or there was none.

A label around work of the host alone costs no trace. A step as long as its siblings that launched nothing does: the time stays,
the work is gone, and every figure per token would be wrong.
"""

from collections.abc import Collection, Iterator

import numpy as np

from llm_perf_opt.core.stages import Stage
from llm_perf_opt.traces.events import Int64, Trace, TraceProblem, WorkKind, different
from llm_perf_opt.traces.projection import NONE, Bool, Projection, graph_launches, kernel_launches, own_stage, step_of_work

WORKING_STAGES = (Stage.PREFILL, Stage.DECODE, Stage.DECODE_STEP)
"""Stages that cannot pass without a kernel on a GPU."""
CUT_SHORT = "Record again with an nsys as new as the CUDA runtime, and look for importer errors in its log."
_AS_LONG = 0.5
"""Of the median of the ranges of a stage that hold work: one that lasts this long did their work too."""
_FEW_KERNELS = 0.5
"""Of the median step's kernels: with fewer, and silence behind it, the recording ended inside the step."""
_LEAST_SIBLINGS = 2
"""Steps with work, beside the last, that say what a step holds."""
_IDLE = "Work of the host alone, or a label that nothing was launched in: its figures are left out."
_AHEAD = "Its figures are left out; each other step holds the launches of the one after."
_WAITS_UNTIL = 0.9
"""Of the last step's length: calls of a program that waits there reach so far; a recording that lost the step's work has none."""
_ELSEWHERE = "Set the ranges on the thread that launches, or read the figures of the whole trace."


def silent_stages(trace: Trace, projection: Projection, expected: Collection[str] = ()) -> Iterator[TraceProblem]:
    """Stages that launched nothing, or ended half-way: the recording lost work, or somebody else launched.

    `expected` are ranges of our own runner's: it launches in every one of its stages.
    """
    if not (trace.work.kind == WorkKind.KERNEL).any():
        return
    stage = own_stage(trace, WORKING_STAGES)
    holding = _ranges_with_work(projection)
    silent = np.flatnonzero((stage != NONE) & ~holding)
    if len(silent):
        yield from _silent(trace, projection, silent, stage, holding, expected)
    yield from _ended_inside_a_step(trace, projection, stage, holding)


def _silent(
    trace: Trace, projection: Projection, silent: Int64, stage: Int64, holding: Bool, expected: Collection[str]
) -> Iterator[TraceProblem]:
    launched, elsewhere = _launched_meanwhile(trace, projection, silent)
    waits = _only_waits(trace, silent, stage) & ~launched & ~elsewhere
    without = silent[~launched & ~elsewhere & ~waits]
    if len(without):
        lost = _work_was_lost(trace, without, stage, holding, expected)
        fact = f"{_counts(without, stage)} hold no kernel and no launch"
        yield TraceProblem("ranges_without_kernels", fact, lost, CUT_SHORT if lost else _IDLE)
    if waits.any():
        fact = f"{_counts(silent[waits], stage)}, the last, only waits: what it waits for was launched a step ahead"
        yield TraceProblem("launched_ahead", fact, fatal=False, remedy=_AHEAD)
    if (launched | elsewhere).any():
        fact = f"{_counts(silent[launched | elsewhere], stage)} hold no kernel: another thread or process launched them"
        yield TraceProblem("launched_elsewhere", fact, fatal=False, remedy=_ELSEWHERE)


def _only_waits(trace: Trace, rows: Int64, stage: Int64) -> Bool:
    """Per range: whether it is the last decode step of its process, and calls were recorded in it almost to its end."""
    start, end, process = trace.ranges.start_ns, trace.ranges.end_ns, trace.ranges.process
    is_step = stage == WORKING_STAGES.index(Stage.DECODE_STEP)
    found = np.zeros(len(rows), np.bool_)
    for one in different(process[rows[is_step[rows]]]).tolist():
        last = int(start[is_step & (process == one)].max())
        mine = np.flatnonzero(is_step[rows] & (process[rows] == one) & (start[rows] == last))
        ended = np.sort(trace.calls.end_ns[(trace.calls.process == one) & (trace.calls.start_ns >= last)])
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


def _work_was_lost(trace: Trace, silent: Int64, stage: Int64, holding: Bool, expected: Collection[str]) -> bool:
    """Whether a silent range must have had work: our runner's, all there are, several at the end, or as long as one with work."""
    if len(silent) == np.count_nonzero(stage != NONE):
        return True
    if any(WORKING_STAGES[place].value in expected for place in different(stage[silent]).tolist()):
        return True
    behind = _beside_the_calls(trace, silent, behind=True)
    if any(np.count_nonzero(stage[silent[behind]] == place) > 1 for place in range(len(WORKING_STAGES))):
        return True
    length = trace.ranges.end_ns - trace.ranges.start_ns
    before = _beside_the_calls(trace, silent, behind=False)
    for place in different(stage[silent]).tolist():
        mine = stage[silent] == place
        working = length[(stage == place) & holding]
        rows = silent[mine]
        if np.count_nonzero(mine & before) == 1:
            rows = silent[mine & ~before]  # calls may come into a recording a step later than labels do
        if len(working) and (length[rows] >= _AS_LONG * float(np.median(working))).any():
            return True
    return False


def _beside_the_calls(trace: Trace, rows: Int64, behind: bool) -> Bool:
    """Per range: whether it begins after the last call recorded of its process (`behind`), or ends before the first."""
    found = np.zeros(len(rows), np.bool_)
    for process in different(trace.ranges.process[rows]).tolist():
        calls = trace.calls.process == process
        mine = trace.ranges.process[rows] == process
        if not calls.any():
            found[mine] = behind
        elif behind:
            found[mine] = trace.ranges.start_ns[rows[mine]] >= int(trace.calls.end_ns[calls].max())
        else:
            found[mine] = trace.ranges.end_ns[rows[mine]] <= int(trace.calls.start_ns[calls].min())
    return found


def _ended_inside_a_step(trace: Trace, projection: Projection, stage: Int64, holding: Bool) -> Iterator[TraceProblem]:
    """The last step with work has few kernels, and its process makes no call for as long as half a step: the rest was lost."""
    steps = np.flatnonzero((stage == WORKING_STAGES.index(Stage.DECODE_STEP)) & holding)
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
            fact = f"the last decode_step with work holds {kernels[last]:,} kernels, the others {usual:,.0f}, and no call follows"
            yield TraceProblem("ended_inside_a_step", fact, fatal=True, remedy=CUT_SHORT)


def _kernels_by_range(trace: Trace, projection: Projection) -> Int64:
    """Per range: the kernels launched in it, where it is a decode step."""
    step = step_of_work(trace, projection)[trace.work.kind == WorkKind.KERNEL]
    return np.bincount(step[step != NONE], minlength=len(trace.ranges)).astype(np.int64)


def _launched_meanwhile(trace: Trace, projection: Projection, rows: Int64) -> tuple[Bool, Bool]:
    """Per range: whether its process launched something on any thread while it was open; whether it never launched at all."""
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
    """Per range: whether it, or a range inside it, launched something."""
    holding = np.zeros(len(projection.parent), np.bool_)
    holding[projection.range_of_work[projection.range_of_work != NONE]] = True
    rows = np.flatnonzero(holding)
    while len(rows):
        rows = different(projection.parent[rows])
        rows = rows[rows != NONE]
        rows = rows[~holding[rows]]
        holding[rows] = True
    return holding
