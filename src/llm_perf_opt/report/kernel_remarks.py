"""What stands below a stage's kernels on every page: marks explained, counters that were lost. Plain words, not yet escaped."""

from llm_perf_opt.analysis.kernels.table import TIME_DIFFERS, StageKernel, StageKernels
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.text import percent, significant

DIFFERS = "†"
"""Beside figures that come from bytes or times under Nsight Compute where those are far from the trace's."""
HALF = "‡"
"""Beside FLOP rates of kernels that issued packed half-precision instructions as well."""


def differs_mark(row: StageKernel) -> str:
    """For what was counted of its bytes and percentages."""
    return f" {DIFFERS}" if row.time_differs else ""


def half_mark(row: StageKernel) -> str:
    """For its FLOP rate."""
    return f" {HALF}" if _half_flops(row) else ""


def stage_remarks(stage: StageKernels) -> list[str]:
    """Everything a reader of its rows must know."""
    remarks = list(stage.notes)
    differing = [row for row in stage.rows if row.time_differs]
    if differing:
        share = sum(row.share for row in differing)
        remarks.append(
            f"{DIFFERS} of {len(differing)} kernels ({percent(share)} of the time) the duration under Nsight Compute differs by "
            f"more than {TIME_DIFFERS * 100:.0f} % from the trace's: it ran alone, with other clocks or a colder cache. "
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
    total = stage.half_flops
    amount = "" if isinstance(total, Missing) else f", at most {significant(total / 1e9)} GFLOP in all"
    return [
        f"{HALF} {having} kernels also issued packed half-precision instructions{amount}. Compilers move constants with these, "
        "in copies too, and counters cannot tell that from computing: they are an upper bound and in no FLOP rate, no FLOP/byte "
        "and no HFU."
    ]


def _half_flops(row: StageKernel) -> float:
    if isinstance(row.per_call, Missing) or isinstance(row.per_call.half_flops, Missing):
        return 0.0
    return row.per_call.half_flops
