"""The search: try the most promising change, keep it if it holds, analyze the result, continue.

How errors are controlled. A change is judged once, by `compare`, after a number of runs that is fixed in advance; before that,
its first run can only end it (not better, other tokens, a constraint), never keep it. Runs of the two sides alternate. Many
changes are tried, so one may be kept by chance, and the gains of kept changes are likely too large. Therefore the claim about the
whole search comes from its end: fresh runs of the base and of the best configuration, alternating, judged once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llm_perf_opt.analysis.tuning.calibration import CalibrationPoint, calibration_rows
from llm_perf_opt.analysis.tuning.candidates import Change, Prediction, prediction
from llm_perf_opt.analysis.tuning.combinations import joint_prediction
from llm_perf_opt.analysis.tuning.deciding import SMALLEST, Decision, decide
from llm_perf_opt.analysis.tuning.goals import GOALS, Constraint, Goal, in_ns
from llm_perf_opt.analysis.tuning.logits import beyond, check_words
from llm_perf_opt.analysis.tuning.measures import broken, level_of, not_better, value_in
from llm_perf_opt.analysis.tuning.outcomes import distance_of, trial_point
from llm_perf_opt.analysis.tuning.records import Ending, NotTried, Step
from llm_perf_opt.analysis.tuning.tokens import TokenCheck, Tried, check_tokens
from llm_perf_opt.config.runtimes import Lever
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import percentage
from llm_perf_opt.core.warnings import NOISE
from llm_perf_opt.workflows.tune_candidates import Allowed, Candidates, Start, Wanted
from llm_perf_opt.workflows.tune_runs import Configuration, OutOfBudgetError, Recorder, folder_name

_BUDGET_ENDED = "the budget ended before the change could be judged"
TOGETHER = "together"
"""What runs of independent findings that are tried as one step are recorded for."""
_ONLY_STEP = "only one change was tried, so its gain was not chosen from several and its own comparison is the claim"
_NO_ROOM = "it does not fit into the budget; --resume with a larger --budget tries it"


@dataclass(frozen=True)
class Rules:
    """What the search is asked to do."""

    goal: Goal
    constraints: tuple[Constraint, ...] = ()
    tokens: str = "same"
    allow_lossy: bool = False
    runs: int = 1
    """Runs per side of a decision."""
    top: int | None = None
    max_steps: int | None = None
    max_logit_diff: float | None = None


@dataclass(frozen=True)
class Place:
    """A configuration of the search, with the runs of it that may be compared."""

    configuration: Configuration
    runs: tuple[Tried, ...]
    """In the order they were made."""
    profiled: Tried | None = None
    """The run whose findings are used."""

    @property
    def analyses(self) -> list[Any]:
        """The analyses of its runs."""
        return [run.analysis for run in self.runs]


@dataclass
class Progress:
    """What the search has found so far."""

    steps: list[Step] = field(default_factory=list)
    not_tried: list[NotTried] = field(default_factory=list)
    points: list[CalibrationPoint] = field(default_factory=list)
    ending: Ending = "running"
    why: str = ""


class Search:
    """A greedy search from a base."""

    def __init__(
        self,
        rules: Rules,
        values: Mapping[str, Any],
        base: Place,
        recorder: Recorder,
        levers: Sequence[Lever] = (),
        calibration: Sequence[CalibrationPoint] = (),
    ) -> None:
        self._rules, self._recorder = rules, recorder
        self._rows = {row.finding: row for row in calibration_rows(calibration)}
        self.base = self.current = base
        self._reference = base.runs[0]
        """The run whose tokens a lossless change must reproduce."""
        self._over_budget = False
        """Whether a change was left out because it did not fit into the budget."""
        allowed = Allowed(rules.allow_lossy, rules.tokens == "any", rules.top)
        self._candidates = Candidates(allowed, values, base.configuration, levers, self._rows)
        self.progress = Progress(not_tried=self._candidates.not_tried)
        self.on_step: Callable[[Step], None] = lambda _: None

    # --- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Try changes until none is left that fits into the budget, or the number of steps is reached."""
        while self._rules.max_steps is None or len(self.progress.steps) < self._rules.max_steps:
            change = self._next()
            if change is None and self._over_budget:
                self._end("budget", "no further change fits into the budget (--budget)")
                return
            if change is None:
                self._end("nothing left", "no further change promises an improvement")
                return
            self._try(*change)
        self._end("max steps", f"--max-steps={self._rules.max_steps} was reached")

    def _end(self, ending: Ending, why: str) -> None:
        self.progress.ending, self.progress.why = ending, why

    @property
    def goal(self) -> Goal:
        """What the next step improves: the figure of the first constraint that is not met, else the objective."""
        unmet = broken(self._rules.constraints, self.current.analyses)
        return GOALS[unmet[0].goal] if unmet else self._rules.goal

    def _next(self) -> Wanted | None:
        """Return what to try next."""
        start = Start(self.current.configuration, self.current.runs[-1], self.current.profiled)
        return self._candidates.next(start, self.goal, self._kept, self._combines)

    @property
    def _kept(self) -> int:
        return sum(step.kept for step in self.progress.steps)

    def _combines(self, together: Wanted, single: Sequence[Wanted]) -> bool:
        """Return whether to try independent findings together: if the budget does not suffice for one after the other.

        A resumed search does what it did before: the runs of a combination are recorded as such.
        """
        recorder, first = self._recorder, single[0][1]
        if recorder.has(together[1], TOGETHER) or recorder.has(first):
            return recorder.has(together[1], TOGETHER)
        each = self._rules.runs * recorder.expected_s(self.current.configuration, first)
        each += recorder.compiling_s(first) + recorder.profiled_s
        return recorder.left_s < len(single) * each + self.reserve_s(together[1])

    # --- one step --------------------------------------------------------------------------------------------------------

    def _try(self, change: Change, wanted: Configuration) -> None:
        goal, number = self.goal, len(self.progress.steps) + 1
        self._candidates.begin(change, wanted)
        step = Step(change.overrides, change.source, False, "", goal.name, self._prediction(change, goal), lossy=change.lossy)
        trial = _Trial(self, change, wanted, number)
        try:
            step = trial.judged(step, goal)
            self._learn(change, trial)
        except OutOfBudgetError:  # a cheaper change may still fit
            self._over_budget = True
            if not trial.runs:
                self._candidates.leave_out(change, _NO_ROOM)
                return
            step = replace(trial.described(step, goal), why=_BUDGET_ENDED)
        if not step.kept:
            self.current = replace(self.current, runs=(*self.current.runs, *trial.again))
            self._candidates.reject(change, self._kept, slow=trial.slow, gain=step.gain)
            self._add(step)
            return
        self._candidates.keep(change)
        self._recorder.changes_from(wanted)
        self.current = self._analyzed(wanted, trial.runs, number, change)
        if change.lossy:
            self._reference = trial.runs[0]
        best = self.current.profiled or trial.runs[-1]
        self._add(replace(step, run=best.path, distance=distance_of(best, goal)))

    def _add(self, step: Step) -> None:
        self.progress.steps.append(step)
        self.on_step(step)

    def _prediction(self, change: Change, goal: Goal) -> Prediction | None:
        level, timings = level_of(self.current.analyses, goal), self.current.runs[-1].timings
        ns = None if isinstance(level, Missing) else in_ns(goal, level)
        if ns is None or isinstance(timings, Missing) or (change.parts and not change.together):
            return None
        findings = [part.finding for part in (change.parts or (change,))]
        return joint_prediction(
            [None if finding is None else prediction(finding, goal, ns, timings, self._rows) for finding in findings], ns
        )

    def _analyzed(self, wanted: Configuration, runs: Sequence[Tried], number: int, change: Change) -> Place:
        """Return the new place, with the findings of a profiled run if the base has any."""
        if self.base.profiled is None:
            return Place(wanted, tuple(runs))
        try:
            found = self._recorder.run(
                wanted, folder_name(number, change.text, "profile"), profiled=True, reserve_s=self.reserve_s(wanted)
            )
        except OutOfBudgetError:
            return Place(wanted, tuple(runs))
        return Place(wanted, tuple(runs)) if isinstance(found, Missing) else Place(wanted, (*runs, found), found)

    def reserve_s(self, best: Configuration) -> float:
        """Return the time that confirming a configuration takes."""
        return self._rules.runs * self._recorder.expected_s(self.base.configuration, best)

    def trial_reserve_s(self, wanted: Configuration) -> float:
        """Return the time that a trial must leave. The first leaves none: if it stays the only one, it needs no fresh runs."""
        return self.reserve_s(wanted) if self.progress.steps else 0.0

    def _learn(self, change: Change, trial: "_Trial") -> None:
        """Keep the prediction and the measurement of a finding."""
        before = trial.before[: len(trial.runs)]  # one of the next pair may be there already
        point = trial_point(change.finding, before, trial.runs) if change.finding and trial.runs else None
        if point is not None:
            self.progress.points.append(point)

    def compared(self, found: Tried, *, lossy: bool) -> tuple[TokenCheck, str]:
        """Compare the tokens and logits of a run with those of the base; return also why it is refused, if it is."""
        tokens = check_tokens(self._reference, found, self.base.runs[0])
        altered = lossy or any(step.kept and step.lossy for step in self.progress.steps)
        why = "" if lossy else tokens.refused(self._rules.tokens)
        return tokens, why or (beyond(tokens.logits, self._rules.max_logit_diff) if altered else "")

    # --- the end -----------------------------------------------------------------------------------------------------------

    def confirm(self) -> tuple[bool | None, str, Decision | None]:
        """Compare base and best in fresh runs. Return whether the gain is confirmed (None: not checked), why, and how."""
        if self.current.configuration == self.base.configuration:
            return None, "nothing was kept", None
        kept = [step for step in self.progress.steps if step.kept]
        lossy = any(step.lossy for step in kept)
        purpose = f"confirm {self.current.configuration.signature}"
        sides: list[list[Tried]] = [[], []]
        try:
            self._recorder.require(self.reserve_s(self.current.configuration), self.base.configuration, purpose)
            for number in range(1, self._rules.runs + 1):
                for side, place, name in zip(sides, (self.base, self.current), ("base", "best"), strict=True):
                    found = self._recorder.run(place.configuration, f"confirm-{name}-{number}", purpose=purpose)
                    if isinstance(found, Missing):
                        return None, f"a fresh run of the {name} failed: {found.why}", None
                    why = "" if lossy and name == "base" else self.compared(found, lossy=lossy)[1]
                    if why:
                        return False, f"a fresh run of the {name}: {why}", None
                    side.append(found)
        except OutOfBudgetError:
            rest, only = self._rest(sum(map(len, sides))), self._only_decision()
            base, best = ([run.analysis for run in side] for side in sides)
            if only is None or (against := not_better(base, best, GOALS[kept[0].goal])):
                return None, rest if only is None else f"{rest}; in those that were made, {against}", None
            return True, f"{only.why}; {_ONLY_STEP}; {rest}", only
        self.base = replace(self.base, runs=(*self.base.runs, *sides[0]))
        self.current = replace(self.current, runs=(*self.current.runs, *sides[1]))
        keys = [text.partition("=")[0] for step in kept for text in step.change]
        goal = GOALS[kept[0].goal]  # a constraint that the base breaks comes first, and may cost some of the objective
        analyses = [[run.analysis for run in side] for side in sides]
        decision = decide(analyses[0], analyses[1], goal, keys, other_model=lossy)
        return decision.better, decision.why, decision

    def _rest(self, made: int) -> str:
        """Return how many fresh runs were made before the budget ended, and how to make the others."""
        needed = 2 * self._rules.runs
        command = self._recorder.resume_command(self.reserve_s(self.current.configuration) * (needed - made) / needed)
        if not made:
            return f"the budget does not suffice for the {needed} fresh runs; `{command}` makes them"
        return f"the budget ended after {made} of {needed} fresh runs; `{command}` makes the rest"

    def _only_decision(self) -> Decision | None:
        """Return the decision on the only change that was tried, which may be claimed: it was made once, before them."""
        steps = self.progress.steps
        return steps[0].decision if len(steps) == 1 and steps[0].kept else None


