"""What hardware counters said of single kernel launches, and what is made of it."""

from dataclasses import dataclass, field

from llm_perf_opt.core.records import Maybe


@dataclass(frozen=True)
class CountedKernel:
    """One launch that Nsight Compute replayed."""

    name: str
    """As the tool spells it."""
    process: int
    device: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    ranges: tuple[str, ...]
    """The NVTX ranges it was launched in, outermost first, as `DOMAIN@name`; start/end ranges, which do not nest, before the
    push/pop ones. Of the default domain the name alone."""
    counters: dict[str, Maybe[float]] = field(default_factory=dict)
    """Counter → value in base units (bytes, ns, FLOP, %)."""


@dataclass(frozen=True)
class CounterProblem:
    """Something that makes counters, or some of them, unfit for a number."""

    id: str
    what: str
    fatal: bool
    remedy: str = ""


@dataclass(frozen=True)
class CounterReport:
    """One report of Nsight Compute."""

    kernels: tuple[CountedKernel, ...]
    units: dict[str, str]
    """Counter → its base unit, as the tool names it."""
    problems: tuple[CounterProblem, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    """What it says of the machine, where it does: device_name, compute_capability, process."""

    @property
    def complete(self) -> bool:
        """Whether its figures may be believed."""
        return not any(problem.fatal for problem in self.problems)


@dataclass(frozen=True)
class KernelUse:
    """One kernel in one launch size, as a trace saw it in a stage."""

    stage: str
    name: str
    """As the trace spells it."""
    grid: int
    """Blocks in all (x·y·z); 0: not known."""
    block: int
    """Threads of a block; 0: not known."""
    calls: int
    total_ns: int
