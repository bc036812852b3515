"""Which launches are worth hardware counters: the kernels that carry a stage's time, in a steady state, within a time budget.

Nsight Compute replays a launch once per group of counters, so counting everything takes minutes to hours. A stage's kernels
repeat from step to step and from layer to layer; one step of those that carry its time says the same. Names here are function
names (no namespace, template or parameters), which is what the tool matches and counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llm_perf_opt.stages import Stage

SECONDS_PER_PASS = 0.03
"""Of one replay with its save and restore of memory, H200 (0.4 s per kernel at 14 passes)."""
STEADY_STEP = 2
"""The third step: the first ones still allocate and choose algorithms."""
COLLECTIVES = ("nccl", "rccl", "allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "cross_device", "multimem")
"""A collective waits for its peers, which a replay never reaches: it would hang."""


@dataclass(frozen=True)
class Launch:
    """One kernel of a timeline, in the order of the launch calls."""

    step: int
    """Which instance of the stage's range it lies in."""
    function: str
    name: str
    grid: int
    block: int
    duration_ns: int


@dataclass(frozen=True)
class SelectedKernel:
    """A function that will be counted."""

    function: str
    calls: int
    """In the sampled step."""
    total_ns: int
    share: float
    """Of the kernel time of the sampled step."""


@dataclass(frozen=True)
class Selection:
    """What Nsight Compute is told to count in one stage."""

    stage: Stage
    source: str
    """The timeline it was chosen from."""
    step: int
    kernels: tuple[SelectedKernel, ...]
    coverage: float
    """Share of the sampled step's kernel time that the chosen functions carry."""
    launch_skip: int
    """Matching launches before the first one counted."""
    launch_count: int
    steps_needed: int
    """Steps the measured process must run to reach them."""
    passes: int
    """Replays expected per launch."""
    seconds: float
    """Expected for all of them."""
    notes: tuple[str, ...] = ()


def expected_passes(metrics: Sequence[str], sections: Sequence[str] = ()) -> int:
    """How often a launch is replayed for these counters; an estimate, since only the tool knows its groups."""
    patched = sum("__sass_" in name for name in metrics)  # counted by instrumented code: a run each
    derived = sum("throughput" in name or ".pct_of_peak" in name for name in metrics)
    plain = len(metrics) - patched - derived
    return max(1, math.ceil(plain / 4) + derived + patched + 5 * len(sections))


def select(
    stage: Stage,
    launches: Sequence[Launch],
    *,
    source: str,
    top: int,
    coverage: float,
    passes: int,
    budget_s: float,
) -> Selection | str:
    """The launches to count, or why there are none.

    At least `top` functions, and as many as it takes to carry `coverage` of the kernel time; the whole steady step where
    the budget allows, else the shortest stretch of it that holds every variant; functions are given up, least first, when
    even that does not fit.
    """
    if not launches:
        return f"the timeline holds no kernel of {stage}"
    step = min(STEADY_STEP, max(launch.step for launch in launches))
    sampled = [launch for launch in launches if launch.step == step]
    if not sampled:
        return f"the timeline holds no kernel of step {step} of {stage}"
    whole_ns = sum(launch.duration_ns for launch in sampled)
    ranked = _ranked(sampled)
    replayable = [entry for entry in ranked if not _collective(entry[0])]
    notes = []
    if len(replayable) < len(ranked):
        left = ", ".join(sorted(name for name, _, _ in ranked if _collective(name)))
        notes.append(f"Collectives are not replayed: {left}.")
    chosen = _enough(replayable, top, coverage * whole_ns)
    allowed = int(budget_s / (passes * SECONDS_PER_PASS))
    while chosen:
        names = {name for name, _, _ in chosen}
        matching = [launch for launch in sampled if launch.function in names]
        first, count = _stretch(matching, allowed)
        if count <= allowed:
            break
        notes.append(f"{chosen[-1][0]} is left out: it does not fit in {budget_s:g} s.")
        chosen = chosen[:-1]
    if not chosen:
        return f"not one launch of {stage} fits in {budget_s:g} s at {passes} passes" if replayable else "only collectives ran"
    before = sum(launch.function in names for launch in launches if launch.step < step)
    covered = sum(total for _, _, total in chosen) / whole_ns if whole_ns else 0.0
    if covered < coverage:
        notes.append(f"The chosen kernels carry {covered:.0%} of the kernel time, less than the {coverage:.0%} asked for.")
    kernels = tuple(SelectedKernel(name, calls, total, total / whole_ns if whole_ns else 0.0) for name, calls, total in chosen)
    return Selection(
        stage, source, step, kernels, covered, before + first, count, step + 1, passes,
        round(count * passes * SECONDS_PER_PASS, 1), tuple(notes),
    )  # fmt: skip


def _collective(function: str) -> bool:
    lowered = function.lower()
    return any(word in lowered for word in COLLECTIVES)


def _ranked(launches: Sequence[Launch]) -> list[tuple[str, int, int]]:
    """(function, calls, total ns), most time first."""
    totals: dict[str, tuple[int, int]] = {}
    for launch in launches:
        calls, total = totals.get(launch.function, (0, 0))
        totals[launch.function] = calls + 1, total + launch.duration_ns
    return sorted(((name, calls, total) for name, (calls, total) in totals.items()), key=lambda row: (-row[2], row[0]))


def _enough(ranked: Sequence[tuple[str, int, int]], top: int, wanted_ns: float) -> list[tuple[str, int, int]]:
    chosen: list[tuple[str, int, int]] = []
    covered = 0
    for entry in ranked:
        if len(chosen) >= top and covered >= wanted_ns:
            break
        chosen.append(entry)
        covered += entry[2]
    return chosen


def _stretch(matching: Sequence[Launch], allowed: int) -> tuple[int, int]:
    """First launch and number of launches: all of them, or the shortest run that holds every variant, widened to the budget."""
    if len(matching) <= allowed:
        return 0, len(matching)
    variants = {(launch.name, launch.grid, launch.block) for launch in matching}
    seen: dict[tuple[str, int, int], int] = {}
    best_first, best_count = 0, len(matching)
    left = 0
    for right, launch in enumerate(matching):
        variant = (launch.name, launch.grid, launch.block)
        seen[variant] = seen.get(variant, 0) + 1
        while len(seen) == len(variants):
            if right - left + 1 < best_count:
                best_first, best_count = left, right - left + 1
            gone = (matching[left].name, matching[left].grid, matching[left].block)
            seen[gone] -= 1
            if not seen[gone]:
                del seen[gone]
            left += 1
    if best_count > allowed:
        return best_first, best_count
    first = max(0, min(best_first, best_first + best_count - allowed))
    return first, min(allowed, len(matching) - first)
