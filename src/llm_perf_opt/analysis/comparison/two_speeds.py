"""Paths of a machine that switches between two speeds, sampled from what the repeats of all runs say.

A hidden Markov chain with two states: inside a run it switches with a small chance per point, between two runs with a larger
one. Baum and Welch's algorithm fits level, change, distance of the speeds and noise from two starts; paths are then drawn from
the chain given the points. They are weighed by importance: what a path explains, times its chance beforehand, over the chance
with which it was drawn. So the sum over them is that over all paths, and a path that was drawn by luck has little weight.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.stability import Floats

Places = npt.NDArray[np.intp]


class Speeds:
    """The constants of the chain."""

    chances: ClassVar[Sequence[float]] = (0.01, 0.1)
    """Of a switch from a point to the next inside a run; each is a kind of machine of its own."""
    between: ClassVar[float] = 0.25
    """Chance of a switch between two runs."""
    rounds: ClassVar[int] = 8
    """Of fitting."""
    draws: ClassVar[int] = 12
    """Paths from each start."""
    seed: ClassVar[int] = 20240229


@dataclass(frozen=True)
class SampledPaths:
    """Paths of 0 and 1, and the logarithm of the weight of each."""

    paths: Floats
    logs: Floats


def sampled_paths(points: Floats, on_new: Floats, runs: Places, change: float) -> SampledPaths:
    """Return paths between two speeds. `change`: where one of the fits of each kind starts; the other starts at no change."""
    between = np.diff(runs, prepend=runs[0]) > 0
    switching = np.stack([np.where(between, Speeds.between, chance) for chance in Speeds.chances for _ in range(2)])
    switching[:, 0] = 0.5
    fits = np.stack([_start(points, on_new, start) for _ in Speeds.chances for start in (0.0, change)])
    for _ in range(Speeds.rounds):
        fits = _improved(points, on_new, _share_of_second(_densities(points, on_new, fits), switching))
    paths, chances = _drawn(_densities(points, on_new, fits), switching)
    switched = np.abs(np.diff(paths, axis=2))
    changing = switching[:, None, 1:]
    before = np.where(switched > 0, np.log(changing), np.log1p(-changing)).sum(axis=2) + math.log(0.5)
    return SampledPaths(paths.reshape(-1, len(points)), (before - chances).ravel())


def _start(points: Floats, on_new: Floats, change: float) -> Floats:
    """Return level, change, distance and variance to begin with."""
    rest = points - change * on_new
    spread = max(float(rest.std()), 1e-12)
    return np.asarray([rest.mean() - 0.8 * spread, change, 1.6 * spread, (0.6 * spread) ** 2])


def _densities(points: Floats, on_new: Floats, fits: Floats) -> Floats:
    """Return the density of each point at each speed, up to a factor per point: speeds × fits × points."""
    level, change, distance, variance = (column[:, None] for column in fits.T)
    rest = points - level - change * on_new
    logs = np.stack([rest**2, (rest - distance) ** 2]) / (-2 * variance)
    found: Floats = np.exp(logs - np.maximum(logs[0], logs[1]))
    return found


def _transfers(densities: Floats, switching: Floats) -> Floats:
    """Return for each point the chances from each speed before it (first axis) to each speed at it, times its density there."""
    found: Floats = np.stack([np.stack([1 - switching, switching]), np.stack([switching, 1 - switching])]) * densities
    return found


def _running_products(matrices: Floats) -> Floats:
    """Return the products of the first k matrices for every k, each divided by its sum, in few steps for all fits at once."""
    found: Floats = matrices / matrices.sum(axis=(0, 1))
    reach = 1
    while reach < found.shape[-1]:
        first, second = found[..., :-reach], found[..., reach:]
        later = first[:, 0, None] * second[0] + first[:, 1, None] * second[1]
        found = np.concatenate([found[..., :reach], later / later.sum(axis=(0, 1))], axis=-1)
        reach *= 2
    return found


def _forward(transfers: Floats) -> Floats:
    """Return the chances of the speeds at each point given the points up to it."""
    found: Floats = _running_products(transfers).sum(axis=0)
    return found


def _share_of_second(densities: Floats, switching: Floats) -> Floats:
    """Return the chance of the second speed at each point, given all points."""
    transfers = _transfers(densities, switching)
    after = _running_products(np.swapaxes(transfers[..., ::-1], 0, 1)).sum(axis=0)[..., ::-1]
    both = _forward(transfers)
    both[..., :-1] *= after[..., 1:]
    found: Floats = both[1] / both.sum(axis=0)
    return found


def _improved(points: Floats, on_new: Floats, second: Floats) -> Floats:
    """Return the fits that the chances of the second speed lead to."""
    gram = np.empty((len(second), 3, 3))
    gram[:, 0, 0], gram[:, 1, 1] = len(points), on_new @ on_new
    gram[:, 0, 1] = gram[:, 1, 0] = on_new.sum()
    gram[:, 0, 2] = gram[:, 2, 0] = gram[:, 2, 2] = second.sum(axis=1)
    gram[:, 1, 2] = gram[:, 2, 1] = second @ on_new
    gram += 1e-6 * np.eye(3)
    sums = np.stack([np.full(len(second), points.sum()), np.full(len(second), on_new @ points), second @ points], axis=1)
    fitted = np.linalg.solve(gram, sums[:, :, None])[:, :, 0]
    squares = float(points @ points)
    variance = np.maximum((squares - (fitted * sums).sum(axis=1)) / len(points), 1e-9 * squares / len(points))
    return np.column_stack([fitted, variance])


def _drawn(densities: Floats, switching: Floats) -> tuple[Floats, Floats]:
    """Return paths drawn from the last point to the first (fits × draws × points), and the logarithm of the chance of each."""
    fits, count = switching.shape
    forward = _forward(_transfers(densities, switching))
    leave = switching[:, 1:]
    stayed, moved = forward[..., :-1] * (1 - leave), forward[..., :-1] * leave
    second = np.empty((2, fits, 1, count))  # chance of the second speed at a point, by the speed at the next one
    second[0, :, 0, :-1] = moved[1] / (moved[1] + stayed[0])
    second[1, :, 0, :-1] = stayed[1] / (stayed[1] + moved[0])
    second[:, :, 0, -1] = forward[1, :, -1]
    following = (_random(count) < second).astype(np.intp).reshape(2, -1, count)
    every = np.arange(following.shape[1])
    path = np.zeros((count + 1, len(every)), np.intp)
    for place in range(count - 1, -1, -1):
        path[place] = following[path[place + 1], every, place]
    paths = path.T.reshape(fits, -1, count + 1)
    chance = np.where(paths[..., 1:] > 0, second[1], second[0])
    logs = np.log(np.where(paths[..., :-1] > 0, chance, 1 - chance)).sum(axis=-1)
    return paths[..., :-1].astype(np.float64), logs


@functools.lru_cache(maxsize=16)
def _random(points: int) -> Floats:
    return np.random.default_rng(Speeds.seed).random((Speeds.draws, points))
