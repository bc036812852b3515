"""The change between several runs a side, from the timeline of all their repeats.

The median of a run hides what a machine did while it ran: a drift or a switch between two speeds then looks like processes that
differ, and a change that every boundary between two runs shows is not found. So each repeat is taken as

    level + change (on the new side) + process (of its run) + path (of the machine) + noise,

and the change is judged for every kind of path that machines were seen to take, weighted by how well it explains the repeats:
none; a line, a random walk or correlated noise inside each run; a line, a random walk or correlated noise that goes on from
run to run; two speeds (`two_speeds`). Inside a kind, the deviations of process and path lie on a grid. Everything is Gaussian
given a point of the grid, so the change has a Student distribution there, and a mixture of those in all. What the repeats leave
open, such as whether processes differ or the machine drifts, therefore widens the interval by itself; nothing is tested first.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.comparison.two_speeds import Places, sampled_paths
from llm_perf_opt.analysis.stability import Floats, median, medians, quarter_spread

MOST_POINTS = 120
"""Longer timelines are reduced to means of consecutive repeats."""
FEWEST_POINTS = 3
"""Points that a run keeps, however many runs there are."""
MOST_RUNS = 60
"""More runs are judged by their levels: time and memory grow with the third power, and so many levels show their spread."""
_WITHIN = 4.0
"""Repeats further from the median of their run than so many deviations are moved there."""
_PROCESSES = (0.0, 0.2, 0.5, 1.2, 3.0, 8.0)
_PATHS = (0.5, 1.0, 2.0, 4.0, 8.0, 20.0)
"""Deviations on the grid, of processes and of paths that take a full covariance, as multiples of the noise of a point."""
_SPEEDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""The same for the distance of two speeds, and for a line over all runs."""
_STEP = 1.6
"""From one deviation of processes to the next, where many cost little."""
_LIKENESS = 0.8
"""Correlation of neighbors in correlated noise."""
_NEGLIGIBLE = 1e-6
"""Noise inside runs, as a share of that between them, that is as good as none."""
_LEFT_OUT = 1e-4
"""Share of the posterior that is left out: the smallest weights, which are most of them."""
_HALVINGS = 24
"""Of the range in which a quantile is sought, 80 deviations."""
_KINDS = 8
"""Kinds of path, all equally likely beforehand."""


@dataclass(frozen=True)
class Posterior:
    """A mixture of Student distributions of the change, as a logarithm."""

    weights: Floats
    centers: Floats
    errors: Floats
    freedom: int

    def below(self, values: Floats) -> Floats:
        """Return the probability that the change is below each value."""
        found: Floats = _student_share((values[:, None] - self.centers) / self.errors, self.freedom) @ self.weights
        return found

    def quantiles(self, *shares: float) -> list[float]:
        """Return the changes that are not exceeded with these probabilities, by bisection."""
        mean = float(self.weights @ self.centers)
        reach = 40 * math.sqrt(float(self.weights @ ((self.centers - mean) ** 2 + self.errors**2)))
        low, high = (np.full(len(shares), mean + side * reach) for side in (-1, 1))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = self.below(middle) < shares
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return [float(value) for value in (low + high) / 2]


@dataclass(frozen=True)
class Timeline:
    """The points of all runs in the order they were made, about zero; with the run and the side of each."""

    points: Floats
    runs: Places
    on_new: Floats
    """1 on the new side, 0 on the base side."""

    @property
    def vectors(self) -> Floats:
        """The points, and what they are fitted with: a level and the change."""
        return np.stack([self.points, np.ones(len(self.points)), self.on_new])


