"""What one rank contributes to the analysis of several: its collectives, its busy time, and what it did between collectives."""

from dataclasses import dataclass, field

from llm_perf_opt.analysis.trace.document import ProblemLine
from llm_perf_opt.traces.events import Columns, Int32, Int64, UInt8

OUTSIDE = "(no operator)"
"""Time of the host in no operator: Python, and everything that the profiler does not record."""
DEVICE_IDLE = "(device idle)"
"""Time in which the device had no work."""
LEFT_LATE = "(already behind)"
"""The rank was behind already in the previous collective, or when its trace began."""


class NameIndex(dict[str, int]):
    """Name → its index; a new name gets the next one."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


@dataclass(frozen=True)
class Occurrences(Columns):
    """The collectives of one rank, sorted by start. Times are on the clock of the rank's host."""

    start_ns: "Int64"
    end_ns: "Int64"
    kind: "Int32"
    """Index of the kind's name."""
    group: "Int32"
    """Index of the group."""
    size_bytes: "Int64"
    """-1: unknown."""
    sequence: "Int64"
    """The library's number of the collective in its group; -1: unknown."""
    step: "Int32"
    """Index of the step, or -1."""
    stream: "Int64"
    """Its stream, which runs one after the other; on a host, 0."""


@dataclass(frozen=True)
class Causes(Columns):
    """What a rank did between the previous collective and this one, sorted by collective."""

    collective: "Int32"
    """Row of the collective that follows."""
    name: "Int32"
    """Index of the operator's name, of OUTSIDE or of DEVICE_IDLE."""
    ns: "Int64"
    on_device: "UInt8"
    """Whether it is time of the device."""


@dataclass(frozen=True)
class Work(Columns):
    """What a rank computes: kernels or, on a CPU, time in operators, sorted by start."""

    start_ns: "Int64"
    end_ns: "Int64"
    following: "Int32"
    """Row of the first collective that was launched after it, or their number; by time if launches are unknown."""


@dataclass(frozen=True)
class Intervals(Columns):
    """Disjoint intervals, sorted."""

    start_ns: "Int64"
    end_ns: "Int64"


@dataclass(frozen=True)
class RankGroup:
    """A process group."""

    name: str
    """Empty if the trace does not name the groups of its collectives."""
    ranks: tuple[int, ...] = ()
    """Empty if unknown."""
    size: int = 0
    """0 if unknown."""
    unclear: bool = False
    """Whether the rank is in several groups and the trace does not state which one this is."""


@dataclass(frozen=True)
class RankStep:
    """A step or a prefill of one rank."""

    name: str
    number: int
    """Among those of its name."""
    wall_ns: int


@dataclass(frozen=True)
class RankTrace:
    """One rank."""

    rank: int | None
    """None if the trace does not state it."""
    world_size: int
    """0 if the trace does not state it."""
    host: str
    """Empty if the trace does not state it."""
    device: str
    """The name of its device; `CPU` if it has none."""
    on_device: bool
    """Whether its collectives are kernels, not labels on the host."""
    span_ns: int
    """From its first to its last work."""
    busy_ns: int
    """Time in which a kernel, a copy, a memset or a collective ran; on a CPU, in which an operator or a collective ran."""
    comm_ns: int
    """Time in which a collective ran."""
    exposed_ns: int
    """The part of it in which no other kernel ran; on a CPU, in which no other operator ran."""
    why: str = ""
    """Why it has no collectives, or no figures at all; empty if it has collectives."""
    own_clock: bool = False
    """Whether its times count from the start of its recording (nsys), so that no other trace shares its clock."""
    ordered_from: int | None = None
    """Row of the collective from which on the work of the device is assigned by launch; None if there is none."""
    first_ns: int | None = None
    """Start of its first work, on the clock of its host; None if unknown."""
    names: tuple[str, ...] = ()
    groups: tuple[RankGroup, ...] = ()
    steps: tuple[RankStep, ...] = ()
    collectives: Occurrences = field(default_factory=Occurrences.none)
    exposed: Intervals = field(default_factory=Intervals.none)
    causes: Causes = field(default_factory=Causes.none)
    work: Work = field(default_factory=Work.none)


@dataclass(frozen=True)
class RankFile:
    """The trace of one rank and where it was read from. Ranks are numbered."""

    rank: int
    file: str
    trace: RankTrace
    problems: tuple[ProblemLine, ...] = ()
    complete: bool = True
