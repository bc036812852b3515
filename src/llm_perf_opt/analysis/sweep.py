"""The points of a sweep: metrics, roofline times, verdicts, and the Pareto front."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llm_perf_opt.analysis.limits.binding import UNKNOWN
from llm_perf_opt.analysis.limits.efficiency import StageEfficiency
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.stats import ends
from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.records import CleanTimings, Distribution, Maybe, Missing
from llm_perf_opt.core.run_status import status_of

Hardware = Mapping[str, str]
"""Facts of the hardware by key, as in a comparison. Unknown facts are left out and do not count as different."""

_OF_DEVICE = ("device", "device_name", "gpu.")
_OF_THREADS = ("threads", "cpus")
_THREAD_SETTINGS = {"threads", "cpu_threads", "cpus"}
_MOST_NAMED = 3


@dataclass(frozen=True)
class PointFacts:
    """What one point ran: device, model, request and software."""

    device: str
    host: str
    model: str
    parameters: int
    dtype: str
    how: str
    """Cache, compilation and attention."""
    prompt_tokens: str
    new_tokens: int
    software: dict[str, str]
    """Versions in the measured process, and the driver's."""
    weights: str = ""
    """Random or real; empty if unknown."""

    @property
    def workload(self) -> str:
        """The model and the request. Points with different workloads are not compared."""
        size = f"{self.parameters:,} parameters{_weights(self)}"
        return f"{self.model} ({size}), {self.prompt_tokens} prompt tokens, {self.new_tokens} new tokens"


def _facts(analysis: RunAnalysis) -> Maybe[PointFacts]:
    """Return what a measured point ran."""
    timings = analysis.timings
    if isinstance(timings, Missing):
        return timings
    model, work = timings.model, timings.workload
    lengths = sorted(set(work.prompt_tokens))
    return PointFacts(
        device=_device(timings),
        host=_host(analysis),
        model=model.name,
        parameters=model.parameters,
        dtype=model.dtype,
        how=f"{model.cache} cache, compile {model.compile}, attention {model.attention}",
        prompt_tokens=f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}",
        new_tokens=work.new_tokens,
        software=_software(analysis, timings),
        weights="" if model.weights is None else model.weights.words,
    )


def _device(timings: CleanTimings) -> str:
    devices = 1 if timings.runtime is None else timings.runtime.devices
    return timings.model.device_name if devices == 1 else f"{devices} × {timings.model.device_name}"


def _host(analysis: RunAnalysis) -> str:
    """Return the name of the processor; empty if it is unknown."""
    cpu = analysis.env.get("cpu")
    name = cpu.get("name") if isinstance(cpu, Mapping) else None
    return name if isinstance(name, str) and not name.startswith("n/a") else ""


def _software(analysis: RunAnalysis, timings: CleanTimings) -> dict[str, str]:
    found = dict(timings.framework)
    if timings.runtime is not None and timings.runtime.type != PYTORCH:
        found[timings.runtime.type] = timings.runtime.version
    driver = analysis.env.get("gpu_driver")
    if isinstance(driver, str) and not driver.startswith("n/a") and timings.model.device.startswith("cuda"):
        found["driver"] = driver
    return {name: version for name, version in found.items() if version}


def _hardware_differences(points: Sequence[Hardware], swept: Sequence[str]) -> list[str]:
    """Return for each point how its hardware differs from that of most points; empty if it does not.

    In a tie, the first point decides. A swept device, and swept threads or CPUs, may differ.
    """
    names = {key.rsplit(".", 1)[-1] for key in swept}
    may_differ = (*(_OF_DEVICE if "device" in names else ()), *(_OF_THREADS if names & _THREAD_SETTINGS else ()))
    known = [{key: value for key, value in point.items() if not key.startswith(may_differ)} for point in points]
    usual = {key: _most_common([point[key] for point in known if key in point]) for point in known for key in point}
    return [differences(usual, point, "most points") for point in known]


def differences(usual: Hardware, here: Hardware, whose: str) -> str:
    """Return the facts that both have and that differ, as text."""
    found = [f"{key} is {value} ({whose}: {usual[key]})" for key, value in here.items() if key in usual and usual[key] != value]
    more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return "; ".join(found[:_MOST_NAMED]) + more


def _most_common(values: Sequence[str]) -> str:
    counts = Counter(values)
    return max(values, key=lambda value: counts[value])  # the first of equals


def mixed_software(points: Sequence[PointFacts]) -> list[str]:
    """Return packages whose version differs between points: it is not swept, but may change results."""
    names = dict.fromkeys(name for point in points for name in point.software)
    found = []
    for name in names:
        counts = Counter(point.software[name] for point in points if name in point.software)
        if len(counts) > 1:
            words = [f"{version} ({count} point{'s' if count > 1 else ''})" for version, count in counts.items()]
            found.append(f"{name} {', '.join(words)}")
    return found


def _weights(point: PointFacts) -> str:
    return f", {point.weights}" if point.weights else ""


