"""The share of slowdowns that the best possible test finds, for each kind of noise of tests/machine_noise.py.

By Neyman and Pearson, no test of a level finds more than the ratio of the likelihoods with and without the slowdown. Here these
know all that the machine is drawn from (deviations, slopes, distances and chances of switches), and are averaged over what it
draws, by sums over grids; only the level is unknown, with every one as likely as any other. Tests of real runs know none of it,
so the figure is a limit that they need not reach. It is that of 2.5 % of false alarms in the direction of the slowdown: 5 % in
both.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from machine_noise import KINDS, PROCESSES, Floats, Plan, pairs

FALSE_ALARMS = 0.025
Likelihood = Callable[[Floats, Plan, float], float]
"""Log-likelihood of the logarithms of all repeats (runs × repeats, in the order made) for a change, up to a constant."""


def limit(kind: str, plan: Plan, count: int, seed: int = 11) -> float:
    """The share of pairs with the plan's slowdown that the best test finds."""
    change = math.log1p(plan.slowdown)
    equal = Plan(runs=plan.runs, repeats=plan.repeats, deviation=plan.deviation)
    ratios = [
        [
            _ratio(LIKELIHOODS[kind], timeline(base, new, each), each, change)
            for base, new in pairs(kind, each, count, seed + place)
        ]
        for place, each in enumerate((equal, plan))
    ]
    return float(np.mean(np.asarray(ratios[1]) > np.quantile(ratios[0], 1 - FALSE_ALARMS)))


def timeline(base: Sequence[Sequence[float]], new: Sequence[Sequence[float]], plan: Plan) -> Floats:
    """The logarithms of the repeats, runs × repeats, in the order the runs were made."""
    waiting = iter(base), iter(new)
    found: Floats = np.log(np.asarray([next(waiting[side]) for side in plan.order]))
    return found


def _ratio(likelihood: Likelihood, found: Floats, plan: Plan, change: float) -> float:
    return likelihood(found, plan, change) - likelihood(found, plan, 0.0)


def _without(found: Floats, plan: Plan, change: float) -> Floats:
    """The timeline without a change, about zero."""
    rest: Floats = found - found.mean() - change * np.asarray(plan.order)[:, None]
    return rest


def _sum(logs: Floats) -> float:
    most = float(logs.max())
    return most + math.log(float(np.exp(logs - most).sum()))


# --- one Gaussian for each of several paths that are known but for the draw ---------------------------------------------


def _gaussian(inside: Callable[[Plan], Floats], paths: Callable[[Plan], Floats]) -> Likelihood:
    """Of noise with a covariance inside a run, and of one of several equally likely paths of the whole timeline."""
    weights: dict[Plan, tuple[Floats, Floats, Floats, Floats]] = {}

    def likelihood(found: Floats, plan: Plan, change: float) -> float:
        if plan not in weights:
            inverse = np.kron(np.eye(len(plan.order)), np.linalg.inv(inside(plan) + PROCESSES**2))
            of_level = inverse.sum(axis=1)
            matrix = inverse - np.outer(of_level, of_level) / of_level.sum()
            rows = paths(plan)
            weights[plan] = matrix, rows, rows @ matrix, np.einsum("ki,ij,kj->k", rows, matrix, rows)
        matrix, rows, weighed, squares = weights[plan]
        rest = _without(found, plan, change).ravel()
        return _sum(-0.5 * (rest @ matrix @ rest - 2 * weighed @ rest + squares))

    return likelihood


def _independent(plan: Plan) -> Floats:
    return plan.deviation**2 * np.eye(plan.repeats)


def _alike(plan: Plan) -> Floats:
    place = np.arange(plan.repeats)
    found: Floats = plan.deviation**2 * 0.8 ** np.abs(place[:, None] - place)
    return found


def _walk(plan: Plan) -> Floats:
    place = np.arange(1, plan.repeats + 1)
    return _independent(plan) + 0.03**2 / plan.repeats * np.minimum.outer(place, place)


def _steady(plan: Plan) -> Floats:
    return np.zeros((1, len(plan.order) * plan.repeats))


def _lines(plan: Plan) -> Floats:
    steps = np.arange(len(plan.order) * plan.repeats)
    return np.stack([slope / plan.repeats * steps for slope in np.linspace(-0.06, 0.06, 241)])


