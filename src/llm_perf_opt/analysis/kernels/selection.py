"""Select the launches to count: the kernels that take most of a stage's time, in a steady step, within a time budget.

Nsight Compute replays a launch once per group of counters, so counting everything takes minutes to hours. The kernels of a
stage repeat from step to step and from layer to layer, so one step of the longest ones is representative. Names are function
names (no namespace, template or parameters), because the tool matches and counts those.
"""

import math
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from llm_perf_opt.analysis.kernels.classes import KernelClass, classify
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import percentage

SECONDS_PER_PASS = 0.03
"""Time of one replay, including saving and restoring memory, on an H200 (0.4 s per kernel at 14 passes)."""
_MOST_NAMED = 8
"""The most kernels that a message names."""
STEADY_STEP = 2
"""The third step; the first ones still allocate memory and choose algorithms."""


@dataclass(frozen=True)
class Launch:
    """One kernel of a timeline, in launch order."""

    step: int
    """Index of the instance of the stage's range that contains it."""
    function: str
    name: str
    grid: int
    block: int
    duration_ns: int
    device: int = 0

    @property
    def variant(self) -> tuple[str, int, int]:
        """The key to join by: the kernel and its launch size."""
        return self.name, self.grid, self.block


Ranked = tuple[str, int, int]
"""Function, calls, nanoseconds."""


@dataclass(frozen=True)
class SelectedKernel:
    """A function to count."""

    function: str
    calls: int
    """In the sampled step."""
    total_ns: int
    share: float
    """Of the kernel time of the sampled step."""