class _Trial:
    """The runs of one change and of the configuration before it."""

    def __init__(self, search: Search, change: Change, wanted: Configuration, number: int) -> None:
        self._search, self._change, self._wanted, self._number = search, change, wanted, number
        self.runs: list[Tried] = []
        self.before: list[Tried] = [search.current.runs[-1]]
        self.again: list[Tried] = []
        """New runs of the configuration before it."""
        self.slow = False
        """Whether it was rejected because it was not better."""
        self._tokens: TokenCheck | None = None
        self._purpose = TOGETHER if change.together else ""
        """What the runs of the change are recorded for."""
        self._doubted = False
        """Whether its first run was not better, but on a noisy machine, so that the second one decides whether to go on."""

    def judged(self, step: Step, goal: Goal) -> Step:
        """Run the change as often as needed and return the step with the decision. What cannot be judged is not begun."""
        search, others = self._search, self._search._rules.runs - 1
        needed = others * search._recorder.expected_s(search.current.configuration, self._wanted)
        needed += search._recorder.expected_s(self._wanted) + search._recorder.compiling_s(self._wanted)
        needed += search.trial_reserve_s(self._wanted)
        search._recorder.require(needed, self._wanted, self._purpose)
        for number in range(1, self._search._rules.runs + 1):
            if why := self._run_before(number):
                return replace(self.described(step, goal), why=f"the configuration before it could not be run again: {why}")
            found = self._run(self._wanted, number, self._purpose)
            if isinstance(found, Missing):
                return replace(self.described(step, goal), why=f"it failed: {found.why}")
            self.runs.append(found)
            why = self._refused(found) or (self._hopeless(found, goal) if number == 1 + self._doubted else "")
            if why:
                return replace(self.described(step, goal), why=why)
        return self._decided(step, goal)

    def _run_before(self, number: int) -> str:
        """Run the configuration before it again; the first time only if its last run is of an earlier process. Return why not."""
        search, purpose = self._search, f"{'first' if number == 1 else 'before'} {self._wanted.signature}"
        if number == 1 and not search._recorder.is_from_before(self.before[-1], self._wanted, purpose, self._purpose):
            return ""
        found = self._run(search.current.configuration, f"before-{number}", purpose)
        if isinstance(found, Missing):
            return found.why
        self.again.append(found)
        self.before = [*(self.before if number > 1 else []), found]
        return ""

    def _run(self, wanted: Configuration, run: int | str, purpose: str = "") -> Maybe[Tried]:
        name = folder_name(self._number, self._change.text, run)
        search = self._search
        return search._recorder.run(wanted, name, reserve_s=search.trial_reserve_s(self._wanted), purpose=purpose)

    def _refused(self, found: Tried) -> str:
        """Return why the change may not be kept whatever it saves: its tokens, or a constraint."""
        rules = self._search._rules
        self._tokens, why = self._search.compared(found, lossy=self._change.lossy)
        if why:
            return f"rejected: {why}"
        unmet = {one.text for one in broken(rules.constraints, self._search.current.analyses)}
        for constraint in rules.constraints:
            why = constraint.broken_by(value_in(found.analysis, GOALS[constraint.goal]))
            if why and constraint.text not in unmet:
                return f"breaks the constraint {why}"
        return ""

    def _hopeless(self, found: Tried, goal: Goal) -> str:
        """Return why no further run is made: the first one is not better than the one before it."""
        before, after = (value_in(run.analysis, goal) for run in (self.before[-1], found))
        if isinstance(before, Missing) or isinstance(after, Missing):
            missing = before if isinstance(before, Missing) else after
            return f"{goal.name} is not known: {missing.why if isinstance(missing, Missing) else ''}"
        gain = after / before - 1 if goal.higher_is_better else 1 - after / before
        if gain >= SMALLEST or self._doubts(found):
            return ""
        self.slow = True
        change = percentage(after / before - 1, 1, signed=True)
        return (
            f"not better in its {'second' if self._doubted else 'first'} run: {goal.text(before)} → {goal.text(after)}, {change}"
        )

    def _doubts(self, found: Tried) -> bool:
        """Return whether a finding gets a second chance: something else used the machine during its first run."""
        findings = [part.finding for part in (self._change.parts or (self._change,)) if part.finding]
        noisy = any(warning.id in NOISE for run in (self.before[-1], found) for warning in run.analysis.warnings)
        first = not self._doubted and self._search._rules.runs > 1
        self._doubted = self._doubted or (first and noisy and bool(findings))
        return first and self._doubted

    def _decided(self, step: Step, goal: Goal) -> Step:
        keys = [text.partition("=")[0] for text in self._change.overrides]
        sides = [[run.analysis for run in runs] for runs in (self.before, self.runs)]
        decision = decide(sides[0], sides[1], goal, keys, other_model=self._change.lossy)
        self.slow = not decision.better
        logits = self._tokens.logits if self._tokens and self._tokens.ties else None
        why = decision.why if logits is None or isinstance(logits, Missing) else f"{decision.why}; {check_words(logits)}"
        return replace(self.described(step, goal), kept=decision.better, why=why, decision=decision)

    def described(self, step: Step, goal: Goal) -> Step:
        """Return the step with what was measured so far."""
        tokens = self._tokens
        levels = [level_of([run.analysis for run in runs], goal) for runs in (self.before, self.runs)]
        before, after = (None if isinstance(level, Missing) else in_ns(goal, level) for level in levels)
        return replace(
            step,
            run=self.runs[-1].path if self.runs else "",
            runs=tuple(run.path for run in self.runs),
            against=tuple(run.path for run in self.before),
            same_tokens=tokens.same if tokens else None,
            tokens_why=tokens.why if tokens else "",
            ties=tokens.ties if tokens else False,
            logits=tokens.logits if tokens else None,
            agreement=None if tokens is None or isinstance(tokens.agreement, Missing) else tokens.agreement,
            before_ns=before,
            measured_ns=after,
            distance=distance_of(self.runs[-1], goal) if self.runs else None,
        )
