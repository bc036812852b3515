"""kernels.md and the report's section on kernels: time from the trace, work from counters where they were read."""

from collections.abc import Callable, Sequence

from llm_perf_opt.analysis.kernels.counter_selftest import SelfTest
from llm_perf_opt.analysis.kernels.hfu import Hfu, StageHfu
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.kernels.table import PerCall, StageKernel, StageKernels
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.kernel_remarks import differs_mark, half_mark, stage_remarks
from llm_perf_opt.report.reasons import Reasons
from llm_perf_opt.report.text import (
    bytes_per_s,
    escape,
    fine_percent,
    flops_per_s,
    milliseconds,
    percent,
    reason,
    significant,
    table,
)

NAME_WIDTH = 72
TOP = 10

_HEADER = [
    *("#", "kernel", "calls", "total", "mean", "share", "tensor, MFLOP per call", "vector, MFLOP per call"),
    *("packed half, MFLOP per call at most", "DRAM, kB per call", "FLOP/s", "bytes/s", "FLOP/byte"),
    *("SM, % of peak", "DRAM, % of peak", "occupancy, %", "mean under ncu", "sampled"),
]


def kernels_page(
    stages: Maybe[Sequence[StageKernels]],
    hfus: Sequence[StageHfu] = (),
    selftest: Maybe[SelfTest] = Missing("no counters were read, so there was nothing to test"),  # noqa: B008 - frozen
) -> str:
    """Every kernel of every stage. `stages` is Missing where no trace has kernels."""
    parts = ["# Kernels\n"]
    if isinstance(stages, Missing):
        return "\n".join([*parts, reason(stages), ""])
    reasons = Reasons()
    parts += [
        "Calls and time are the trace's. FLOPs and bytes are hardware counters of sampled launches, replayed alone by Nsight "
        "Compute; rates are those counts over the trace's time. FLOPs in rates and in FLOP/byte are those of the tensor cores "
        "and of single and double precision beside them (vector). A mean over launch sizes is weighted by calls, percentages by "
        "time.\n",
        _selftest(selftest),
    ]
    numbered = 0
    cut: list[tuple[int, StageKernel]] = []
    for stage in stages:
        rows = []
        for row in stage.rows:
            numbered += 1
            rows.append([str(numbered), *_cells(row, reasons)])
            if short_name(row.name, NAME_WIDTH) != row.spelled:
                cut.append((numbered, row))
        parts += [f"## {stage.stage}\n", _coverage(stage), "", table(_HEADER, rows, "rl" + "r" * (len(_HEADER) - 3) + "l")]
        parts += _remarks(stage)
    parts += [_hfu_section(hfus, reasons)] if hfus else []
    parts += [*reasons.lines(), "", "## Names in full\n"]
    parts += [f"- {number}: {escape(row.spelled)}" for number, row in cut] or ["No name was shortened."]
    return "\n".join(parts) + "\n"


def top_kernels_section(stages: Maybe[Sequence[StageKernels]], hfus: Sequence[StageHfu] = (), top: int = TOP) -> str:
    """For the report: the longest kernels of each stage, what the counters cover, HFU."""
    if isinstance(stages, Missing):
        return f"## Top kernels\n\n{reason(stages)}\n"
    reasons = Reasons()
    parts = ["## Top kernels\n"]
    header = ["kernel", "calls", "total", "share", "FLOP/s", "bytes/s", "SM, % of peak", "DRAM, % of peak"]
    for stage in stages:
        rows = [_top_cells(row, reasons) for row in stage.rows[:top]]
        rest = stage.rows[top:]
        if rest:
            time = sum(row.total_ns for row in rest)
            calls = sum(row.calls for row in rest)
            share = percent(time / max(stage.total_ns, 1))
            rows.append([f"{len(rest)} others", f"{calls:,}", milliseconds(time), share, "", "", "", ""])
        parts += [f"{_coverage(stage)}\n", table([f"{stage.stage}: {header[0]}", *header[1:]], rows, "l" + "r" * 7)]
        parts += _remarks(stage)
    parts += [_hfu_section(hfus, reasons, level="###")] if hfus else []
    return "\n".join([*parts, *reasons.lines(), "", "All of them, with what was counted: kernels.md."]) + "\n"


def _coverage(stage: StageKernels) -> str:
    whole = f"{stage.stage}: {stage.calls:,} kernel launches, {milliseconds(stage.total_ns)} of kernel time"
    if isinstance(stage.counters, Missing):
        return f"{whole}; counters {reason(stage.counters)}."
    by_name = f", {percent(stage.by_name)} of it by name, from launches with another grid" if stage.by_name else ""
    return f"{whole}; counters for {percent(stage.counters)} of it{by_name}."


def _remarks(stage: StageKernels) -> list[str]:
    return [*[f"- {escape(remark)}" for remark in stage_remarks(stage)], ""]


def _cells(row: StageKernel, reasons: Reasons) -> list[str]:
    counted, differs = row.per_call, differs_mark(row)
    cells: list[Maybe[str]] = [
        _scaled(_of(counted, "tensor_flops"), 1e-6),
        _scaled(_of(counted, "vector_flops"), 1e-6),
        _scaled(_of(counted, "half_flops"), 1e-6),
        _scaled(_of(counted, "dram_bytes"), 1e-3, mark=differs),
        _rate(row.flops_per_s, flops_per_s, half_mark(row)),
        _rate(row.bytes_per_s, bytes_per_s, differs),
        _scaled(row.flops_per_byte, 1, mark=half_mark(row) + differs),
        _scaled(_of(counted, "sm_pct"), 1, 3, differs),
        _scaled(_of(counted, "dram_pct"), 1, 3, differs),
        _scaled(_of(counted, "occupancy_pct"), 1, 3, differs),
        _own_time(row),
        _sampled(row),
    ]
    return [
        escape(short_name(row.name, NAME_WIDTH)),
        f"{row.calls:,}",
        milliseconds(row.total_ns),
        milliseconds(row.mean_ns),
        percent(row.share),
        *[reasons.cell(cell) for cell in cells],
    ]


