"""The records of a server under load: capture and import write them, analysis reads them. Frozen; units are in the names.

Times are unix nanoseconds, the clock that load generators, servers, OpenTelemetry spans and torch traces share.
"""

from dataclasses import dataclass, field
from typing import Literal

from llm_perf_opt.core.missing import Maybe, Missing

_NOT_RECORDED = Missing("not recorded")
_NOT_REPORTED = Missing("the server does not report it")
_NO_METRICS = Missing("the server has no metrics")

POINT_FILE, METRICS_FILE, SPANS_FILE = "point.json", "metrics.jsonl", "spans.jsonl"
"""The files of a load that llm-perf writes; the others are the generator's."""


LoadKind = Literal["rate", "concurrency"]
Arrival = Literal["poisson", "constant", "burst", "closed"]
"""When requests are sent: at random or even gaps, all at once, or each when another one ends."""
LoadClock = Literal["unix", "monotonic", "none"]
"""`none`: the file says how long requests took, not when they were sent."""


@dataclass(frozen=True)
class ServedRequest:
    """One request, as its load generator recorded it."""

    id: str
    sent_ns: int
    """When it was sent."""
    end_ns: int
    """When its last byte arrived, or it failed."""
    token_ns: tuple[int, ...] = ()
    """Arrival of each chunk with output, the first token first; empty if it was not streamed or failed before."""
    prompt_tokens: Maybe[int] = _NOT_RECORDED
    output_tokens: Maybe[int] = _NOT_RECORDED
    """As the server counted them, if it did."""
    scheduled_ns: Maybe[int] = _NOT_RECORDED
    """When the generator meant to send it."""
    error: str = ""
    """Why it failed, such as `429 Too Many Requests`; empty if it succeeded."""
    last_token_ns: Maybe[int] = _NOT_RECORDED
    """Arrival of the last token, if `token_ns` does not have every chunk."""
    client_tokens: Maybe[int] = _NOT_RECORDED
    """Output tokens as the generator's own tokenizer counted them."""
    cut: bool = False
    """Whether the generator stopped it because the measurement ended: neither a success nor a failure. `error` says so."""

    @property
    def failed(self) -> bool:
        """Whether it failed."""
        return bool(self.error) and not self.cut


@dataclass(frozen=True)
class LoadRecords:
    """What a load generator's file holds: the requests and its own summary of them."""

    generator: str
    requests: tuple[ServedRequest, ...]
    version: Maybe[str] = _NOT_RECORDED
    asked: Maybe[float] = _NOT_RECORDED
    """Requests per second, or requests at a time."""
    kind: LoadKind = "rate"
    arrival: Maybe[Arrival] = _NOT_RECORDED
    own: dict[str, dict[str, float]] = field(default_factory=dict)
    """Its own figures: ttft, tpot, itl, e2e in ns, throughput in 1/s → statistic (mean, p50, p90, p99) → value."""
    notes: tuple[str, ...] = ()
    clock: LoadClock = "unix"
    """What the times count from."""
    model: Maybe[str] = _NOT_RECORDED
    url: Maybe[str] = _NOT_RECORDED
    duration_s: Maybe[float] = _NOT_RECORDED
    """How long the measurement took by the generator's own account: what it divides by."""


@dataclass(frozen=True)
class RequestSpan:
    """What the server recorded about one request, from its OpenTelemetry span."""

    id: str
    """The request's id, with what the server put around it."""
    start_ns: int
    end_ns: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    ttft_ns: Maybe[int] = _NOT_RECORDED
    """From its arrival at the server."""
    e2e_ns: Maybe[int] = _NOT_RECORDED


@dataclass(frozen=True)
class LoadPoint:
    """One load that was put on the server: `raw/load_NN/point.json`."""

    number: int
    kind: LoadKind
    asked: float
    """Requests per second, or requests at a time; `inf` is not used: a burst has an arrival of its own."""
    arrival: Arrival
    generator: str
    file: str
    """The generator's record file in the same folder."""
    requests: int
    """How many were requested, without warm-up."""
    started_ns: int
    ended_ns: int
    status: Literal["complete", "partial", "failed"]
    why: str = ""
    """Why it is not complete."""
    profiled: bool = False
    """Whether the server ran under its profiler: such a point has no latencies of its own."""
    trace: str = ""
    """The server's trace in the same folder, of a profiled point."""
    spans: str = ""
    """OpenTelemetry spans in the same folder, as JSON lines."""
    metrics: str = ""
    """Scrapes of the server's metrics in the same folder: JSON lines of `MetricsSample`."""
    part: int = 0
    """Which load of the file, if the generator wrote several into one."""
    monotonic_offset_ns: Maybe[int] = _NOT_RECORDED
    """Unix time minus the monotonic clock of the machine, for generators that record the latter."""
    unrecorded: tuple[Literal["asked", "arrival"], ...] = ()
    """What the generator's file does not say: `asked` is then the rate that was issued, `arrival` a guess."""
    prompt_tokens: Maybe[int] = _NOT_RECORDED
    """Per request, as asked."""
    new_tokens: Maybe[int] = _NOT_RECORDED
    seed: Maybe[int] = _NOT_RECORDED
    """Of prompts and arrivals."""
    problems: tuple[str, ...] = ()
    """What went wrong next to the load: spans or metrics that could not be read."""


@dataclass(frozen=True)
class MetricsSample:
    """One scrape of a server's Prometheus metrics."""

    at_ns: int
    series: dict[str, float]
    """`NAME{labels}` → value, of the series that say something about load."""


@dataclass(frozen=True)
class ServerFacts:
    """The server that was driven: `raw/server/server.json`."""

    url: str
    model: str
    """The name that requests use."""
    argv: tuple[str, ...] = ()
    """The command that started it; empty if it was running already."""
    engine: Maybe[str] = _NOT_REPORTED
    version: Maybe[str] = _NOT_REPORTED
    metrics_url: Maybe[str] = _NO_METRICS
    notes: tuple[str, ...] = ()
    slo_ns: dict[str, int] = field(default_factory=dict)
    """Limits of a good request that the user gave: ttft, tpot, itl, e2e in ns; empty: none."""
