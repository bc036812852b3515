"""The components of the model in the steps of a trace without labels, such as CUDA graphs of an engine.

Each prefill and step is assigned by the structure of its kernels (`layer_structure`), on each device by itself. Steps with the
same kernels are assigned once.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from llm_perf_opt.analysis.cost_model.cost import COMPONENT_NAMES, step_cost
from llm_perf_opt.analysis.cost_model.models import architecture_that_ran
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.trace.document import ComponentLine, ComponentTable
from llm_perf_opt.analysis.trace.intervals import sums
from llm_perf_opt.analysis.trace.layer_structure import (
    ATTENTION,
    OTHER,
    PRODUCT,
    UNKNOWN,
    StepStructure,
    role_of,
    structure_of,
)
from llm_perf_opt.analysis.trace.stage_instances import DECODE, DECODE_STEP, PREFILL, TraceStages
from llm_perf_opt.analysis.trace.stage_launches import instance_kernels
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Maybe, Missing, ModelFacts, PartTime, TorchPass
from llm_perf_opt.core.stages import MIXED_STEP, STEP
from llm_perf_opt.traces.events import Int64, Trace, WorkKind, different
from llm_perf_opt.traces.projection import NONE, graph_launches

NAMES = (*COMPONENT_NAMES, OTHER, UNKNOWN)
"""In columns, the number of a component is its index here."""
_PLACE = {name: place for place, name in enumerate(NAMES)}
STAGES = (PREFILL, DECODE_STEP, MIXED_STEP, STEP)
MOST_SEQUENCES = 256
"""Different sequences of kernels that are assigned; the steps of a decode repeat a few."""
MOST_KERNELS, MOST_INSTANCES = 100_000, 10_000
"""Kernels of one step, and steps of a stage, up to which they are assigned: far more than a recorded decode has."""
MOST_FAILURES = 8
"""Sequences without a known structure after which no other is tried, unless one was assigned."""


@dataclass(frozen=True)
class StageComponents:
    """The components of one stage's kernels."""

    stage: str
    instances: int
    assigned: int
    """Instances whose kernels were assigned, on every device."""
    structures: tuple[StepStructure, ...]
    """The different structures that were found."""
    why: str
    """Why the other instances were not assigned; empty if all were."""


@dataclass(frozen=True)
class TraceComponents:
    """The components of a trace's kernels."""

    component: Int64
    """Per row of device work: index into NAMES; -1 if unassigned."""
    stages: tuple[StageComponents, ...]


def find_components(trace: Trace, stages: TraceStages) -> TraceComponents:
    """Assign the kernels of every prefill and step."""
    component = np.full(len(trace.work), NONE, np.int64)
    known: dict[bytes, Maybe[StepStructure]] = {}
    found = []
    for stage in STAGES:
        instances = instance_kernels(trace, stages, stage)
        if instances:
            found.append(_stage(trace, stage, instances, known, component))
    return TraceComponents(component, tuple(found))


def _stage(
    trace: Trace, stage: str, instances: list[Int64], known: dict[bytes, Maybe[StepStructure]], component: Int64
) -> StageComponents:
    if len(instances) > MOST_INSTANCES:
        return StageComponents(stage, len(instances), 0, (), f"they are more than {MOST_INSTANCES:,}")
    structures: dict[bytes, StepStructure] = {}
    numbers: dict[bytes, Int64] = {}
    whys: Counter[str] = Counter()
    assigned = 0
    for rows in instances:
        results = []
        for every in _by_device(trace, rows):
            mine = _on_working_streams(trace, every)
            key = trace.work.name[mine].tobytes()
            if key not in known:
                known[key] = _structure(trace, mine, list(known.values()))
            result = known[key]
            results.append(result)
            if not isinstance(result, Missing):
                if key not in structures:
                    structures[key] = result
                    numbers[key] = np.array([_PLACE[name] for name in result.components], np.int64)
                component[every] = _PLACE[OTHER]
                component[mine] = numbers[key]
        failed = [result.why for result in results if isinstance(result, Missing)]
        assigned += not failed
        whys.update(failed[:1])
    why = whys.most_common(1)[0][0] if whys else ""
    return StageComponents(stage, len(instances), assigned, tuple(structures.values()), why)


def _structure(trace: Trace, rows: Int64, known: list[Maybe[StepStructure]]) -> Maybe[StepStructure]:
    if len(known) >= MOST_SEQUENCES or len(rows) > MOST_KERNELS:
        return Missing(f"there are more than {MOST_SEQUENCES} different steps, or {MOST_KERNELS:,} kernels in one")
    if len(known) >= MOST_FAILURES and isinstance(known[0], Missing) and all(isinstance(each, Missing) for each in known):
        return known[0]
    return structure_of([trace.name_of(name) for name in trace.work.name[rows].tolist()])


def _by_device(trace: Trace, rows: Int64) -> list[Int64]:
    device = trace.work.device[rows]
    return [rows[device == number] for number in different(device).tolist()]


def _on_working_streams(trace: Trace, rows: Int64) -> Int64:
    """Return the kernels on streams with products or attention: another stream's may run in the middle of any layer."""
    stream = trace.work.stream[rows]
    if (stream == stream[0]).all():
        return rows
    names = different(trace.work.name[rows])
    working = names[[role_of(trace.name_of(name)) in (PRODUCT, ATTENTION) for name in names.tolist()]]
    return np.asarray(rows[np.isin(stream, stream[np.isin(trace.work.name[rows], working)])])


