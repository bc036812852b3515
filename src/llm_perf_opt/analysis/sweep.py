"""What the points of a sweep came to, side by side: figures, floors, what binds each, and which are not beaten by another."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llm_perf_opt.analysis.limits.binding import UNKNOWN
from llm_perf_opt.analysis.limits.efficiency import StageEfficiency
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.stats import ends
from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.records import CleanTimings, Distribution, Maybe, Missing

Hardware = Mapping[str, str]
"""By key, as a comparison knows it. What is not known is not there: it cannot be said to differ."""

_OF_DEVICE = ("device", "device_name", "gpu.")
_MOST_NAMED = 3


@dataclass(frozen=True)
class PointFacts:
    """One point as it really ran."""

    device: str
    host: str
    model: str
    parameters: int
    dtype: str
    how: str
    """Cache, compilation, attention; what ran it where that is no plain PyTorch."""
    prompt_tokens: str
    new_tokens: int
    software: dict[str, str]
    """Versions inside the measured process, and the driver's."""

    @property
    def workload(self) -> str:
        """The model and the request, in words: figures of different ones are of different work, and none is the better."""
        return f"{self.model} ({self.parameters:,} parameters), {self.prompt_tokens} prompt tokens, {self.new_tokens} new tokens"


def ran(analysis: RunAnalysis) -> Maybe[PointFacts]:
    """Of a point that was measured."""
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
    )


def _device(timings: CleanTimings) -> str:
    devices = 1 if timings.runtime is None else timings.runtime.devices
    return timings.model.device_name if devices == 1 else f"{devices} × {timings.model.device_name}"


def _host(analysis: RunAnalysis) -> str:
    """The processor beside the device; empty where it is the device, or is not known."""
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


def elsewhere(points: Sequence[Hardware], swept: Sequence[str]) -> list[str]:
    """For each point what differs from the hardware of most points, in words; empty where nothing does.

    Of two halves the one of the first point is taken for the rest. A device that was swept over may differ.
    """
    device_swept = any(key.rsplit(".", 1)[-1] == "device" for key in swept)
    known = [
        {key: value for key, value in point.items() if not (device_swept and key.startswith(_OF_DEVICE))} for point in points
    ]
    usual = {key: _most_common([point[key] for point in known if key in point]) for point in known for key in point}
    return [differences(usual, point, "most points") for point in known]


def differences(usual: Hardware, here: Hardware, whose: str) -> str:
    """What differs, in words; only what both know."""
    found = [f"{key} is {value} ({whose}: {usual[key]})" for key, value in here.items() if key in usual and usual[key] != value]
    more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return "; ".join(found[:_MOST_NAMED]) + more


def _most_common(values: Sequence[str]) -> str:
    counts = Counter(values)
    return max(values, key=lambda value: counts[value])  # the first of equals


def mixed_software(points: Sequence[PointFacts]) -> list[str]:
    """What is not of one version in all points: nothing sweeps over it, and it may change a figure."""
    names = dict.fromkeys(name for point in points for name in point.software)
    found = []
    for name in names:
        counts = Counter(point.software[name] for point in points if name in point.software)
        if len(counts) > 1:
            words = [f"{version} ({count} point{'s' if count > 1 else ''})" for version, count in counts.items()]
            found.append(f"{name} {', '.join(words)}")
    return found


def mixed_models(points: Sequence[PointFacts], swept: Sequence[str]) -> list[str]:
    """The models that ran, where there are several and no swept key says so: of no two of them is a figure alike."""
    if any(key.split(".")[0] == "model" or key.endswith("dtype") for key in swept):
        return []
    found = list(dict.fromkeys(f"{point.model} ({point.parameters:,} parameters, {point.dtype})" for point in points))
    return found if len(found) > 1 else []


IMPOSSIBLE = "impossible"
"""Status of a point with a figure that cannot be true."""
ELSEWHERE = "other hardware"
"""Status of a point that ran on other hardware than most."""

_NOT_MEASURED = Missing("it was not measured")
METRIC_KEYS = ("ttft", "tpot", "e2e", "decode_rate", "output_rate")


