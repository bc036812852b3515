"""The stages of a trace: every instance of every stage, and the instance that each row of device work belongs to."""

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
    """One row per instance of a stage, sorted by start, outer ones first."""

    stage: "Int32"
    """Index of the stage's name."""
    start_ns: "Int64"
    """Start of the label on the host; without a label, of the first device work."""
    end_ns: "Int64"
    parent: "Int64"
    """The instance around it, or -1."""
    range: "Int64"
    """Row of the label in the trace's ranges; -1 if the instance was built from others or from device work."""


@dataclass(frozen=True)
class TraceStages:
    """The stages of a trace and how they were found."""

    method: str
    """The dialect of its labels (`labels.dialects`), `kernel sequence`, `none`, or `labels, steps by kernel sequence`."""
    why: str
    """The evidence in one line."""
    names: tuple[str, ...]
    """The stages that occur."""
    instances: Instances
    of_work: Int64
    """Per row of device work: its innermost instance, or -1."""
    coverage: float | None
    """Share of the summed device time that belongs to a stage; None without device time."""

    def of_stage(self, name: str) -> Int64:
        """Return, per row of device work, its instance of this stage, directly or through an inner stage, or -1."""
        if name not in self.names:
            return np.full(len(self.of_work), NONE, np.int64)
        marked = self.instances.stage == self.names.index(name)
        return through(self.of_work, nearest_marked(self.instances.parent, marked))

    def rows_of(self, name: str) -> Int64:
        """Return the rows of one stage's instances."""
        return np.flatnonzero(self.instances.stage == (self.names.index(name) if name in self.names else NONE))

    @property
    def step_stage(self) -> str | None:
        """The stage whose instances are the steps: decode steps, otherwise plain or mixed ones."""
        return next((name for name in (DECODE_STEP, STEP, MIXED_STEP) if name in self.names), None)


def coverage_of(of_work: Int64, duration_ns: Int64) -> float | None:
    """Return the share of the summed device time with an owner."""
    total = int(duration_ns.sum())
    return int(duration_ns[of_work != NONE].sum()) / total if total else None
