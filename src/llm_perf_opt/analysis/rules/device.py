"""Rules on how much of the device is used: occupancy, waves, and a batch that leaves the memory roof to one sequence."""

from collections.abc import Callable

from llm_perf_opt.analysis.cost_model.cost import step_cost
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.dtypes import compute_dtype
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.finding import After, Bounds, Finding, Kind, Saving, ToTry, milliseconds, saving_of, weightiest
from llm_perf_opt.analysis.kernels.table import StageKernel
from llm_perf_opt.analysis.limits.device_limits import devices_of
from llm_perf_opt.analysis.limits.efficiency import RequestCost, request_cost
from llm_perf_opt.analysis.limits.floor import floor, turning_point
from llm_perf_opt.analysis.limits.hardware import Hardware
from llm_perf_opt.analysis.rules.launching import request_units
from llm_perf_opt.analysis.rules.wall_clock import felt
from llm_perf_opt.analysis.trace.stage_instances import DECODE
from llm_perf_opt.records import Maybe, Missing

LOW_OCCUPANCY = 25.0
"""Percent of the warps an SM can hold, below which latency is hardly hidden."""
NEAR_A_LIMIT = 60.0
"""Percent of a unit's peak: a kernel this near to one is not held back by occupancy."""
NOTEWORTHY = 0.05
TAIL = 0.25
"""Share of a kernel's blocks' last round that stands empty, over all its rounds, from which on it is worth a word."""
LARGER_BATCH = 8
"""How many times the batch is tried, where the turning point is not nearer."""

WordsOf = Callable[[StageKernel], tuple[str, float] | None]
"""What holds a kernel back, in words, and the share of its time that a better one could save at most."""


def low_occupancy(evidence: Evidence) -> Finding | None:
    """Kernels that carry much of the time, near no limit, with few warps."""
    return _counted(
        evidence,
        "low_occupancy",
        _occupancy_words,
        "Kernels of {stage} fill few of the device's warps and are near no limit: {names}.",
        "More work per launch (a larger batch, a longer prompt), smaller tiles or split-K; max-autotune searches for such "
        "kernels.",
        ("runtime.cache=static", "runtime.compile=max-autotune"),
    )


def wave_tail(evidence: Evidence) -> Finding | None:
    """Kernels whose blocks do not fill the device in their last, or only, round."""
    return _counted(
        evidence,
        "wave_tail",
        _tail_words,
        "Kernels of {stage} leave a part of the device empty in their last round of blocks: {names}.",
        "Choose tiles so that blocks fill whole rounds (split-K, stream-K, persistent kernels); max-autotune searches for "
        "such kernels.",
        ("runtime.cache=static", "runtime.compile=max-autotune"),
    )


def small_batch(evidence: Evidence) -> Finding | None:
    """Decode reads all weights for a few tokens: more sequences cost little."""
    stage, facts = evidence.stage(DECODE), evidence.facts
    if stage is None or not stage.by_token or isinstance(facts.timings, Missing) or isinstance(facts.hardware, Missing):
        return None
    request = request_cost(facts.timings)
    if isinstance(request, Missing):
        return None
    work = facts.timings.workload
    turn = turning_point(request.architecture, facts.hardware, work.padded_tokens, request.formats)
    if isinstance(turn.weights, Missing) or work.batch_size * 2 > turn.weights:
        return None
    larger = min(work.batch_size * LARGER_BATCH, turn.weights)
    shared = devices_of(facts.timings)
    floors = [_step_floor_ns(request, facts.hardware, batch, work.padded_tokens, shared) for batch in (work.batch_size, larger)]
    if isinstance(floors[0], Missing) or isinstance(floors[1], Missing):
        return None
    # A larger step moves and computes more, at the limits of the device; at worst, all its kernels grow with the batch.
    step_ns, busy_ns = stage.wall_ns, stage.per_unit(stage.budget.busy_ns)
    now, best = step_ns / work.batch_size, step_ns / larger
    then = (step_ns + floors[1] - floors[0]) / larger
    worst = (step_ns + busy_ns * (larger / work.batch_size - 1)) / larger
    whole = "" if isinstance(turn.step, Missing) else f"; with the cache's bytes at {turn.step:,}"
    return Finding(
        "small_batch",
        Kind.THROUGHPUT,
        stage.name,
        f"At batch {work.batch_size} each token reads all weights for itself. Products turn from memory- to compute-bound at "
        "batch "
        f"{turn.weights:,} ({facts.hardware.name}){whole}: until then a step takes hardly longer, and a token's share of it "
        "falls. "
        "A single request is no faster.",
        (
            f"a step of {milliseconds(step_ns)} at batch {work.batch_size}: {milliseconds(now)} a token",
            f"a step of batch {larger} moves and computes {milliseconds(floors[1] - floors[0])} more: {milliseconds(then)} a "
            "token",
        ),
        _batch_saving(stage, now, (min(then, best), then, max(then, worst)), kept=work.batch_size / larger),
        request_units(evidence, stage),
        "medium",
        "the larger step is taken for the present one and what more it must move; at worst all its kernels grow with the batch",
        ToTry((f"runtime.batch_size={larger}",), "Serve more sequences at once (continuous batching)."),
    )


