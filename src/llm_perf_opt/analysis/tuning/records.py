"""The result of a search: every change that was tried, what was kept, and whether fresh runs confirm the gain."""

from dataclasses import dataclass, field
from typing import Any, Literal

from llm_perf_opt.analysis.tuning.calibration import CalibrationPoint
from llm_perf_opt.analysis.tuning.candidates import Prediction
from llm_perf_opt.analysis.tuning.deciding import Decision
from llm_perf_opt.analysis.tuning.logits import LogitCheck
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.weight_records import TokenAgreement

ALREADY = "the run already has this setting"
"""Why a change is not tried that changes nothing."""
Ending = Literal["nothing left", "budget", "max steps", "interrupted", "running"]


@dataclass(frozen=True)
class StageDistance:
    """How far a stage is from its roofline time."""

    times: float
    roofline_ns: float
    """Of the whole stage; for decode, of all steps."""


@dataclass(frozen=True)
class Step:
    """One change that was tried on top of the configuration before it."""

    change: tuple[str, ...]
    source: str
    """The id of the finding, or the name of the lever."""
    kept: bool
    why: str
    """What decided."""
    goal: str = "tpot"
    """The figure that was compared: the objective, or a constraint that the configuration before did not meet."""
    predicted: Prediction | None = None
    decision: Decision | None = None
    run: str = ""
    """Folder of its best documented run: profiled if it was kept; empty if none was started."""
    runs: tuple[str, ...] = ()
    """Every run of it that the decision is based on."""
    against: tuple[str, ...] = ()
    lossy: bool = False
    same_tokens: bool | None = None
    tokens_why: str = ""
    agreement: TokenAgreement | None = None
    ties: bool = False
    """Whether the tokens differ by rounding only."""
    logits: Maybe[LogitCheck] | None = None
    """Compared with those of the base, with the same tokens fed; None if nothing was run."""
    distance: StageDistance | None = None
    """From the roofline time of the stage; None if it is unknown."""
    measured_ns: int | None = None
    before_ns: int | None = None

    @property
    def gain(self) -> float:
        """The share of the time that it saved; 0 if it is unknown."""
        return 1 - self.measured_ns / self.before_ns if self.measured_ns and self.before_ns else 0.0


@dataclass(frozen=True)
class NotTried:
    """A change that was left out."""

    change: tuple[str, ...]
    source: str
    why: str


@dataclass(frozen=True)
class ConstraintLine:
    """A constraint, at the base and at the best configuration."""

    text: str
    base: str
    best: str
    met: bool


@dataclass(frozen=True)
class TuneResult:
    """Everything that the page shows."""

    base: str
    """The run that the search started from."""
    best: str
    """A run of the best configuration; the base if nothing better was found."""
    objective: str
    unit: str
    steps: tuple[Step, ...]
    ending: Ending
    why: str
    """Why the search ended."""
    overrides: tuple[str, ...] = ()
    """What differs from the base in the best configuration."""
    confirmation: Decision | None = None
    """Base against best in fresh runs that no step was decided with; None if there were none."""
    confirmed: bool | None = None
    """None: not checked."""
    confirmed_why: str = ""
    not_tried: tuple[NotTried, ...] = ()
    constraints: tuple[ConstraintLine, ...] = ()
    base_value: float | None = None
    """The objective in the base: in the runs that `confirmation` compares if it is about the objective, else in the first."""
    remeasured: bool = False
    """Whether the base is an earlier run that was measured again."""
    recorded_value: float | None = None
    """The objective in that earlier run."""
    base_distance: StageDistance | None = None
    spent_s: float = 0.0
    budget_s: float = 0.0
    runs_per_side: int = 1
    command: tuple[str, ...] = ()
    """Repeats the best configuration."""
    diff: tuple[tuple[str, str, str], ...] = ()
    """Setting, value of the base, value of the best."""
    calibration: tuple[CalibrationPoint, ...] = ()
    """Earlier and new trials on this kind of device."""
    device: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def kept(self) -> list[Step]:
        """The steps that lead to the best configuration."""
        return [step for step in self.steps if step.kept]

    @property
    def constraints_met(self) -> bool:
        """Whether the best configuration meets every constraint."""
        return all(line.met for line in self.constraints)


def tune_json(found: TuneResult) -> dict[str, Any]:
    """Return the result as `llm-perf tune --json` prints it."""
    return {
        "base": found.base,
        "best": found.best,
        "objective": found.objective,
        "steps": [_step_json(step, found.unit) for step in found.steps],
        "base_value": found.base_value,
        "recorded_value": found.recorded_value,
        "ending": found.ending,
        "why": found.why,
        "overrides": list(found.overrides),
        "confirmed": found.confirmed,
        "confirmed_why": found.confirmed_why,
        "confirmation": found.confirmation,
        "constraints": list(found.constraints),
        "constraints_met": found.constraints_met,
        "not_tried": list(found.not_tried),
        "spent_s": round(found.spent_s, 3),
        "budget_s": found.budget_s,
        "runs_per_side": found.runs_per_side,
        "command": list(found.command),
        "notes": list(found.notes),
    }


def _step_json(step: Step, unit: str) -> dict[str, Any]:
    decision, predicted = step.decision, step.predicted
    return {
        "change": " ".join(step.change),
        "predicted_ns": predicted.expected_ns if predicted else None,
        "measured_ns": step.measured_ns,
        "kept": step.kept,
        "why": step.why,
        "source": step.source,
        "goal": step.goal,
        "before_ns": step.before_ns,
        "predicted_low_ns": predicted.low_ns if predicted else None,
        "predicted_high_ns": predicted.high_ns if predicted else None,
        "predicted_from_trials": predicted.trials if predicted else None,
        "measured": decision.after if decision else None,
        "unit": unit,
        "change_low": decision.low if decision else None,
        "change_high": decision.high if decision else None,
        "run": step.run,
        "runs": list(step.runs),
        "against": list(step.against),
        "lossy": step.lossy,
        "same_tokens": step.same_tokens,
        "agreement": step.agreement,
        "ties": step.ties,
        "logits": None if isinstance(step.logits, Missing) else step.logits,
        "logits_why": step.logits.why if isinstance(step.logits, Missing) else "",
        "times_roofline": step.distance.times if step.distance else None,
        "cautions": list(decision.cautions) if decision else [],
    }
