"""The timelines a run holds, best first: what kernels are chosen from and summed up over."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.analysis.trace_health import examined
from llm_perf_opt.errors import ParseError
from llm_perf_opt.events import Trace
from llm_perf_opt.parsers.trace_cache import cached_trace
from llm_perf_opt.records import Missing
from llm_perf_opt.run_folder import RunFolder

NSYS_PASSES = ("nsys", "nsys_decode")


@dataclass(frozen=True)
class Timeline:
    """One trace that may be believed."""

    source: str
    """Which pass recorded it, in words."""
    trace: Trace


def timelines(folder: RunFolder) -> Iterator[Timeline | Missing]:
    """Every timeline of the run, or why a pass that was run has none."""
    for name in NSYS_PASSES:
        entry = folder.manifest().pass_named(name)
        if entry is None:
            continue
        if entry.status != "complete":
            yield Missing(f"{name} is {entry.status}: {entry.why}")
            continue
        try:
            yield Timeline(f"Nsight Systems ({name})", _read(folder, name, folder.timeline_file(name)))
        except ParseError as error:
            yield Missing(f"{name}: {error.fact}")
    if folder.torch_trace_file.exists():
        try:
            yield Timeline("torch.profiler", _read(folder, "torch", folder.torch_trace_file))
        except ParseError as error:
            yield Missing(f"torch: {error.fact}")


def _read(folder: RunFolder, name: str, file: Path) -> Trace:
    """From the tables of the pass, which are made where they are not there yet: a trace is parsed once."""
    return examined(cached_trace(file, folder.tables(name)).trace)
