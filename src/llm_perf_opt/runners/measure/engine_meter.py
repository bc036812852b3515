"""Times an engine that runs whole requests by itself, from the moments its tokens arrive."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.core.records import Iteration
from llm_perf_opt.runners.measure.annotations import StageMarker, unmarked
from llm_perf_opt.runners.measure.meter import RequestMeter

_CLOCK = "The runner's clock must be time.monotonic_ns, read inside `generate`."


@dataclass(frozen=True)
class Generated:
    """What an engine gave back for one batch, and when."""

    started_ns: int
    """Monotonic clock, read inside `generate`, when the first sequence was handed over."""
    arrivals_ns: tuple[tuple[int, ...], ...]
    """Per sequence: monotonic clock when each of its new tokens was in the caller's hands."""
    tokens: tuple[tuple[int, ...], ...]
    """Per sequence: its new tokens, as many as arrivals."""
    held_back: bool = False
    """Whether a step of decode is known to have passed over a sequence. Arrivals tell too, except of a sequence's last token."""


class Generates(Protocol):
    """What this meter can time: all sequences of a batch at once, greedy, each to exactly `new_tokens`."""

    def generate(self, prompts: Any, new_tokens: int, marker: StageMarker) -> Generated:
        """Run one batch to its end.

        `marker` brackets the stages for profilers, from the thread that launches the work: `profile` around the whole, `prefill`
        until every sequence has its first token, `decode` around the rest with a `decode_step` for each step. An engine whose
        work is launched elsewhere marks nothing.
        """


class EngineMeter(RequestMeter):
    """Runs whole requests on an engine.

    Prefill ends when every sequence has its first token; step k ends when every sequence has token k + 1. That adds up to the
    whole request exactly. Where a sequence had its second token before another had its first, the engine ran prefill and decode
    together; where one ran ahead of another later, the engine held that one back, or put it out and computed it again. The
    times stand, but they are times of neither stage, and `inseparable` says so. Where a sequence had several tokens at once,
    as with speculative decoding, the steps between them took no time that could be told, and `unstepped` says so.
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

    def iterate(self) -> Iteration:
        """One batch, from submission to the last token of the last sequence."""
        asked = self._clock()
        generated = self._engine.generate(self._prompts, self._new_tokens, self._marker)
        ended = self._clock()
        self._check(generated, asked, ended)
        self._tokens = [list(sequence) for sequence in generated.tokens]
        self._requests += 1
        mixed = is_mixed(generated)
        self._mixed += mixed
        self._apart += not mixed and is_out_of_step(generated)
        self._at_once += any(len(set(arrivals)) < len(arrivals) for arrivals in generated.arrivals_ns)
        reached = [generated.started_ns, *(max(arrived) for arrived in zip(*generated.arrivals_ns, strict=True))]
        lengths = [later - earlier for earlier, later in itertools.pairwise(reached)]
        return Iteration(generated.started_ns, ended - generated.started_ns, lengths[0], tuple(lengths[1:]))

    def tokens(self) -> list[list[int]]:
        """The new tokens of the latest request."""
        return self._tokens

    @property
    def inseparable(self) -> str:
        """Why prefill and decode cannot be told apart; empty where they can."""
        found = []
        if self._mixed:
            found.append(
                f"in {self._mixed} of {self._requests} requests some sequences decoded while others were still in prefill"
            )
        if self._apart:
            found.append(
                f"in {self._apart} of {self._requests} requests some sequences decoded while others were held back, as when an "
                "engine runs out of cache, preempts a sequence and computes it again"
            )
        return "; ".join(found)

    @property
    def unstepped(self) -> str:
        """Why single steps of decode have no times; empty where they have."""
        if not self._at_once:
            return ""
        return (
            f"in {self._at_once} of {self._requests} requests the engine handed over several tokens of a sequence at once, as "
            "with speculative decoding: the gaps between those cannot be told"
        )

    def _check(self, generated: Generated, asked_ns: int, ended_ns: int) -> None:
        """An engine that drops sequences, ends early, or gives tokens out of order, would be timed as a faster one."""
        given, timed = len(generated.tokens), len(generated.arrivals_ns)
        if (given, timed) != (self._sequences, self._sequences):
            times = "" if given == timed else f" and times of {timed}"
            raise CaptureError(
                f"The engine gave tokens of {given} sequences{times}; {self._sequences} were handed to it.",
                "Check the engine's limits on the batch (runtime.engine.*) and see the pass's log.txt.",
            )
        lengths = {len(sequence) for sequence in (*generated.tokens, *generated.arrivals_ns)}
        if lengths != {self._new_tokens}:
            raise CaptureError(
                f"The engine gave {', '.join(map(str, sorted(lengths)))} tokens per sequence; {self._new_tokens} were asked for.",
                "Check the engine's limits on length (runtime.engine.*) and see the pass's log.txt.",
            )
        if generated.started_ns < asked_ns:
            raise CaptureError(
                f"The engine says it began {(asked_ns - generated.started_ns) / 1e6:,.3f} ms before it was asked.", _CLOCK
            )
        for arrivals in generated.arrivals_ns:
            if any(later < earlier for earlier, later in itertools.pairwise((generated.started_ns, *arrivals))):
                raise CaptureError("The engine's tokens arrived before they were asked for.", _CLOCK)
            if arrivals[-1] > ended_ns:
                raise CaptureError("The engine's tokens arrived after it had returned them.", _CLOCK)


def is_mixed(generated: Generated) -> bool:
    """Whether a sequence had its second token when another did not have its first yet, or got it in the same step."""
    second = [arrivals[1] for arrivals in generated.arrivals_ns if len(arrivals) > 1]
    return bool(second) and min(second) <= max(arrivals[0] for arrivals in generated.arrivals_ns)


def is_out_of_step(generated: Generated) -> bool:
    """Whether a sequence had a token when another did not have the one before it yet, or got that in the same step.

    An engine that hands over several tokens at once (speculative decoding, a stream read late) gets sequences out of step by
    tokens alone: they must be so by the moments of handing over too.
    """
    moments = tuple(tuple(sorted(set(arrivals))) for arrivals in generated.arrivals_ns)
    return generated.held_back or (_overtakes(generated.arrivals_ns) and _overtakes(moments))


def _overtakes(rows: Sequence[Sequence[int]]) -> bool:
    """Whether any row's entry k + 1 is not after another row's entry k."""
    for place in range(max(map(len, rows), default=0) - 1):
        reached = [(row[place], number) for number, row in enumerate(rows) if len(row) > place]
        after = [(row[place + 1], number) for number, row in enumerate(rows) if len(row) > place + 1]
        # Of all pairs of two rows, those with the latest row in them decide.
        latest, last = max(reached)
        if any(time <= latest for time, number in after if number != last):
            return True
        others = [time for time, number in reached if number != last]
        if others and any(time <= max(others) for time, number in after if number == last):
            return True
    return False
