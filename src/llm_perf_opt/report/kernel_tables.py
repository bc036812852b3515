"""Kernels: time from the trace, work from counters where they were read. Tables of the reports, and kernels.md."""

from collections.abc import Sequence

from llm_perf_opt.analysis.kernels.counter_selftest import SelfTest
from llm_perf_opt.analysis.kernels.evidence import KernelEvidence, StageHfu
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.kernels.table import TIME_DIFFERS, StageKernel, StageKernels
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Item,
    Items,
    Paragraph,
    Section,
    Table,
    bullets,
    cell,
    count_cell,
    name_cell,
    numbers,
    when_known,
)
from llm_perf_opt.report.efficiency import hfu_cell
from llm_perf_opt.report.text import (
    bytes_per_s,
    duration,
    flops,
    flops_per_s,
    grouped,
    known,
    moved_bytes,
    percent,
    significant,
    then,
    times,
    words,
)

MOST_ROWS = 400
"""Of a large table in a report; the rest is one row, and all are in the run's files."""
NAME_WIDTH = 90
DIFFERS = "†"
"""Marks figures that come from bytes or times under Nsight Compute where those are far from the trace's."""
HALF = "‡"
"""Marks FLOP rates of kernels that issued packed half-precision instructions as well."""
_MANY = Missing("a row of many kernels")
_NO_SELFTEST = Missing("no counters were read, so there was nothing to test")
_COUNTED = (
    "tensor FLOPs per call",
    "vector FLOPs per call",
    "packed half FLOPs per call, at most",
    "DRAM bytes per call",
    "FLOP/byte",
    "SM, % of peak",
    "DRAM, % of peak",
    "occupancy, %",
    "mean under ncu",
)
_ABOUT_HFU = (
    "Executed FLOPs of the counted kernels over unprofiled time and peak: of the tensor cores, and of single and double "
    "precision next to them. Packed half precision next to them is left out, for its instructions also move constants. ≥: "
    "kernels or kinds of FLOPs are not in it. ≈: for some launches the counters of another grid are used. ≳: both. Ratio: "
    "tensor-core FLOPs over the cost model's of the same steps; above 1 where tiles pad the matrices or attention is computed "
    "whole, below 1 where matrix products run outside the tensor cores or were not counted."
)
_ABOUT_KERNELS = (
    "Calls and time are the trace's. FLOPs and bytes are hardware counters of sampled launches, replayed alone by Nsight "
    "Compute; rates are those counts over the trace's time. FLOPs in rates and in FLOP/byte are those of the tensor cores and "
    "of single and double precision next to them (vector). A mean over launch sizes is weighted by calls, percentages by time."
)


# --- in a report ----------------------------------------------------------------------------------------------------------


def kernel_blocks(stages: Sequence[StageKernels], hfus: Sequence[StageHfu] = ()) -> list[Block]:
    """Return what counters cover, kernels by time, their counters, HFU, and what a reader of the rows must know."""
    blocks: list[Block] = [bullets(map(_coverage, stages)), kernels_table(stages)]
    if any(not isinstance(stage.counters, Missing) for stage in stages):
        blocks.append(counters_table(stages))
    blocks += [hfu_table(hfus)] if hfus else []
    remarks = [f"{stage.stage}: {remark}" for stage in stages for remark in stage_remarks(stage)]
    return [*blocks, *([bullets(remarks, "foot")] if remarks else [])]


def provenance(found: KernelEvidence) -> list[str]:
    """Return where the kernels of each stage come from, and what was left out."""
    lines = [f"Kernels of {stage} are from {source}." for stage, source in found.sources.items()]
    lines += [f"The timeline holds {found.decode_steps} decode steps."] if found.decode_steps else []
    return [*lines, *found.notes]


def kernels_table(stages: Sequence[StageKernels]) -> Table:
    """Return kernels by time."""
    columns = [Column("stage"), Column("kernel"), *numbers("calls", "total", "mean", "share of its stage", "FLOP/s", "bytes/s")]
    table = Table("kernels", "Kernels, from the timeline", columns, tools=True)
    left_out = 0
    for stage in stages:
        for row in stage.rows[:MOST_ROWS]:
            table.add(stage.stage, _name(row), *_times(row), *_rates(row))
        rest = stage.rows[MOST_ROWS:]
        left_out += len(rest)
        if rest:
            calls, time = sum(row.calls for row in rest), sum(row.total_ns for row in rest)
            spent = [cell(time, duration), cell(time / calls, duration), cell(time / max(stage.total_ns, 1), percent)]
            table.add(stage.stage, f"{len(rest):,} others", count_cell(calls), *spent, _MANY, _MANY)
    table.foot = f"The {MOST_ROWS} longest of each stage; all are in kernels.md." if left_out else ""
    return table


