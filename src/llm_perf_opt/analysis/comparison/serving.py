"""Compare runs under load: the same load on both sides, with the requests of each run as repeats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llm_perf_opt.analysis.comparison.compare import Row
from llm_perf_opt.analysis.comparison.effects import Judgement
from llm_perf_opt.analysis.comparison.gates import NO_REMEDY, Gate, GateResult, check_gate
from llm_perf_opt.analysis.comparison.statistics import ACCELERATOR_SPREAD, RECOMMENDED_RUNS, effect
from llm_perf_opt.analysis.serving.generator import GeneratorCheck
from llm_perf_opt.analysis.serving.knee import Knee
from llm_perf_opt.analysis.serving.points import MeasuredLoad
from llm_perf_opt.analysis.serving.requests import LATENCIES, LatencyDefinition, values_of
from llm_perf_opt.analysis.serving.serving_analysis import ServingAnalysis
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import LoadKind, LoadRecords, ServedRequest

SLICES = 12
"""The sending time of a load is divided into so many parts, whose throughputs are the repeats of a run."""
SAME_LENGTH = 0.02
"""Mean prompt and output lengths of one workload differ by less than this share."""
RATE_KEY = "output_rate"
GATED = ("ttft", "tpot", "e2e", RATE_KEY)
KINDS = ("model", "workload")
"""What `--allow` accepts."""
Key = tuple[LoadKind, float, str]


@dataclass(frozen=True)
class ServingRun:
    """One run under load."""

    analysis: ServingAnalysis
    loads: tuple[MeasuredLoad, ...]
    accelerator: bool
    """Whether the server's machine has a GPU, so that little spread between processes may be assumed."""


@dataclass(frozen=True)
class ComparedLoad:
    """One load on both sides."""

    kind: LoadKind
    asked: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class ServingComparison:
    """The comparison of two sides, each one or more runs under load."""

    base_runs: tuple[str, ...]
    new_runs: tuple[str, ...]
    judgement: Judgement
    loads: tuple[ComparedLoad, ...]
    only_base: tuple[float, ...]
    """Loads that the other side does not have."""
    only_new: tuple[float, ...]
    knees: tuple[Maybe[Knee], Maybe[Knee]]
    """Of the first run of each side."""
    cautions: tuple[str, ...]
    gates: tuple[GateResult, ...]


def compare_serving(
    base: Sequence[ServingRun],
    new: Sequence[ServingRun],
    gates: Sequence[Gate],
    allow: Sequence[str],
    judgement: Judgement,
) -> ServingComparison:
    """Compare the loads that every run of both sides has. Raise a ConfigError if there is none, or the workloads differ."""
    for gate in gates:
        if gate.metric not in GATED:
            raise ConfigError(f"--gate {gate.asked} is not a metric of runs under load.", f"Known: {', '.join(GATED)}.")
    _check_models(base, new, allow)
    judgement = _judgement(base, new, judgement)
    sides = [[_by_load(run) for run in side] for side in (base, new)]
    present = [set.intersection(*(set(loads) for loads in side)) for side in sides]
    common = sorted(present[0] & present[1], key=lambda key: (key[0], key[1]))
    if not common:
        listed = ["; ".join(f"{key[1]:g} ({key[0]})" for key in sorted(keys)) or "none" for keys in present]
        raise ConfigError(f"No load is on both sides. Base: {listed[0]}. New: {listed[1]}.", "Compare runs with the same loads.")
    loads = []
    for key in common:
        records = [[run[key] for run in side] for side in sides]
        if "workload" not in allow:
            _check_lengths(key, records)
        loads.append(ComparedLoad(key[0], key[1], _rows(records[0], records[1], judgement)))
    only = [tuple(sorted(key[1] for key in keys - set(common))) for keys in present]
    return ServingComparison(
        base_runs=tuple(run.analysis.run for run in base),
        new_runs=tuple(run.analysis.run for run in new),
        judgement=judgement,
        loads=tuple(loads),
        only_base=only[0],
        only_new=only[1],
        knees=(base[0].analysis.knee, new[0].analysis.knee),
        cautions=_cautions(base, new),
        gates=tuple(_gate_result(gate, load) for gate in gates for load in loads),
    )


def _judgement(base: Sequence[ServingRun], new: Sequence[ServingRun], judgement: Judgement) -> Judgement:
    """Return the judgement for requests: they differ by their place in the queue, which says nothing about the machine."""
    spread = judgement.process_spread
    if spread is None and all(run.accelerator for run in (*base, *new)):
        spread = ACCELERATOR_SPREAD
    return replace(judgement, process_spread=spread, restless=math.inf, timed=False)


def _check_models(base: Sequence[ServingRun], new: Sequence[ServingRun], allow: Sequence[str]) -> None:
    for word in allow:
        if word not in KINDS:
            raise ConfigError(f"--allow {word} does not apply to runs under load.", f"Known: {', '.join(KINDS)}.")
    names = {run.analysis.server.model for run in (*base, *new) if not isinstance(run.analysis.server, Missing)}
    if len(names) > 1 and "model" not in allow:
        raise ConfigError(
            f"The runs are of different models: {', '.join(sorted(names))}.", "Compare runs of one model, or add --allow model."
        )


