"""Rules for a program on the CPU: framework overhead, number format, threads, int8 weights, cache, attention."""

from collections.abc import Mapping

from llm_perf_opt.analysis.cost_model.cost import step_cost
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.evidence import Evidence, HostStageEvidence
from llm_perf_opt.analysis.findings import device
from llm_perf_opt.analysis.findings.finding import (
    ATTENTION,
    CACHE,
    PRODUCTS,
    Bounds,
    Claim,
    Grounds,
    Throughput,
    ToTry,
    finding,
    largest_saving,
    place_of,
    saving_of,
    unit_time,
)
from llm_perf_opt.analysis.limits.efficiency import request_cost
from llm_perf_opt.analysis.limits.peaks import best_roofline_time, measured_ns
from llm_perf_opt.analysis.trace.document import WHOLE, Finding
from llm_perf_opt.analysis.trace.operator_classes import HostRow
from llm_perf_opt.analysis.trace.stage_instances import DECODE, PREFILL
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.core.stages import MIXED_STEP, STEP
from llm_perf_opt.core.units import counted, duration, percentage

WORTHWHILE = 0.05
"""The least share of a stage that a change must save to be a finding."""
_COMPILE = ("runtime.compile=default", "runtime.cache=static")
_FUSED = (HostRow.ELEMENTWISE, HostRow.NORM, HostRow.MEMORY)
_OVERHEAD = (HostRow.FRAMEWORK, HostRow.PYTHON)
_LEFT: Bounds = (0.1, 0.4, 0.6)
"""What a compiled step leaves of framework, Python and the operators that it fuses: guards, the generated wrapper, and calls of
products. Two models on two CPUs left 14, 44, 46 and 51 % (docs/measurements.md)."""
_GROWING = (HostRow.MATMUL, HostRow.ATTENTION, HostRow.NORM, HostRow.COMPILED)
_BATCH_GROWTH = 0.4
"""How far the time of operators is expected to be from its best to its worst at a larger batch; fitted to tiny and qwen2_5_0_5b
on a CPU (docs/measurements.md)."""
_LOOPS = (DECODE, STEP, MIXED_STEP, WHOLE)
"""The stages that repeat, the first known one counts; a trace without labels is one stage."""
_STAGES = {PREFILL: "gemm", DECODE: "gemv"}
"""Stage → its measured products with weights."""


def framework_bound_decode(evidence: Evidence) -> Finding | None:
    """Framework and Python take much of decode; compile the step."""
    stage = next((found for name in _LOOPS if (found := evidence.cpu_stage(name)) is not None), None)
    if stage is None or evidence.facts.compiled or stage.rows.get(HostRow.COMPILED) or not evidence.facts.own_runtime:
        return None
    overhead, fused = (sum(stage.rows.get(row, 0) for row in rows) for rows in (_OVERHEAD, _FUSED))
    most, middle, least = ((overhead + fused) * (1 - left) for left in _LEFT)
    if middle < WORTHWHILE * stage.budget.wall_ns:
        return None
    calls = stage.per_unit(sum(stage.time.calls.values()))
    if not calls:  # nothing shows that the time without operators is Python's, or that there is anything to compile
        return None
    to_try, advice = _compiling(evidence)
    return finding(
        "framework_bound_decode",
        place_of(evidence, stage),
        (
            f"Framework and Python take {percentage(overhead / stage.budget.wall_ns)} of {stage.name}: "
            f"{unit_time(stage, overhead)} of {unit_time(stage, stage.budget.wall_ns)} per {stage.unit}, for {calls:,.0f} "
            "operators.",
            advice,
        ),
        Grounds(
            (
                f"budget of {stage.name} per {stage.unit}: framework {_per_unit(stage, HostRow.FRAMEWORK)}, Python "
                f"{_per_unit(stage, HostRow.PYTHON)}",
                f"fused by a compiler: elementwise {_per_unit(stage, HostRow.ELEMENTWISE)}, norms "
                f"{_per_unit(stage, HostRow.NORM)}, memory operators {_per_unit(stage, HostRow.MEMORY)}",
            ),
            "medium" if stage.unprofiled else "low",
            f"a compiled step is expected to keep {percentage(_LEFT[1])} of this time, for its wrapper and calls of products",
        ),
        saving_of(stage, least if stage.unprofiled else 0, middle, most, kept=1 - middle / stage.budget.wall_ns),
        to_try,
    )