def counters_table(stages: Sequence[StageKernels]) -> Table:
    """Return the hardware counters of the kernels that were counted."""
    columns = [Column("stage"), Column("kernel"), *numbers("mean", *_COUNTED)]
    table = Table("counters", "Hardware counters, per call", columns, tools=True)
    uncounted: dict[str, int] = {}
    for row in (row for stage in stages for row in stage.rows):
        if isinstance(row.per_call, Missing):
            uncounted[row.per_call.why] = uncounted.get(row.per_call.why, 0) + 1
        elif len(table.rows) < MOST_ROWS:
            table.add(row.stage, _name(row), cell(row.mean_ns, duration), *_counted(row))
    table.foot = " ".join(f"{count:,} kernels have no counters: {why}." for why, count in uncounted.items())
    return table


def hfu_table(hfus: Sequence[StageHfu]) -> Table:
    """Return executed FLOPs of each stage against the peaks and the cost model."""
    roofs = list(dict.fromkeys(name for stage in hfus for name, _ in stage.against))
    names = ("FLOPs executed", "on tensor cores", "packed half, at most, not in it", "cost model", "ratio", "counted")
    columns = [Column("stage"), *numbers(*[f"HFU against {name} peak" for name in roofs], *names)]
    table = Table("hfu", "HFU", columns, foot=_ABOUT_HFU)
    for stage in hfus:
        against = dict(stage.against)
        found = sorted(against.values(), key=lambda value: isinstance(value, Missing))
        first = found[0] if found else Missing("no peak is known")
        table.add(
            stage.stage,
            *[hfu_cell(against.get(name, Missing("no such peak"))) for name in roofs],
            cell(then(first, lambda hfu: hfu.executed_flops), flops),
            cell(then(stage.model, lambda model: model.tensor_flops), flops),
            cell(stage.half_flops, flops),
            cell(then(stage.model, lambda model: model.model_flops), flops),
            cell(then(stage.model, lambda model: model.ratio), times),
            cell(then(first, lambda hfu: hfu.coverage), percent),
        )
    return table


def _coverage(stage: StageKernels) -> str:
    whole = f"{stage.stage}: {stage.calls:,} kernel launches, {duration(stage.total_ns)} of kernel time"
    by_name = f", {percent(stage.by_name)} of it by name, from launches with another grid" if stage.by_name else ""
    return f"{whole}; counters {words(stage.counters, lambda share: f'for {percent(share)} of it{by_name}')}."


# --- cells ------------------------------------------------------------------------------------------------------------------


def _name(row: StageKernel) -> Cell:
    return name_cell(row.spelled, short_name(row.name, NAME_WIDTH))


def _times(row: StageKernel) -> list[Cell | Missing]:
    spent = (cell(row.total_ns, duration), cell(row.mean_ns, duration), cell(row.share, percent))
    return [count_cell(row.calls), *spent]


def _rates(row: StageKernel) -> list[Cell | Missing]:
    return [cell(row.flops_per_s, flops_per_s, _half_mark(row)), cell(row.bytes_per_s, bytes_per_s, _differs_mark(row))]


def _counted(row: StageKernel) -> list[Cell | Missing]:
    counted, differs = row.per_call, _differs_mark(row)
    executed = [then(counted, lambda one: one.tensor_flops), then(counted, lambda one: one.vector_flops)]
    executed.append(then(counted, lambda one: one.half_flops))
    shares = [then(counted, lambda one: one.sm_pct), then(counted, lambda one: one.dram_pct)]
    shares.append(then(counted, lambda one: one.occupancy_pct))
    return [
        *[cell(value, flops) for value in executed],
        cell(then(counted, lambda one: one.dram_bytes), moved_bytes, differs),
        cell(row.flops_per_byte, significant, _half_mark(row) + differs),
        *[cell(value, lambda share: significant(share, 3), differs) for value in shares],
        cell(then(counted, lambda one: one.time_ns), duration, differs),
    ]


def _differs_mark(row: StageKernel) -> str:
    return f" {DIFFERS}" if row.time_differs else ""


def _half_mark(row: StageKernel) -> str:
    return f" {HALF}" if _half_flops(row) else ""


def _half_flops(row: StageKernel) -> float:
    return known(then(row.per_call, lambda counted: counted.half_flops), 0.0)


# --- remarks ------------------------------------------------------------------------------------------------------------------


