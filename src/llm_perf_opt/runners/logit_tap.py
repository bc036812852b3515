"""Taps on the functions that a runner steps: they keep the logits, which are otherwise reduced to the next token."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llm_perf_opt.runners.compilation import Compilation

_PARTS = range(64, 1025)
"""Into how many parts a vocabulary is divided."""


def next_token(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the most likely tokens, [batch, 1].

    Inductor computes the largest of one row in one block of the GPU, 35 µs for 150,000 logits on an H200. In two steps, many
    blocks share the work.
    """
    return in_two_steps(logits) if torch.compiler.is_compiling() and logits.is_cuda else logits.argmax(-1)


def in_two_steps(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of the first largest number along the last dimension: that of the first part which has it."""
    width = logits.shape[-1]
    parts = _parts(width)
    divided = logits.reshape(*logits.shape[:-1], parts, width // parts)
    part: torch.Tensor = divided.amax(-1).argmax(-1)
    inside = divided.argmax(-1).gather(-1, part.unsqueeze(-1)).squeeze(-1)
    return part * (width // parts) + inside


def _parts(width: int) -> int:
    for count in _PARTS:  # torch.compile traces it: no generator
        if width % count == 0:
            return count
    return 1


class LogitTap:
    """Calls a function that returns tokens and logits, and returns the tokens alone."""

    def __init__(self, call: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._call = call
        self.kept: list[torch.Tensor] | None = None
        """Receives a copy of the logits of each call; None: they are dropped."""

    def __call__(self, *given: Any) -> torch.Tensor:
        """Return the tokens."""
        token, logits = self._call(*given)
        if self.kept is not None:
            self.kept.append(logits.clone())  # a CUDA graph overwrites its output in the next step
        return token


class TappedRunner(ABC):
    """A runner whose logits can be recorded after its times were measured.

    Eager functions are measured as they are. Compiled functions return their logits, too, if and only if they will be recorded
    (`return_logits`). The kernels are the same: the logits become an output of the graph instead of a temporary buffer.
    """

    _compilation: Compilation
    _first: Callable[..., torch.Tensor]
    _decode: Callable[..., torch.Tensor]
    _cache: Any

    @abstractmethod
    def _forward(self, *given: Any, **named: Any) -> torch.Tensor:
        """Return the next token of each sequence."""

    @abstractmethod
    def _logits(self, *given: Any, **named: Any) -> torch.Tensor:
        """Return the logits of the last position, [batch, 1, vocabulary]."""

    def _with_logits(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(*given)
        return next_token(logits), logits[:, -1]

    def return_logits(self) -> None:
        """Make the compiled functions return their logits, too. Call it before the first request."""
        if self._decode != self._forward:
            self._decode = LogitTap(self._compilation.compiled(self._with_logits))
        if self._first != self._forward:
            self._first = LogitTap(self._compilation.compiled(self._with_logits))

    @contextmanager
    def tapped(self) -> Iterator[list[torch.Tensor]]:
        """Add the logits of every step to the list while the context is open, [batch, vocabulary].

        A compiled function is the one that was measured. An eager one makes the same call of the model.
        """
        kept: list[torch.Tensor] = []
        before = self._first, self._decode
        if any(function != self._forward and not isinstance(function, LogitTap) for function in before):
            raise RuntimeError("The compiled functions do not return logits: return_logits was not called.")
        taps = [function if isinstance(function, LogitTap) else LogitTap(self._with_logits) for function in before]
        self._first, self._decode = taps
        for tap in taps:
            tap.kept = kept
        try:
            yield kept
        finally:
            self._first, self._decode = before
            for tap in taps:
                tap.kept = None

    def release(self) -> None:
        """Free the cache and the compiled code. The runner cannot be stepped after that."""
        self._cache = None
        if any(function != self._forward for function in (self._first, self._decode)):
            torch.compiler.reset()