def mixed_models(points: Sequence[PointFacts], swept: Sequence[str]) -> list[str]:
    """Return the models if there are several but none was swept: their results are not comparable."""
    if any(key.split(".")[0] == "model" or key.endswith("dtype") for key in swept):
        return []
    words = [f"{point.model} ({point.parameters:,} parameters, {point.dtype}{_weights(point)})" for point in points]
    found = list(dict.fromkeys(words))
    return found if len(found) > 1 else []


IMPOSSIBLE = "impossible"
"""Status of a point with an implausible figure."""
OTHER_HARDWARE = "other hardware"
"""Status of a point that did not run on the hardware of most points."""

_NOT_MEASURED = Missing("the point was not measured")
METRIC_KEYS = ("ttft", "tpot", "e2e", "decode_rate", "output_rate")


@dataclass(frozen=True)
class SweepEntry:
    """One requested point and the analysis of its run."""

    swept: tuple[str, ...]
    """`KEY=VALUE` of the swept settings."""
    status: str
    why: str
    folder: str
    analysis: Maybe[RunAnalysis]
    page: str = ""
    """Path of its own report, relative to the sweep's folder; empty if there is none."""
    hardware: Hardware = field(default_factory=dict)
    """The hardware it ran on."""


@dataclass(frozen=True)
class Interval:
    """A median and its interval."""

    low: float
    median: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        """Return whether the two intervals overlap."""
        return self.low <= other.high and other.low <= self.high

    def is_below(self, other: "Interval") -> bool:
        """Return whether the whole interval lies below the other."""
        return self.high < other.low


@dataclass(frozen=True)
class SweepRow:
    """One point as a row of the table."""

    number: int
    values: dict[str, str]
    """Swept key → value."""
    status: str
    why: str
    """Why it is incomplete or has no figures."""
    folder: str
    metrics: dict[str, Maybe[Distribution]]
    batch: Maybe[int]
    roofline_ns: Maybe[float]
    """Roofline time of a decode step, at the best known peaks."""
    times_floor: Maybe[float]
    """Decode time divided by its roofline time."""
    prefill_bound: Maybe[str]
    decode_bound: Maybe[str]
    warnings: int
    page: str = ""
    """Path of its own report; empty if there is none."""
    ranked: bool = True
    """Whether it is compared with the other points; if not, `status` and `why` say why."""
    ran: Maybe[PointFacts] = _NOT_MEASURED

    @property
    def workload(self) -> str:
        """The model and the request; only points with the same workload are compared. Empty if unknown."""
        return "" if isinstance(self.ran, Missing) else self.ran.workload

    def interval(self, key: str) -> Interval | None:
        """Return a metric's median with its 95 % interval, or with its minimum and maximum if there are too few repeats."""
        value = self.metrics.get(key)
        if value is None or isinstance(value, Missing):
            return None
        low, high = ends(value)
        return Interval(low, value.median, high)

    @property
    def repeats(self) -> Maybe[int]:
        """Number of measured repeats."""
        known = [value for value in self.metrics.values() if not isinstance(value, Missing)]
        absent = [value for value in self.metrics.values() if isinstance(value, Missing)]
        return known[0].n if known else absent[0] if absent else _NOT_MEASURED

    def median(self, key: str) -> Maybe[float]:
        """Return the median of a metric."""
        value = self.metrics.get(key, _NOT_MEASURED)
        return value if isinstance(value, Missing) else value.median

    @property
    def roofline_rate(self) -> Maybe[float]:
        """Decode tokens per second if every step took its roofline time."""
        if isinstance(self.roofline_ns, Missing):
            return self.roofline_ns
        return self.batch if isinstance(self.batch, Missing) else self.batch * 1e9 / self.roofline_ns

    @property
    def label(self) -> str:
        """Its swept values, for a chart."""
        return ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in self.values.items()) or f"point {self.number}"


def sweep_rows(entries: Sequence[SweepEntry]) -> tuple[SweepRow, ...]:
    """Return one row per point, in the requested order. Points on different hardware from most are not ranked."""
    rows = [_row(number, entry) for number, entry in enumerate(entries)]
    # implausible and incomplete points do not count when deciding what most points ran on
    hardware = [entry.hardware if row.ranked else {} for row, entry in zip(rows, entries, strict=True)]
    apart = _hardware_differences(hardware, swept_keys(rows))
    return tuple(
        replace(row, ranked=False, status=OTHER_HARDWARE, why=f"it did not run on the hardware of most points: {words}")
        if words
        else row
        for row, words in zip(rows, apart, strict=True)
    )


def swept_keys(rows: Sequence[SweepRow]) -> list[str]:
    """Return the swept keys in the requested order."""
    return list(dict.fromkeys(key for row in rows for key in row.values))