def stage_remarks(stage: StageKernels) -> list[str]:
    """Return everything a reader of a stage's rows must know: marks explained, counters that were lost."""
    remarks = list(stage.notes)
    differing = [row for row in stage.rows if row.time_differs]
    if differing:
        share = sum(row.share for row in differing)
        remarks.append(
            f"{DIFFERS} of {len(differing)} kernels ({percent(share)} of the time) the duration under Nsight Compute differs by "
            f"more than {percent(TIME_DIFFERS, 0)} from the trace's: it ran alone, with other clocks or a colder cache. "
            "Its DRAM bytes, GB/s and percentages may differ from the real run's as well; FLOPs do not."
        )
    remarks += _half_remark(stage)
    if stage.unused:
        remarks.append(
            f"{stage.unused} sampled launches are of kernels that the trace did not see in this stage; they are not used."
        )
    if stage.not_collected:
        names = ", ".join(stage.not_collected)
        remarks.append(f"FLOPs of these kinds were not collected and are not in the figures: {names}.")
    return remarks


def _half_remark(stage: StageKernels) -> list[str]:
    having = sum(bool(_half_flops(row)) for row in stage.rows)
    if not having:
        return []
    amount = known(then(stage.half_flops, lambda total: f", at most {flops(total)} in all"), "")
    return [
        f"{HALF} {having} kernels also issued packed half-precision instructions{amount}. Compilers move constants with these, "
        "in copies too, and counters cannot tell that from computing: they are an upper bound and in no FLOP rate, no FLOP/byte "
        "and no HFU."
    ]


# --- kernels.md ---------------------------------------------------------------------------------------------------------------


def kernels_document(found: Maybe[KernelEvidence]) -> Document:
    """Return every kernel of every stage of a run."""
    if isinstance(found, Missing):
        return all_kernels(found)
    return all_kernels(found.stages, found.hfus, found.selftest, provenance(found))


def all_kernels(
    stages: Maybe[Sequence[StageKernels]],
    hfus: Sequence[StageHfu] = (),
    selftest: Maybe[SelfTest] = _NO_SELFTEST,
    notes: Sequence[str] = (),
) -> Document:
    """Return every kernel of every stage with its counters. `stages` is Missing where no trace has kernels."""
    if isinstance(stages, Missing):
        return Document("Kernels", "", "", [Section("kernels", "", when_known("Kernels:", stages, lambda _: []))])
    sections = [Section("selftest", "Counter self-test", when_known("Counter self-test:", selftest, _selftest))]
    numbered = 0
    for stage in stages:
        table = _all_of(stage, numbered)
        sections.append(Section(stage.stage, stage.stage, [Paragraph(_coverage(stage)), table, *_remarks(stage)]))
        numbered += len(stage.rows)
    sections += [Section("hfu", "HFU", [hfu_table(hfus)])] if hfus else []
    rows = [row for stage in stages for row in stage.rows]
    cut = [Item(f"{place}:", row.spelled) for place, row in enumerate(rows, 1) if row.spelled != _name(row).text]
    in_full: Block = Items(cut) if cut else Paragraph("No name was shortened.")
    sections.append(Section("names", "Names in full", [in_full]))
    sections += [Section("notes", "Notes", [bullets(notes)])] if notes else []
    return Document("Kernels", _ABOUT_KERNELS, "", sections)


def _all_of(stage: StageKernels, before: int) -> Table:
    heads = numbers("calls", "total", "mean", "share", "FLOP/s", "bytes/s", *_COUNTED)
    table = Table(stage.stage, "", [*numbers("#"), Column("kernel"), *heads, Column("sampled")])
    for place, row in enumerate(stage.rows, before + 1):
        table.add(count_cell(place), _name(row), *_times(row), *_rates(row), *_counted(row), _sampled(row))
    return table


def _remarks(stage: StageKernels) -> list[Block]:
    remarks = stage_remarks(stage)
    return [bullets(remarks)] if remarks else []


def _sampled(row: StageKernel) -> Cell | Missing:
    """How many launches, and of how many of its launch sizes they are."""
    exact = [variant for variant in row.variants if variant.sampled and not variant.by_name]
    launches = sum(variant.sampled for variant in exact)
    sizes = f"{launches} of {len(exact)}/{len(row.variants)} sizes" if exact else ""
    shown = sizes if not row.by_name else f"{sizes}, rest by name" if sizes else "by name"
    return cell(row.per_call, lambda _: shown)


def _selftest(found: SelfTest) -> list[Block]:
    verdict = "passed" if found.passed else "FAILED, so no counter below is used"
    columns = [Column("known work"), *numbers("run", "counted"), Column("allowed"), Column("right")]
    table = Table("selftest-table", "", columns)
    for row in found.rows:
        counted = cell(row.counted, lambda value, unit=row.unit: f"{grouped(value)} {unit}")  # type: ignore[misc]
        table.add(row.what, f"{grouped(row.expected)} {row.unit}", counted, row.allowed, "yes" if row.passed else "NO")
    return [Paragraph(f"Counter self-test {verdict}: {found.why}."), *([table] if found.rows else [])]
