"""How far predictions were off in earlier trials on this kind of device, by finding; and intervals that follow from it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.verification import Trial

COVERAGE = 0.8
"""Share of new trials that an interval from calibration is meant to contain."""
FEWEST = 9
"""Trials of a finding from which its interval comes from calibration: with n trials, the range between the smallest and the
largest ratio contains a new one in (n - 1) / (n + 1) of cases, whatever their distribution."""


@dataclass(frozen=True)
class CalibrationPoint:
    """One trial of a finding: predicted and measured."""

    finding: str
    device: str
    """The kind of device, such as NVIDIA H200."""
    model: str
    run: str
    """The folder of the trial; with the time and the finding it identifies the point."""
    made: str
    before_ns: int
    predicted_ns: int
    measured_ns: int
    stage: str = ""

    @property
    def sound(self) -> bool:
        """Whether its figures can be used: a file may be damaged."""
        return self.before_ns > 0 and self.predicted_ns > 0 and self.measured_ns > 0 and self.predicted_ns != self.before_ns

    @property
    def error(self) -> float:
        """Relative error of the predicted time; positive if the prediction was too slow."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def ratio(self) -> float:
        """The measured saving divided by the predicted one."""
        return (self.before_ns - self.measured_ns) / (self.before_ns - self.predicted_ns)


def point_of(trial: Trial, *, device: str, model: str, run: str, made: str) -> CalibrationPoint | None:
    """Return the point of a trial of a latency finding; None if it has no prediction or no measurement."""
    if trial.kind != "latency" or trial.before_ns is None or trial.after_ns is None or trial.predicted_ns is None:
        return None
    found = CalibrationPoint(trial.id, device, model, run, made, trial.before_ns, trial.predicted_ns, trial.after_ns, trial.unit)
    return found if found.sound else None


@dataclass(frozen=True)
class CalibrationRow:
    """The trials of one finding."""

    finding: str
    n: int
    median_error: float
    worst_error: float
    """The error that is farthest from zero."""
    median_ratio: float
    low_ratio: float | None
    """The ends of the interval of the saving, as a share of the predicted saving; None with fewer than `FEWEST` trials."""
    high_ratio: float | None

    def bounds(self, saving: float) -> tuple[float, float] | None:
        """Return the interval of a saving; None with too few trials."""
        if self.low_ratio is None or self.high_ratio is None:
            return None
        return saving * self.low_ratio, saving * self.high_ratio


def calibration_rows(points: Iterable[CalibrationPoint]) -> tuple[CalibrationRow, ...]:
    """Return a row per finding, the most tried first."""
    groups: dict[str, list[CalibrationPoint]] = {}
    for point in points:
        if point.sound:
            groups.setdefault(point.finding, []).append(point)
    rows = [_row(finding, members) for finding, members in groups.items()]
    return tuple(sorted(rows, key=lambda row: (-row.n, row.finding)))


def _row(finding: str, points: Sequence[CalibrationPoint]) -> CalibrationRow:
    errors, ratios = [point.error for point in points], sorted(point.ratio for point in points)
    low, high = _interval(ratios)
    return CalibrationRow(finding, len(points), percentile(errors, 0.5), max(errors, key=abs), percentile(ratios, 0.5), low, high)


def _interval(ratios: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the distribution-free interval of a further ratio at `COVERAGE`: two of the sorted ratios."""
    if len(ratios) < FEWEST:
        return None, None
    rank = max(1, math.floor((len(ratios) + 1) * (1 - COVERAGE) / 2))
    return ratios[rank - 1], ratios[-rank]
