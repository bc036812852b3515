"""What a search tries next, and what it has tried.

The order: findings of the current configuration by their promise, levers one setting at a time, changes that were not better
before another one was kept, then pairs of changes that were not better alone. It follows from the runs that were recorded, so a
resumed search takes the same decisions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_perf_opt.analysis.tuning.calibration import CalibrationRow
from llm_perf_opt.analysis.tuning.candidates import Change, Lossy, already, finding_changes, lever_changes, remedy_levers
from llm_perf_opt.analysis.tuning.combinations import MOST_PAIRS, independent_changes, pairs
from llm_perf_opt.analysis.tuning.goals import Goal
from llm_perf_opt.analysis.tuning.records import ALREADY, NotTried
from llm_perf_opt.analysis.tuning.tokens import Tried
from llm_perf_opt.config.runtimes import Lever
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.workflows.tune_runs import Configuration, configuration

Wanted = tuple[Change, Configuration]
"""A change, and the configuration that it leads to."""
_NEVER_AGAIN = 10**9


@dataclass(frozen=True)
class Allowed:
    """Which changes may be tried."""

    lossy: bool = False
    other_work: bool = False
    """Whether the requests may change, so that tokens are not compared."""
    top: int | None = None
    """The most findings of a configuration."""


@dataclass(frozen=True)
class Start:
    """The configuration that is changed."""

    configuration: Configuration
    last: Tried
    """Its last run."""
    profiled: Tried | None
    """The run whose findings are used."""


class Candidates:
    """The changes that are left. No configuration is tried twice."""

    def __init__(
        self,
        allowed: Allowed,
        values: Mapping[str, Any],
        base: Configuration,
        levers: Sequence[Lever],
        rows: Mapping[str, CalibrationRow],
    ) -> None:
        self._allowed, self._values, self._levers, self._rows = allowed, values, levers, rows
        self._configurations = {base.signature}
        self._composed: dict[tuple[str, ...], Configuration] = {}
        self._changes: set[frozenset[str]] = set()
        self._slow: dict[frozenset[str], int] = {}
        """Changes that were not better, and how many steps were kept then: each may be tried once more on another base."""
        self._alone: dict[frozenset[str], tuple[Change, float]] = {}
        """The same changes, and what they gained in their last trial."""
        self._apart = -1
        """How many steps were kept when a combination of findings did not hold: from there they are tried one by one."""
        self._paired = 0
        """Pairs that were tried."""
        self.not_tried: list[NotTried] = []

    def next(self, current: Start, goal: Goal, kept: int, combines: Callable[[Wanted, list[Wanted]], bool]) -> Wanted | None:
        """Return the most promising change that leads to a configuration which was not tried.

        `combines` is asked whether independent findings are tried together: it takes the combination and the single ones.
        """
        timings = current.last.timings
        runtime = None if isinstance(timings, Missing) else timings.runtime
        remedies = runtime.remedies if runtime else ()
        lossy = Lossy(self._levers, remedies)
        found = finding_changes(_findings(current), goal, lossy, self._rows)[: self._allowed.top]
        single = list(self._untried(found, current))
        if single and (together := self._together(single, current, kept)) and combines(together, single):
            return together
        if single:
            return single[0]
        levers = lever_changes([*self._levers, *remedy_levers(remedies)], goal, lossy)
        again = [change for change in (*found, *levers) if self._slow.get(change.key, kept) < kept]
        return next(self._untried(levers, current), None) or self._first(again, current) or self._pair(current)

    def _untried(self, changes: Sequence[Change], current: Start) -> Iterator[Wanted]:
        for change in changes:
            wanted = None if change.key in self._changes else self._wanted(change, current)
            if wanted is not None and wanted.signature not in self._configurations:
                yield change, wanted

    def _first(self, changes: Sequence[Change], current: Start) -> Wanted | None:
        for change in changes:
            wanted = self._wanted(change, current)
            if wanted is not None and wanted.signature not in self._configurations:
                return change, wanted
        return None

    def _together(self, single: Sequence[Wanted], current: Start, kept: int) -> Wanted | None:
        """Return the findings that are independent of the first, if none was found to depend on another here."""
        change = independent_changes([change for change, _ in single]) if self._apart < kept else None
        return None if change is None else self._first([change], current)

    def _pair(self, current: Start) -> Wanted | None:
        """Return two changes that were not better alone; they may be together."""
        for change in pairs(self._alone) if self._paired < MOST_PAIRS else ():
            found = None if change.key in self._changes else self._first([change], current)
            if found is not None:
                return found
        return None

    def _wanted(self, change: Change, current: Start) -> Configuration | None:
        """Return the configuration with the change, or record why it is not tried."""
        why, last = "", current.last
        if not isinstance(last.timings, Missing) and already(change.overrides, last.timings, last.analysis.env):
            why = ALREADY
        elif change.lossy and not self._allowed.lossy:
            why = "it changes the precision of the model; --allow-lossy allows it"
        elif change.other_work and not self._allowed.other_work:
            why = "it changes the requests, so the tokens cannot be compared; --tokens any allows it"
        overrides = (*current.configuration.overrides, *change.overrides)
        wanted = None
        try:
            wanted = self._composed.get(overrides) or configuration(self._values, overrides)
            self._composed[overrides] = wanted
        except ConfigError as error:
            why = why or f"refused: {error.fact}"
        if why:
            self.leave_out(change, why)
        return None if why else wanted

    def leave_out(self, change: Change, why: str) -> None:
        """Record why a change is not tried; for a combination, its parts say it."""
        left_out = NotTried(change.overrides, change.source, why)
        if not change.parts and left_out not in self.not_tried:
            self.not_tried.append(left_out)

    # --- what happened to a change -----------------------------------------------------------------------------------------

    def begin(self, change: Change, wanted: Configuration) -> None:
        """Note that a change is tried."""
        self._changes.add(change.key)
        self._configurations.add(wanted.signature)
        self._paired += bool(change.parts) and not change.together

    def keep(self, change: Change) -> None:
        """Note that a change was kept; with a combination, its parts were."""
        for part in (change, *change.parts):
            self._changes.add(part.key)
            self._alone.pop(part.key, None)

    def reject(self, change: Change, kept: int, *, slow: bool, gain: float) -> None:
        """Note that a change was not kept. `slow`: only because it was not better."""
        if change.together:
            self._apart = kept
        if not slow or change.parts:
            return
        self._slow[change.key] = kept if change.key not in self._slow else _NEVER_AGAIN
        self._alone[change.key] = (change, gain)


def _findings(current: Start) -> Sequence[Any]:
    profiled = current.profiled
    trace = Missing("not profiled") if profiled is None else profiled.analysis.trace
    return () if isinstance(trace, Missing) or not trace.complete else trace.findings