def _by_load(run: ServingRun) -> dict[Key, LoadRecords]:
    """Return the unprofiled loads of a run by kind, asked load and arrival; of several equal ones that with the most requests."""
    found: dict[Key, LoadRecords] = {}
    for load in run.loads:
        if not isinstance(load.records, Missing) and not load.point.profiled:
            key: Key = (load.point.kind, load.point.asked, load.point.arrival)
            if key not in found or len(found[key].requests) < len(load.records.requests):
                found[key] = load.records
    return found


def _check_lengths(key: Key, sides: Sequence[Sequence[LoadRecords]]) -> None:
    """Raise a ConfigError if the requests of the sides have different lengths."""
    for name in ("prompt_tokens", "output_tokens"):
        means = [_mean_length(side, name) for side in sides]
        base, new = means
        if base is not None and new is not None and abs(new - base) > SAME_LENGTH * base:
            what = name.replace("_tokens", "")
            raise ConfigError(
                f"The requests at {key[1]:g} differ: {base:.1f} {what} tokens on average in base, {new:.1f} in new.",
                "Compare runs of one workload, or add --allow workload.",
            )


def _mean_length(runs: Sequence[LoadRecords], name: str) -> float | None:
    counts = [getattr(request, name) for run in runs for request in run.requests if not request.error]
    found = [count for count in counts if not isinstance(count, Missing)]
    return sum(found) / len(found) if found else None


def _rows(base: Sequence[LoadRecords], new: Sequence[LoadRecords], judgement: Judgement) -> tuple[Row, ...]:
    rows = []
    for definition in LATENCIES:
        if definition.key in GATED:
            sides = [[_medians(definition, run) for run in side] for side in (base, new)]
            rows.append(_row(definition.key, definition.label, "ns", False, sides, judgement))
    sides = [[_slices(run) for run in side] for side in (base, new)]
    rows.append(_row(RATE_KEY, "output tokens/s", "tokens/s", True, sides, judgement))
    return tuple(rows)


def _row(
    key: str, label: str, unit: str, higher: bool, sides: Sequence[Sequence[Maybe[list[float]]]], judgement: Judgement
) -> Row:
    missing = next((values for side in sides for values in side if isinstance(values, Missing)), None)
    if missing is not None:
        return Row(key, label, unit, higher, missing)
    found = [[values for values in side if not isinstance(values, Missing)] for side in sides]
    return Row(key, label, unit, higher, effect(found[0], found[1], higher, judgement))


def _medians(definition: LatencyDefinition, load: LoadRecords) -> Maybe[list[float]]:
    values = values_of(definition, load.requests)
    return values if isinstance(values, Missing) else [value for each in values for value in each]


def _slices(load: LoadRecords) -> Maybe[list[float]]:
    """Return the output tokens per second in equal parts of the sending time; a token counts where its chunk arrives."""
    if load.clock == "none":
        return Missing("the file does not say when requests were sent")
    sent = [request.sent_ns for request in load.requests]
    start, end = min(sent), max(sent)
    if end <= start:
        return Missing("all requests were sent at once")
    places, tokens = [], []
    for request in load.requests:
        if not request.error and not isinstance(request.output_tokens, Missing):
            chunks = _arrivals(request)
            places += [(time - start) * SLICES // (end - start) for time in chunks]
            tokens += [request.output_tokens / len(chunks)] * len(chunks)
    inside = [(place, count) for place, count in zip(places, tokens, strict=True) if 0 <= place < SLICES]
    sums = np.bincount([place for place, _ in inside], [count for _, count in inside], SLICES) if inside else np.zeros(SLICES)
    seconds = (end - start) / SLICES / 1e9
    return [float(value) / seconds for value in sums[1:]]  # the first part fills the server


def _arrivals(request: ServedRequest) -> Sequence[int]:
    """Return when tokens arrived: each chunk, or the end of the answer."""
    return request.token_ns if len(request.token_ns) > 1 else (request.end_ns,)


def _cautions(base: Sequence[ServingRun], new: Sequence[ServingRun]) -> tuple[str, ...]:
    found = []
    generators = [sorted({point.generator for run in side for point in run.analysis.points}) for side in (base, new)]
    if generators[0] != generators[1]:
        found.append(f"The load generators differ: {', '.join(generators[0])} and {', '.join(generators[1])}.")
    off = [run.analysis.run for run in (*base, *new) if any(_is_off(point.checks) for point in run.analysis.curve)]
    if off:
        found.append(f"The load generator was off in {', '.join(off[:5])}: see the report of the run.")
    if min(len(base), len(new)) < RECOMMENDED_RUNS:
        found.append(
            f"{len(base)} and {len(new)} runs: use {RECOMMENDED_RUNS} per side, alternating, to measure how much servers differ "
            "from start to start."
        )
    return tuple(found)


def _is_off(checks: Sequence[GeneratorCheck]) -> bool:
    return any(check.outcome == "off" for check in checks)


def _gate_result(gate: Gate, load: ComparedLoad) -> GateResult:
    row = next(row for row in load.rows if row.key == gate.metric)
    unit = "requests/s" if load.kind == "rate" else "at a time"
    return check_gate(replace(gate, asked=f"{gate.asked} at {load.asked:g} {unit}"), row.effect, row.higher_is_better, NO_REMEDY)