@dataclass(frozen=True)
class SweepEntry:
    """One point as it was asked for, and the analysis of its run."""

    swept: tuple[str, ...]
    """`KEY=VALUE` of what differs between the points."""
    status: str
    why: str
    folder: str
    analysis: Maybe[RunAnalysis]
    page: str = ""
    """Its own report, from the folder of the sweep; empty where there is none."""
    hardware: Hardware = field(default_factory=dict)
    """What it ran on."""


@dataclass(frozen=True)
class Interval:
    """A median and the ends it is known within."""

    low: float
    median: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        """Whether the two may be the same."""
        return self.low <= other.high and other.low <= self.high

    def surely_below(self, other: "Interval") -> bool:
        """Whether it is less, wherever in its reach each of them is."""
        return self.high < other.low


@dataclass(frozen=True)
class SweepRow:
    """One point."""

    number: int
    values: dict[str, str]
    """Swept key → value."""
    status: str
    why: str
    """Why it is not complete, or has no figures."""
    folder: str
    metrics: dict[str, Maybe[Distribution]]
    batch: Maybe[int]
    floor_ns: Maybe[float]
    """The least time of a decode step, on the best limits known."""
    times_floor: Maybe[float]
    """Of decode."""
    prefill_bound: Maybe[str]
    decode_bound: Maybe[str]
    warnings: int
    page: str = ""
    """Its own report; empty where there is none to lead to."""
    ranked: bool = True
    """Whether its figures stand beside the others'; where they do not, `status` and `why` say what is wrong with them."""
    ran: Maybe[PointFacts] = _NOT_MEASURED

    @property
    def workload(self) -> str:
        """What it did, in words; only points that did the same are ranked against each other. Empty where it is not known."""
        return "" if isinstance(self.ran, Missing) else self.ran.workload

    def interval(self, key: str) -> Interval | None:
        """A metric with the ends it is known within: the 95 % interval; of fewer repeats than that needs, the least and most."""
        value = self.metrics.get(key)
        if value is None or isinstance(value, Missing):
            return None
        low, high = ends(value)
        return Interval(low, value.median, high)

    @property
    def repeats(self) -> Maybe[int]:
        """How many times the request was measured."""
        known = [value for value in self.metrics.values() if not isinstance(value, Missing)]
        absent = [value for value in self.metrics.values() if isinstance(value, Missing)]
        return known[0].n if known else absent[0] if absent else _NOT_MEASURED

    def median(self, key: str) -> Maybe[float]:
        """The median of a metric."""
        value = self.metrics.get(key, _NOT_MEASURED)
        return value if isinstance(value, Missing) else value.median

    @property
    def floor_rate(self) -> Maybe[float]:
        """Decode tokens per second of the batch, if every step took its floor."""
        if isinstance(self.floor_ns, Missing):
            return self.floor_ns
        return self.batch if isinstance(self.batch, Missing) else self.batch * 1e9 / self.floor_ns

    @property
    def label(self) -> str:
        """Its values, for a chart."""
        return ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in self.values.items()) or f"point {self.number}"


def sweep_rows(entries: Sequence[SweepEntry]) -> tuple[SweepRow, ...]:
    """A row for each point, in the order they were asked for. Points of other hardware than most are not ranked."""
    rows = [_row(number, entry) for number, entry in enumerate(entries)]
    # what cannot be true, or is not complete, has no say in what the others ran on
    hardware = [entry.hardware if row.ranked else {} for row, entry in zip(rows, entries, strict=True)]
    apart = elsewhere(hardware, swept_keys(rows))
    return tuple(
        replace(row, ranked=False, status=ELSEWHERE, why=f"it ran on other hardware than most points: {words}") if words else row
        for row, words in zip(rows, apart, strict=True)
    )


def swept_keys(rows: Sequence[SweepRow]) -> list[str]:
    """What differs between the points, in the order it was given."""
    return list(dict.fromkeys(key for row in rows for key in row.values))


