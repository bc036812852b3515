"""What a search improves, and what it must respect."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import BYTES, DIGITS, SIZES_WRITTEN, duration, scaled, seconds_of, significant

Unit = Literal["ns", "tokens/s", "bytes", "J"]


@dataclass(frozen=True)
class Goal:
    """A figure of a run that a search improves or limits."""

    name: str
    unit: Unit
    row: str
    """Its row in a comparison; for memory on a GPU, `gpu_row`."""
    gpu_row: str = ""
    stage: str = ""
    """The stage whose roofline time it is compared with; empty: none."""

    @property
    def higher_is_better(self) -> bool:
        """Whether it is a rate."""
        return self.unit == "tokens/s"

    def row_on(self, device: str) -> str:
        """Return the row of a comparison on this device."""
        return self.gpu_row if self.gpu_row and device.startswith("cuda") else self.row

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        if self.unit == "ns":
            return duration(value)
        return scaled(value, BYTES) if self.unit == "bytes" else f"{significant(value, DIGITS)} {self.unit}"


GOALS = {
    goal.name: goal
    for goal in (
        Goal("tpot", "ns", "tpot", stage="decode"),
        Goal("ttft", "ns", "ttft", stage="prefill"),
        Goal("latency", "ns", "e2e"),
        Goal("throughput", "tokens/s", "output_rate", stage="decode"),
        Goal("memory", "bytes", "memory.process", "memory.reserved"),
        Goal("energy", "J", "energy.counter", stage="decode"),
    )
}
OBJECTIVES = ("tpot", "ttft", "throughput", "energy")


def objective_named(name: str) -> Goal:
    """Return an objective, or raise a ConfigError with the choices."""
    if name not in OBJECTIVES:
        raise ConfigError(
            f"--objective {name}: unknown objective.{nearest(name, OBJECTIVES)}", f"Known: {', '.join(OBJECTIVES)}."
        )
    return GOALS[name]


_TIMES = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_UNITS: dict[Unit, dict[str, float]] = {
    "ns": _TIMES,
    "bytes": SIZES_WRITTEN,
    "tokens/s": {"": 1.0, "tokens/s": 1.0},
    "J": {"J": 1.0, "mJ": 1e-3},
}
_EXAMPLES: dict[Unit, str] = {"ns": "50ms", "bytes": "20GB", "tokens/s": "100", "J": "5J"}
_CONSTRAINT = re.compile(r"\s*(?P<name>[A-Za-z_]+)\s*(?P<sign><=|>=|<|>)\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-zµ/]*)\s*")


@dataclass(frozen=True)
class Constraint:
    """A limit that the result must respect."""

    text: str
    """As typed."""
    goal: str
    limit: float
    """In the unit of the goal."""

    def broken_by(self, value: Maybe[float]) -> str:
        """Return why a value breaks it; empty if it does not. A missing value breaks it: nothing shows that it holds."""
        goal = GOALS[self.goal]
        if isinstance(value, Missing):
            return f"{self.text}: {self.goal} is not known ({value.why})"
        if (value < self.limit) if goal.higher_is_better else (value > self.limit):
            return f"{self.text}: {self.goal} is {goal.text(value)}"
        return ""


def parse_constraints(texts: Iterable[str]) -> tuple[Constraint, ...]:
    """Return constraints from `ttft<50ms`, `memory<20GB`, `throughput>100`."""
    return tuple(_constraint(text) for text in texts)


def _constraint(text: str) -> Constraint:
    found = _CONSTRAINT.fullmatch(text)
    if not found:
        raise ConfigError(f"--constraint {text!r} is not METRIC<LIMIT.", "Write 'ttft<50ms', 'memory<20GB' or 'throughput>100'.")
    name, unit = found["name"], found["unit"]
    if name not in GOALS:
        raise ConfigError(
            f"--constraint {text!r}: no metric is called {name!r}.{nearest(name, GOALS)}", f"Known: {', '.join(GOALS)}."
        )
    goal = GOALS[name]
    units = _UNITS[goal.unit]
    if unit not in units:
        given = f"the unit {unit!r} does not fit {name}" if unit else f"{name} needs a unit"
        raise ConfigError(
            f"--constraint {text!r}: {given}.",
            f"Write {name}{found['sign']}{_EXAMPLES[goal.unit]}; units: {', '.join(filter(None, units))}.",
        )
    if (found["sign"][0] == ">") != goal.higher_is_better:
        better = "higher" if goal.higher_is_better else "lower"
        raise ConfigError(
            f"--constraint {text!r} limits {name} from the wrong side: {better} is better.",
            f"Write '{name}{'>' if goal.higher_is_better else '<'}{found['number']}{unit}'.",
        )
    return Constraint(text.strip(), name, float(found["number"]) * units[unit])


def parse_budget(text: str) -> float:
    """Return seconds from `90s`, `20m` or `1.5h`."""
    return seconds_of(text, "--budget")


def in_ns(goal: Goal, value: float) -> int | None:
    """Return the value as a time: for a rate, the time per token; None if it is no time."""
    if goal.unit == "ns":
        return round(value)
    return round(1e9 / value) if goal.unit == "tokens/s" and value > 0 else None