def pareto_front(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the ranked points that no other point of their workload beats, shortest TPOT first.

    A point beats another if it is better in TPOT or in decode throughput, with intervals that do not overlap, and not worse, in
    the same sense, in the other of the two.

    Points cannot beat each other in a circle, so the front is never empty: decode throughput is the batch divided by TPOT, so the
    relative interval of a point is the same in both.
    """
    placed = [
        (latency, rate, row)
        for row in rows
        if row.ranked and (latency := row.interval("tpot")) is not None and (rate := row.interval("decode_rate")) is not None
    ]

    def beaten(latency: Interval, rate: Interval, row: SweepRow) -> bool:
        for other_latency, other_rate, other in placed:
            if other.workload != row.workload:
                continue
            faster, slower = other_latency.is_below(latency), latency.is_below(other_latency)
            more, less = rate.is_below(other_rate), other_rate.is_below(rate)
            if (faster and not less) or (more and not slower):
                return True
        return False

    front = [place for place in placed if not beaten(*place)]
    front.sort(key=lambda place: (place[0].median, -place[1].median))
    return [row for _, _, row in front]


def by_workload(rows: Sequence[SweepRow]) -> dict[str, list[SweepRow]]:
    """Return the ranked points of each workload, in the requested order."""
    found: dict[str, list[SweepRow]] = {}
    for row in rows:
        if row.ranked:
            found.setdefault(row.workload, []).append(row)
    return found


def front_line(front: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the points of one workload's front to connect by a line: each next one has a higher median throughput.

    Points whose intervals overlap may have medians in any order; a line through all of them would zigzag.
    """
    line: list[SweepRow] = []
    most = 0.0
    for row in front:
        rate = row.interval("decode_rate")
        if rate is not None and rate.median > most:
            line.append(row)
            most = rate.median
    return line


def indistinguishable(rows: Sequence[SweepRow], key: str, *, most: bool = False) -> list[SweepRow]:
    """Return the ranked point with the smallest median (or largest: `most`), then those whose intervals overlap with its own."""
    placed = [(interval, row) for row in rows if row.ranked and (interval := row.interval(key)) is not None]
    placed.sort(key=lambda place: -place[0].median if most else place[0].median)
    return [row for interval, row in placed if interval.overlaps(placed[0][0])]


def _row(number: int, entry: SweepEntry) -> SweepRow:
    values = {key: value for key, _, value in (text.partition("=") for text in entry.swept)}
    analysis = entry.analysis
    if isinstance(analysis, Missing):
        none = dict.fromkeys(METRIC_KEYS, analysis)
        return SweepRow(
            number, values, entry.status, entry.why or analysis.why, entry.folder, dict(none), analysis, analysis, analysis,
            analysis, analysis, 0, entry.page, ranked=False, ran=analysis,
        )  # fmt: skip
    found: dict[str, Maybe[Distribution]] = {}
    timings = analysis.timings
    for key in METRIC_KEYS:
        metric = analysis.metric(key)
        absent = timings if isinstance(timings, Missing) else _NOT_MEASURED
        found[key] = absent if metric is None else metric.value
    decode = _stage(analysis, "decode")
    steps = timings if isinstance(timings, Missing) else timings.workload.decode_steps
    status, why, ranked = _status(entry, analysis)
    return SweepRow(
        number, values, status, why, entry.folder, found,
        timings if isinstance(timings, Missing) else timings.workload.batch_size,
        _roofline_ns(decode, steps), _times_roofline(decode), _bound(_stage(analysis, "prefill")), _bound(decode),
        len(analysis.warnings), entry.page, ranked, _facts(analysis),
    )  # fmt: skip


def _status(entry: SweepEntry, analysis: RunAnalysis) -> tuple[str, str, bool]:
    """Return status, reason, and whether to rank the point: its figures are plausible and its unprofiled pass is complete."""
    if analysis.impossible is not None:
        return IMPOSSIBLE, f"{analysis.impossible.fact} {analysis.impossible.remedy}", False
    if analysis.damaged is not None:
        return status_of(analysis.damaged), analysis.damaged.fact, False
    if entry.status == "partial" and analysis.manifest.status == "partial":  # another of its passes failed
        return entry.status, entry.why, analysis.manifest.has_times
    return entry.status, entry.why, entry.status == "complete"


def _stage(analysis: RunAnalysis, name: str) -> Maybe[StageEfficiency]:
    found = analysis.efficiency
    if isinstance(found, Missing):
        return found
    return next((stage for stage in found.stages if stage.stage == name), Missing(f"the request has no {name}"))


def _roofline_ns(decode: Maybe[StageEfficiency], steps: Maybe[int]) -> Maybe[float]:
    if isinstance(decode, Missing):
        return decode
    if isinstance(steps, Missing):
        return steps
    for entry in reversed(decode.against):
        if not isinstance(entry.roofline, Missing) and steps:
            return entry.roofline.seconds * 1e9 / steps
    return Missing("no peak is known to compare with")


def _times_roofline(decode: Maybe[StageEfficiency]) -> Maybe[float]:
    if isinstance(decode, Missing):
        return decode
    known = [entry.times_roofline for entry in reversed(decode.against) if not isinstance(entry.times_roofline, Missing)]
    return known[0] if known else Missing("no peak is known to compare with")


def _bound(stage: Maybe[StageEfficiency]) -> Maybe[str]:
    if isinstance(stage, Missing):
        return stage
    return Missing(stage.because) if stage.verdict == UNKNOWN else stage.verdict
