"""Rules on how much of the device is used: occupancy, waves, and a batch that leaves the memory roof to one sequence."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from llm_perf_opt.analysis.cost_model.cost import kv_cache_bytes, weight_bytes
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.findings.finding import Grounds, Throughput, ToTry, finding, milliseconds, saving_of, weightiest
from llm_perf_opt.analysis.findings.launching import place_of, wall_clock_saving
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.kernels.table import StageKernel
from llm_perf_opt.analysis.limits.efficiency import RequestCost, request_cost
from llm_perf_opt.analysis.limits.hardware import Hardware, devices_of
from llm_perf_opt.analysis.limits.roofline import largest_batch_within, step_roofline_time, turning_point
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE
from llm_perf_opt.core.records import Missing

LOW_OCCUPANCY = 25.0
"""Percent of the warps an SM can hold, below which latency is hardly hidden."""
NEAR_A_LIMIT = 60.0
"""Percent of a unit's peak: a kernel this near to one is not held back by occupancy."""
NOTEWORTHY = 0.05
TAIL = 0.25
"""Share of a kernel's blocks' last round that stands empty, over all its rounds, from which on it is worth a word."""
LARGER_BATCH = 8
"""How many times the batch is tried, where nothing says less."""
HARDLY_LONGER = 0.10
"""A step whose roofline time is longer by at most this share is called hardly longer."""
WORTHWHILE = 1.1
"""How many times as many tokens per second a larger batch must make."""

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
    """Decode reads its weights for few tokens: a larger batch makes more tokens per second."""
    stage, facts = evidence.stage(DECODE), evidence.facts
    if stage is None or not stage.by_token or isinstance(facts.timings, Missing) or isinstance(facts.hardware, Missing):
        return None
    request = request_cost(facts.timings)
    if isinstance(request, Missing):
        return None
    work = facts.timings.workload
    cost = _StepCost(request, facts.hardware, work.padded_tokens, devices_of(facts.timings))
    batch, larger, alike = work.batch_size, cost.larger_batch(work.batch_size, work.new_tokens), cost.alike(work.batch_size)
    floors = [cost.least_ns(one) for one in (batch, larger, max(alike, batch))]
    if larger < 2 * batch or min(floors) <= 0:
        return None
    # A larger step moves and computes more, at the limits of the device; at worst, all its kernels grow with the batch.
    step_ns, busy_ns = stage.wall_ns, stage.per_unit(stage.budget.busy_ns)
    then = step_ns + floors[1] - floors[0]
    worst = step_ns + busy_ns * (larger / batch - 1)
    if larger / then < WORTHWHILE * batch / step_ns:
        return None
    most = round(max(then, worst))
    found = Throughput(batch, larger, round(step_ns), round(then), round(step_ns), most, stage.unit, stage.units)
    return finding(
        "small_batch",
        place_of(evidence, stage),
        (
            f"At batch {batch} a decode step reads its weights for {'one token' if batch == 1 else f'{batch} tokens at once'}.",
            f"{_growth_words(cost, (batch, larger, alike), (floors[0], floors[1], floors[2]))} A larger batch makes more tokens "
            "per second; a single request is no faster.",
        ),
        Grounds(
            (
                f"a step of {milliseconds(step_ns)} at batch {batch}: {batch * 1e9 / step_ns:,.4g} tokens/s",
                f"a step of batch {larger} moves and computes {milliseconds(floors[1] - floors[0])} more at the limits of "
                f"{facts.hardware.name}: {milliseconds(then)}, {larger * 1e9 / then:,.4g} tokens/s",
            ),
            "medium",
            "the larger step is taken for the present one and what more it must move; at worst all its kernels grow with the "
            "batch",
        ),
        found,
        ToTry((f"runtime.batch_size={larger}",), "Serve more sequences at once (continuous batching)."),
    )


@dataclass(frozen=True)
class _StepCost:
    """What a decode step of any batch takes at least, by the same arithmetic as `llm-perf cost`."""

    request: RequestCost
    hardware: Hardware
    context: int
    devices: int

    @property
    def has_idle_experts(self) -> bool:
        """Whether a larger batch reads weights that a smaller one does not."""
        return self.request.architecture.active_params < self.request.architecture.params

    def least_ns(self, batch: int) -> float:
        """The roofline time of a step; 0 where it is not known."""
        found = step_roofline_time(self.request.architecture, self.hardware, Step(batch, 1, self.context), self.request.formats)
        return 0.0 if isinstance(found, Missing) else found.seconds * 1e9 / self.devices

    def alike(self, batch: int) -> int:
        """The largest batch whose step is hardly longer."""
        found = largest_batch_within(
            self.request.architecture, self.hardware, batch, self.context, self.request.formats, HARDLY_LONGER
        )
        return batch if isinstance(found, Missing) else found

    def larger_batch(self, batch: int, new_tokens: int) -> int:
        """What to try: so many times the batch, as long as products wait for memory, and what the device has room for."""
        turn = turning_point(self.request.architecture, self.hardware, self.context, self.request.formats).weights
        bounds = [LARGER_BATCH * batch, self._room(new_tokens), 0 if isinstance(turn, Missing) else turn]
        alike = self.alike(batch)
        return min([*bounds, alike] if alike >= 2 * batch else bounds)

    def _room(self, new_tokens: int) -> int:
        """The largest batch whose weights and cache are within the devices' memory; where that is not known, any."""
        memory, formats, architecture = self.hardware.memory_bytes, self.request.formats, self.request.architecture
        sequence = kv_cache_bytes(architecture, 1, self.context + new_tokens, formats)
        if isinstance(memory, Missing) or not sequence:
            return sys.maxsize
        return int((memory * self.devices - weight_bytes(architecture, formats)) // sequence)


def _growth_words(cost: _StepCost, batches: tuple[int, int, int], floors: tuple[float, float, float]) -> str:
    """How the roofline time of a step grows with the batch: up to where hardly, or, where it does at once, how much."""
    batch, larger, alike = batches
    now, then, longest = (milliseconds(ns) for ns in floors)
    name = cost.hardware.name
    if alike >= 2 * batch:
        return (
            f"Its roofline time, the least that {name} allows, is {now}; up to batch {alike:,} it stays within "
            f"{HARDLY_LONGER:.0%} of that ({longest})."
        )
    why = ": more sequences reach more experts, whose weights are read, too" if cost.has_idle_experts else ""
    return f"Its roofline time, the least that {name} allows, grows from {now} to {then} at batch {larger}{why}."


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
    names = "; ".join(f"{short_name(row.name, 60)} ({words})" for row, (words, _) in held[:3])
    text = claim.format(stage=stage.name, names=names)
    on_the_wall = wall_clock_saving(stage, (0, gain / 2, gain))
    because = "counters say what is not used, not what a better kernel would reach; half of it is shown"
    rows = tuple(
        f"{short_name(row.name, 90)}: {row.calls:,} calls, {milliseconds(row.total_ns)}, {row.share:.1%} of {stage.name}'s "
        f"kernel time, {words}"
        for row, (words, _) in held[:3]
    )
    grounds = Grounds(rows, "low", f"{because}; {on_the_wall.because}" if on_the_wall.because else because)
    saving = saving_of(stage, *on_the_wall.bounds)
    return finding(id, place_of(evidence, stage), (text, on_the_wall.claim), grounds, saving, ToTry(overrides, change))


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
