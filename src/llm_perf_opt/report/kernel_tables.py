"""Tables of kernels, with time from the trace and work from the counters, and kernels.md."""

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
"""Most rows of a large table in a report; the files of the run have all."""
NAME_WIDTH = 90
DIFFERS = "†"
"""Marks figures from Nsight Compute for kernels whose duration there differs much from the trace."""
HALF = "‡"
"""Marks FLOP rates of kernels that also issued packed half-precision instructions."""
_MANY = Missing("a row of many kernels")
_NO_SELFTEST = Missing("no counters were read")
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
    "HFU is the executed FLOPs of the counted kernels divided by (unprofiled time × peak): tensor-core FLOPs, plus single- and "
    "double-precision FLOPs outside the tensor cores. Packed half-precision FLOPs outside the tensor cores are excluded, because "
    "these instructions also move constants. ≥: some kernels or kinds of FLOPs are not included. ≈: for some launches the "
    "counters of another grid are used. ≳: both. Ratio: tensor-core FLOPs divided by those of the cost model for the same steps. "
    "It is above 1 if tiles pad the matrices or full attention is computed, below 1 if matrix products run outside the tensor "
    "cores or were not counted."
)
_ABOUT_KERNELS = (
    "Calls and times come from the trace. FLOPs and bytes are hardware counters of sampled launches, each replayed alone by "
    "Nsight Compute; rates are these counts over the time in the trace. FLOPs in rates and in FLOP/byte are tensor-core FLOPs "
    "plus single- and double-precision FLOPs outside the tensor cores (vector). Means over launch sizes are weighted by calls, "
    "percentages by time."
)


# --- in a report ----------------------------------------------------------------------------------------------------------


def kernel_blocks(stages: Sequence[StageKernels], hfus: Sequence[StageHfu] = ()) -> list[Block]:
    """Return the coverage of the counters, kernels by time, their counters, HFU, and remarks."""
    blocks: list[Block] = [bullets(map(_coverage, stages)), kernels_table(stages)]
    if any(not isinstance(stage.counters, Missing) for stage in stages):
        blocks.append(counters_table(stages))
    blocks += [hfu_table(hfus)] if hfus else []
    remarks = [f"{stage.stage}: {remark}" for stage in stages for remark in stage_remarks(stage)]
    return [*blocks, *([bullets(remarks, "foot")] if remarks else [])]


def provenance(found: KernelEvidence) -> list[str]:
    """Return the source of the kernels of each stage, and what was left out."""
    lines = [f"Kernels of {stage} come from {source}." for stage, source in found.sources.items()]
    lines += [f"The timeline has {found.decode_steps} decode steps."] if found.decode_steps else []
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
    table.foot = f"The {MOST_ROWS} longest kernels of each stage; kernels.md has all." if left_out else ""
    return table


def counters_table(stages: Sequence[StageKernels]) -> Table:
    """Return the hardware counters of the counted kernels."""
    columns = [Column("stage"), Column("kernel"), *numbers("mean", *_COUNTED)]
    table = Table("counters", "Hardware counters, per call", columns, tools=True)
    uncounted: dict[str, int] = {}
    for row in (row for stage in stages for row in stage.rows):
        if isinstance(row.per_call, Missing):
            uncounted[row.per_call.why] = uncounted.get(row.per_call.why, 0) + 1
        elif len(table.rows) < MOST_ROWS:
            table.add(row.stage, _name(row), cell(row.mean_ns, duration), *_counted(row))
    table.foot = " ".join(f"Kernels without counters: {count:,} ({why})." for why, count in uncounted.items())
    return table