def timeline_of(base: Sequence[Floats], new: Sequence[Floats], sides: Sequence[int]) -> Timeline:
    """Return the timeline of runs, each the logarithms of its repeats × steps, in the order they were made on their side.

    `sides`: the side of each run, 0 for base and 1 for new, in the order all were made.
    """
    levels = _levels_of_repeats([*base, *new])
    waiting = iter(levels[: len(base)]), iter(levels[len(base) :])
    runs = [next(waiting[side]) for side in sides]
    deviations = [run - median(run) for run in runs]
    reach = _WITHIN * quarter_spread(np.concatenate(deviations))
    most = max(FEWEST_POINTS, MOST_POINTS // len(runs))
    folded = [_folded(median(run) + np.clip(apart, -reach, reach), most) for run, apart in zip(runs, deviations, strict=True)]
    counts = [len(run) for run in folded]
    points = np.concatenate(folded)
    return Timeline(
        points - points.mean(), np.repeat(np.arange(len(runs)), counts), np.repeat(np.asarray(sides, np.float64), counts)
    )


def _levels_of_repeats(runs: Sequence[Floats]) -> list[Floats]:
    """Return one logarithm per repeat, from repeats × steps, without what all runs share: the growth over the steps."""
    shared = np.mean([medians(run.T) for run in runs], axis=0) if runs[0].shape[1] > 1 else 0.0
    return [medians(run - shared) for run in runs]


def _folded(run: Floats, most: int) -> Floats:
    fold = math.ceil(len(run) / most)
    return run if fold == 1 else np.asarray([part.mean() for part in np.array_split(run, math.ceil(len(run) / fold))])


def posterior(found: Timeline) -> Posterior | None:
    """Return the posterior of the change; None if nothing varies."""
    inside, across = _spreads(found)
    if max(inside, across) <= _NEGLIGIBLE * _NEGLIGIBLE:
        return None
    if inside < _NEGLIGIBLE * across:  # a clock too coarse to show any noise inside a run
        jitter = np.where(np.arange(len(found.points)) % 2, 1, -1) * _NEGLIGIBLE * across
        found = Timeline(found.points + jitter, found.runs, found.on_new)
        inside = _NEGLIGIBLE * across
    grid = _process_grid(across / inside)
    parts = [_paths_with_covariance(found), *_low_rank_paths(found, grid)]
    logs, centers, errors = (np.concatenate(column) for column in zip(*parts, strict=True))
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    kept = np.argsort(weights)[::-1]
    kept = kept[: int(np.searchsorted(np.cumsum(weights[kept]), 1 - _LEFT_OUT)) + 1]
    return Posterior(weights[kept] / weights[kept].sum(), centers[kept], errors[kept], len(found.points) - 2)


def _spreads(found: Timeline) -> tuple[float, float]:
    """Return the deviations inside the runs and between the means of all runs."""
    counts = np.bincount(found.runs)
    means = np.bincount(found.runs, found.points) / counts
    return float(np.std(found.points - means[found.runs])), float(np.std(means))


def _process_grid(ratio: float) -> Floats:
    """Return the deviations of processes to consider, as multiples of the noise, up to far beyond what is seen."""
    most = 20 * max(1.0, ratio)
    return np.concatenate([[0.0], 0.15 * _STEP ** np.arange(math.ceil(math.log(most / 0.15, _STEP)))])


Weighed = tuple[Floats, Floats, Floats]
"""Log-evidence, center and error of the change at each point of a grid."""


def _low_rank_paths(found: Timeline, processes: Floats) -> Iterator[Weighed]:
    """Yield no path, one line over all runs, and two speeds: one known vector of unknown size is added to the noise."""
    count = len(found.points)
    line = (np.arange(count) - (count - 1) / 2)[None, :] / count
    none = np.zeros((1, count))
    start = _weighed(found, none, np.zeros(1), processes, (0.0,))
    yield start
    yield _weighed(found, line * math.sqrt(12), np.zeros(1), processes, _SPEEDS)
    guess = float(start[1][int(np.argmax(start[0]))])
    sampled = sampled_paths(found.points, found.on_new, found.runs, guess)
    yield _weighed(found, sampled.paths, sampled.logs, processes, _SPEEDS)


def _weighed(found: Timeline, paths: Floats, logs: Floats, processes: Floats, sizes: Sequence[float]) -> Weighed:
    """Return the change for every path, deviation of processes and size of the path. `logs`: weight of each path."""
    counts = np.bincount(found.runs).astype(np.float64)
    vectors = np.concatenate([found.vectors, paths])
    sums = np.stack([np.bincount(found.runs, vector) for vector in vectors])
    shrunk = processes[:, None] ** 2 / (1 + counts * processes[:, None] ** 2)
    left = vectors @ vectors[:3].T, (paths * paths).sum(axis=1)
    products = left[0] - np.einsum("vr,pr,wr->pvw", sums, shrunk, sums[:3])  # process, vector, one of the first three
    squares = left[1] - np.einsum("vr,pr->pv", sums[3:] ** 2, shrunk)  # process, path
    size2 = np.asarray(sizes, np.float64)[:, None, None] ** 2
    reduced = size2 / (1 + size2 * squares)  # size, process, path
    crossed = products[:, 3:]
    gram = products[None, :, None, :3] - reduced[..., None, None] * crossed[None, :, :, :, None] * crossed[None, :, :, None, :]
    penalty = 0.5 * (np.log1p(counts * processes[:, None] ** 2).sum(axis=1)[None, :, None] + np.log1p(size2 * squares))
    evidence, center, error = _fitted(gram, len(found.points) - 2)
    prior = logs - math.log(_KINDS * len(paths) * len(sizes) * len(processes))
    return (evidence - penalty + prior).ravel(), center.ravel(), error.ravel()


def _fitted(gram: Floats, freedom: int) -> Weighed:
    """Return the restricted log-likelihood without the part of the covariance, the change and its standard error.

    `gram`: the products of points, level and change with each other, divided by the covariance.
    """
    level, mixed, change = gram[..., 1, 1], gram[..., 1, 2], gram[..., 2, 2]
    determinant = level * change - mixed**2
    by_change = (level * gram[..., 0, 2] - mixed * gram[..., 0, 1]) / determinant
    by_level = (change * gram[..., 0, 1] - mixed * gram[..., 0, 2]) / determinant
    rest = np.maximum(gram[..., 0, 0] - by_level * gram[..., 0, 1] - by_change * gram[..., 0, 2], 1e-300)
    error = np.sqrt(rest / freedom * level / determinant)
    return -0.5 * np.log(determinant) - freedom / 2 * np.log(rest), by_change, error


# --- paths with a covariance of every two points ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shapes:
    """What the fit with each covariance takes, for one order of runs."""

    squares: Floats
    """Of each covariance, the upper triangle of the matrix that gives the rest of the squares."""
    changes: Floats
    """The weights of the points in the change."""
    logs: Floats
    errors: Floats
    """Standard error of the change at noise 1."""


def _paths_with_covariance(found: Timeline) -> Weighed:
    """Return the change for paths that start again in each run, or that continue from run to run."""
    shapes = _shapes(tuple(np.bincount(found.runs).tolist()), tuple(found.on_new[_firsts(found.runs)].tolist()))
    upper, doubled = _upper(len(found.points))
    products = found.points[upper[0]] * found.points[upper[1]] * doubled
    freedom = len(found.points) - 2
    rest = np.maximum(shapes.squares @ products, 1e-300)
    errors = np.sqrt(rest / freedom) * shapes.errors
    return shapes.logs - freedom / 2 * np.log(rest), shapes.changes @ found.points, errors


@functools.lru_cache(maxsize=16)
def _upper(count: int) -> tuple[tuple[Places, Places], Floats]:
    rows, columns = np.triu_indices(count)
    return (rows, columns), np.where(rows == columns, 1.0, 2.0)


def _firsts(runs: Places) -> Places:
    return np.flatnonzero(np.diff(runs, prepend=-1))


@functools.lru_cache(maxsize=8)
def _shapes(counts: tuple[int, ...], sides: tuple[float, ...]) -> _Shapes:
    """Return the fits for runs of so many points on these sides."""
    runs = np.repeat(np.arange(len(counts)), counts)
    fixed = np.stack([np.ones(len(runs)), np.repeat(np.asarray(sides), counts)], axis=1)
    same = (runs[:, None] == runs).astype(np.float64)
    kinds = list(_covariances(runs, same))
    grid = [(kind, path, process) for kind in kinds for path in _PATHS for process in _PROCESSES]
    upper = _upper(len(runs))[0]
    rows = []
    for kind, path, process in grid:
        whiten = np.linalg.inv(np.linalg.cholesky(np.eye(len(runs)) + process**2 * same + path**2 * kind))
        seen = whiten @ fixed
        gram = seen.T @ seen
        fit = np.linalg.solve(gram, seen.T @ whiten)
        left = whiten - seen @ fit
        log = float(np.log(np.diag(whiten)).sum() - 0.5 * np.linalg.slogdet(gram)[1])
        rows.append(((left.T @ left)[upper], fit[1], log, math.sqrt(np.linalg.inv(gram)[1, 1])))
    squares, changes, logs, errors = (np.asarray(column) for column in zip(*rows, strict=True))
    return _Shapes(squares, changes, logs - math.log(_KINDS * len(_PATHS) * len(_PROCESSES)), errors)


def _covariances(runs: Places, same: Floats) -> Iterator[Floats]:
    """Yield the covariance of each kind of path, at deviation 1: at the end of a run, or of the timeline, if it grows."""
    place = np.arange(len(runs), dtype=np.float64)
    inside = place - place[_firsts(runs)][runs]
    share = inside / np.maximum(1, np.bincount(runs) - 1)[runs]
    alike = _LIKENESS ** np.abs(place[:, None] - place)
    yield same * alike
    yield same * np.outer(share, share)
    yield same * np.minimum.outer(share, share)
    yield alike
    yield np.minimum.outer(place, place) / len(place)


def _student_share(values: Floats, freedom: int) -> Floats:
    """Return the share of Student's distribution below each value, by the normal distribution; for ten degrees and more."""
    normal = values * (1 - 1 / (4 * freedom)) / np.sqrt(1 + values**2 / (2 * freedom))
    beyond = np.abs(normal) / math.sqrt(2)
    term = 1 / (1 + 0.3275911 * beyond)  # Abramowitz and Stegun, 7.1.26: exact to 1.5e-7
    tail = term * np.polyval([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592], term) * np.exp(-(beyond**2)) / 2
    found: Floats = np.where(normal < 0, tail, 1 - tail)
    return found
