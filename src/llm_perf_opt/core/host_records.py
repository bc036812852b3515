"""Records of the measured process on its host: how the system scheduled it, and what torch.profiler added."""

from dataclasses import dataclass, field
from typing import Literal

from llm_perf_opt.core.missing import Maybe, Missing


@dataclass(frozen=True)
class HostLoad:
    """How the system scheduled the measured process during the repeats, and how busy the machine was before them."""

    wall_ns: int
    """Time covered, including pauses between repeats."""
    processors: int
    """Processors that the process may run on."""
    cpus: Maybe[str]
    """Their numbers, such as 0-3,8."""
    threads: Maybe[int]
    """Threads of the process at the end, including those that only wait."""
    main_delay_ns: Maybe[int]
    """Time that the main thread was runnable but waited for a processor."""
    other_delay_ns: Maybe[int]
    """The same for all other threads of the process, summed."""
    involuntary_switches: Maybe[int]
    """How often a thread of the process was preempted."""
    voluntary_switches: Maybe[int]
    """How often a thread of the process gave up its processor to wait."""
    runnable_before: Maybe[int]
    """Runnable tasks of the whole system before the first repeat, including the one that asked."""
    others_before: Maybe[float]
    """Mean number of processors that other processes used while the model was loaded."""
    others_before_s: float
    """Seconds that `others_before` covers."""
    wait_policy: Literal["default", "active", "passive"]
    """How OpenMP threads wait for work, as set in the environment of the process."""

    def delay_share(self, threads: int) -> Maybe[float]:
        """Return the share of the time covered that a thread waited for a processor: the mean of those that compute.

        The process also has threads that do not compute. Their delays are small, and included. If they are not, there is no mean.
        """
        main, others = self.main_delay_ns, self.other_delay_ns
        if isinstance(main, Missing) or isinstance(others, Missing):
            return main if isinstance(main, Missing) else others
        if threads < 2:
            return Missing("the main thread is the only thread that computes")
        if not self.wall_ns:
            return Missing("no time was covered")
        mean = (main + others) / (threads * self.wall_ns)
        return mean if mean <= 1 else Missing("threads that do not compute waited too")


@dataclass(frozen=True)
class CostRange:
    """A time per event: the median of several rounds, and their extremes."""

    ns: float
    low_ns: float
    high_ns: float


@dataclass(frozen=True)
class ProfilerCost:
    """The time that torch.profiler adds for each event, measured in the process of the torch pass with its settings."""

    operator_ns: CostRange
    """Per operator that Python calls. The time is added around it."""
    inner_ns: CostRange
    """Per operator inside another. The time is added to the own time of the outer one."""
    label_ns: CostRange
    """Per label of a component, with what sets it."""
    stage_label_ns: CostRange
    """Per label of a stage, with what sets it."""
    smallest_operator_ns: float
    """Recorded duration of an in-place addition to one element: what every operator takes at least."""
    rounds: int


@dataclass(frozen=True)
class OperatorTotals:
    """What torch.profiler sums over the calls of an operator and a trace does not contain. 0: nothing, or not recorded."""

    flops: int
    cpu_memory_bytes: int
    device_memory_bytes: int


@dataclass(frozen=True)
class ProgramProfile:
    """What torch.profiler recorded of a user's program, apart from its trace."""

    torch_version: str
    cuda: bool
    """Whether the program could use a GPU."""
    profiled_s: float
    preset: str
    settings: dict[str, bool]
    operators: dict[str, OperatorTotals] = field(default_factory=dict)
    worked: bool = True
    """Whether the trace contains an operator."""
    operators_why: str = ""
    """Why the FLOPs and memory of operators are missing although they were recorded; empty if they are not missing."""