def hfu_table(hfus: Sequence[StageHfu]) -> Table:
    """Return the executed FLOPs of each stage against the peaks and the cost model."""
    roofs = list(dict.fromkeys(name for stage in hfus for name, _ in stage.against))
    names = ("FLOPs executed", "on tensor cores", "packed half, at most, excluded", "cost model", "ratio", "counted")
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
    by_name = f", {percent(stage.by_name)} by name, from launches with another grid" if stage.by_name else ""
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
    executed = [then(counted, lambda values: values.tensor_flops), then(counted, lambda values: values.vector_flops)]
    executed.append(then(counted, lambda values: values.half_flops))
    shares = [then(counted, lambda values: values.sm_pct), then(counted, lambda values: values.dram_pct)]
    shares.append(then(counted, lambda values: values.occupancy_pct))
    return [
        *[cell(value, flops) for value in executed],
        cell(then(counted, lambda values: values.dram_bytes), moved_bytes, differs),
        cell(row.flops_per_byte, significant, _half_mark(row) + differs),
        *[cell(value, lambda share: significant(share, 3), differs) for value in shares],
        cell(then(counted, lambda values: values.time_ns), duration, differs),
    ]


def _differs_mark(row: StageKernel) -> str:
    return f" {DIFFERS}" if row.time_differs else ""


def _half_mark(row: StageKernel) -> str:
    return f" {HALF}" if _half_flops(row) else ""


def _half_flops(row: StageKernel) -> float:
    return known(then(row.per_call, lambda counted: counted.half_flops), 0.0)


# --- remarks ------------------------------------------------------------------------------------------------------------------


def stage_remarks(stage: StageKernels) -> list[str]:
    """Return remarks on the kernels of a stage: marks, and missing counters."""
    remarks = list(stage.notes)
    differing = [row for row in stage.rows if row.time_differs]
    if differing:
        share = sum(row.share for row in differing)
        remarks.append(
            f"{DIFFERS} For {len(differing)} of {len(stage.rows)} kernels ({percent(share)} of the time), the duration under "
            f"Nsight Compute differs by more than {percent(TIME_DIFFERS, 0)} from the trace: there they run alone, with other "
            "clocks or a colder cache. Their DRAM bytes, GB/s and percentages may also differ from the real run; FLOPs do not."
        )
    remarks += _half_remark(stage)
    if stage.unused:
        remarks.append(
            f"{stage.unused} sampled launches belong to kernels that are not in this stage of the trace; they are not used."
        )
    if stage.not_collected:
        names = ", ".join(stage.not_collected)
        remarks.append(f"These kinds of FLOPs were not collected and are not included: {names}.")
    return remarks


def _half_remark(stage: StageKernels) -> list[str]:
    having = sum(bool(_half_flops(row)) for row in stage.rows)
    if not having:
        return []
    amount = known(then(stage.half_flops, lambda total: f", at most {flops(total)} in all"), "")
    return [
        f"{HALF} {having} of {len(stage.rows)} kernels also issued packed half-precision instructions{amount}. Compilers also "
        "use these to move constants, and counters cannot distinguish that from arithmetic: the counts are an upper bound, "
        "and FLOP rates, FLOP/byte and HFU exclude them."
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
    """Return every kernel of every stage with its counters; `stages` is missing if no trace has kernels."""
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
    """Return how many launches were sampled, and of how many launch sizes."""
    exact = [variant for variant in row.variants if variant.sampled and not variant.by_name]
    launches = sum(variant.sampled for variant in exact)
    sizes = f"{launches} of {len(exact)}/{len(row.variants)} sizes" if exact else ""
    shown = sizes if not row.by_name else f"{sizes}, rest by name" if sizes else "by name"
    return cell(row.per_call, lambda _: shown)


def _selftest(found: SelfTest) -> list[Block]:
    verdict = "passed" if found.passed else "FAILED, so no counter is used"
    columns = [Column("known work"), *numbers("run", "counted"), Column("allowed"), Column("correct")]
    table = Table("selftest-table", "", columns)
    for row in found.rows:
        counted = cell(row.counted, lambda value, unit=row.unit: f"{grouped(value)} {unit}")  # type: ignore[misc]
        table.add(row.what, f"{grouped(row.expected)} {row.unit}", counted, row.allowed, "yes" if row.passed else "NO")
    return [Paragraph(f"Counter self-test {verdict}: {found.why}."), *([table] if found.rows else [])]
