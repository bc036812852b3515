"""Time an operation at full load: probe, rest, one uninterrupted series. Independent of the framework."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.core.machine_records import CeilingUnit
from llm_perf_opt.core.records import Distribution, Maybe, Missing
from llm_perf_opt.runners.measure.clock import Clock

LEAST_SAMPLES = 9
"""The fewest samples for an interval of the median that excludes both extremes."""
_WARM_CALLS = 2
_PROBE_CALLS = 3


@dataclass(frozen=True)
class Trial:
    """One operation to time. Calls are numbered, so that they can use buffers in turn."""

    name: str
    work: float
    """FLOPs, bytes or launches of one call."""
    call: Callable[[int], object]


@dataclass(frozen=True)
class Measured:
    """The value of a quantity and how it was measured."""

    value: Distribution
    how: str
    conditions: str = ""
    gpus: int = 1
    """GPUs that took part."""


@dataclass(frozen=True)
class Conditions:
    """The conditions of the measurement."""

    notes: tuple[str, ...]
    doubt: str = ""
    """Why the results may be below the device's peaks, or an empty string."""


@dataclass(frozen=True)
class Quantity:
    """One quantity: its share of the time, and how it is measured in a given number of seconds."""

    key: str
    label: str
    unit: CeilingUnit
    weight: float
    """Share of the time relative to the others; 0 for a quantity known to be missing."""
    measure: Callable[[float], Maybe[Measured]]
    instructions: str = ""
    native: bool | None = None
    work: float | None = None
    """These three as in the `CeilingRow`."""


@dataclass(frozen=True)
class Pace:
    """How long a series may take, and how long the device rests before it."""

    most_samples: int
    sample_ns: int
    """Minimum duration of a sample; several shorter calls are timed together."""
    burst_s: float
    """Maximum duration of a series beyond LEAST_SAMPLES: a long one heats the device until it slows down."""
    rest_s: float


@dataclass(frozen=True)
class Stopwatch:
    """Times trials on one device."""

    clock: Clock
    pace: Pace
    watch: Callable[[], str] = field(default=lambda: "")
    """Called while the device works; returns its clocks and power."""
    sleep: Callable[[float], None] = time.sleep

    def probe_ns(self, trial: Trial) -> float:
        """Return a rough time of one call, after the warm-up calls."""
        self._marked(trial, _WARM_CALLS, 1)
        return min(self._marked(trial, _PROBE_CALLS, 1)) or 1.0

    def series(self, trial: Trial, seconds: float) -> tuple[list[float], str]:
        """Return the time per call of each sample in ns, taken in about `seconds`, and the conditions meanwhile."""
        once = self.probe_ns(trial)
        calls = max(1, math.ceil(self.pace.sample_ns / once))
        wanted = min(seconds, self.pace.burst_s) * 1e9 / (once * calls)
        samples = max(LEAST_SAMPLES, min(self.pace.most_samples, int(wanted)))
        if self.pace.rest_s:
            self.sleep(self.pace.rest_s)
        seen: list[str] = []
        times = self._marked(trial, samples, calls, lambda: seen.append(self.watch()))
        return times, seen[0]

    def _marked(self, trial: Trial, samples: int, calls: int, meanwhile: Callable[[], None] = lambda: None) -> list[float]:
        self.clock.synchronize()
        trial.call(0)  # puts the host ahead of the device, so that no sample waits for a launch
        self.clock.begin()
        self.clock.mark()
        number = 1
        for _ in range(samples):
            for _ in range(calls):
                trial.call(number)
                number += 1
            self.clock.mark()
        meanwhile()
        self.clock.synchronize()
        marks = self.clock.read_ns()
        return [max(1.0, float(after - before)) / calls for before, after in itertools.pairwise(marks)]


def best_rate(stopwatch: Stopwatch, trials: Sequence[Trial], seconds: float) -> Measured:
    """Return the result of the trial with the highest median work per second."""
    best: Measured | None = None
    for trial in trials:
        times, conditions = stopwatch.series(trial, seconds / len(trials))
        value = summarize([trial.work / (time_ns * 1e-9) for time_ns in times])
        if best is None or value.median > best.value.median:
            best = Measured(value, trial.name, conditions)
    if best is None:
        raise ValueError("no trials")
    return best


def time_per_unit(stopwatch: Stopwatch, trial: Trial, seconds: float) -> Measured:
    """Return the nanoseconds per unit of a trial's work."""
    times, conditions = stopwatch.series(trial, seconds)
    return Measured(summarize([time_ns / trial.work for time_ns in times]), trial.name, conditions)


def host_latency(
    how: str,
    action: Callable[[], object],
    seconds: float,
    *,
    per: int = 1,
    prepare: Callable[[], object] = lambda: None,
    most: int = 200,
) -> Measured:
    """Return the host nanoseconds of `action` divided by `per`; `prepare` is not timed."""

    def once() -> int:
        prepare()
        begun = time.perf_counter_ns()
        action()
        return time.perf_counter_ns() - begun

    begun = time.perf_counter()
    for _ in range(_WARM_CALLS + _PROBE_CALLS):
        once()
    each = (time.perf_counter() - begun) / (_WARM_CALLS + _PROBE_CALLS)
    samples = max(LEAST_SAMPLES, min(most, int(seconds / each)))
    return Measured(summarize([once() / per for _ in range(samples)]), how)


def host_difference(
    how: str, action: Callable[[], object], without: Callable[[], object], seconds: float, *, per: int = 1, most: int = 200
) -> Maybe[Measured]:
    """Return how much longer `action` takes the host than `without`, divided by `per`. They are timed in turn."""
    begun = time.perf_counter()
    for _ in range(_WARM_CALLS + _PROBE_CALLS):
        action()
        without()
    each = (time.perf_counter() - begun) / (_WARM_CALLS + _PROBE_CALLS)
    times = []
    for _ in range(max(LEAST_SAMPLES, min(most, int(seconds / each)))):
        marks = [time.perf_counter_ns()]
        for run in (action, without):
            run()
            marks.append(time.perf_counter_ns())
        times.append((marks[1] - marks[0] - (marks[2] - marks[1])) / per)
    value = summarize(times)
    return Measured(value, how) if value.median > 0 else Missing("the difference is smaller than its noise")