def _steps(plan: Plan) -> Floats:
    steps = np.arange(len(plan.order) * plan.repeats)
    sizes = [sign * size for sign in (-1, 1) for size in np.linspace(0.05, 0.10, 11)]
    return np.stack([size * (steps >= at) for size, at in product(sizes, steps)])


# --- runs that share nothing but the level ------------------------------------------------------------------------------

_LEVELS = np.arange(-0.12, 0.1201, 0.0025)
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(7)


def _own_drift(found: Floats, plan: Plan, change: float) -> float:
    """Of a slope from ±6 % for each run: the sum over slopes at each level, multiplied over the runs."""
    inverse = np.linalg.inv(_independent(plan) + PROCESSES**2)
    line = np.linspace(0, 1, plan.repeats)
    total = np.zeros(len(_LEVELS))
    for run in _without(found, plan, change):
        rest = run - np.linspace(-0.06, 0.06, 61)[:, None] * line
        squares, sums = np.einsum("si,ij,sj->s", rest, inverse, rest), rest @ inverse.sum(axis=1)
        logs = -0.5 * (squares[:, None] - 2 * sums[:, None] * _LEVELS + inverse.sum() * _LEVELS**2)
        total += np.logaddexp.reduce(logs, axis=0)
    return _sum(total)


def _bimodal(found: Floats, plan: Plan, change: float) -> float:
    """Of repeats of which four in ten take 4 % longer: the sum over processes at each level, multiplied over the runs."""
    places = _LEVELS[:, None] + PROCESSES * _NODES
    total = np.zeros(len(_LEVELS))
    for run in _without(found, plan, change):
        rest = (run - places[:, :, None]) / (plan.deviation / 2)
        slow = rest - 0.04 / (plan.deviation / 2)
        logs = np.logaddexp(math.log(0.6) - 0.5 * rest**2, math.log(0.4) - 0.5 * slow**2).sum(axis=2)
        total += np.logaddexp.reduce(logs + np.log(_WEIGHTS), axis=1)
    return _sum(total)


def _switches(found: Floats, plan: Plan, change: float) -> float:
    """Of a hidden chain of two speeds, forward over the timeline at each level and distance, summed over processes run by run."""
    sizes = np.linspace(0.05, 0.10, 6)[None, :, None]
    chance = 1 / plan.repeats
    fast = slow = np.full((len(_LEVELS), 6), 0.5)
    logs = np.zeros((len(_LEVELS), 6))
    for run in _without(found, plan, change):
        places = _LEVELS[:, None, None] + PROCESSES * _NODES
        one, two = (np.repeat(side[:, :, None], len(_NODES), axis=2) for side in (fast, slow))
        scale = np.zeros_like(one)
        for value in run:
            one, two = (1 - chance) * one + chance * two, chance * one + (1 - chance) * two
            rest = (value - places) / plan.deviation
            near, far = -0.5 * rest**2, -0.5 * (rest - sizes / plan.deviation) ** 2
            most = np.maximum(near, far)
            one, two = one * np.exp(near - most), two * np.exp(far - most)
            both = one + two
            one, two, scale = one / both, two / both, scale + most + np.log(both)
        most = scale.max(axis=2, keepdims=True)
        parts = np.exp(scale - most) * _WEIGHTS
        whole = parts.sum(axis=2)
        fast, slow = (one * parts).sum(axis=2) / whole, (two * parts).sum(axis=2) / whole
        logs += most[:, :, 0] + np.log(whole)
    return _sum(logs)


LIKELIHOODS: dict[str, Likelihood] = {
    "normal": _gaussian(_independent, _steady),
    "log-normal": _gaussian(_independent, _steady),
    "AR(1) 0.8": _gaussian(_alike, _steady),
    "bimodal": _bimodal,
    "drift, own": _own_drift,
    "drift, continuing": _gaussian(_independent, _lines),
    "drift, random walk": _gaussian(_walk, _steady),
    "one switch": _gaussian(_independent, _steps),
    "switches": _switches,
}
if LIKELIHOODS.keys() != KINDS.keys():
    raise LookupError("every kind of noise needs its likelihood")
