"""All that is said of a trace, as one plain record: what is printed, kept as JSON and read back.

A number that cannot be had is None, and `why` says why. Nothing here takes long to import: a kept analysis is shown at once.
"""

import msgspec

OVERLAP = "Savings overlap and are not to be added: what one change saves, another cannot save again."


class ProblemLine(msgspec.Struct, frozen=True):
    """Something that makes a trace, or a part of it, unfit for a number."""

    id: str
    what: str
    fatal: bool
    remedy: str


class GpuTotals(msgspec.Struct, frozen=True):
    """All devices together: busy is the union of kernels, copies and memsets; span runs from the first to the last of them."""

    kernels: int | None
    kernel_ns: int | None
    busy_ns: int | None
    idle_ns: int | None
    span_ns: int | None


class StageLine(msgspec.Struct, frozen=True):
    """One stage, all its instances together. Of a trace without device work only the wall time is known."""

    name: str
    count: int
    wall_ns: int
    gpu_busy_ns: int | None
    idle_ns: int | None
    kernels: int | None
    launches: int | None
    kernel_ns: int | None
    span_ns: int | None = None
    """From the first to the last of its device work, summed over its instances: busy and idle add up to it."""


class StepLine(msgspec.Struct, frozen=True):
    """One step; its window runs to the first work of the next."""

    stage: str
    step: int
    wall_ns: int
    span_ns: int | None
    gpu_busy_ns: int | None
    idle_ns: int | None
    kernels: int | None
    kernel_ns: int | None
    launches: int | None


class DeviceStageLine(msgspec.Struct, frozen=True):
    """The work of one stage on one device."""

    name: str
    busy_ns: int
    idle_ns: int
    span_ns: int
    kernels: int
    kernel_ns: int


class DeviceLine(msgspec.Struct, frozen=True):
    """One device by itself: busy is the union over its streams, and busy and idle add up to its span."""

    device: int
    name: str
    """Empty where the trace does not tell."""
    kernels: int
    kernel_ns: int
    busy_ns: int
    idle_ns: int
    span_ns: int
    idle: "list[IdleLine]"
    stages: list[DeviceStageLine]
    """Of several devices; with one, the stages of the whole are its own."""


class GpuMetricLine(msgspec.Struct, frozen=True):
    """One metric of a device while a stage's work ran on it, of the samples that fell into it."""

    stage: str
    """Empty: from the first to the last work of the device."""
    device: int
    metric: str
    samples: int
    mean: float
    least: int
    most: int


class HostOperatorLine(msgspec.Struct, frozen=True):
    """The host time of one operator, by name."""

    name: str
    calls: int
    self_ns: int
    """Without the operators inside it."""
    total_ns: int
    """With them; an operator inside another of its name is counted once."""
    share: float
    """`self_ns` in the time of all operators."""


class HostStageLine(msgspec.Struct, frozen=True):
    """The host time of one stage: inside operators and outside them it adds up to the wall time."""

    name: str
    wall_ns: int
    operator_ns: int
    """On the thread of the stage's label."""
    outside_ns: int
    """Python, and whatever else the profiler does not record as an operator."""
    operators: list[HostOperatorLine]
    """Of that thread, shares of the stage's operator time."""


class HostTable(msgspec.Struct, frozen=True):
    """Where the host's time went, of a trace that holds no device work."""

    operators: list[HostOperatorLine]
    stages: list[HostStageLine]


class LabelLine(msgspec.Struct, frozen=True):
    """All ranges of one label that marks neither a stage nor a module."""

    name: str
    """As `DOMAIN@name` where it has a domain."""
    calls: int
    wall_ns: int
    """Of the label, under the profiler; one inside another of its name counts once."""
    kernels: int | None
    """Launched while it was open, inner labels included; None where that is not told."""
    kernel_ns: int | None


class OwnerLine(msgspec.Struct, frozen=True):
    """The device time of one operator or module."""

    name: str
    calls: int
    kernels: int
    self_ns: int
    total_ns: int
    share: float


class BorrowedLine(msgspec.Struct, frozen=True):
    """The kernels that one module owns, by the eager trace of the same model."""

    name: str
    kernels: int
    self_ns: int
    share: float
    """Of the summed kernel time."""


