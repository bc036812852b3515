"""Marks stages for profilers: NVTX ranges and record_function labels."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from llm_perf_opt.core.stages import DOMAIN


class StageMarker(Protocol):
    """Marks work with the name of its stage."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which the stage `name` runs."""


_NOTHING = nullcontext()


def unmarked(name: str) -> AbstractContextManager[None]:
    """Return a no-op context, for the unprofiled pass."""
    return _NOTHING


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Open an NVTX range in the domain LLM and a record_function label of the same name."""
    from torch.profiler import record_function

    with _nvtx_range(name), record_function(name):
        yield


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    try:
        import nvtx
    except ImportError:  # not Linux: there are no Nsight tools either
        yield
        return
    with nvtx.annotate(name, domain=DOMAIN):
        yield