def _compiling(evidence: Evidence) -> tuple[ToTry, str]:
    """Return what to try and a sentence on the compiler: torch.compile needs one for C++ on a CPU."""
    words = 'Compile the decode step (torch.compile) with a static cache (transformers: cache_implementation="static").'
    title = "Compile the decode step" if evidence.cpu_stage(DECODE) else "Compile the model"
    found = evidence.facts.env.get("compiler")
    if isinstance(found, str):
        change = f"{words} This machine cannot compile C++: {found.removeprefix('n/a: ')}"
        return ToTry((), change, title), "It needs a C++ compiler, which this machine does not have."
    return ToTry(_COMPILE, words, title), ""


def slow_dtype(evidence: Evidence) -> Finding | None:
    """The products with weights would be faster in another number format on this CPU."""
    timings = evidence.facts.timings
    if isinstance(timings, Missing) or (timings.model.weights is not None and timings.model.weights.quantized):
        return None
    now = timings.model.dtype
    found = [
        each
        for stage in evidence.on_cpu
        for dtype in ("fp32", "bf16", "fp16")
        if dtype != now and (each := _other_products(evidence, stage, timings, dtype)) is not None
    ]
    return largest_saving(found)


def int8_weights(evidence: Evidence) -> Finding | None:
    """Decode reads its weights in a wide format; int8 weights take fewer bytes."""
    timings, stage = evidence.facts.timings, evidence.cpu_stage(DECODE)
    if stage is None or isinstance(timings, Missing) or (timings.model.weights is not None and timings.model.weights.quantized):
        return None
    return _other_products(evidence, stage, timings, "int8")


def _other_products(evidence: Evidence, stage: HostStageEvidence, timings: CleanTimings, dtype: str) -> Finding | None:
    """Return the finding that the products of a stage are faster in another format, as measured at the model's shapes."""
    kind = _STAGES.get(stage.name)
    products = stage.rows.get(HostRow.MATMUL, 0)
    if kind is None or not products or (stage.name == DECODE and not stage.by_token) or not evidence.facts.own_runtime:
        return None  # an engine has kernels of its own, which were not measured
    now, then = (measured_ns(evidence.facts.ceilings, f"model_{kind}_{name}") for name in (timings.model.dtype, dtype))
    if isinstance(now, Missing) or isinstance(then, Missing) or then >= now:
        return None
    saved = products * (1 - then / now)
    if saved < WORTHWHILE * stage.budget.wall_ns:
        return None
    int8 = dtype == "int8"
    override = "runtime.quantization=int8" if int8 else f"model.dtype={dtype}"
    what = "int8 weights" if int8 else dtype
    claim: Claim = (
        f"With {what}, the matrix products of {stage.name} take {duration(then, 3)} per {stage.unit} on this CPU instead of "
        f"{duration(now, 3)} in {timings.model.dtype}.",
        "Quantized weights change the output: the trial compares the tokens." if int8 else "",
    )
    rows = (
        f"measured at the shapes of this model: {timings.model.dtype} {duration(now, 3)}, {what} {duration(then, 3)}",
        f"matrix products of {stage.name}: {unit_time(stage, products)} of {unit_time(stage, stage.budget.wall_ns)}",
        *_other_stage(evidence, stage, timings.model.dtype, dtype),
    )
    return finding(
        "int8_weights" if int8 else "slow_dtype",
        place_of(evidence, stage),
        claim,
        Grounds(rows, "medium", "the products were measured alone; other operators are assumed not to change"),
        saving_of(stage, 0.5 * saved, saved, min(1.25 * saved, products), kept=1 - saved / stage.budget.wall_ns),
        ToTry((override,), f"Use {what}." if int8 else f"Load the model in {dtype}.", f"Use {what}", PRODUCTS),
    )


def _other_stage(evidence: Evidence, stage: HostStageEvidence, now: str, then: str) -> tuple[str, ...]:
    """Return what another format does to the products of the other stage."""
    name, kind = (PREFILL, "gemm") if stage.name == DECODE else (DECODE, "gemv")
    before, after = (measured_ns(evidence.facts.ceilings, f"model_{kind}_{dtype}") for dtype in (now, then))
    if evidence.cpu_stage(name) is None or isinstance(before, Missing) or isinstance(after, Missing):
        return ()
    return (f"matrix products of {name}: {duration(before, 3)} in {now}, {duration(after, 3)} in {then}",)


