"""Mark stages and modules for profilers: NVTX ranges, record_function labels, hooks on a module's forward."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol

from llm_perf_opt.core.stages import DOMAIN, Stage


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

    with nvtx_range(name), record_function(name):
        yield


_GATES = {Stage.PROFILE.value: "range", Stage.DECODE.value: "decode_all"}
"""Stage → the range that the gates of the profiling guides wait for: `range@LLM` of nsys, `LLM@decode_all/` of ncu."""


@contextmanager
def marked_for_guides(name: str) -> Iterator[None]:
    """As `marked`; the measured iteration and decode also lie in the range that the gates of the guides wait for."""
    with nvtx_range(_GATES[name]) if name in _GATES else _NOTHING, marked(name):
        yield


@contextmanager
def around_forward(module: Any, new_context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run every forward of a torch module inside a new context while this one is open."""
    opened: list[AbstractContextManager[Any]] = []

    def enter(*_: Any) -> None:
        context = new_context()
        context.__enter__()
        opened.append(context)

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        hooks.callback(module.register_forward_pre_hook(enter).remove)
        hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def labeled_forward(module: Any, label: str) -> Iterator[None]:
    """Label every forward of a torch module for torch.profiler while this context is open.

    A hook with record_function takes ten times as long (26 µs instead of 2.4 µs on the slowest machine measured), which a decode
    step with a hundred modules would show. The label is recorded as an operator; the reader of traces knows it by its name.
    """
    from torch._C._profiler import _RecordFunctionFast

    original, own = module.forward, module.__dict__.get("forward")

    @wraps(original)
    def forward(*arguments: Any, **options: Any) -> Any:
        with _RecordFunctionFast(label):
            return original(*arguments, **options)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def nvtx_range(name: str, domain: str = DOMAIN) -> Iterator[None]:
    """Open an NVTX range."""
    try:
        import nvtx
    except ImportError:  # not Linux: there are no Nsight tools either
        yield
        return
    with nvtx.annotate(name, domain=domain):
        yield