def component_table(trace: Trace, stages: TraceStages) -> ComponentTable | None:
    """Return kernel time by stage and component; None if no step was assigned and the trace has no graph that needs it."""
    found = find_components(trace, stages)
    if not any(entry.assigned for entry in found.stages) and not graph_launches(trace).any():
        return None
    rows, coverage = [], {}
    for entry in found.stages:
        if not entry.assigned:
            continue
        lines = _lines(trace, stages, found, entry.stage)
        rows += lines
        named = sum(line.share for line in lines if line.name not in (OTHER, UNKNOWN))
        coverage[entry.stage] = named if lines else None
    return ComponentTable(
        evidence={entry.stage: _evidence(entry) for entry in found.stages if entry.assigned},
        why={entry.stage: _why(entry) for entry in found.stages if entry.why},
        coverage=coverage,
        rows=rows,
    )


def _lines(trace: Trace, stages: TraceStages, found: TraceComponents, stage: str) -> list[ComponentLine]:
    """Return the components of one stage, longest first. Unassigned kernels are `unknown`."""
    rows = np.flatnonzero((stages.of_stage(stage) != NONE) & (trace.work.kind == WorkKind.KERNEL))
    number = np.where(found.component[rows] == NONE, _PLACE[UNKNOWN], found.component[rows])
    duration = (trace.work.end_ns - trace.work.start_ns)[rows]
    time, count = sums(number, duration, len(NAMES)).tolist(), np.bincount(number, minlength=len(NAMES)).tolist()
    whole = int(duration.sum())
    lines = [
        ComponentLine(stage, name, count[place], time[place], time[place] / whole if whole else 0.0)
        for place, name in enumerate(NAMES)
        if count[place]
    ]
    return sorted(lines, key=lambda line: (line.name in (OTHER, UNKNOWN), -line.kernel_ns, line.name))


def _evidence(entry: StageComponents) -> str:
    words = " | ".join(dict.fromkeys(structure.evidence for structure in entry.structures))
    return words if entry.assigned == entry.instances else f"{entry.assigned} of {entry.instances}: {words}"


def _why(entry: StageComponents) -> str:
    return entry.why if not entry.assigned else f"{entry.instances - entry.assigned} of {entry.instances}: {entry.why}"


# --- components of a run ------------------------------------------------------------------------------------------------------


def with_components(torch: TorchPass, trace: Trace, facts: ModelFacts) -> tuple[TorchPass, str]:
    """Return the torch pass with the device time of prefill and decode by component, and how the components were found.

    A stage is left out unless all its kernels were assigned and their structure is that of the model.
    """
    try:
        model = architecture_that_ran(facts, decoder_only=True)
    except ConfigError:
        return torch, ""
    if len(different(trace.work.device)) > 1:
        return replace(torch, parts=Missing("the kernels ran on several devices")), ""
    stages = find_stages(trace)
    found = find_components(trace, stages)
    expected = frozenset(component.name for component in step_cost(model, Step(1, 1, 1)).components)
    layers = model.depth
    parts: list[PartTime] = []
    how = []
    for stage, inner in ((PREFILL, PREFILL), (DECODE, DECODE_STEP)):
        entry = next((entry for entry in found.stages if entry.stage == inner), None)
        why = "the trace does not show its steps" if entry is None else _mismatch(entry, layers, expected)
        mine = [] if why else _part_times(trace, stages, found.component, stage)
        parts += mine
        how.append(f"{stage}: n/a, {why}" if entry is None or why else f"{stage}: {_evidence(entry)}, {_covered(mine)}")
    words = "; ".join(how)
    if not parts:
        return replace(torch, parts=Missing(f"the kernels do not show their components ({words})")), ""
    return replace(torch, parts=tuple(parts)), f"Components were found by the order of the kernels: {words}."


def _covered(parts: list[PartTime]) -> str:
    whole = sum(part.time_ns for part in parts)
    named = sum(part.time_ns for part in parts if part.part != OTHER)
    return f"{100 * named / max(whole, 1):.1f} % of the device time"


def _mismatch(entry: StageComponents, layers: int, expected: frozenset[str]) -> str:
    """Return why the structure is not that of the model, or an empty string."""
    if entry.assigned < entry.instances:
        return _why(entry)
    seen = {structure.layers for structure in entry.structures}
    if seen != {layers}:
        return f"its kernels show {' or '.join(map(str, sorted(seen)))} layers, but the model has {layers}"
    strange = {name for structure in entry.structures for name in structure.components} - expected - {OTHER, UNKNOWN}
    return f"its kernels show {', '.join(sorted(strange))}, which the model does not have" if strange else ""


def _part_times(trace: Trace, stages: TraceStages, component: Int64, stage: str) -> list[PartTime]:
    """Return the components of a stage. Work outside its steps, copies and unknown kernels are `other`."""
    rows = np.flatnonzero(stages.of_stage(stage) != NONE)
    known = (component[rows] != NONE) & (component[rows] != _PLACE[UNKNOWN])
    number = np.where(known, component[rows], _PLACE[OTHER])
    duration = (trace.work.end_ns - trace.work.start_ns)[rows]
    time, count = sums(number, duration, len(NAMES)).tolist(), np.bincount(number, minlength=len(NAMES)).tolist()
    return [PartTime(stage, name, count[place], time[place]) for place, name in enumerate(NAMES) if count[place]]