def thread_count(evidence: Evidence) -> Finding | None:
    """Another number of threads multiplies the weights faster."""
    timings, stage = evidence.facts.timings, evidence.cpu_stage(DECODE)
    if stage is None or not stage.by_token or isinstance(timings, Missing) or isinstance(evidence.facts.ceilings, Missing):
        return None
    times = _times_by_threads(evidence) if evidence.facts.own_runtime else {}
    now, products = times.get(timings.threads), stage.rows.get(HostRow.MATMUL, 0)
    if now is None or not products:
        return None
    best = min(times, key=lambda count: (times[count], count))
    saved = products * (1 - times[best] / now)
    if best == timings.threads or saved < WORTHWHILE * stage.budget.wall_ns:
        return None
    fewer = best < timings.threads
    used = f"{counted(timings.threads, 'thread')} {'is' if timings.threads == 1 else 'are'}"
    table = ", ".join(f"{count}: {duration(ns, 3)}" for count, ns in sorted(times.items()))
    return finding(
        "thread_count",
        place_of(evidence, stage),
        (
            f"{used} too {'many' if fewer else 'few'} for decode: with {best}, its matrix products take "
            f"{duration(times[best], 3)} instead of {duration(now, 3)}.",
        ),
        Grounds(
            (f"matrix products of a decode step by threads: {table}",),
            "medium",
            "the products were measured alone; other operators are assumed not to change",
        ),
        saving_of(stage, 0.5 * saved, saved, min(1.5 * saved, products), kept=1 - saved / stage.budget.wall_ns),
        ToTry(
            (f"hardware.threads={best}", *_one_per_core(evidence, best)),
            f"Call torch.set_num_threads({best}) or set OMP_NUM_THREADS={best}.",
            f"Use {best} thread{'s' if best > 1 else ''}",
        ),
    )


def _one_per_core(evidence: Evidence, threads: int) -> tuple[str, ...]:
    """Return the setting that gives each thread a core of its own, if the CPU has hyperthreads and as many threads as cores."""
    ceilings = evidence.facts.ceilings
    if isinstance(ceilings, Missing) or not threads == len(ceilings.core_cpus) < ceilings.processors:
        return ()
    return (f"hardware.cpus='{','.join(str(cpu) for cpu in ceilings.core_cpus)}'",)


def _times_by_threads(evidence: Evidence) -> Mapping[int, float]:
    """Return threads → time of the products of a decode step."""
    ceilings = evidence.facts.ceilings
    if isinstance(ceilings, Missing):
        return {}
    found = {}
    for row in ceilings.rows:
        words = row.key.split("_", 2)
        if words[0] == "threads" and words[2:] == ["model_gemv"] and not isinstance(row.value, Missing):
            found[int(words[1])] = row.value.median
    return found


def growing_cache(evidence: Evidence) -> Finding | None:
    """Every decode step copies the whole cache to append one token."""
    stage, timings = evidence.cpu_stage(DECODE), evidence.facts.timings
    if stage is None or not stage.by_token or isinstance(timings, Missing) or not evidence.facts.own_runtime:
        return None
    calls, cat_ns = stage.time.by_name.get("aten::cat", (0, 0))
    traced, memory = stage.time.rows.get(HostRow.MEMORY, 0), stage.rows.get(HostRow.MEMORY, 0)
    if calls < stage.units or not traced or evidence.facts.setting("runtime.cache") != "dynamic":
        return None
    copied = min(cat_ns * memory / traced, memory)
    work = timings.workload
    mean = work.padded_tokens + work.decode_steps / 2
    longer = stage.rows.get(HostRow.ATTENTION, 0) * ((work.padded_tokens + work.new_tokens) / mean - 1)
    saved = copied / 2 - longer
    if saved < WORTHWHILE * stage.budget.wall_ns:
        return None
    return finding(
        "growing_cache",
        place_of(evidence, stage),
        (
            f"Each token needs {calls / stage.units:,.0f} concatenations, which take {unit_time(stage, copied)}.",
            "A cache that grows is copied whole for every token.",
        ),
        Grounds(
            (
                f"aten::cat: {calls:,} calls, {duration(cat_ns, 3)} under the profiler",
                f"attention over a static cache reads its whole length: {unit_time(stage, longer)} more per token",
            ),
            "low",
            "position embeddings concatenate, too, and the trace does not show which is which; the expected saving is half",
        ),
        saving_of(stage, 0, saved, copied, kept=1 - saved / stage.budget.wall_ns),
        ToTry(("runtime.cache=static",), "Preallocate the KV cache.", "Use a static KV cache", CACHE),
    )


