"""Rules on kernels: work that is unnecessary or too slow. If the device waits for the host, faster kernels save nothing."""

import re
from collections.abc import Sequence

from llm_perf_opt.analysis.budget import BudgetKey
from llm_perf_opt.analysis.cost_model.cost import step_cost
from llm_perf_opt.analysis.cost_model.work import Logits, Step
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.findings.finding import (
    ATTENTION,
    CACHE,
    HOST_BOUND,
    PRODUCTS,
    Bounds,
    Claim,
    Grounds,
    ToTry,
    finding,
    gap_saving_of,
    largest_saving,
    place_of,
    saving_of,
    unit_time,
    wall_clock_saving,
)
from llm_perf_opt.analysis.findings.host import launches_one_by_one, profiled_gaps
from llm_perf_opt.analysis.kernels.classes import KernelClass
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.limits.efficiency import request_cost
from llm_perf_opt.analysis.limits.peaks import best_roofline_time
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE, PREFILL
from llm_perf_opt.analysis.trace.stage_launches import KernelTotal
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.units import duration, percentage

NOTEWORTHY = 0.05
"""The least share of a stage's kernel time that makes kernels a finding."""
_FUSED_CLASSES = (KernelClass.ELEMENTWISE, KernelClass.NORM, KernelClass.REDUCTION, KernelClass.COPY)
_PRODUCTS = (KernelClass.GEMM, KernelClass.GEMV)
_CONCATENATION = re.compile(r"CatArrayBatchedCopy|cat_?kernel|concat", re.IGNORECASE)
_NO_TENSOR_CORES = re.compile(r"simt|(?<![a-z])[sd]gemm(?!.*(tf32|tensorop|x3))|gemmSN|gemv2?[TN]_kernel.*float", re.IGNORECASE)
_HALF = re.compile(r"bfloat16|(?<![a-z])(__)?half|bf16|fp16|f16", re.IGNORECASE)
_SOFTMAX = re.compile(r"(?<!log_)(?<!log)softmax|soft_max", re.IGNORECASE)


def cache_concatenation(evidence: Evidence) -> Finding | None:
    """Each step copies the whole cache to append one token."""
    stage = evidence.stage(DECODE)
    if stage is None or evidence.facts.setting("runtime.cache") == "static":
        return None
    rows = [row for row in stage.kernels if _CONCATENATION.search(row.name)]
    if not _noteworthy(rows, stage):
        return None
    total = sum(row.total_ns for row in rows)
    return _kernel_finding(
        evidence,
        stage,
        "cache_concatenation",
        (
            f"Each {stage.unit} runs {_calls(rows, stage)} that concatenate tensors, {unit_time(stage, total)} in all.",
            "A growing cache is copied whole in every step.",
        ),
        rows,
        (0, total / 2, total),
        "some of these copies belong to rotary embedding, not to the cache; the expected saving is half of their time",
        ToTry(
            ("runtime.cache=static",),
            "Keep keys and values in preallocated tensors (StaticCache, or a paged cache).",
            "Use a static KV cache",
            CACHE,
        ),
    )


def unfused_elementwise(evidence: Evidence) -> Finding | None:
    """Many small kernels could be fused by a compiler."""
    fusable = [stage for stage in evidence.stages if stage.fusion.fusable_kernels]
    stage = max(fusable, key=lambda stage: stage.fusion.saved_ns, default=None)
    if stage is None or stage.fusion.saved_ns < NOTEWORTHY * stage.kernel_ns:
        return None
    fusion = stage.fusion
    gone = 1 - fusion.kernels / (fusion.kept_kernels + fusion.fusable_kernels)
    headline = (
        f"{stage.per_unit(fusion.fusable_kernels):,.0f} elementwise, norm, reduction and copy kernels per {stage.unit} take "
        f"{unit_time(stage, fusion.fusable_ns)}; fused, they would be {stage.per_unit(fusion.runs):,.0f} to "
        f"{stage.per_unit(fusion.sizes):,.0f} kernels and take about {unit_time(stage, fusion.fused_ns)}."
    )
    rows = [row for row in stage.kernels if row.kind in _FUSED_CLASSES]
    to_try = ToTry(
        ("runtime.cache=static", "runtime.compile=default")
        if stage.name == DECODE and not evidence.facts.compiled and launches_one_by_one(stage)
        else (),
        "Compile the step (torch.compile), or use fused kernels for norms, rotary embedding and activations.",
        f"Fuse the small kernels of {stage.name}",
    )
    if stage.busy_share < HOST_BOUND and launches_one_by_one(stage):
        gaps = stage.budget.ns(BudgetKey.LAUNCH) * gone
        return finding(
            "unfused_elementwise",
            place_of(evidence, stage),
            (
                headline,
                f"The step waits for launches, so time is saved by {percentage(gone)} fewer launches, not by faster kernels.",
            ),
            Grounds(
                _rows(rows, stage),
                "low",
                "the host time of launching compiled code is unknown; the expected saving is half of the gaps"
                + profiled_gaps(stage),
            ),
            gap_saving_of(stage, 0, gaps / 2, gaps),
            to_try,
        )
    return _kernel_finding(
        evidence,
        stage,
        "unfused_elementwise",
        (headline,),
        rows,
        (fusion.fusable_ns - fusion.most_ns, fusion.saved_ns, fusion.fusable_ns - fusion.least_ns),
        "the bounds assume one fused kernel per launch size and one per run of adjacent kernels",
        to_try,
    )