class BorrowedTable(msgspec.Struct, frozen=True):
    """Modules of CUDA graphs and compiled code."""

    source: str
    """The eager trace."""
    coverage: dict[str, float | None]
    """Share of the kernel time by how its module was found: own, name, class, between, nothing."""
    rows: list[BorrowedLine]


class KernelLine(msgspec.Struct, frozen=True, rename={"kind": "class"}):
    """All launches of one kernel."""

    name: str
    kind: str
    calls: int
    total_ns: int
    mean_ns: float
    share: float


class IdleLine(msgspec.Struct, frozen=True):
    """Idle time of one cause."""

    cause: str
    ns: int


class BudgetLine(msgspec.Struct, frozen=True):
    """One row of a budget."""

    key: str
    label: str
    ns: int
    share: float


class BudgetTable(msgspec.Struct, frozen=True):
    """The budget of a stage; its rows sum to `wall_ns`."""

    stage: str
    unit: str
    units: int
    wall_ns: int
    wall_source: str
    busy_ns: int
    rows: list[BudgetLine]
    problems: list[str]
    notes: list[str]


class ThroughputLine(msgspec.Struct, frozen=True):
    """Tokens per second now and at a larger batch, and how long a token takes then: as long as a step."""

    batch: int
    batch_after: int
    step_ns: int
    step_after_ns: int
    step_after_low_ns: int
    step_after_high_ns: int
    tokens_per_s: float
    tokens_per_s_after: float
    tokens_per_s_after_low: float
    tokens_per_s_after_high: float


class Finding(msgspec.Struct, frozen=True, rename={"to_try": "try"}):
    """One finding, from the rule that makes it to JSON and page; savings are of wall time per `saving_per`."""

    id: str
    headline: str
    """The claim in one sentence."""
    claim: str
    """The headline, and what is to be said after it."""
    saving_ns: int | None
    evidence: list[str]
    to_try: str
    kind: str
    stage: str
    saving_low_ns: int | None
    saving_high_ns: int | None
    saving_per: str
    saving_why: str
    """Why there is no saving."""
    units: int
    """How often the unit occurs in a request, or in the trace."""
    confidence: str
    because: str
    overrides: list[str]
    change: str
    counted: int = 0
    """Units that the budget it stands on holds: decode steps in the trace. 0: all there are."""
    before_ns: int | None = None
    """The time per unit that the saving is taken from, and below what it is predicted to become."""
    after_ns: int | None = None
    after_low_ns: int | None = None
    after_high_ns: int | None = None
    kept: float = 1.0
    """Where the time before is measured otherwise, the share of the difference that the time after has, too: 0 where the time
    after is predicted by itself, 1 where a saving is."""
    throughput: ThroughputLine | None = None
    """Of a change that makes no request faster: then nothing is saved, and `before_ns` and `after_ns` are a token's share of the
    batch's step."""

    @property
    def weight_ns(self) -> int:
        """The expected saving over a whole request."""
        return (self.saving_ns or 0) * self.units


class TraceAnalysis(msgspec.Struct, frozen=True):
    """One trace."""

    source: str
    complete: bool
    problems: list[ProblemLine]
    gpu: GpuTotals
    stages: list[StageLine]
    kernels: list[KernelLine]
    idle: list[IdleLine]
    findings: list[Finding]
    why: str
    """Why there are no numbers; empty where there are."""
    profiler: str
    device: str
    stage_method: str
    stage_why: str
    stage_coverage: float | None
    """Share of the device time that belongs to a stage."""
    unknown_share: float | None
    """Share of the kernel time whose class is not known."""
    budgets: list[BudgetTable]
    steps: list[StepLine]
    modules: list[OwnerLine]
    """By the device time of their own; empty where the trace labels none."""
    operators: list[OwnerLine] = msgspec.field(default_factory=list)
    """The same of operators, by name; empty where the trace records none, as nsys does not."""
    borrowed: BorrowedTable | None = None
    """Where an eager trace was given for it."""
    devices: list[DeviceLine] = msgspec.field(default_factory=list)
    """Every device with work in the trace, each by itself."""
    gpu_metrics: list[GpuMetricLine] = msgspec.field(default_factory=list)
    """Sampled by nsys, where it was told to; of a run, from its nsys pass, whichever trace the rest is from."""
    host: HostTable | None = None
    """Of a trace without device work that records operators."""
    labels: list[LabelLine] = msgspec.field(default_factory=list)
    """What the program marked that is neither a stage nor a module."""
