"""What a search may change next: findings with a predicted saving, then levers without one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE, PREFILL
from llm_perf_opt.analysis.tuning.calibration import CalibrationRow
from llm_perf_opt.analysis.tuning.goals import Goal
from llm_perf_opt.analysis.verification import predicted_saving, unit_times
from llm_perf_opt.config.runtimes import Lever
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.core.remedy_records import EngineRemedy

LOSSY_WORDS = ("dtype", "quant")
"""A setting with one of these in the last part of its name changes the precision: model.dtype, runtime.engine.quantization."""
_TRUST = {"high": 1.0, "medium": 0.75, "low": 0.5}
"""How much of a predicted saving counts when findings are ranked, by confidence; calibration replaces it."""
_MOST_TRUST = 1.5
_STAGES = {"tpot": (DECODE,), "ttft": (PREFILL,)}
"""Stages whose findings can improve a goal; all others can improve the rest."""


@dataclass(frozen=True)
class Change:
    """Overrides that are tried together."""

    overrides: tuple[str, ...]
    source: str
    """The id of the finding, or the name of the lever."""
    lossy: bool = False
    other_work: bool = False
    """Whether it changes the requests, such as the batch, so that tokens cannot be compared."""
    finding: Finding | None = None
    parts: tuple["Change", ...] = ()
    """The changes that it consists of; empty for a single one."""
    together: bool = False
    """Whether its parts are independent findings. Otherwise, parts are changes that were not better alone."""

    @property
    def key(self) -> frozenset[str]:
        """What identifies it: its overrides, in any order."""
        return frozenset(self.overrides)

    @property
    def text(self) -> str:
        """Its overrides as typed."""
        return " ".join(self.overrides)


def finding_changes(findings: Sequence[Finding], goal: Goal, lossy: "Lossy", rows: Mapping[str, CalibrationRow]) -> list[Change]:
    """Return the findings that are settings and can improve the goal, the most promising first.

    Those that change the precision come last: the tokens of what follows are then those of another model.
    """
    stages = _STAGES.get(goal.name, ())
    found = []
    for finding in findings:
        throughput = finding.throughput is not None
        useful = goal.name == "throughput" if throughput else bool(finding.saving_high_ns) and goal.unit != "bytes"
        if finding.overrides and useful and (not stages or finding.stage in stages):
            found.append((promise(finding, rows), _change(finding, lossy)))
    return [change for _, change in sorted(found, key=lambda pair: (pair[1].lossy, -pair[0]))]


def promise(finding: Finding, rows: Mapping[str, CalibrationRow]) -> float:
    """Return the saving over a request that counts in the ranking: the predicted one times its confidence, or times the
    median of measured / predicted in earlier trials."""
    row = rows.get(finding.id)
    known = row is not None and row.low_ratio is not None
    trust = min(max(row.median_ratio, 0.0), _MOST_TRUST) if row is not None and known else _TRUST.get(finding.confidence, 0.5)
    line = finding.throughput
    weight = finding.weight_ns
    if line is not None:
        weight = round(max(line.step_ns / line.batch - line.step_after_ns / line.batch_after, 0.0) * finding.units)
    return weight * trust


def _change(finding: Finding, lossy: "Lossy") -> Change:
    overrides = tuple(finding.overrides)
    other = finding.throughput is not None or changes_work(overrides)
    return Change(overrides, finding.id, lossy.of(overrides), other, finding)


def lever_changes(levers: Iterable[Lever], goal: Goal, lossy: "Lossy") -> list[Change]:
    """Return every choice of every lever that can improve the goal."""
    return [
        Change(tuple(choice), lever.name, lever.lossy or lossy.of(choice), changes_work(choice))
        for lever in levers
        if _helps(lever, goal)
        for choice in lever.choices
    ]


def _helps(lever: Lever, goal: Goal) -> bool:
    if lever.throughput and goal.name not in ("throughput", "energy"):
        return False
    stages = _STAGES.get(goal.name, ())
    return not lever.stage or not stages or lever.stage in stages


def already(overrides: Iterable[str], timings: CleanTimings, env: Mapping[str, Any]) -> bool:
    """Return whether a run already had these settings, although its configuration left them to the framework."""
    waiting = env.get("waiting")
    ran = {
        "hardware.wait_policy": waiting.get("policy") if isinstance(waiting, Mapping) else None,
        "runtime.attn_implementation": timings.model.attention,
        "model.dtype": timings.model.dtype,
        "hardware.threads": str(timings.threads),
    }
    return all(ran.get(_key(text)) == text.partition("=")[2] for text in overrides)


def remedy_levers(remedies: Iterable[EngineRemedy]) -> list[Lever]:
    """Return the changes that an engine declares as levers, for those without a finding."""
    return [Lever(remedy.kind, (remedy.overrides,), lossy=remedy.alters_output) for remedy in remedies if remedy.overrides]


def changes_work(overrides: Iterable[str]) -> bool:
    """Return whether overrides change the requests."""
    keys = ("runtime.batch_size", "runtime.prompt_tokens", "runtime.num_new_tokens")
    return any(text.partition("=")[0] in keys or text.startswith("dataset.") for text in overrides)


class Lossy:
    """Knows which overrides change the precision of the model."""

    def __init__(self, levers: Iterable[Lever] = (), remedies: Iterable[EngineRemedy] = ()) -> None:
        self._keys = {_key(text) for lever in levers if lever.lossy for choice in lever.choices for text in choice}
        self._texts = {text for remedy in remedies if remedy.alters_output for text in remedy.overrides}

    def of(self, overrides: Iterable[str]) -> bool:
        """Return whether one of the overrides does."""
        return any(_key(text) in self._keys or text in self._texts or _changes_precision(text) for text in overrides)


def _changes_precision(override: str) -> bool:
    name = _key(override).rpartition(".")[2]
    return any(word in name for word in LOSSY_WORDS)


def _key(override: str) -> str:
    return override.partition("=")[0]


# --- predictions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The predicted time of the goal after a change; for throughput, the time per output token."""

    expected_ns: int
    low_ns: int
    high_ns: int
    trials: int = 0
    """Earlier trials that the interval comes from; 0: it is that of the finding."""


