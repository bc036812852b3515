"""Times an engine that runs whole requests, from the arrival times of its tokens."""

import itertools
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.core.records import Iteration
from llm_perf_opt.runners.measure.annotations import StageMarker, unmarked
from llm_perf_opt.runners.measure.meter import RequestMeter

_CLOCK = "Read the runner's times inside `generate` with time.monotonic_ns."


@dataclass(frozen=True)
class Generated:
    """The tokens of one batch and their arrival times."""

    started_ns: int
    """Monotonic clock, read inside `generate`, when the first sequence was submitted."""
    arrivals_ns: tuple[tuple[int, ...], ...]
    """Per sequence: monotonic clock when each of its new tokens reached the caller."""
    tokens: tuple[tuple[int, ...], ...]
    """Per sequence: its new tokens, as many as arrival times."""
    held_back: bool = False
    """Whether a decode step is known to have skipped a sequence. Arrival times show this too, except at the last token."""
    ended_ns: int | None = None
    """Monotonic clock, if `generate` did something else after the request; None: the request ended when `generate` returned."""


class Generates(Protocol):
    """What this meter can time: a batch whose sequences run together, greedy, each to exactly `new_tokens`."""

    def generate(self, prompts: Any, new_tokens: int, marker: StageMarker) -> Generated:
        """Run one batch and return its tokens.

        `marker` opens the ranges of the stages on the thread that launches the work: `profile` around the request, `prefill`
        until every sequence has its first token, `decode` around the rest, with a `decode_step` for each step. An engine whose
        work is launched elsewhere marks nothing.
        """


class EngineProfiler(Protocol):
    """torch.profiler, run by the engine."""

    def start(self) -> None:
        """Start recording with the request's `profiling.torch.preset`."""

    def stop(self) -> Path:
        """Stop recording and return the path of the Chrome trace."""


