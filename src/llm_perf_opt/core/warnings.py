"""Warnings about the numbers of a run. Code compares the id of a warning, never its text."""

from dataclasses import dataclass
from enum import Enum


class WarningId(str, Enum):
    """What a warning is about."""

    # the run
    RUN_INCOMPLETE = "run_incomplete"
    TIMES_UNREADABLE = "times_unreadable"
    SETTINGS_UNKNOWN = "settings_unknown"
    ENVIRONMENT_UNKNOWN = "environment_unknown"
    IMPLAUSIBLE = "implausible"
    """A number exceeds what the hardware can do."""
    OTHER_ARCHITECTURE = "other_architecture"
    """The weights do not have the shape that the name of the model stands for."""
    OTHER_PARAMETERS = "other_parameters"
    """The module that ran has another number of parameters than its runner states."""
    # the times
    SPREAD_TARGET_MISSED = "spread_target_missed"
    NOT_SETTLED = "not_settled"
    SPEED_CHANGED = "speed_changed"
    STAGES_INSEPARABLE = "stages_inseparable"
    STEPS_UNTIMED = "steps_untimed"
    PROFILER_SLOWED = "profiler_slowed"
    FASTER_UNDER_PROFILER = "faster_under_profiler"
    # the machine
    THROTTLED = "throttled"
    BUSY_PROCESSORS = "busy_processors"
    CONTENDED_PROCESSORS = "contended_processors"
    """Threads of the measured process waited for a processor."""
    SHARED_GPU = "shared_gpu"
    RANKS_SHARE_DEVICE = "ranks_share_device"
    """Ranks take turns on a device: the times are not those of one rank per device."""
    BUSY_GPU_BEFORE = "busy_gpu_before"
    WRONG_DEVICE_WATCHED = "wrong_device_watched"
    ONE_OF_SEVERAL_WATCHED = "one_of_several_watched"
    PEAKS_NOT_USED = "peaks_not_used"
    # traces and counters
    TRACE_NOT_USED = "trace_not_used"
    PASSES_DISAGREE = "passes_disagree"
    COUNTERS_WRONG = "counters_wrong"
    COUNTERS_UNTESTED = "counters_untested"
    COUNTERS_FALL_SHORT = "counters_fall_short"
    NO_GPU_METRICS = "no_gpu_metrics"
    METRICS_PARTLY_COLLECTED = "metrics_partly_collected"
    """A metric set needs a pass that the run does not have."""
    # what was not written
    TRACE_TABLES_NOT_KEPT = "trace_tables_not_kept"
    TABLES_NOT_WRITTEN = "tables_not_written"
    PAGE_NOT_WRITTEN = "page_not_written"
    REPORTS_NOT_WRITTEN = "reports_not_written"


NOISE = frozenset({WarningId.BUSY_PROCESSORS, WarningId.CONTENDED_PROCESSORS, WarningId.SHARED_GPU, WarningId.BUSY_GPU_BEFORE})
"""Warnings that something else used the machine."""


@dataclass(frozen=True)
class RunWarning:
    """A warning: its id and its text."""

    id: WarningId
    text: str

    def __str__(self) -> str:
        return self.text
