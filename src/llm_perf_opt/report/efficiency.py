"""The section on limits: MFU, MBU, floor and roofline, per stage and per part."""

from collections.abc import Callable, Sequence

from llm_perf_opt.analysis.kernels.hfu import Hfu, StageHfu
from llm_perf_opt.analysis.limits.binding import EVIDENCE, VERDICTS
from llm_perf_opt.analysis.limits.efficiency import Efficiency, PartEfficiency, RooflineComparison, StageEfficiency
from llm_perf_opt.analysis.limits.efficiency_metrics import EFFICIENCY_METRICS
from llm_perf_opt.analysis.limits.floor import FloorPart
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.reasons import Reasons
from llm_perf_opt.report.text import (
    bytes_per_s,
    escape,
    fine_percent,
    flops_per_s,
    known_within,
    milliseconds,
    percent,
    significant,
    table,
)


def efficiency_section(found: Maybe[Efficiency], hfus: Sequence[StageHfu] = ()) -> str:
    """How far each stage is from the limit; `hfus` where counters were read."""
    if isinstance(found, Missing):
        return f"## MFU and distance from the limit\n\n{escape(str(found))}\n"
    reasons = Reasons()
    parts = ["## MFU and distance from the limit\n"]
    parts += [f"- **{stage.binds}**: {escape(stage.because)}." for stage in found.stages]
    parts += ["", *[f"- {word}: {meaning}" for word, meaning in used_verdicts(found)], f"- {EVIDENCE}"]
    parts += ["", _roofs(found, reasons), *[_stage(stage, _hfu_of(stage, hfus), reasons) for stage in found.stages]]
    parts += [
        "Parts: time under the profiler (of kernels, which it does not change; of the host on a CPU) in prefill and in the "
        "profiled decode steps, against the floor of as many steps on the best limits known. Reading the cache counts with "
        "attention_core, writing it with the projections.\n",
        *[_parts(stage, reasons) for stage in found.stages],
    ]
    parts += [*reasons.lines(), *[f"- {escape(note)}" for note in found.notes]]
    parts += [f"- **{metric.label}** = {metric.formula}. {metric.definition}" for metric in EFFICIENCY_METRICS]
    return "\n".join(parts) + "\n"


def efficiency_sentences(found: Maybe[Efficiency]) -> list[str]:
    """One sentence per stage for the summary."""
    if isinstance(found, Missing):
        return []
    return [f"{stage.binds}: {escape(stage.because)}." for stage in found.stages]


def used_verdicts(found: Efficiency) -> list[tuple[str, str]]:
    """The words that the stages are called by, with what they mean."""
    used = {stage.verdict for stage in found.stages}
    return [(word, meaning) for word, meaning in VERDICTS if used.intersection(word.split(", "))]


def _roofs(found: Efficiency, reasons: Reasons) -> str:
    rows = [
        [
            roof.name,
            reasons.cell(_shown(roof.peak_flops_per_s, flops_per_s)),
            reasons.cell(_shown(roof.bandwidth_bytes_per_s, bytes_per_s)),
            reasons.cell(_shown(roof.ridge_flops_per_byte, lambda ridge: f"{significant(ridge)} FLOP/byte")),
            escape(roof.source) if not isinstance(roof.peak_flops_per_s, Missing) else "",
        ]
        for roof in found.roofs
    ]
    return table(["limits", f"peak, {found.dtype}", "memory bandwidth", "ridge", "source"], rows, "lrrrl")


def _hfu_of(stage: StageEfficiency, hfus: Sequence[StageHfu]) -> list[Maybe[str]]:
    """One cell per limit."""
    found = next((entry for entry in hfus if entry.stage == stage.stage), None)
    if found is None:
        return [Missing("no hardware counters were read")] * len(stage.against)
    of_roof = dict(found.against)
    return [_executed(of_roof.get(entry.roof.name, Missing("it was not compared with this limit"))) for entry in stage.against]


def _executed(value: Maybe[Hfu]) -> Maybe[str]:
    return value if isinstance(value, Missing) else f"{value.sign} {fine_percent(value.share)}".strip()


