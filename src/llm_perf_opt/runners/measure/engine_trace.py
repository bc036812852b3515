"""The torch pass of an engine that runs torch.profiler itself: its trace is taken over, and the figures are read from it."""

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from llm_perf_opt.analysis.trace.operators import operator_rows, stage_activity_of
from llm_perf_opt.core.records import Iteration, Missing
from llm_perf_opt.runners.measure.torch_profiler import Profiled
from llm_perf_opt.traces.torch_json.trace import read_torch_trace


class Records(Protocol):
    """An engine's own profiler."""

    def start(self) -> None:
        """Begin to record."""

    def stop(self) -> Path:
        """End recording; the Chrome trace it left."""


def profile_engine(profiler: Records, iterate: Callable[[], Iteration], cuda: bool, trace: Path) -> Profiled:
    """Profile one iteration after one that only wakes the profiler up; leaves the gzipped Chrome trace at `trace`."""
    profiler.start()
    iterate()
    profiler.stop().unlink()
    profiler.start()
    measured = iterate()
    _take_over(profiler.stop(), trace)
    found = read_torch_trace(trace)
    return Profiled(
        iteration=measured,
        operators=list(operator_rows(found, cuda)),
        activity=stage_activity_of(found) if cuda else Missing("the run is on the CPU"),
        parts=Missing("the modules of an engine are not labeled with the parts of the cost model"),
    )


def _take_over(left: Path, trace: Path) -> None:
    """The engine's file under our name, compressed; it appears whole."""
    if left.name.endswith(".gz"):
        left.replace(trace)
        return
    beside = trace.with_name(f".{os.getpid()}.{trace.name}")
    with left.open("rb") as plain, gzip.open(beside, "wb", compresslevel=6) as packed:
        shutil.copyfileobj(plain, packed)
    beside.replace(trace)
    left.unlink()
