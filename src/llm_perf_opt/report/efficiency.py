"""Stages and components of the model against the roofline: MFU, MBU, roofline time."""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

from llm_perf_opt.analysis.kernels.evidence import Hfu, StageHfu
from llm_perf_opt.analysis.limits.binding import VERDICTS, shown_verdict
from llm_perf_opt.analysis.limits.compared import RooflineComparison
from llm_perf_opt.analysis.limits.efficiency import ComponentEfficiency, Efficiency, StageEfficiency
from llm_perf_opt.analysis.limits.roofline import ComponentRoofline
from llm_perf_opt.core.records import Distribution, Maybe, Missing
from llm_perf_opt.report.document import Cell, Column, Item, Items, Table, cell, numbers
from llm_perf_opt.report.text import (
    bytes_per_s,
    duration,
    ends,
    fine_percent,
    flops,
    flops_per_s,
    grouped,
    known,
    known_within,
    moved_bytes,
    percent,
    significant,
    then,
    times,
    words,
)

_OUTSIDE = Missing("outside the cost model")
_COMPONENTS = (
    "Times are measured under the profiler, in prefill and in the profiled decode steps: kernel time, which the profiler does "
    "not change, or host time on a CPU. The roofline time is that of the same steps at the best known peaks. Reading the KV "
    "cache belongs to attention_core, writing it to the projections."
)
_SUBSTAGES = (
    "Unprofiled times of all forwards in a prefill, each with the sub-stages inside it. The FLOPs and the minimum bytes are "
    "those of the images that ran, or of the whole prompt in the text decoder."
)


def used_verdicts(found: Efficiency) -> list[tuple[str, str]]:
    """Return the verdicts that occur, with their meanings."""
    used = {stage.verdict for stage in found.stages}
    return [(shown_verdict(word), meaning) for word, meaning in VERDICTS if used.intersection(word.split(", "))]


def verdict_items(found: Efficiency) -> Items:
    """Return what bounds each stage, and why."""
    return Items([Item(f"{stage.binds}:", f"{stage.because}.") for stage in found.stages], "verdicts")


def peaks_table(found: Efficiency) -> Table:
    """Return the peaks that stages are compared with."""
    columns = [Column("peaks"), *numbers(f"compute, {found.dtype}", "memory bandwidth", "ridge"), Column("source")]
    table = Table("roofs", "Peaks of the hardware", columns)
    for roof in found.peak_sets:
        table.add(
            f"{roof.name} peak",
            cell(roof.peak_flops_per_s, flops_per_s),
            cell(roof.bandwidth_bytes_per_s, bytes_per_s, f" ({roof.level})" if roof.level else ""),
            cell(roof.ridge_flops_per_byte, lambda ridge: f"{significant(ridge)} FLOP/byte"),
            roof.source,
        )
    return table


def stage_facts(found: Efficiency) -> Items:
    """Return what each stage computes and moves, and the rates it achieves."""
    return Items([Item(f"{stage.stage}:", _facts(stage)) for stage in found.stages])


def _facts(stage: StageEfficiency) -> str:
    cost = stage.cost
    launches = known(then(stage.launches, lambda count: f", {count:,} launches, including copies, in the profiled steps"), "")
    return (
        f"{duration(stage.time_ns.median)} ({known_within(stage.time_ns, 'ns')}); "
        f"{flops(cost.flops)} causal ({flops(cost.flops_full_attention)} with full attention) and "
        f"at least {moved_bytes(cost.bytes)}; achieved {flops_per_s(stage.flops_per_s)} and "
        f"{bytes_per_s(stage.bytes_per_s)}; {significant(cost.flops_per_byte)} FLOP/byte; "
        f"kernels' share of the time {words(stage.busy, percent)}{launches}."
    )


def limits_table(found: Efficiency, hfus: Sequence[StageHfu]) -> Table:
    """Return every stage against every pair of peaks; `hfus` are empty if no counters were read."""
    names = ("MFU (causal)", "MFU (full attention)", "HFU", "MBU", "roofline time", "× roofline", "kernels' share of the time")
    table = Table("limits-table", "Stages against the roofline", [Column("stage"), Column("against"), *numbers(*names)])
    for stage in found.stages:
        for entry in stage.against:
            shares = [cell(value, fine_percent) for value in (entry.mfu, entry.mfu_full_attention, entry.mbu)]
            table.add(
                stage.stage,
                _against(entry),
                *shares[:2],
                hfu_cell(_hfu(stage, entry.peaks.name, hfus)),
                shares[2],
                _roofline_time(entry),
                _times(entry.times_roofline, stage.time_ns),
                cell(stage.busy, percent),
            )
    return table


