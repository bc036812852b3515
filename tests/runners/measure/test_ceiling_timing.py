"""The stopwatch, with a clock that moves only when an operation is called."""

from dataclasses import dataclass, field

import pytest

from llm_perf_opt.runners.measure.ceiling_timing import LEAST_SAMPLES, Pace, Stopwatch, Trial, best_rate, time_per_unit
from llm_perf_opt.runners.measure.clock import ClockName


@dataclass
class FakeClock:
    """A device whose every call takes as long as it is told."""

    name: ClockName = "host clock"
    now_ns: int = 0
    marks: list[int] = field(default_factory=list)

    def synchronize(self) -> None:
        pass

    def begin(self) -> None:
        self.marks = []

    def mark(self) -> int:
        self.marks.append(self.now_ns)
        return len(self.marks) - 1

    def read_ns(self) -> list[int]:
        return [mark - self.marks[0] for mark in self.marks]

    def read_cpu_ns(self) -> list[int]:
        return []

    def trial(self, name: str, work: float, *takes_ns: int) -> Trial:
        def call(number: int) -> None:
            self.now_ns += takes_ns[number % len(takes_ns)]

        return Trial(name, work, call)


PACE = Pace(most_samples=20, sample_ns=0, burst_s=1.0, rest_s=0.0)


def test_a_rate_is_work_over_time() -> None:
    clock = FakeClock()
    measured = best_rate(Stopwatch(clock, PACE), [clock.trial("product", 2e6, 1_000_000)], seconds=1.0)
    assert measured.value.median == 2e9  # two million in a millisecond
    assert measured.value.n == 20
    assert measured.value.iqr == 0


def test_the_highest_median_wins_not_the_highest_sample() -> None:
    clock = FakeClock()
    steady = clock.trial("steady", 1.0, 100)
    lucky = clock.trial("lucky", 1.0, 10, 200, 200, 200)
    assert best_rate(Stopwatch(clock, PACE), [lucky, steady], seconds=1.0).how == "steady"


def test_short_calls_are_timed_several_at_once() -> None:
    clock = FakeClock()
    pace = Pace(most_samples=20, sample_ns=1000, burst_s=1.0, rest_s=0.0)
    times, _ = Stopwatch(clock, pace).series(clock.trial("uneven", 1.0, 100, 300), 1.0)
    assert set(times) == {200.0}  # ten or more calls each, so every sample holds both kinds


@pytest.mark.parametrize(
    ("seconds", "burst_s", "samples"),
    [
        (1.0, 1.0, 20),  # as many as allowed
        (0.015, 1.0, 15),  # as many as there is time for, at a millisecond each
        (1.0, 0.012, 12),  # as long as a series may last
        (0.0, 1.0, LEAST_SAMPLES),  # never fewer than carry an interval
    ],
)
def test_the_series_keeps_to_its_time(seconds: float, burst_s: float, samples: int) -> None:
    clock = FakeClock()
    pace = Pace(most_samples=20, sample_ns=0, burst_s=burst_s, rest_s=0.0)
    times, _ = Stopwatch(clock, pace).series(clock.trial("product", 1.0, 1_000_000), seconds)
    assert len(times) == samples


def test_the_device_rests_once_per_series_and_is_read_while_it_works() -> None:
    clock = FakeClock()
    rests: list[float] = []
    marks_at_reading: list[int] = []

    def watch() -> str:
        marks_at_reading.append(len(clock.marks))
        return "SM 1980 MHz"

    pace = Pace(most_samples=20, sample_ns=0, burst_s=1.0, rest_s=0.15)
    stopwatch = Stopwatch(clock, pace, watch, rests.append)
    measured = best_rate(stopwatch, [clock.trial("product", 1.0, 1_000_000)], seconds=1.0)
    assert rests == [0.15]
    assert marks_at_reading == [21]  # everything is enqueued, nothing waited for
    assert measured.conditions == "SM 1980 MHz"


def test_time_per_unit_divides_by_the_work() -> None:
    clock = FakeClock()
    measured = time_per_unit(Stopwatch(clock, PACE), clock.trial("1000 kernels", 1000, 917_000), seconds=1.0)
    assert measured.value.median == 917.0


def test_calls_go_through_the_buffers_in_turn() -> None:
    seen: list[int] = []
    Stopwatch(FakeClock(), PACE).series(Trial("any", 1.0, seen.append), 1.0)
    series = seen[-21:]
    assert series == list(range(21))


def test_an_operation_too_fast_for_the_clock_is_not_divided_by_zero() -> None:
    times, _ = Stopwatch(FakeClock(), PACE).series(Trial("nothing", 1.0, lambda _: None), 1.0)
    assert all(time_ns > 0 for time_ns in times)
