"""The analysis of a trace as plain records, which are printed, saved as JSON and read back.

A missing number is None, and `why` has the reason. The module imports quickly, so that a saved analysis shows at once.
"""

import msgspec

WHOLE = "trace"
"""The stage, and its unit, of a trace without stage labels."""
ON_CPU = "CPU"
"""The device of a trace without device work."""
UNPROFILED = "the unprofiled pass"
"""How `wall_source` begins if the wall time is unprofiled."""
OVERLAP = "Savings overlap, so do not add them: what one change saves, another cannot save again."


class ProblemLine(msgspec.Struct, frozen=True):
    """A problem that makes some or all numbers of a trace unreliable."""

    id: str
    what: str
    fatal: bool
    remedy: str


class GpuTotals(msgspec.Struct, frozen=True):
    """All devices together: busy is the union of kernels, copies and memsets; span is from the first to the last of them."""

    kernels: int | None
    kernel_ns: int | None
    busy_ns: int | None
    idle_ns: int | None
    span_ns: int | None


class StageLine(msgspec.Struct, frozen=True):
    """One stage, all its instances together. Without device work, only the wall time is known."""

    name: str
    count: int
    wall_ns: int
    gpu_busy_ns: int | None
    idle_ns: int | None
    kernels: int | None
    launches: int | None
    kernel_ns: int | None
    span_ns: int | None = None
    """Time from the first to the last of its device work, summed over its instances: busy + idle."""


class StepLine(msgspec.Struct, frozen=True):
    """One step; its window ends at the first work of the next."""

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
    """One device: busy is the union over its streams, and busy + idle = span."""

    device: int
    name: str
    """Empty if the trace does not name it."""
    kernels: int
    kernel_ns: int
    busy_ns: int
    idle_ns: int
    span_ns: int
    idle: "list[IdleLine]"
    stages: list[DeviceStageLine]
    """Empty if there is only one device."""


class GpuMetricLine(msgspec.Struct, frozen=True):
    """One sampled metric of a device while a stage's work ran on it."""

    stage: str
    """Empty for the time from the first to the last work of the device."""
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
    """Without inner operators."""
    total_ns: int
    """With inner operators; an operator inside another of its name counts once."""
    share: float
    """`self_ns` / the time of all operators."""


class HostStageLine(msgspec.Struct, frozen=True):
    """The host time of one stage: time inside and outside operators adds up to the wall time."""

    name: str
    wall_ns: int
    operator_ns: int
    """Time inside operators on the thread of the stage's label."""
    outside_ns: int
    """Python, and everything else that the profiler does not record as an operator."""
    operators: list[HostOperatorLine]
    """Operators of that thread, with shares of the stage's operator time."""


class HostTable(msgspec.Struct, frozen=True):
    """Host time of a trace without device work."""

    operators: list[HostOperatorLine]
    stages: list[HostStageLine]


class LabelLine(msgspec.Struct, frozen=True):
    """All ranges of one label that is neither a stage nor a module."""

    name: str
    """`DOMAIN@name` if it has a domain."""
    calls: int
    wall_ns: int
    """Time of the label under the profiler; one inside another of its name counts once."""
    kernels: int | None
    """Kernels launched while it was open, including inner labels; None if unknown."""
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
    """The kernels of one module or operator, according to another trace of the same model."""

    name: str
    kernels: int
    self_ns: int
    share: float
    """Share of the summed kernel time."""


class BorrowedTable(msgspec.Struct, frozen=True):
    """Modules of CUDA graphs and compiled code."""

    source: str
    """The eager trace, or the trace of the capture."""
    coverage: dict[str, float | None]
    """Share of the kernel time by how the module was found: own, name, class, between, capture, nothing."""
    rows: list[BorrowedLine]
    operators: list[BorrowedLine] = msgspec.field(default_factory=list)
    """Operators of the kernels, if the source records the capture of the graphs."""


class ComponentLine(msgspec.Struct, frozen=True):
    """The kernels of one component of the model in one stage."""

    stage: str
    name: str
    """A component of the cost model; `other` for kernels outside the components, `unknown` for kernels without one."""
    kernels: int
    kernel_ns: int
    share: float
    """Share of the stage's summed kernel time."""


class ComponentTable(msgspec.Struct, frozen=True):
    """Components by the structure of the layers: the order of attention, products and norms in each step."""

    evidence: dict[str, str]
    """Stage → the structure that was found."""
    why: dict[str, str]
    """Stage → why some or all of its kernels have no component."""
    coverage: dict[str, float | None]
    """Stage → share of the summed kernel time with a component."""
    rows: list[ComponentLine]


class CaptureLine(msgspec.Struct, frozen=True):
    """Graphs captured under one label."""

    label: str
    """The innermost range around the capture; empty if there is none."""
    graphs: int
    nodes: int
    """Captured launches, copies and memsets; they run when a graph is replayed."""
    wall_ns: int
    """Host time of the capture under the profiler."""