class EngineMeter(RequestMeter):
    """Runs whole requests on an engine.

    Prefill ends when every sequence has its first token; step k ends when every sequence has token k + 1. The stages add up to
    the request exactly. Stages are `inseparable` if a sequence has its second token before another has its first (prefill and
    decode ran together), or if one runs ahead of another later (the engine held a sequence back, or preempted and recomputed
    it). Steps are `unstepped` if a sequence gets several tokens at once, as with speculative decoding.
    """

    def __init__(
        self,
        engine: Generates,
        prompts: Any,
        sequences: int,
        new_tokens: int,
        marker: StageMarker = unmarked,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._prompts = prompts
        self._sequences = sequences
        self._new_tokens = new_tokens
        self._marker = marker
        self._tokens: list[list[int]] = []
        self._requests = 0
        self._mixed = 0
        self._apart = 0
        self._at_once = 0
        self._waited = 0
        self._held = 0

    def iterate(self) -> Iteration:
        """Run one batch, from submission to the last token of the last sequence."""
        called = self._clock()
        generated = self._engine.generate(self._prompts, self._new_tokens, self._marker)
        returned = self._clock()
        ended = returned if generated.ended_ns is None else min(generated.ended_ns, returned)
        self._check(generated, called, ended)
        self._tokens = [list(sequence) for sequence in generated.tokens]
        self._requests += 1
        mixed = is_mixed(generated)
        self._mixed += mixed
        self._apart += not mixed and is_out_of_step(generated)
        self._waited += most_running(generated) < self._sequences
        self._held += generated.held_back
        self._at_once += any(len(set(arrivals)) < len(arrivals) for arrivals in generated.arrivals_ns)
        reached = [generated.started_ns, *(max(arrived) for arrived in zip(*generated.arrivals_ns, strict=True))]
        lengths = [later - earlier for earlier, later in itertools.pairwise(reached)]
        return Iteration(generated.started_ns, ended - generated.started_ns, lengths[0], tuple(lengths[1:]))

    def tokens(self) -> list[list[int]]:
        """Return the new tokens of the latest request."""
        return self._tokens

    @property
    def inseparable(self) -> str:
        """Why prefill and decode cannot be separated, or an empty string."""
        found = []
        if self._mixed:
            found.append(
                f"in {self._mixed} of {self._requests} requests some sequences decoded while others were still in prefill"
            )
        if self._apart:
            found.append(
                f"in {self._apart} of {self._requests} requests some sequences decoded while others were held back, as when an "
                "engine runs out of cache, preempts a sequence and recomputes it"
            )
        return "; ".join(found)

    @property
    def held_back(self) -> bool:
        """Whether sequences waited until others had ended, or were held back in decode."""
        return bool(self._waited or self._apart or self._held)

    @property
    def unstepped(self) -> str:
        """Why single decode steps have no times, or an empty string."""
        if not self._at_once:
            return ""
        return (
            f"in {self._at_once} of {self._requests} requests the engine returned several tokens of a sequence at once, as "
            "with speculative decoding: the gaps between those are unknown"
        )

    def _check(self, generated: Generated, called_ns: int, ended_ns: int) -> None:
        """Raise if tokens are missing, surplus or out of order: the times would be wrong."""
        given, timed = len(generated.tokens), len(generated.arrivals_ns)
        if (given, timed) != (self._sequences, self._sequences):
            times = "" if given == timed else f" and times of {timed}"
            raise CaptureError(
                f"The engine returned tokens of {given} sequences{times}; {self._sequences} were submitted.",
                "Check the engine's limits on the batch (runtime.engine.*) and see the pass's log.txt.",
            )
        lengths = {len(sequence) for sequence in (*generated.tokens, *generated.arrivals_ns)}
        if lengths != {self._new_tokens}:
            raise CaptureError(
                f"The engine returned {', '.join(map(str, sorted(lengths)))} tokens per sequence, not {self._new_tokens}.",
                "Check the engine's limits on length (runtime.engine.*) and see the pass's log.txt.",
            )
        if generated.started_ns < called_ns:
            raise CaptureError(
                f"The engine reports a start {(called_ns - generated.started_ns) / 1e6:,.3f} ms before `generate` was called.",
                _CLOCK,
            )
        for arrivals in generated.arrivals_ns:
            if any(later < earlier for earlier, later in itertools.pairwise((generated.started_ns, *arrivals))):
                raise CaptureError("The engine reports tokens that arrived before they were requested.", _CLOCK)
            if arrivals[-1] > ended_ns:
                raise CaptureError("The engine reports tokens that arrived after `generate` returned.", _CLOCK)


def is_mixed(generated: Generated) -> bool:
    """Return whether a sequence had its second token before another had its first, or in the same step."""
    second = [arrivals[1] for arrivals in generated.arrivals_ns if len(arrivals) > 1]
    return bool(second) and min(second) <= max(arrivals[0] for arrivals in generated.arrivals_ns)


def most_running(generated: Generated) -> int:
    """Return how many sequences had begun and not ended at once, at most."""
    first, last = (sorted(arrivals[place] for arrivals in generated.arrivals_ns) for place in (0, -1))
    return max(bisect_right(first, time) - bisect_left(last, time) for time in first)


def is_out_of_step(generated: Generated) -> bool:
    """Return whether a sequence had a token before another had its previous one, or in the same step.

    An engine that returns several tokens at once (speculative decoding, a stream that is read late) is out of step by token
    count alone, so the distinct arrival times must be out of step too.
    """
    moments = tuple(tuple(sorted(set(arrivals))) for arrivals in generated.arrivals_ns)
    return generated.held_back or (_overtakes(generated.arrivals_ns) and _overtakes(moments))


def _overtakes(rows: Sequence[Sequence[int]]) -> bool:
    """Return whether any row's entry k + 1 is not after another row's entry k."""
    for place in range(max(map(len, rows), default=0) - 1):
        reached = [(row[place], number) for number, row in enumerate(rows) if len(row) > place]
        after = [(row[place + 1], number) for number, row in enumerate(rows) if len(row) > place + 1]
        # Only pairs that contain the latest row can differ.
        latest, last = max(reached)
        if any(time <= latest for time, number in after if number != last):
            return True
        others = [time for time, number in reached if number != last]
        if others and any(time <= max(others) for time, number in after if number == last):
            return True
    return False
