"""Which launches are worth hardware counters: the kernels that carry a stage's time, in a steady state, within a time budget.

Nsight Compute replays a launch once per group of counters, so counting everything takes minutes to hours. A stage's kernels
repeat from step to step and from layer to layer; one step of those that carry its time says the same. Names here are function
names (no namespace, template or parameters), which is what the tool matches and counts.
"""

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from llm_perf_opt.analysis.kernels.classes import KernelClass, classify
from llm_perf_opt.core.records import Maybe, Missing

SECONDS_PER_PASS = 0.03
"""Of one replay with its save and restore of memory, H200 (0.4 s per kernel at 14 passes)."""
STEADY_STEP = 2
"""The third step: the first ones still allocate and choose algorithms."""


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
    device: int = 0

    @property
    def variant(self) -> tuple[str, int, int]:
        """What it is joined by: the kernel and its launch size."""
        return self.name, self.grid, self.block


Ranked = tuple[str, int, int]
"""Function, calls, nanoseconds."""


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

    stage: str
    source: str
    """The timeline it was chosen from."""
    step: int
    kernels: tuple[SelectedKernel, ...]
    coverage: float
    """Share of the sampled step's kernel time that the counted kernels and launch sizes carry."""
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
    stage: str,
    launches: Sequence[Launch],
    *,
    source: str,
    top: int,
    coverage: float,
    passes: int,
    budget_s: float,
) -> Maybe[Selection]:
    """The launches to count, or why there are none.

    At least `top` functions, and as many as it takes to carry `coverage` of the kernel time; the whole steady step where the
    budget allows. Where it does not, the stretch of launches within the budget whose kernels and launch sizes carry the most
    time, and of the functions so many that this is most.
    """
    if not launches:
        return Missing(f"the timeline holds no kernel of {stage}")
    step = min(STEADY_STEP, max(launch.step for launch in launches))
    sampled = [launch for launch in launches if launch.step == step]
    if not sampled:
        return Missing(f"the timeline holds no kernel of step {step} of {stage}")
    whole_ns = max(1, sum(launch.duration_ns for launch in sampled))
    ranked = _ranked(sampled)
    collectives = {launch.function for launch in launches if _collective(launch)}
    replayable = [entry for entry in ranked if entry[0] not in collectives]
    if not replayable:
        return Missing(f"{stage} ran nothing but collectives, which are never replayed")
    allowed = int(budget_s / (passes * SECONDS_PER_PASS))
    if not allowed:
        return Missing(f"not one launch of {stage} fits in {budget_s:g} s at {passes} passes")
    asked = _enough(replayable, top, coverage * whole_ns)
    stretches = [_stretch(sampled, {name for name, _, _ in asked[:count]}, allowed) for count in range(len(asked), 0, -1)]
    best = max(stretches, key=lambda found: found.covered_ns)  # the first of equals has the most functions
    chosen = asked[: len(best.functions)]
    before = sum(launch.function in best.functions for launch in launches if launch.step < step)
    covered = best.covered_ns / whole_ns
    reachable = sum(total for _, _, total in replayable)
    return Selection(
        stage=str(stage),
        source=source,
        step=step,
        kernels=tuple(SelectedKernel(name, calls, total, total / whole_ns) for name, calls, total in chosen),
        coverage=covered,
        launch_skip=before + best.first,
        launch_count=best.count,
        steps_needed=step + 1,
        passes=passes,
        seconds=round(best.count * passes * SECONDS_PER_PASS, 1),
        notes=tuple(_notes(collectives, asked, chosen, _Shares(covered, reachable / whole_ns, coverage), budget_s)),
    )


@dataclass(frozen=True)
class _Shares:
    """Of the step's kernel time."""

    covered: float
    reachable: float
    """By all that can be replayed."""
    asked: float

    @property
    def remedy(self) -> str:
        """Of what stands in the way: time to replay in, or collectives, which no time would help."""
        collectives = f"collectives take {1 - self.reachable:.0%} of it, so that no more than {self.reachable:.0%} can be counted"
        if self.reachable >= self.asked:
            return "raise profiling.ncu.budget_s or ask for fewer counters."
        if self.covered < self.reachable:
            return f"{collectives}; for more of that, raise profiling.ncu.budget_s or ask for fewer counters."
        return f"{collectives}."


def _notes(
    collectives: Set[str], asked: Sequence[Ranked], chosen: Sequence[Ranked], shares: _Shares, budget_s: float
) -> Iterator[str]:
    if collectives:
        yield f"Collectives are not replayed: {', '.join(sorted(collectives))}."
    if len(chosen) < len(asked):
        yield f"Left out to stay within {budget_s:g} s: {', '.join(name for name, _, _ in asked[len(chosen) :])}."
    if shares.covered < shares.asked:
        yield (
            f"What is counted stands for {shares.covered:.0%} of the kernel time, less than the {shares.asked:.0%} asked for; "
            f"{shares.remedy}"
        )


def _collective(launch: Launch) -> bool:
    """A collective waits for its peers, which a replay never reaches: it would hang. Some show it in their namespace alone."""
    return classify(launch.name) is KernelClass.COLLECTIVE


def _ranked(launches: Sequence[Launch]) -> list[Ranked]:
    """(function, calls, total ns), most time first."""
    totals: dict[str, tuple[int, int]] = {}
    for launch in launches:
        calls, total = totals.get(launch.function, (0, 0))
        totals[launch.function] = calls + 1, total + launch.duration_ns
    return sorted(((name, calls, total) for name, (calls, total) in totals.items()), key=lambda row: (-row[2], row[0]))


def _enough(ranked: Sequence[Ranked], top: int, wanted_ns: float) -> list[Ranked]:
    chosen: list[Ranked] = []
    covered = 0
    for entry in ranked:
        if len(chosen) >= top and covered >= wanted_ns:
            break
        chosen.append(entry)
        covered += entry[2]
    return chosen


@dataclass(frozen=True)
class _Stretch:
    """A run of matching launches, and the time its kernels and launch sizes carry in the whole step."""

    functions: frozenset[str]
    first: int
    count: int
    covered_ns: int


def _stretch(sampled: Sequence[Launch], functions: Set[str], allowed: int) -> _Stretch:
    """All launches of these functions, or the `allowed` in a row that stand for the most time; of equals the latest."""
    matching = [launch for launch in sampled if launch.function in functions]
    worth: dict[tuple[str, int, int], int] = {}
    for launch in matching:
        worth[launch.variant] = worth.get(launch.variant, 0) + launch.duration_ns
    if len(matching) <= allowed:
        return _Stretch(frozenset(functions), 0, len(matching), sum(worth.values()))
    inside: dict[tuple[str, int, int], int] = {}
    covered = best_ns = best_first = 0
    for right, launch in enumerate(matching):
        covered += worth[launch.variant] if not inside.get(launch.variant) else 0
        inside[launch.variant] = inside.get(launch.variant, 0) + 1
        left = right - allowed
        if left >= 0:
            gone = matching[left].variant
            inside[gone] -= 1
            covered -= worth[gone] if not inside[gone] else 0
        if covered >= best_ns:
            best_ns, best_first = covered, max(0, left + 1)
    return _Stretch(frozenset(functions), best_first, allowed, best_ns)