def unfused_attention(evidence: Evidence) -> Finding | None:
    """Attention runs as separate products and softmax instead of one fused operator."""
    timings = evidence.facts.timings
    if isinstance(timings, Missing) or evidence.facts.attention != "eager":
        return None
    found = []
    for stage in evidence.on_cpu:
        core = stage.time.components.get("attention_core", {})
        part = sum(core.get(row, 0) for row in (HostRow.ATTENTION, HostRow.ELEMENTWISE, HostRow.MEMORY))
        whole = sum(ns for row, ns in stage.time.rows.items() if row is not HostRow.PYTHON)
        if not part or not whole:
            continue
        spent = part / whole * stage.budget.busy_ns
        if spent / 2 < WORTHWHILE * stage.budget.wall_ns:
            continue
        attention = finding(
            "unfused_attention",
            place_of(evidence, stage),
            (f"Attention of {stage.name} is not fused: its products, softmax and copies take {unit_time(stage, spent)}.",),
            Grounds(
                (f"attention implementation: {evidence.facts.attention}",),
                "low",
                "a fused operator does not write the scores to memory; the expected saving is half of their time",
            ),
            saving_of(stage, 0, spent / 2, spent, kept=1 - spent / 2 / stage.budget.wall_ns),
            ToTry(("runtime.attn_implementation=sdpa",), "Use scaled_dot_product_attention.", "Use fused attention", ATTENTION),
        )
        found.append(attention)
    return largest_saving(found)


def small_batch_on_cpu(evidence: Evidence) -> Finding | None:
    """Decode on the CPU handles few sequences at once; a larger batch raises throughput."""
    stage, facts = evidence.cpu_stage(DECODE), evidence.facts
    if stage is None or not stage.by_token or isinstance(facts.timings, Missing) or isinstance(facts.efficiency, Missing):
        return None
    request = request_cost(facts.timings)
    if isinstance(request, Missing):
        return None
    batch, peak_sets = facts.timings.workload.batch_size, facts.efficiency.peak_sets
    larger, context = device.LARGER_BATCH * batch, facts.timings.workload.padded_tokens
    least = [
        best_roofline_time(step_cost(request.architecture, Step(many, 1, context), request.formats), peak_sets)
        for many in (batch, larger)
    ]
    now, then = ((None if isinstance(each, Missing) else each[1].seconds) for each in least)
    if not now or not then:
        return None
    # At best, products, attention and norms grow as their roofline time does; at worst, all operators grow with the batch.
    growing = stage.per_unit(sum(stage.rows.get(row, 0) for row in _GROWING))
    linear = stage.per_unit(sum(stage.rows.get(row, 0) for row in (HostRow.ELEMENTWISE, HostRow.MEMORY)))
    more, least_more = larger / batch - 1, then / now - 1
    after = stage.wall_ns + growing * (least_more + _BATCH_GROWTH * (more - least_more)) + linear * _BATCH_GROWTH * more
    worst = stage.wall_ns + (growing + linear) * more
    if larger / after < device.WORTHWHILE * batch / stage.wall_ns:
        return None
    step_ns = round(stage.wall_ns)
    found = Throughput(batch, larger, step_ns, round(after), step_ns, round(worst), stage.unit, stage.units)
    return finding(
        "small_batch_on_cpu",
        place_of(evidence, stage),
        (
            f"At batch {batch}, a decode step takes {duration(stage.wall_ns, 3)}; at batch {larger}, about {duration(after, 3)}.",
            "A larger batch gives more tokens per second; a single request is no faster.",
        ),
        Grounds(
            (
                f"batch {batch}: {batch * 1e9 / stage.wall_ns:,.4g} tokens/s",
                f"batch {larger}: {larger * 1e9 / after:,.4g} tokens/s",
                f"products, attention and norms: {duration(growing, 3)} per step; roofline time × {then / now:.3g}",
            ),
            "medium",
            "framework and Python are assumed not to grow; the rest grows between its roofline time and the batch",
        ),
        found,
        ToTry((f"runtime.batch_size={larger}",), "Process more sequences at once.", "Use a larger batch"),
    )


def _per_unit(stage: HostStageEvidence, row: HostRow) -> str:
    return unit_time(stage, stage.rows.get(row, 0))