class CaptureTable(msgspec.Struct, frozen=True):
    """The capture of CUDA graphs."""

    captures: list[CaptureLine]
    operators: dict[str, int]
    """Operator → the nodes that it launched, most first."""


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
    low_ns: int | None = None
    """The interval of `ns`, if it is an estimate."""
    high_ns: int | None = None


class ComponentTimeLine(msgspec.Struct, frozen=True):
    """The host time of one component of the model under the profiler, by row of the budget."""

    name: str
    rows: dict[str, int]
    ns: int


class BudgetTable(msgspec.Struct, frozen=True):
    """The budget of a stage; its rows add up to `wall_ns`."""

    stage: str
    unit: str
    units: int
    wall_ns: int
    wall_source: str
    busy_ns: int
    rows: list[BudgetLine]
    problems: list[str]
    notes: list[str]
    components: list[ComponentTimeLine] = msgspec.field(default_factory=list)
    """Time by component, if the trace of a program on the CPU labels them; profiled, longest first."""
    request_units: int = 0
    """Units in a whole request, the first of which are in the trace; 0: unknown."""

    @property
    def scope(self) -> str:
        """The steps of a request that the rows cover, such as `steps 1–16 of 63`; empty if all of them, or unknown."""
        return f"steps 1–{self.units} of {self.request_units}" if 0 < self.units < self.request_units else ""


class ThroughputLine(msgspec.Struct, frozen=True):
    """Tokens per second now and at a larger batch, and the time of a step, which is that of a token."""

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
    """One finding, from its rule to JSON and page; savings are wall time per `saving_per`."""

    id: str
    headline: str
    """The claim in one sentence."""
    claim: str
    """The headline and what follows it."""
    saving_ns: int | None
    evidence: list[str]
    to_try: str
    kind: str
    stage: str
    saving_low_ns: int | None
    saving_high_ns: int | None
    saving_per: str
    saving_why: str
    """Why there is no saving; empty if there is one."""
    units: int
    """How often the unit occurs in a request or in the trace."""
    confidence: str
    because: str
    overrides: list[str]
    change: str
    counted: int = 0
    """Units (decode steps in the trace) in the budget that it is based on; 0 for all."""
    before_ns: int | None = None
    """The time per unit before the change; `after_ns` is the predicted time after it."""
    after_ns: int | None = None
    after_low_ns: int | None = None
    after_high_ns: int | None = None
    kept: float = 1.0
    """If another run measures a different time before, the share of the difference that also applies to the time after: 0 if
    the rule predicts the time after, 1 if it predicts the saving."""
    throughput: ThroughputLine | None = None
    """For a change that makes no request faster: nothing is saved, and `before_ns` and `after_ns` are a token's share of the
    batch's step."""
    title: str = ""
    """The change in a few words, as an imperative; for a finding about trust, what is wrong. Empty: show the headline."""
    concerns: list[str] = msgspec.field(default_factory=list)
    """What of its stage the saving is taken from: attention, products, cache, host. Findings on different ones are independent.
    Empty: any of it."""

    @property
    def weight_ns(self) -> int:
        """The expected saving over a whole request."""
        return (self.saving_ns or 0) * self.units


class TraceAnalysis(msgspec.Struct, frozen=True):
    """The analysis of one trace."""

    source: str
    complete: bool
    problems: list[ProblemLine]
    gpu: GpuTotals
    stages: list[StageLine]
    kernels: list[KernelLine]
    idle: list[IdleLine]
    findings: list[Finding]
    why: str
    """Why there are no numbers or, for the capture of CUDA graphs, no budgets and findings; empty if there are."""
    profiler: str
    device: str
    stage_method: str
    stage_why: str
    stage_coverage: float | None
    """Share of the device time that belongs to a stage."""
    unknown_share: float | None
    """Share of the kernel time whose class is unknown."""
    budgets: list[BudgetTable]
    steps: list[StepLine]
    modules: list[OwnerLine]
    """Modules by their own device time; empty if the trace labels none."""
    operators: list[OwnerLine] = msgspec.field(default_factory=list)
    """Operators by their own device time; empty if the trace records none (nsys)."""
    borrowed: BorrowedTable | None = None
    """Modules from an eager trace, if one was given."""
    devices: list[DeviceLine] = msgspec.field(default_factory=list)
    """Every device with work in the trace."""
    gpu_metrics: list[GpuMetricLine] = msgspec.field(default_factory=list)
    """GPU metrics sampled by nsys, if enabled; for a run, always from its nsys pass."""
    host: HostTable | None = None
    """Host time, for a trace with operators but without device work."""
    labels: list[LabelLine] = msgspec.field(default_factory=list)
    """Labels that are neither stages nor modules."""
    components: ComponentTable | None = None
    """Components by the structure of the layers, if the trace has steps and no labels of components."""
    captures: CaptureTable | None = None
    """Captured CUDA graphs, if the trace records any."""
