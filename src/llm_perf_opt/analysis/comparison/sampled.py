"""One side of a comparison in numbers: its level, bootstrap draws of it, and what the repeats of its runs show."""

import math
from collections.abc import Sequence

import numpy as np

from llm_perf_opt.analysis.stability import Floats, quarter_spread, stability

BEYOND_CHANCE = 0.002
"""p-value from which a movement inside a run widens the interval. Stricter than that of a warning: a chance find costs power."""
DRAWS = 1000


class SampledSide:
    """A side: its profile (a value per step, or just one), bootstrap draws of it, each run's level; logarithms but `level`."""

    def __init__(self, runs: Sequence[Floats], inflation: float, generator: np.random.Generator, rates: bool) -> None:
        profiles = [np.median(run, axis=0) for run in runs]
        draws = [
            profile + inflation * (_resampled_medians(run, generator) - profile)
            for run, profile in zip(runs, profiles, strict=True)
        ]
        self.profile = mean(profiles)
        self.draws = mean(draws)
        self.run_levels: Floats = np.asarray([np.median(profile) for profile in profiles])
        # As a run's own report has it: of an even count the middle two times are averaged as they are, not as logarithms, nor
        # as the rates that they make.
        sign = -1 if rates else 1
        shown = [sign * np.log(np.median(np.median(np.exp(sign * run), axis=0))) for run in runs]
        self.level = float(np.exp(mean(shown)))
        self.repeats = [np.median(run, axis=1) for run in runs]
        self.scatters = [quarter_spread(values) for values in self.repeats]
        self.visited = max(float(np.ptp(values)) for values in self.repeats)
        self.stability = tuple(stability(values) for values in self.repeats)
        self.moved = max(abs(math.log1p(run.size)) if run.p_value <= BEYOND_CHANCE else 0.0 for run in self.stability)


def mean(values: Sequence[Floats]) -> Floats:
    """Of several runs; of equal ones exactly what they are, which a sum divided by their number need not be."""
    found: Floats = values[0] + np.mean([value - values[0] for value in values], axis=0)
    return found


def pooled_scatter(scatters: Sequence[float]) -> float:
    """Return the scatter of the most restless run, pooled with the runs that scatter at least half as much.

    One run's scatter is known only roughly: of two runs of 30 repeats with a true 2.4 %, one shows over 3 % in 15 % of pairs.
    """
    alike = [one for one in scatters if one >= max(scatters) / 2]
    return math.sqrt(sum(one * one for one in alike) / len(alike))


def _resampled_medians(run: Floats, generator: np.random.Generator) -> Floats:
    """Medians over resampled repeats, draws × steps; whole repeats are drawn, so the steps of one stay together."""
    repeats, steps = run.shape
    medians = np.empty((DRAWS, steps))
    at_once = max(1, 4_000_000 // (repeats * steps))
    for first in range(0, DRAWS, at_once):
        count = min(at_once, DRAWS - first)
        chosen = generator.integers(0, repeats, (count, repeats))
        medians[first : first + count] = np.median(run[chosen], axis=1)
    return medians