def pareto_front(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The ranked points that no other of their workload beats, the shortest TPOT first.

    One point beats another that is surely worse (their intervals lie apart) in TPOT or in decode throughput, and not surely
    better in the other of the two: a difference within the noise is no reason to choose a point that is surely worse.

    No circle of points can beat each other, so the front is never empty: decode throughput is the batch over TPOT, so each point
    is known within the same ratio in both, and a circle would need ratios that add up to more than themselves.
    """
    placed = [
        (latency, rate, row)
        for row in rows
        if row.ranked and (latency := row.interval("tpot")) is not None and (rate := row.interval("decode_rate")) is not None
    ]

    def beaten(latency: Interval, rate: Interval, row: SweepRow) -> bool:
        for time, much, other in placed:
            if other.workload != row.workload:
                continue
            faster, slower = time.surely_below(latency), latency.surely_below(time)
            more, less = rate.surely_below(much), much.surely_below(rate)
            if (faster and not less) or (more and not slower):
                return True
        return False

    front = [place for place in placed if not beaten(*place)]
    front.sort(key=lambda place: (place[0].median, -place[1].median))
    return [row for _, _, row in front]


def by_workload(rows: Sequence[SweepRow]) -> dict[str, list[SweepRow]]:
    """The ranked points of each workload, in the order they were asked for."""
    found: dict[str, list[SweepRow]] = {}
    for row in rows:
        if row.ranked:
            found.setdefault(row.workload, []).append(row)
    return found


def front_line(front: Sequence[SweepRow]) -> list[SweepRow]:
    """Those of one workload's front to join by a line: each next one has a longer TPOT and more throughput, by their medians.

    Points of the front that are not told apart may have medians in any order; a line through all of them would go to and fro.
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
    """Of one workload the ranked point with the least median (or the `most`), then those whose intervals reach into its own."""
    placed = [(reach, row) for row in rows if row.ranked and (reach := row.interval(key)) is not None]
    placed.sort(key=lambda place: -place[0].median if most else place[0].median)
    return [row for reach, row in placed if reach.overlaps(placed[0][0])]


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
    status, why, ranked = _standing(entry, analysis)
    return SweepRow(
        number, values, status, why, entry.folder, found,
        timings if isinstance(timings, Missing) else timings.workload.batch_size,
        _floor_ns(decode, steps), _times_floor(decode), _bound(_stage(analysis, "prefill")), _bound(decode),
        len(analysis.warnings), entry.page, ranked, ran(analysis),
    )  # fmt: skip


def _standing(entry: SweepEntry, analysis: RunAnalysis) -> tuple[str, str, bool]:
    """Status, reason, and whether its figures count: they are true, and the unprofiled pass, which they are of, is complete."""
    if analysis.impossible is not None:
        return IMPOSSIBLE, f"{analysis.impossible.fact} {analysis.impossible.remedy}", False
    if analysis.damaged is not None:
        return "damaged", analysis.damaged.fact, False
    if entry.status == "partial" and analysis.manifest.status == "partial":  # another of its passes failed
        clean = analysis.manifest.pass_named("clean")
        return entry.status, entry.why, clean is not None and clean.status == "complete"
    return entry.status, entry.why, entry.status == "complete"


def _stage(analysis: RunAnalysis, name: str) -> Maybe[StageEfficiency]:
    found = analysis.efficiency
    if isinstance(found, Missing):
        return found
    return next((stage for stage in found.stages if stage.stage == name), Missing(f"the request has no {name}"))


def _floor_ns(decode: Maybe[StageEfficiency], steps: Maybe[int]) -> Maybe[float]:
    if isinstance(decode, Missing):
        return decode
    if isinstance(steps, Missing):
        return steps
    for entry in reversed(decode.against):
        if not isinstance(entry.floor, Missing) and steps:
            return entry.floor.seconds * 1e9 / steps
    return Missing("no peak is known to compare with")


def _times_floor(decode: Maybe[StageEfficiency]) -> Maybe[float]:
    if isinstance(decode, Missing):
        return decode
    known = [entry.times_floor for entry in reversed(decode.against) if not isinstance(entry.times_floor, Missing)]
    return known[0] if known else Missing("no peak is known to compare with")


def _bound(stage: Maybe[StageEfficiency]) -> Maybe[str]:
    if isinstance(stage, Missing):
        return stage
    return Missing(stage.because) if stage.verdict == UNKNOWN else stage.verdict