def _batch_saving(stage: StageEvidence, now: float, after: Bounds, kept: float) -> Saving:
    """A token's share of the step, now and then. Of another step than the present one the larger batch shares that out, too."""
    low, then, high = (round(ns) for ns in after)
    before = round(now)
    told = After(then, low, high, before, kept)
    expected, least, most = (max(before - ns, 0) for ns in (then, high, low))
    return Saving(expected, least, most, stage.unit, stage.units, told)


def _step_floor_ns(request: RequestCost, hardware: Hardware, batch: int, context: int, devices: int) -> Maybe[float]:
    peak = hardware.peak(compute_dtype(request.formats.weights))
    if isinstance(peak, Missing):
        return peak
    cost = step_cost(request.architecture, Step(batch, 1, context), request.formats)
    return floor(cost, peak.flops_per_s, hardware.bandwidth_bytes_per_s).seconds * 1e9 / devices


def _counted(
    evidence: Evidence, id: str, words_of: WordsOf, claim: str, change: str, overrides: tuple[str, ...]
) -> Finding | None:
    if evidence.facts.setting("runtime.compile") == "max-autotune":
        overrides = ()  # set already
    found = []
    for stage in evidence.stages:
        held = [(row, words) for row in _all_rows(stage) if row.share >= NOTEWORTHY and (words := words_of(row))]
        if held:
            tried = overrides if stage.name == DECODE else ()
            found.append(_device_finding(evidence, stage, id, held, claim, change, tried))
    return weightiest(found)


def _device_finding(
    evidence: Evidence,
    stage: StageEvidence,
    id: str,
    held: list[tuple[StageKernel, tuple[str, float]]],
    claim: str,
    change: str,
    overrides: tuple[str, ...],
) -> Finding:
    share = stage.kernel_ns / max(sum(row.total_ns for row in _all_rows(stage)), 1)
    gain = sum(row.total_ns * part for row, (_, part) in held) * share
    names = "; ".join(f"{row.name[:60]} ({words})" for row, (words, _) in held[:3])
    text = claim.format(stage=stage.name, names=names)
    on_the_wall = felt(stage, (0, gain / 2, gain))
    because = "counters say what is not used, not what a better kernel would reach; half of it is shown"
    return Finding(
        id,
        Kind.LATENCY,
        stage.name,
        text + on_the_wall.claim,
        tuple(
            f"{row.name[:90]}: {row.calls:,} calls, {milliseconds(row.total_ns)}, {row.share:.1%} of {stage.name}'s kernel "
            f"time, {words}"
            for row, (words, _) in held[:3]
        ),
        saving_of(stage, *on_the_wall.bounds),
        request_units(evidence, stage),
        "low",
        f"{because}; {on_the_wall.because}" if on_the_wall.because else because,
        ToTry(overrides, change),
    )


def _all_rows(stage: StageEvidence) -> tuple[StageKernel, ...]:
    return () if isinstance(stage.counters, Missing) else stage.counters.rows


def _occupancy_words(row: StageKernel) -> tuple[str, float] | None:
    call = row.per_call
    if isinstance(call, Missing):
        return None
    occupancy, sm, dram = call.occupancy_pct, call.sm_pct, call.dram_pct
    if isinstance(occupancy, Missing) or isinstance(sm, Missing) or isinstance(dram, Missing):
        return None
    if occupancy >= LOW_OCCUPANCY or max(sm, dram) >= NEAR_A_LIMIT:
        return None
    return f"occupancy {occupancy:.0f} %, SM {sm:.0f} %, DRAM {dram:.0f} %", 1 - max(sm, dram) / 100


def _tail_words(row: StageKernel) -> tuple[str, float] | None:
    call = row.per_call
    if isinstance(call, Missing) or isinstance(call.waves, Missing) or call.waves <= 0:
        return None
    limits = [value for value in (call.sm_pct, call.dram_pct) if not isinstance(value, Missing)]
    rounds = -(-call.waves // 1)
    empty = 1 - call.waves / rounds
    if empty < TAIL or (limits and max(limits) >= NEAR_A_LIMIT):
        return None
    return f"{call.waves:.2f} rounds, {empty:.0%} of the places empty", empty