def _stage(stage: StageEfficiency, hfu: list[Maybe[str]], reasons: Reasons) -> str:
    header = [stage.stage, *[f"against {entry.roof.name}" for entry in stage.against]]
    rows: list[list[Maybe[str]]] = [
        ["MFU (causal)", *[_percent(entry.mfu) for entry in stage.against]],
        ["MFU (whole attention)", *[_percent(entry.mfu_full_attention) for entry in stage.against]],
        ["HFU", *hfu],
        ["MBU", *[_percent(entry.mbu) for entry in stage.against]],
        ["floor", *[_floor(entry) for entry in stage.against]],
        ["times off the floor", *[_times(entry.times_floor, stage) for entry in stage.against]],
    ]
    facts = (
        f"{stage.stage}: {milliseconds(stage.time_ns.median)} "
        f"({known_within(stage.time_ns, 'ns')}), "
        f"{significant(stage.cost.flops / 1e9)} GFLOP causal "
        f"({significant(stage.cost.flops_full_attention / 1e9)} whole), {significant(stage.cost.bytes / 1e6)} MB at least; "
        f"achieved {flops_per_s(stage.flops_per_s)} and {bytes_per_s(stage.bytes_per_s)}; "
        f"intensity {significant(stage.cost.flops_per_byte)} FLOP/byte; "
        f"kernels' share of the time {reasons.cell(_percent(stage.busy))}{_launches(stage)}.\n"
    )
    return facts + "\n" + table(header, [[reasons.cell(cell) for cell in row] for row in rows], "l" + "r" * len(stage.against))


def _launches(stage: StageEfficiency) -> str:
    return "" if isinstance(stage.launches, Missing) else f", {stage.launches:,} launches, copies too, in the profiled steps"


def _parts(stage: StageEfficiency, reasons: Reasons) -> str:
    """Every part in the profiled steps: its own time, and how that compares with its own floor."""
    if isinstance(stage.parts, Missing):
        rows = [[part.name, significant(part.flops / 1e9), significant(part.bytes / 1e6)] for part in stage.cost.parts]
        return table([f"parts of {stage.stage}", "GFLOP", "MB"], rows, "lrr")
    known = [part.time_ns for part in stage.parts if not isinstance(part.time_ns, Missing)]
    whole = sum(known) or 1
    rows = []
    for part in stage.parts:
        time: Maybe[str] = part.time_ns if isinstance(part.time_ns, Missing) else milliseconds(part.time_ns)
        share: Maybe[str] = part.time_ns if isinstance(part.time_ns, Missing) else percent(part.time_ns / whole)
        rows.append([part.name, *[reasons.cell(cell) for cell in (time, share)], *_part_cells(part, reasons)])
    header = [
        f"parts of {stage.stage}",
        "time",
        "share",
        "FLOP/s",
        "bytes/s",
        "FLOP/byte",
        "MFU",
        "MBU",
        "floor",
        "× floor",
        "floor is",
    ]
    return table(header, rows, "lrrrrrrrrrl")


def _part_cells(part: PartEfficiency, reasons: Reasons) -> list[str]:
    if part.floor is None:
        return [reasons.cell(_percent(part.mfu))] * 8
    floor, time = part.floor, part.time_ns
    rates: list[Maybe[str]] = [time, time] if isinstance(time, Missing) else [
        flops_per_s(floor.flops * 1e9 / max(time, 1)),
        bytes_per_s(floor.bytes * 1e9 / max(time, 1)),
    ]  # fmt: skip
    intensity = significant(floor.flops / floor.bytes) if floor.bytes else "no bytes"
    times: Maybe[str] = part.times_floor if isinstance(part.times_floor, Missing) else f"× {significant(part.times_floor, 3)}"
    cells: list[Maybe[str]] = [
        *rates,
        intensity,
        _percent(part.mfu),
        _percent(part.mbu),
        milliseconds(floor.seconds * 1e9),
        times,
        bound_words(floor),
    ]
    return [reasons.cell(cell) for cell in cells]


def bound_words(floor: FloorPart) -> str:
    """Which of computing and moving a part's floor is; of a part with no floor, neither."""
    return floor.bound if floor.seconds else "nothing"


def _percent(value: Maybe[float]) -> Maybe[str]:
    return value if isinstance(value, Missing) else fine_percent(value)


def _floor(entry: RooflineComparison) -> Maybe[str]:
    if isinstance(entry.floor, Missing):
        return entry.floor
    alone = ", computing alone" if entry.roof.in_cache else ""
    return f"{milliseconds(entry.floor.seconds * 1e9)}{alone}"


def _times(value: Maybe[float], stage: StageEfficiency) -> Maybe[str]:
    """With the time's own interval carried over."""
    if isinstance(value, Missing):
        return value
    time = stage.time_ns
    if isinstance(time.ci_low, Missing) or isinstance(time.ci_high, Missing):
        return f"× {significant(value, 3)}"
    low, high = (value * end / time.median for end in (time.ci_low, time.ci_high))
    return f"× {significant(value, 3)} ({significant(low, 3)} – {significant(high, 3)})"


def _shown(value: Maybe[float], show: Callable[[float], str]) -> Maybe[str]:
    return value if isinstance(value, Missing) else show(value)
