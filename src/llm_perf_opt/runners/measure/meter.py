"""The unprofiled pass: warm up until times are stable, repeat until the median is precise enough."""

import gc
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from llm_perf_opt.analysis.stats import percentile, within_target
from llm_perf_opt.core.records import Iteration, SubstageSpan
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.core.units import percentage
from llm_perf_opt.runners.measure.annotations import StageMarker, unmarked
from llm_perf_opt.runners.measure.clock import Clock

SETTLED_WITHIN = 0.05
"""Warm-up ends when the last three iterations are within this fraction of their median."""
SETTLED_OVER = 3
WARMUP_TIME_SHARE = 0.1
"""Maximum share of the time limit for warm-up after its first iteration, whose compilation is not limited."""


class Steppable(Protocol):
    """What a meter can time: prefill once, then one decode step per additional token.

    Tokens stay on the device, and no step may wait for it. `begin` prepares a request and is not timed.
    """

    def begin(self) -> None:
        """Empty the cache for the next `prefill`."""

    def prefill(self, prompts: Any) -> Any:
        """Process the whole prompt and return the first new token of each sequence."""

    def decode_step(self, token: Any) -> Any:
        """Process one token per sequence and return the next."""

    def to_lists(self, tokens: list[Any]) -> list[list[int]]:
        """Return the tokens of each sequence as integers; waits for the device."""


@dataclass(frozen=True)
class Effort:
    """When to stop warming up and repeating."""

    max_warmup: int
    min_repeats: int
    max_repeats: int
    ci_target: float
    time_limit_s: float


@dataclass(frozen=True)
class Progress:
    """Progress of the pass."""

    phase: str
    done: int
    at_most: int
    estimate_ns: float
    """The latest iteration's time."""


@dataclass(frozen=True)
class Measured:
    """The iterations of a pass and why it ended."""

    warmup: tuple[Iteration, ...]
    iterations: tuple[Iteration, ...]
    settled: bool
    stable: bool
    stopped: str
    tokens: list[list[int]]
    tokens_repeat: bool
    interrupted: bool