def products_without_tensor_cores(evidence: Evidence) -> Finding | None:
    """Matrix products run without tensor cores."""
    found = []
    for stage in evidence.stages:
        rows = [row for row in stage.kernels if row.kind in _PRODUCTS and _without_tensor_cores(row, stage)]
        if not _noteworthy(rows, stage):
            continue
        total = sum(row.total_ns for row in rows)
        dtype = "" if isinstance(evidence.facts.timings, Missing) else evidence.facts.timings.model.dtype
        wide = dtype in ("", "fp32")
        if not wide and not evidence.facts.own_runtime:
            continue  # an engine chooses its kernels itself
        product = _kernel_finding(
            evidence,
            stage,
            "products_without_tensor_cores",
            (
                f"Matrix products of {stage.name} run without tensor cores: {_calls(rows, stage)} per {stage.unit}, "
                f"{unit_time(stage, total)}" + (f"; the model is in {dtype}." if dtype else "."),
            ),
            rows,
            (0, total / 2, total),
            "bf16 halves the bytes of a memory-bound product and makes a compute-bound one far faster; the expected saving is "
            "half of their time",
            ToTry(
                ("model.dtype=bf16",) if wide else (),
                'Use bf16 or fp16 weights, or allow TF32 (torch.set_float32_matmul_precision("high")).',
                "Run matrix products on tensor cores",
                PRODUCTS,
            ),
        )
        found.append(product)
    return largest_saving(found)


def math_attention(evidence: Evidence) -> Finding | None:
    """Attention runs unfused: it writes its scores to memory and runs softmax as a separate kernel."""
    found = []
    for stage in evidence.stages:
        softmax = [row for row in stage.kernels if _SOFTMAX.search(row.name) and row.kind is not KernelClass.ATTENTION]
        if stage.name == DECODE:  # of one row, a compiler fuses it with its neighbors
            softmax = [row for row in softmax if not row.name.startswith("triton_")]
        fused = any(row.kind is KernelClass.ATTENTION for row in stage.kernels)
        calls = sum(row.calls for row in softmax)
        if fused or calls < 2 * stage.units or stage.unit == DECODE:  # one softmax per step may be that of sampling
            continue
        total = sum(row.total_ns for row in softmax)
        attention = _kernel_finding(
            evidence,
            stage,
            "math_attention",
            (
                f"Attention of {stage.name} is not fused: {_calls(softmax, stage)} of softmax per {stage.unit} and no fused "
                "attention kernel.",
                "It writes its scores to memory.",
            ),
            softmax,
            (0, 2 * total, 4 * total),
            "softmax, masking, scaling and the traffic of the scores disappear, but a fused kernel takes time, too; the expected "
            "saving is twice the softmax time",
            ToTry(
                () if evidence.facts.attention == "sdpa" else ("runtime.attn_implementation=sdpa",),
                "Use scaled_dot_product_attention with a mask that a fused backend supports.",
                "Use fused attention",
                ATTENTION,
            ),
        )
        found.append(attention)
    return largest_saving(found)


