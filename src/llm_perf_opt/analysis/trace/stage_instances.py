"""Stages as they occurred in a trace: every instance of every stage, and which instance each piece of device work belongs to."""

from dataclasses import dataclass

import numpy as np

from llm_perf_opt.core.stages import MIXED_STEP, STEP, Stage
from llm_perf_opt.traces.events import Columns, Int32, Int64
from llm_perf_opt.traces.projection import NONE, nearest_marked, through

PROFILE = Stage.PROFILE.value
PREFILL = Stage.PREFILL.value
DECODE = Stage.DECODE.value
DECODE_STEP = Stage.DECODE_STEP.value


@dataclass(frozen=True)
class Instances(Columns):
    """One row per time a stage ran, in the order of their start, the outer first."""

    stage: "Int32"
    """Index of the stage's name."""
    start_ns: "Int64"
    """Of the label on the host; where there is none, of the first device work."""
    end_ns: "Int64"
    parent: "Int64"
    """The instance it lies in, or -1."""
    range: "Int64"
    """Row of the label among the trace's ranges; -1: the instance was made from others, or from device work."""


@dataclass(frozen=True)
class TraceStages:
    """What the stages of a trace are, and how that was found out."""

    method: str
    """The dialect of its labels (`labels.dialects`), kernel sequence or none; or `labels, steps by kernel sequence`."""
    why: str
    """The evidence in a line."""
    names: tuple[str, ...]
    """The stages that occur."""
    instances: Instances
    of_work: Int64
    """Per row of device work: the innermost instance it belongs to, or -1."""
    coverage: float | None
    """Share of the device work's summed time that belongs to a stage; None where the trace holds no device time."""

    def of_stage(self, name: str) -> Int64:
        """Per row of device work: the instance of this stage it belongs to, itself or through a stage inside it, or -1."""
        if name not in self.names:
            return np.full(len(self.of_work), NONE, np.int64)
        marked = self.instances.stage == self.names.index(name)
        return through(self.of_work, nearest_marked(self.instances.parent, marked))

    def rows_of(self, name: str) -> Int64:
        """The instances of one stage."""
        return np.flatnonzero(self.instances.stage == (self.names.index(name) if name in self.names else NONE))

    @property
    def step_stage(self) -> str | None:
        """The stage whose instances are the steps: decode steps, or the most telling there is."""
        return next((name for name in (DECODE_STEP, STEP, MIXED_STEP) if name in self.names), None)


def coverage_of(of_work: Int64, duration_ns: Int64) -> float | None:
    """Share of the summed device time whose row has an owner."""
    total = int(duration_ns.sum())
    return int(duration_ns[of_work != NONE].sum()) / total if total else None