def _top_cells(row: StageKernel, reasons: Reasons) -> list[str]:
    differs = differs_mark(row)
    cells = [
        _rate(row.flops_per_s, flops_per_s, half_mark(row)),
        _rate(row.bytes_per_s, bytes_per_s, differs),
        _scaled(_of(row.per_call, "sm_pct"), 1, 3, differs),
        _scaled(_of(row.per_call, "dram_pct"), 1, 3, differs),
    ]
    return [
        escape(short_name(row.name, NAME_WIDTH)),
        f"{row.calls:,}",
        milliseconds(row.total_ns),
        percent(row.share),
        *[reasons.cell(cell) for cell in cells],
    ]


def _own_time(row: StageKernel) -> Maybe[str]:
    own = _of(row.per_call, "time_ns")
    if isinstance(own, Missing):
        return own
    return milliseconds(own) + differs_mark(row)


def _sampled(row: StageKernel) -> Maybe[str]:
    """How many launches, and of how many of its launch sizes they are."""
    if isinstance(row.per_call, Missing):
        return row.per_call
    exact = [variant for variant in row.variants if variant.sampled and not variant.by_name]
    launches = sum(variant.sampled for variant in exact)
    told = f"{launches} of {len(exact)}/{len(row.variants)} sizes" if exact else ""
    return told if not row.by_name else f"{told}, rest by name" if told else "by name"


def _hfu_section(hfus: Sequence[StageHfu], reasons: Reasons, level: str = "##") -> str:
    roofs = list(dict.fromkeys(name for stage in hfus for name, _ in stage.against))
    rows = []
    for stage in hfus:
        known = dict(stage.against)
        first = next((value for _, value in stage.against if not isinstance(value, Missing)), None)
        model = stage.model
        cells: list[Maybe[str]] = [_hfu(known.get(name, Missing("no such limit"))) for name in roofs]
        why = next((value for _, value in stage.against if isinstance(value, Missing)), Missing("no limit is known"))
        cells += [
            f"{significant(first.executed_flops / 1e9)}" if first else why,
            model if isinstance(model, Missing) else significant(model.tensor_flops / 1e9),
            _scaled(stage.half_flops, 1e-9),
            model if isinstance(model, Missing) else significant(model.model_flops / 1e9),
            model if isinstance(model, Missing) else f"× {significant(model.ratio)}",
            percent(first.coverage) if first else why,
        ]
        rows.append([stage.stage, *[reasons.cell(cell) for cell in cells]])
    header = [
        "stage",
        *[f"HFU against {name}" for name in roofs],
        "GFLOP executed",
        "on tensor cores",
        "packed half, at most, not in it",
        "cost model",
        "ratio",
        "counted",
    ]
    return "\n".join(
        [
            f"{level} HFU\n",
            table(header, rows, "l" + "r" * (len(header) - 1)),
            "Executed FLOPs of the counted kernels over unprofiled time and peak: of the tensor cores, and of single and double "
            "precision beside them. Packed half precision beside them is left out, for its instructions also move constants. "
            "≥: kernels or kinds of FLOPs are not in it. ≈: for some launches the counters of another grid stand in. ≳: both. "
            "Ratio: tensor-core FLOPs over the cost model's of the same steps; above 1 where tiles pad the matrices or attention "
            "is computed whole, below 1 where matrix products run outside the tensor cores or were not counted.\n",
        ]
    )


def _hfu(value: Maybe[Hfu]) -> Maybe[str]:
    return value if isinstance(value, Missing) else f"{value.sign} {fine_percent(value.share)}".strip()


def _selftest(found: Maybe[SelfTest]) -> str:
    if isinstance(found, Missing):
        return f"Counter self-test: {reason(found)}\n"
    verdict = "passed" if found.passed else "**failed**, so no counter below is used"
    rows = [
        [
            row.what,
            f"{row.expected:,.0f} {row.unit}",
            reason(row.counted) if isinstance(row.counted, Missing) else f"{row.counted:,.0f} {row.unit}",
            row.allowed,
            "yes" if row.passed else "**no**",
        ]
        for row in found.rows
    ]
    told = f"Counter self-test {verdict}: {escape(found.why)}.\n"
    return f"{told}\n{table(['known work', 'run', 'counted', 'allowed', 'right'], rows, 'lrrll')}" if rows else told


def _of(counted: Maybe[PerCall], amount: str) -> Maybe[float]:
    if isinstance(counted, Missing):
        return counted
    value: Maybe[float] = getattr(counted, amount)
    return value


def _scaled(value: Maybe[float], factor: float, digits: int = 4, mark: str = "") -> Maybe[str]:
    return value if isinstance(value, Missing) else significant(value * factor, digits) + mark


def _rate(value: Maybe[float], show: Callable[[float], str], mark: str) -> Maybe[str]:
    return value if isinstance(value, Missing) else show(value) + mark