class RequestMeter(ABC):
    """Repeats a request until its times are precise enough."""

    @abstractmethod
    def iterate(self) -> Iteration:
        """Run one request, from an idle device to an idle device."""

    @abstractmethod
    def tokens(self) -> list[list[int]]:
        """Return the new tokens of the latest request, per sequence; waits for the device."""

    def _agreed(self, seconds: float) -> float:
        """Return the time that decides whether to go on; ranks must decide alike."""
        return seconds

    def measure(
        self,
        effort: Effort,
        on_progress: Callable[[Progress], None] = lambda _: None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Measured:
        """Warm up, then repeat until the medians of prefill and decode are within the target or a limit is reached.

        The repeats run inside the context `around`. An interruption keeps the finished repeats; before the first repeat it is
        raised.
        """
        warmup = self._warm_up(effort, on_progress)
        begun = time.monotonic()
        settled = _settled([iteration.total_ns for iteration in warmup])
        first_tokens = self.tokens()
        iterations: list[Iteration] = []
        repeat = True
        stopped, stable, interrupted = "", False, False
        with _frozen_heap(), around():
            try:
                while not stopped:
                    iterations.append(self.iterate())
                    same = self.tokens() == first_tokens  # every time: ranks compare their tokens here
                    repeat = repeat and same
                    on_progress(Progress("repeats", len(iterations), effort.max_repeats, iterations[-1].total_ns))
                    stable = is_stable(iterations, effort.ci_target)
                    stopped = _stop(len(iterations), stable, effort, self._agreed(time.monotonic() - begun))
            except KeyboardInterrupt:
                if not iterations:
                    raise
                interrupted, stopped = True, f"interrupted after {len(iterations)} repeats"
        return Measured(tuple(warmup), tuple(iterations), settled, stable, stopped, first_tokens, repeat, interrupted)

    def _warm_up(self, effort: Effort, on_progress: Callable[[Progress], None]) -> list[Iteration]:
        done: list[Iteration] = []
        begun = 0.0
        while len(done) < effort.max_warmup and not _settled([iteration.total_ns for iteration in done]):
            if done and self._agreed(time.monotonic() - begun) > effort.time_limit_s * WARMUP_TIME_SHARE:
                break
            done.append(self.iterate())
            if len(done) == 1:
                begun = time.monotonic()
            on_progress(Progress("warm-up", len(done), effort.max_warmup, done[-1].total_ns))
        return done


class Meter(RequestMeter):
    """Runs requests step by step and times their stages."""

    def __init__(self, runner: Steppable, prompts: Any, new_tokens: int, clock: Clock, marker: StageMarker = unmarked) -> None:
        self._runner = runner
        self._prompts = prompts
        self._steps = new_tokens - 1
        self._clock = clock
        self._marker = marker
        self._spans: list[tuple[str, int, int]] = []
        self._tokens: list[Any] = []
        self.around_prefill: Callable[[], AbstractContextManager[None]] = nullcontext
        """Opened before each prefill and closed with it: hooks whose cost must not be part of decode steps."""

    def iterate(self) -> Iteration:
        """Run one request, from an idle device to an idle device."""
        runner, clock, marker = self._runner, self._clock, self._marker
        runner.begin()
        clock.begin()
        self._spans = []
        marks: list[int] = []
        tokens = []
        hooks = ExitStack()
        hooks.enter_context(self.around_prefill())
        clock.synchronize()
        started = time.monotonic_ns()
        with marker(Stage.PROFILE.value):
            marks.append(clock.mark())
            with hooks, marker(Stage.PREFILL.value):
                token = runner.prefill(self._prompts)
            marks.append(clock.mark())
            tokens.append(token)
            with marker(Stage.DECODE.value):
                for _ in range(self._steps):
                    with marker(Stage.DECODE_STEP.value):
                        token = runner.decode_step(token)
                    marks.append(clock.mark())
                    tokens.append(token)
                clock.synchronize()
        wall = time.monotonic_ns() - started
        self._tokens = tokens
        return self._read(started, wall, marks)

    def tokens(self) -> list[list[int]]:
        """Return the new tokens of the latest request, per sequence; waits for the device."""
        return self._runner.to_lists(self._tokens)

    @contextmanager
    def substage(self, name: str) -> Iterator[None]:
        """Time a span inside the current stage; called by hooks on submodules."""
        with self._marker(name):
            start = self._clock.mark()
            try:
                yield
            finally:
                self._spans.append((name, start, self._clock.mark()))

    def _read(self, started: int, wall: int, marks: Sequence[int]) -> Iteration:
        times = self._clock.read_ns()
        stage_times = [times[mark] for mark in marks]
        lengths = [later - earlier for earlier, later in itertools.pairwise(stage_times)]
        spans = []
        for name, first, last in self._spans:
            stage = next(index for index, mark in enumerate(marks[1:]) if last < mark)
            spans.append(
                SubstageSpan(
                    name=name,
                    stage=Stage.PREFILL.value if stage == 0 else Stage.DECODE_STEP.value,
                    step=stage - 1,
                    start_ns=times[first],
                    duration_ns=times[last] - times[first],
                )
            )
        used = self._clock.read_cpu_ns()
        cpu = [used[later] - used[earlier] for earlier, later in itertools.pairwise(marks)] if used else []
        return Iteration(started, wall, lengths[0], tuple(lengths[1:]), tuple(spans), cpu[0] if cpu else None, tuple(cpu[1:]))


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Exclude existing objects from garbage collection, so that collections inside the loop stay short."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def is_stable(iterations: Sequence[Iteration], target: float) -> bool:
    """Return whether the medians of prefill and decode are both known within `target`."""
    series = [[iteration.prefill_ns for iteration in iterations]]
    if iterations and iterations[0].steps_ns:
        series.append([iteration.decode_ns for iteration in iterations])
    return all(within_target(values, target) for values in series)


def _settled(totals: Sequence[int]) -> bool:
    if len(totals) < SETTLED_OVER + 1:  # the first one compiles and allocates, and never counts
        return False
    latest = totals[-SETTLED_OVER:]
    middle = percentile(latest, 0.5)
    return all(abs(value - middle) <= SETTLED_WITHIN * middle for value in latest)


def _stop(done: int, stable: bool, effort: Effort, elapsed_s: float) -> str:
    if stable and done >= effort.min_repeats:
        return f"the target of ±{percentage(effort.ci_target, 1)} was reached after {done} repeats"
    if done >= effort.max_repeats:
        return f"runtime.max_repeats={effort.max_repeats} was reached before the target of ±{percentage(effort.ci_target, 1)}"
    if elapsed_s > effort.time_limit_s:
        return f"runtime.time_limit_s={effort.time_limit_s:g} was reached after {done} repeats"
    return ""