def logits_for_the_whole_prompt(evidence: Evidence) -> Finding | None:
    """Prefill computes logits for the whole prompt and uses only the last."""
    timings, efficiency, stage = evidence.facts.timings, evidence.facts.efficiency, evidence.stage(PREFILL)
    if stage is None or isinstance(timings, Missing) or timings.model.logits != "whole prompt" or isinstance(efficiency, Missing):
        return None
    request = request_cost(timings)
    if isinstance(request, Missing):
        return None
    work = timings.workload
    both: tuple[Logits, Logits] = ("all", "last")
    steps = [Step(work.batch_size, work.padded_tokens, 0, logits) for logits in both]
    costs = [step_cost(request.architecture, step, request.formats) for step in steps]
    most, least = (best_roofline_time(cost, efficiency.peak_sets) for cost in costs)
    if isinstance(most, Missing) or isinstance(least, Missing):
        return None
    saved = (most[1].seconds - least[1].seconds) * 1e9 * stage.units
    if saved < 0.01 * stage.budget.wall_ns:
        return None
    return _kernel_finding(
        evidence,
        stage,
        "logits_for_the_whole_prompt",
        (
            f"Prefill computes logits for all {work.padded_tokens} positions and uses one: at the peaks of the device, the "
            f"others take {unit_time(stage, saved)}.",
        ),
        [row for row in stage.kernels if row.kind is KernelClass.GEMM],
        (saved, saved, 2 * saved),
        "the figure comes from the cost model at the device's peaks; a real matrix product takes longer",
        ToTry(
            change="Pass logits_to_keep=1 to the model's forward, or slice the hidden states before the LM head.",
            title="Compute logits for the last position only",
        ),
    )


def _without_tensor_cores(row: KernelTotal, stage: StageEvidence) -> bool:
    """Return whether a product runs without tensor cores: by its name, or because counters show vector and no tensor FLOPs."""
    if row.kind is KernelClass.GEMV and _HALF.search(row.name):
        return False  # a matrix-vector product in 16 bits is memory-bound: tensor cores gain nothing
    if _NO_TENSOR_CORES.search(row.name):
        return True
    if isinstance(stage.counters, Missing):
        return False
    counted = next((entry.per_call for entry in stage.counters.rows if entry.spelled == row.name), None)
    if counted is None or isinstance(counted, Missing) or isinstance(counted.tensor_flops, Missing):
        return False
    vector = sum(kind for kind in (counted.vector_flops, counted.half_flops) if not isinstance(kind, Missing))
    return row.kind is KernelClass.GEMM and counted.tensor_flops == 0 and vector > 0 and "splitKreduce" not in row.name


def _noteworthy(rows: Sequence[KernelTotal], stage: StageEvidence) -> bool:
    return sum(row.total_ns for row in rows) >= max(NOTEWORTHY * stage.kernel_ns, 1)


def _calls(rows: Sequence[KernelTotal], stage: StageEvidence) -> str:
    return f"{stage.per_unit(sum(row.calls for row in rows)):,.4g} kernels"


def _rows(rows: Sequence[KernelTotal], stage: StageEvidence) -> tuple[str, ...]:
    """Return the first three rows of the kernel table as text."""
    return tuple(
        f"{row.kind} {short_name(row.name, 90)}: {row.calls:,} calls, {duration(row.total_ns, 3)}, {percentage(row.share, 1)} of "
        f"{stage.name}'s kernel time"
        for row in rows[:3]
    )


def _kernel_finding(
    evidence: Evidence,
    stage: StageEvidence,
    id: str,
    claim: Claim,
    rows: Sequence[KernelTotal],
    bounds: Bounds,
    because: str,
    to_try: ToTry,
) -> Finding:
    """Return a finding on kernels; its saving counts only where the stage waits for the device."""
    most = float(stage.kernel_ns)
    low, expected, high = (min(value, most) for value in bounds)
    on_wall = wall_clock_saving(stage, (low, expected, high))
    if on_wall.because:
        because = on_wall.because if on_wall.claim else f"{because}; {on_wall.because}"
    grounds = Grounds(_rows(rows, stage), "high" if on_wall.certain else "medium", because)
    saving = saving_of(stage, *on_wall.bounds)
    return finding(id, place_of(evidence, stage), (*claim, on_wall.claim), grounds, saving, to_try)
