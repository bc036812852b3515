"""The outcome of findings that were tried: predicted and measured times, both from unprofiled runs."""

from dataclasses import dataclass

from llm_perf_opt.analysis.separable import stages_unavailable, steps_unavailable
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE, PREFILL
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.core.stages import REQUEST


@dataclass(frozen=True)
class Trial:
    """One finding, tried alone on the run's configuration. Times are per unit: a token or a prefill."""

    id: str
    overrides: tuple[str, ...]
    unit: str
    run: str
    """The folder of the trial; empty if none was started."""
    why: str
    """Why there is no measurement; empty if there is one."""
    predicted_saving_ns: int | None
    """Relative to `before_ns`, with its bounds. Without a measurement: the finding's own figure."""
    predicted_low_ns: int | None
    predicted_high_ns: int | None
    before_ns: int | None = None
    after_ns: int | None = None
    spread_ns: int | None = None
    """Half the interquartile ranges of both runs, added: a smaller saving is noise."""
    kind: str = "latency"
    """Kind of the finding. For throughput, times are per token (step time / batch), and no request is faster."""
    same_tokens: bool | None = None
    """Whether both runs produced the same tokens; None if they ran other requests, or their repeats differ."""
    repeats: int | None = None
    """Repeats of the run that has fewer."""

    @property
    def saving_ns(self) -> int | None:
        """The measured saving."""
        return None if self.before_ns is None or self.after_ns is None else self.before_ns - self.after_ns

    @property
    def predicted_ns(self) -> int | None:
        """The predicted time."""
        if self.before_ns is None or self.predicted_saving_ns is None:
            return None
        return self.before_ns - self.predicted_saving_ns

    @property
    def error(self) -> float | None:
        """Relative error of the predicted time; positive if the prediction was too slow."""
        if self.predicted_ns is None or not self.after_ns:
            return None
        return self.predicted_ns / self.after_ns - 1


@dataclass(frozen=True)
class Verification:
    """The content of verify.json."""

    base: str
    """The run that trials are compared with."""
    remeasured: str
    """Why the base was measured again; empty if the run's own times are used."""
    trials: tuple[Trial, ...]


def unmeasured(finding: Finding, why: str, run: str = "") -> Trial:
    """Return a trial without measurement."""
    return Trial(
        finding.id, tuple(finding.overrides), finding.saving_per, run, why,
        finding.saving_ns, finding.saving_low_ns, finding.saving_high_ns, kind=finding.kind,
    )  # fmt: skip


def measured(finding: Finding, base: CleanTimings, tried: CleanTimings, run: str) -> Trial:
    """Compare the finding's stage in both runs. For throughput, the time per token is the step time divided by the batch."""
    before, after = (unit_times(finding, timings) for timings in (base, tried))
    if isinstance(before, Missing) or isinstance(after, Missing):
        times = {"before": before, "with the change": after}
        reasons = [f"{when}: {value.why}" for when, value in times.items() if isinstance(value, Missing)]
        return unmeasured(finding, "; ".join(reasons), run)
    spread = sum(percentile(values, 0.75) - percentile(values, 0.25) for values in (before, after)) / 2
    before_ns = round(percentile(before, 0.5))
    return Trial(
        finding.id, tuple(finding.overrides), finding.saving_per, run, "", *predicted_saving(finding, before_ns),
        before_ns=before_ns, after_ns=round(percentile(after, 0.5)), spread_ns=round(spread), kind=finding.kind,
        same_tokens=_same_tokens(base, tried), repeats=min(len(before), len(after)),
    )  # fmt: skip


def _same_tokens(base: CleanTimings, tried: CleanTimings) -> bool | None:
    if base.workload != tried.workload or not (base.tokens_repeat and tried.tokens_repeat):
        return None
    return base.tokens_sha256 == tried.tokens_sha256


def predicted_saving(finding: Finding, before_ns: int) -> tuple[int | None, int | None, int | None]:
    """Return the predicted saving (expected, least, most) for a newly measured time before.

    If the finding predicts the time after, that time stays as predicted; if it predicts a saving, the saving does.
    """
    if finding.before_ns is None or finding.after_ns is None or finding.after_low_ns is None or finding.after_high_ns is None:
        return finding.saving_ns, finding.saving_low_ns, finding.saving_high_ns
    unmoved = before_ns - round(finding.kept * (before_ns - finding.before_ns))
    return unmoved - finding.after_ns, unmoved - finding.after_high_ns, unmoved - finding.after_low_ns


def unit_times(finding: Finding, timings: CleanTimings) -> list[float] | Missing:
    """Return the time per unit of the finding's stage, one value per repeat."""
    share = timings.workload.batch_size if finding.kind == "throughput" else 1
    found: list[float] = []
    unavailable = None if finding.stage == REQUEST else stages_unavailable(timings)
    if unavailable is not None:
        return unavailable
    if finding.stage == PREFILL:
        found = [iteration.prefill_ns / share for iteration in timings.iterations]
    elif finding.stage == REQUEST:
        found = [iteration.total_ns / share for iteration in timings.iterations]
    elif finding.stage == DECODE and finding.saving_per != DECODE:
        unavailable = steps_unavailable(timings) if finding.counted else None
        if unavailable is not None:
            return unavailable
        # Only the steps that the prediction covers: later ones have a longer context.
        covered = [iteration.steps_ns[: finding.counted or None] for iteration in timings.iterations if iteration.steps_ns]
        found = [sum(steps) / len(steps) / share for steps in covered]
    return found or Missing(f"{finding.stage} was not timed")