def substage_limits_tables(found: Efficiency) -> list[Table]:
    """Return the table of sub-stages against every pair of peaks; none if the cost model counts none of them."""
    if not any(entry.against for entry in found.substages):
        return []
    names = ("forwards", "time", "FLOPs", "bytes", "MFU", "MBU", "roofline time", "× roofline")
    columns = [Column("sub-stage"), Column("against"), *numbers(*names)]
    table = Table("substage-limits", f"Sub-stages of {found.substages[0].stage} against the roofline", columns, foot=_SUBSTAGES)
    for entry in found.substages:
        spent = [cell(entry.forwards, grouped), cell(entry.time_ns.median, duration)]
        cost = [cell(then(entry.cost, attrgetter(name)), shown) for name, shown in (("flops", flops), ("bytes", moved_bytes))]
        if not entry.against:
            table.add(entry.name, "", *spent, *cost, *[cost[0]] * 4)
        for compared in entry.against:
            table.add(
                entry.name,
                _against(compared),
                *spent,
                *cost,
                *[cell(share, fine_percent) for share in (compared.mfu, compared.mbu)],
                _roofline_time(compared),
                _times(compared.times_roofline, entry.time_ns),
            )
    return [table]


def _against(entry: RooflineComparison) -> str:
    return f"{entry.peaks.name} peak{f', {entry.peaks.level}' if entry.peaks.level else ''}"


def _hfu(stage: StageEfficiency, roof: str, hfus: Sequence[StageHfu]) -> Maybe[Hfu]:
    found = next((dict(entry.against) for entry in hfus if entry.stage == stage.stage), None)
    if found is None:
        return Missing("no hardware counters were read")
    return found.get(roof, Missing("not compared with this peak"))


def hfu_cell(value: Maybe[Hfu]) -> Cell | Missing:
    """Return executed FLOPs over the peak; a sign shows what is not included."""
    return cell(value, lambda hfu: f"{hfu.sign} {fine_percent(hfu.share)}".strip())


def _roofline_time(entry: RooflineComparison) -> Cell | Missing:
    alone = ", compute only" if entry.peaks.in_cache else ""
    return cell(then(entry.roofline, lambda least: least.seconds * 1e9), duration, alone)


def _times(value: Maybe[float], time: Distribution) -> Cell | Missing:
    """Return the factor with its interval, derived from that of the time."""
    within = then(value, lambda factor: then(ends(time), partial(_scaled, factor, time.median)))
    return cell(value, times, known(within, ""))


def _scaled(factor: float, median: float, found: tuple[float, float]) -> str:
    low, high = (factor * end / median for end in found)
    return f" ({significant(low, 3)} – {significant(high, 3)})"


def components_table(found: Efficiency) -> Table:
    """Return every component against its roofline time; without times, only what it computes and moves."""
    names = ("FLOPs", "bytes", "FLOP/byte", "time", "share", "FLOP/s", "bytes/s", "MFU", "MBU", "roofline time", "× roofline")
    columns = [Column("stage"), Column("component"), *numbers(*names), Column("bound by")]
    table = Table("components", "Components of the model, in the profiled steps", columns, tools=True, foot=_COMPONENTS)
    for stage in found.stages:
        if isinstance(stage.components, Missing):
            for cost in stage.cost.components:
                table.add(stage.stage, cost.name, *_work(cost.flops, cost.bytes), *[stage.components] * 9)
            continue
        whole = sum(known(part.time_ns, 0) for part in stage.components) or 1
        for part in stage.components:
            table.add(stage.stage, part.name, *_component(part, whole))
    table.foot += _above_peak(found)
    return table


def _above_peak(found: Efficiency) -> str:
    """Return a sentence on the components that are faster than the measured peak, within its margin; empty if none is."""
    above = [
        f"{part.name} of {stage.stage}"
        for stage in found.stages
        for part in known(stage.components, ())
        if max(known(part.mfu, 0.0), known(part.mbu, 0.0)) > 1
    ]
    if not above:
        return ""
    return (
        f" Above 100 %: {', '.join(above)}. The measured peak is the best rate of plain products and reads of large arrays on "
        "this device; either these kernels are faster, or they do not read all bytes that the cost model counts."
    )


def _component(part: ComponentEfficiency, whole_ns: int) -> list[Cell | Missing | str]:
    least, time = part.roofline, part.time_ns
    spent = [cell(time, duration), cell(then(time, lambda ns: ns / whole_ns), percent)]
    if least is None:
        return [*[_OUTSIDE] * 3, *spent, *[_OUTSIDE] * 7]
    rate = then(time, lambda ns: least.flops * 1e9 / max(ns, 1))
    moved = then(time, lambda ns: least.bytes * 1e9 / max(ns, 1))
    return [
        *_work(least.flops, least.bytes),
        *spent,
        cell(rate, flops_per_s),
        cell(moved, bytes_per_s),
        cell(part.mfu, fine_percent),
        cell(part.mbu, fine_percent),
        cell(least.seconds * 1e9, duration),
        cell(part.times_roofline, times),
        bound_words(least),
    ]


def _work(computed: float, moved: float) -> list[Cell | Missing]:
    intensity: Maybe[float] = computed / moved if moved else Missing("it moves no bytes")
    return [cell(computed, flops), cell(moved, moved_bytes), cell(intensity, significant)]


def bound_words(least: ComponentRoofline) -> str:
    """Return whether compute or memory sets the roofline time of a component, or `nothing`."""
    return least.bound if least.seconds else "nothing"