@dataclass(frozen=True)
class Selection:
    """What Nsight Compute counts in one stage."""

    stage: str
    source: str
    """The timeline it was selected from."""
    step: int
    kernels: tuple[SelectedKernel, ...]
    coverage: float
    """Share of the sampled step's kernel time that the counted kernels and launch sizes take."""
    launch_skip: int
    """Matching launches before the first counted one."""
    launch_count: int
    steps_needed: int
    """Steps that the measured process must run to reach them."""
    passes: int
    """Expected replays per launch."""
    seconds: float
    """Expected time of all replays."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """Which launches the user wants counted."""

    top: int
    """At least this many functions …"""
    coverage: float
    """… and as many as take this share of the kernel time."""
    pattern: str | None = None
    """Only functions whose name contains a match of this regular expression."""
    skip: int | None = None
    """Skip this many matching launches of the stage and count the next ones, whatever time they take."""
    count: int | None = None
    """How many to count after `skip`; None: as many as the budget allows."""

    @property
    def by_hand(self) -> bool:
        """Whether the launches are given by number."""
        return self.skip is not None or self.count is not None

    def matches(self, function: str) -> bool:
        """Return whether the pattern allows a function."""
        return self.pattern is None or re.search(self.pattern, function) is not None


def expected_passes(metrics: Sequence[str], sections: int = 0) -> int:
    """Return an estimate of the replays per launch; only the tool knows how it groups counters."""
    patched = sum("__sass_" in name for name in metrics)  # counted by instrumented code, one replay each
    derived = sum("throughput" in name or ".pct_of_peak" in name for name in metrics)
    plain = len(metrics) - patched - derived
    return max(1, math.ceil(plain / 4) + derived + patched + 5 * sections)


def select(
    stage: str,
    launches: Sequence[Launch],
    *,
    source: str,
    wanted: Wanted,
    passes: int,
    budget_s: float,
) -> Maybe[Selection]:
    """Return the launches to count, or why there are none.

    Select at least `top` functions, and enough to cover `coverage` of the kernel time, in the whole steady step if the budget
    allows it. Otherwise, select the consecutive launches within the budget and the number of functions whose kernels and
    launch sizes take the most time. Launches that the user gives by number are taken as they are.
    """
    if not launches:
        return Missing(f"the timeline has no kernel of {stage}")
    if wanted.by_hand:
        return _by_hand(stage, launches, wanted, source=source, passes=passes, budget_s=budget_s)
    step = min(STEADY_STEP, max(launch.step for launch in launches))
    sampled = [launch for launch in launches if launch.step == step]
    if not sampled:
        return Missing(f"the timeline has no kernel of step {step} of {stage}")
    whole_ns = max(1, sum(launch.duration_ns for launch in sampled))
    ranked = _ranked(sampled)
    collectives = {launch.function for launch in launches if _collective(launch)}
    matching = [entry for entry in ranked if wanted.matches(entry[0])]
    if not matching:
        return _no_match(stage, wanted, [entry[0] for entry in ranked])
    replayable = [entry for entry in matching if entry[0] not in collectives]
    if not replayable:
        return Missing(f"{stage} ran only collectives, which are never replayed")
    allowed = int(budget_s / (passes * SECONDS_PER_PASS))
    if not allowed:
        return Missing(f"no launch of {stage} fits in {budget_s:g} s at {passes} passes")
    enough = _enough(replayable, wanted.top, wanted.coverage * whole_ns)
    stretches = [_stretch(sampled, {name for name, _, _ in enough[:count]}, allowed) for count in range(len(enough), 0, -1)]
    best = max(stretches, key=lambda found: found.covered_ns)  # on a tie, the first has the most functions
    chosen = enough[: len(best.functions)]
    before = sum(launch.function in best.functions for launch in launches if launch.step < step)
    covered = best.covered_ns / whole_ns
    reachable = sum(total for _, _, total in replayable) / whole_ns
    least = wanted.coverage if wanted.pattern is None else min(wanted.coverage, reachable)
    notes = [
        *_pattern_note(wanted, reachable),
        *_notes(collectives, enough, chosen, _Shares(covered, reachable, least), budget_s),
    ]
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
        notes=tuple(notes),
    )


def _by_hand(
    stage: str, launches: Sequence[Launch], wanted: Wanted, *, source: str, passes: int, budget_s: float
) -> Maybe[Selection]:
    """Return the launches that the user gives by number, of all functions that match and are not collectives."""
    collectives = {launch.function for launch in launches if _collective(launch)}
    matching = [launch for launch in launches if wanted.matches(launch.function) and launch.function not in collectives]
    if not matching:
        return _no_match(stage, wanted, [launch.function for launch in launches])
    skip = wanted.skip or 0
    count = wanted.count or max(1, int(budget_s / (passes * SECONDS_PER_PASS)))
    chosen = matching[skip : skip + count]
    if not chosen:
        return Missing(f"{stage} has {len(matching)} matching launches, so none is left after skipping {skip}")
    steps = {launch.step for launch in chosen}
    sampled = [launch for launch in launches if launch.step in steps]
    whole_ns = max(1, sum(launch.duration_ns for launch in sampled))
    variants = {launch.variant for launch in chosen}
    covered_ns = sum(launch.duration_ns for launch in sampled if launch.variant in variants)
    return Selection(
        stage=str(stage),
        source=source,
        step=min(steps),
        kernels=tuple(SelectedKernel(name, calls, total, total / whole_ns) for name, calls, total in _ranked(matching)),
        coverage=covered_ns / whole_ns,
        launch_skip=skip,
        launch_count=len(chosen),
        steps_needed=max(steps) + 1,
        passes=passes,
        seconds=round(len(chosen) * passes * SECONDS_PER_PASS, 1),
        notes=(f"The launches are those of profiling.ncu.launch_skip={skip} and launch_count={len(chosen)}.",),
    )


def _no_match(stage: str, wanted: Wanted, functions: Sequence[str]) -> Missing:
    if wanted.pattern is None:
        return Missing(f"{stage} ran only collectives, which are never replayed")
    first = list(dict.fromkeys(functions))
    shown = ", ".join(first[:_MOST_NAMED]) + (f" and {len(first) - _MOST_NAMED} more" if len(first) > _MOST_NAMED else "")
    return Missing(f"no kernel of {stage} matches {wanted.pattern!r}; it ran {shown}")


def _pattern_note(wanted: Wanted, share: float) -> list[str]:
    if wanted.pattern is None:
        return []
    return [f"Only kernels that match {wanted.pattern!r} are counted; they take {percentage(share)} of the kernel time."]


@dataclass(frozen=True)
class _Shares:
    """Shares of the step's kernel time."""

    covered: float
    reachable: float
    """Share of all kernels that can be replayed."""
    wanted: float

    @property
    def remedy(self) -> str:
        """What to do about the cause: too little time for replays, or collectives, for which more time does not help."""
        collectives = (
            f"collectives take {percentage(1 - self.reachable)} of it, so at most {percentage(self.reachable)} can be counted"
        )
        if self.reachable >= self.wanted:
            return "raise profiling.ncu.budget_s or request fewer counters."
        if self.covered < self.reachable:
            return f"{collectives}; to count more of that, raise profiling.ncu.budget_s or request fewer counters."
        return f"{collectives}."


def _notes(
    collectives: Set[str], wanted: Sequence[Ranked], chosen: Sequence[Ranked], shares: _Shares, budget_s: float
) -> Iterator[str]:
    if collectives:
        yield f"Collectives are not replayed: {', '.join(sorted(collectives))}."
    if len(chosen) < len(wanted):
        yield f"Left out to stay within {budget_s:g} s: {', '.join(name for name, _, _ in wanted[len(chosen) :])}."
    if shares.covered < shares.wanted:
        yield (
            f"The counted launches represent {percentage(shares.covered)} of the kernel time, less than the requested "
            f"{percentage(shares.wanted)}; {shares.remedy}"
        )


def _collective(launch: Launch) -> bool:
    """Return whether a kernel is a collective: it waits for its peers, so a replay would hang."""
    return classify(launch.name) is KernelClass.COLLECTIVE


def _ranked(launches: Sequence[Launch]) -> list[Ranked]:
    """Return the functions, longest first."""
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
    """Consecutive matching launches, and the time that their kernels and launch sizes take in the whole step."""

    functions: frozenset[str]
    first: int
    count: int
    covered_ns: int


def _stretch(sampled: Sequence[Launch], functions: Set[str], allowed: int) -> _Stretch:
    """Return all launches of these functions, or the `allowed` consecutive ones that cover the most time, the latest on a tie."""
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
