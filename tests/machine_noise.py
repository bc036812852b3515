"""Times of runs on machines with known noise, for tests and benchmarks of verdicts. Everything is drawn from the generator given.

A repeat takes `level × exp(process + path + noise)`. `process` is drawn once per run (deviation `PROCESSES`), `noise` once per
repeat (deviation `deviation`, unless the kind says otherwise), and the path is what the machine does meanwhile:

- normal, log-normal: none; the noise is that of the name.
- AR(1) 0.8: none; each repeat's noise is correlated by 0.8 with the one before.
- bimodal: none; four repeats in ten, each by itself, take 4 % longer, with half the noise.
- drift, own: a line from 0 to a slope drawn from ±6 %, for each run anew.
- drift, continuing: one line over the runs in the order they are made, a slope from ±6 % per run.
- drift, random walk: a walk from 0, with a deviation of 3 % after as many steps as a run has repeats, for each run anew.
- one switch: two speeds, 5 to 10 % apart, and one switch, at any place of the timeline of all runs as likely as at any other.
- switches: the same speeds; after each repeat the machine switches with a chance of 1 / (repeats of a run).

The timeline is that of the runs in the order they are made, each of its repeats one step, with `gap` steps between two runs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Runs = list[list[float]]

PROCESSES = 0.005
LEVEL = 100.0


@dataclass(frozen=True)
class Plan:
    """How the runs of a pair are made."""

    repeats: int = 30
    runs: int = 1
    """A side."""
    deviation: float = 0.024
    slowdown: float = 0.0
    """True change from base to new."""
    gap: int = 0
    """Steps of the timeline between two runs."""
    in_turn: bool = True
    """Whether base and new alternate; else all of base come first."""
    switch_at: int | None = None
    """The step of the timeline before which the one switch falls; none: it is drawn."""

    @property
    def order(self) -> list[int]:
        """Which side each run belongs to, in the order they are made: 0 base, 1 new."""
        return [0, 1] * self.runs if self.in_turn else [0] * self.runs + [1] * self.runs


def _steady(generator: np.random.Generator, plan: Plan) -> list[Floats]:
    return [np.zeros(plan.repeats) for _ in plan.order]


def _own_drift(generator: np.random.Generator, plan: Plan) -> list[Floats]:
    return [generator.uniform(-0.06, 0.06) * np.linspace(0, 1, plan.repeats) for _ in plan.order]


def _walk(generator: np.random.Generator, plan: Plan) -> list[Floats]:
    step = 0.03 / math.sqrt(plan.repeats)
    return [np.cumsum(step * generator.normal(size=plan.repeats)) for _ in plan.order]


def _continuing_drift(generator: np.random.Generator, plan: Plan) -> list[Floats]:
    slope = generator.uniform(-0.06, 0.06)
    return _cut(slope / plan.repeats * np.arange(_steps(plan)), plan)


def _one_switch(generator: np.random.Generator, plan: Plan) -> list[Floats]:
    steps = _steps(plan)
    by = generator.uniform(0.05, 0.10) * generator.choice([-1, 1])
    drawn = int(generator.integers(0, steps))
    return _cut(by * (np.arange(steps) >= (drawn if plan.switch_at is None else plan.switch_at)), plan)


def _switches(generator: np.random.Generator, plan: Plan) -> list[Floats]:
    steps = _steps(plan)
    switched = np.cumsum(generator.random(steps) < 1 / plan.repeats) + generator.integers(0, 2)
    return _cut(generator.uniform(0.05, 0.10) * (switched % 2), plan)


def _steps(plan: Plan) -> int:
    return len(plan.order) * (plan.repeats + plan.gap) - plan.gap


def _cut(timeline: npt.NDArray[np.floating[Any]], plan: Plan) -> list[Floats]:
    """The pieces of a timeline that the runs lie on."""
    starts = [index * (plan.repeats + plan.gap) for index in range(len(plan.order))]
    return [timeline[start : start + plan.repeats].astype(np.float64) for start in starts]


def _normal(generator: np.random.Generator, plan: Plan) -> Floats:
    return np.log(1 + plan.deviation * generator.normal(size=plan.repeats))


def _log_normal(generator: np.random.Generator, plan: Plan) -> Floats:
    return plan.deviation * generator.normal(size=plan.repeats)


def _alike(generator: np.random.Generator, plan: Plan, likeness: float = 0.8) -> Floats:
    steps = generator.normal(size=plan.repeats)
    values = np.empty(plan.repeats)
    values[0] = steps[0]
    for index in range(1, plan.repeats):
        values[index] = likeness * values[index - 1] + math.sqrt(1 - likeness**2) * steps[index]
    return plan.deviation * values


def _bimodal(generator: np.random.Generator, plan: Plan) -> Floats:
    return _log_normal(generator, plan) / 2 + 0.04 * (generator.random(plan.repeats) < 0.4)


Noise = Callable[[np.random.Generator, Plan], Floats]
Path = Callable[[np.random.Generator, Plan], list[Floats]]

STATIONARY: dict[str, tuple[Noise, Path]] = {
    "normal": (_normal, _steady),
    "log-normal": (_log_normal, _steady),
    "AR(1) 0.8": (_alike, _steady),
    "bimodal": (_bimodal, _steady),
}
MOVING: dict[str, tuple[Noise, Path]] = {
    "drift, own": (_log_normal, _own_drift),
    "drift, continuing": (_log_normal, _continuing_drift),
    "drift, random walk": (_log_normal, _walk),
    "one switch": (_log_normal, _one_switch),
    "switches": (_log_normal, _switches),
}
KINDS = {**STATIONARY, **MOVING}


def pair(kind: str, plan: Plan, generator: np.random.Generator) -> tuple[Runs, Runs]:
    """The times of a pair of sides, base and new."""
    noise, path = KINDS[kind]
    sides: tuple[Runs, Runs] = [], []
    for side, moved in zip(plan.order, path(generator, plan), strict=True):
        level = LEVEL * (1 + plan.slowdown * side) * math.exp(PROCESSES * generator.normal())
        sides[side].append([float(time) for time in level * np.exp(moved + noise(generator, plan))])
    return sides


def pairs(kind: str, plan: Plan, count: int, seed: int = 7) -> Sequence[tuple[Runs, Runs]]:
    """So many pairs, the same ones for the same kind, plan and seed."""
    generator = np.random.default_rng([seed, list(KINDS).index(kind)])
    return [pair(kind, plan, generator) for _ in range(count)]
