"""What became of findings that were tried: predicted against measured, on the unprofiled clock of both runs."""

from dataclasses import dataclass

from llm_perf_opt.analysis.separable import steps_unavailable
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE, PREFILL
from llm_perf_opt.core.records import CleanTimings, Missing


@dataclass(frozen=True)
class Trial:
    """One finding, tried alone on top of the run's own configuration. Times are per unit: a token, or a prefill."""

    id: str
    overrides: tuple[str, ...]
    unit: str
    run: str
    """The folder of the run that tried it; empty where none was begun."""
    why: str
    """Why there is no measurement; empty where there is one."""
    predicted_saving_ns: int | None
    """From `before_ns`, whichever run that was measured in; with its bounds. Not measured: as the finding says."""
    predicted_low_ns: int | None
    predicted_high_ns: int | None
    before_ns: int | None = None
    after_ns: int | None = None
    spread_ns: int | None = None
    """Half the distance of the quartiles of both runs, added: a saving below it is not real."""
    kind: str = "latency"
    """Of the finding. For throughput, times are a token's share of the batch's step, and no request is faster."""

    @property
    def saving_ns(self) -> int | None:
        """As measured."""
        return None if self.before_ns is None or self.after_ns is None else self.before_ns - self.after_ns

    @property
    def predicted_ns(self) -> int | None:
        """The time that was predicted."""
        if self.before_ns is None or self.predicted_saving_ns is None:
            return None
        return self.before_ns - self.predicted_saving_ns

    @property
    def error(self) -> float | None:
        """How far the predicted time is from the measured one, as a share of it; above zero: slower was predicted."""
        if self.predicted_ns is None or not self.after_ns:
            return None
        return self.predicted_ns / self.after_ns - 1


@dataclass(frozen=True)
class Verification:
    """verify.json."""

    base: str
    """The run that the trials are compared with."""
    remeasured: str
    """Why the base was measured again; empty where the run's own times stand."""
    trials: tuple[Trial, ...]


def unmeasured(finding: Finding, why: str, run: str = "") -> Trial:
    """A finding that could not be tried."""
    return Trial(
        finding.id, tuple(finding.overrides), finding.saving_per, run, why,
        finding.saving_ns, finding.saving_low_ns, finding.saving_high_ns, kind=finding.kind,
    )  # fmt: skip


def measured(finding: Finding, base: CleanTimings, tried: CleanTimings, run: str) -> Trial:
    """Compare the finding's stage in both runs. For throughput, a token's time is its share of the batch's step."""
    before, after = (_unit_times(finding, timings) for timings in (base, tried))
    if isinstance(before, Missing) or isinstance(after, Missing):
        whys = {"before": before, "with the change": after}
        return unmeasured(finding, "; ".join(f"{when}: {it.why}" for when, it in whys.items() if isinstance(it, Missing)), run)
    spread = sum(percentile(values, 0.75) - percentile(values, 0.25) for values in (before, after)) / 2
    before_ns = round(percentile(before, 0.5))
    return Trial(
        finding.id, tuple(finding.overrides), finding.saving_per, run, "", *predicted_saving(finding, before_ns),
        before_ns=before_ns, after_ns=round(percentile(after, 0.5)), spread_ns=round(spread), kind=finding.kind,
    )  # fmt: skip


def predicted_saving(finding: Finding, before_ns: int) -> tuple[int | None, int | None, int | None]:
    """What the finding says is saved of a time before that may be another than its own: expected, least and most.

    A finding that predicts the time after stands by it, however the base has moved; one that predicts a saving stands by that.
    """
    if finding.before_ns is None or finding.after_ns is None or finding.after_low_ns is None or finding.after_high_ns is None:
        return finding.saving_ns, finding.saving_low_ns, finding.saving_high_ns
    unmoved = before_ns - round(finding.kept * (before_ns - finding.before_ns))
    return unmoved - finding.after_ns, unmoved - finding.after_high_ns, unmoved - finding.after_low_ns


def _unit_times(finding: Finding, timings: CleanTimings) -> list[float] | Missing:
    share = timings.workload.batch_size if finding.kind == "throughput" else 1
    found: list[float] = []
    if finding.stage == PREFILL:
        found = [iteration.prefill_ns / share for iteration in timings.iterations]
    elif finding.stage == DECODE and finding.saving_per != DECODE:
        untold = steps_unavailable(timings) if finding.counted else None
        if untold is not None:
            return untold
        # The steps that the prediction is of: later ones have a longer context, and the host its moods.
        taken = [one.steps_ns[: finding.counted or None] for one in timings.iterations if one.steps_ns]
        found = [sum(steps) / len(steps) / share for steps in taken]
    return found or Missing(f"{finding.stage} was not timed")