def prediction(
    finding: Finding, goal: Goal, level_ns: float, timings: CleanTimings, rows: Mapping[str, CalibrationRow]
) -> Prediction | None:
    """Return what a finding predicts for the goal; None if it predicts another figure. `level_ns`: the measured time before."""
    if goal.name not in ("tpot", "ttft", "throughput", "latency"):
        return None
    if finding.throughput is not None:
        return _larger_batch(finding, timings) if goal.name == "throughput" else None
    times = unit_times(finding, timings)
    if isinstance(times, Missing):
        return None
    before = percentile(times, 0.5)
    saving, low, high = predicted_saving(finding, round(before))
    if saving is None or low is None or high is None:
        return None
    row = rows.get(finding.id)
    bounds = row.bounds(saving) if row is not None else None
    low_saving, high_saving = sorted(bounds) if bounds else (low, high)
    every = unit_times(msgspec.structs.replace(finding, counted=0), timings)
    scale = 1.0 if isinstance(every, Missing) else percentile(every, 0.5) / before  # the covered steps, the first, may be slower
    per = scale * _per_goal(finding, goal, timings)
    after = [max(round(level_ns - value * per), 1) for value in (saving, high_saving, low_saving)]
    return Prediction(after[0], min(after), max(after), row.n if row is not None and bounds else 0)


def _per_goal(finding: Finding, goal: Goal, timings: CleanTimings) -> float:
    """Return by how much the goal's time falls per nanosecond that a unit of the finding saves."""
    if goal.name in _STAGES:
        return 1.0
    work = timings.workload
    return finding.units / (work.batch_size * work.new_tokens) if goal.name == "throughput" else float(finding.units)


def _larger_batch(finding: Finding, timings: CleanTimings) -> Prediction | None:
    """Return the time per output token at a larger batch: prefill grows with the batch, at best not at all."""
    line, work = finding.throughput, timings.workload
    if line is None:
        return None
    prefill = percentile([repeat.prefill_ns for repeat in timings.iterations], 0.5)
    tokens = line.batch_after * work.new_tokens
    grown = prefill * line.batch_after / line.batch
    ends = ((grown, line.step_after_ns), (prefill, line.step_after_low_ns), (grown, line.step_after_high_ns))
    expected, low, high = (round((first + step * work.decode_steps) / tokens) for first, step in ends)
    return Prediction(expected, low, high)
