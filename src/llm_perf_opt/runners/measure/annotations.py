"""Emits stages into profilers: NVTX ranges and record_function labels from one definition."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from llm_perf_opt.core.stages import DOMAIN


class StageMarker(Protocol):
    """Brackets a stretch of work with its stage's name."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """A context in which the stage `name` runs."""


_NOTHING = nullcontext()


def unmarked(name: str) -> AbstractContextManager[None]:
    """For the unprofiled pass: no range, no cost."""
    return _NOTHING


@contextmanager
def marked(name: str) -> Iterator[None]:
    """An NVTX range in our domain, and a record_function label of the same name."""
    from torch.profiler import record_function

    with _nvtx_range(name), record_function(name):
        yield


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    try:
        import nvtx
    except ImportError:  # not a Linux machine: there is no Nsight tool to see the range either
        yield
        return
    with nvtx.annotate(name, domain=DOMAIN):
        yield
