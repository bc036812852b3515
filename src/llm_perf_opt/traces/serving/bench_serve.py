"""Read the JSON of `vllm bench serve --save-result --save-detailed`: one flat object with a list per figure.

Its start times count from an arbitrary point (Python's `perf_counter`); durations are seconds.
"""

import math
from pathlib import Path

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import Arrival, LoadKind, LoadRecords, ServedRequest
from llm_perf_opt.traces.serving.json_files import (
    NULL,
    Kept,
    checked_ns,
    count_of,
    load_number,
    ns_of,
    number_of,
    plain,
    read_json,
    refused,
    seconds_of,
    statistics_of,
    text_of,
)

NAME = "vllm bench serve"
_MS = 1e6
_OWN = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}
_STATISTICS = {"mean": "mean_{}_ms", "p50": "median_{}_ms", "p90": "p90_{}_ms", "p99": "p99_{}_ms"}
_NOT_DETAILED = "Repeat the measurement with --save-result --save-detailed."


class _Result(msgspec.Struct):
    num_prompts: int
    duration: float
    model_id: str = ""
    request_rate: float | str | None = None
    burstiness: float | msgspec.UnsetType | None = msgspec.UNSET
    """None: `Infinity`, which JSON lacks; the gaps are then even. Unset: an earlier version, which made them Poisson."""
    max_concurrency: int | None = None
    request_throughput: float | None = None
    output_throughput: float | None = None
    input_lens: list[int | None] = []
    output_lens: list[int | None] = []
    ttfts: list[float | None] = []
    itls: list[list[float]] = []
    latencies: list[float | None] = []
    start_times: list[float] = []
    errors: list[str | None] = []


_FIGURES = tuple(form.format(name) for name in _OWN.values() for form in _STATISTICS.values())
_Figures = msgspec.defstruct("_Figures", [(name, msgspec.Raw, NULL) for name in _FIGURES])


def read_bench_serve(path: Path, cut_short: bool = False) -> list[LoadRecords]:
    """Return the requests of one measurement. The file is written at its end, so a part of one is never valid."""
    found = read_json(path, _Result)
    count = len(found.ttfts)
    if not count:
        raise ParseError(f"{path} has no single requests, only a summary.", _NOT_DETAILED)
    for name in ("itls", "output_lens", "start_times", "latencies", "errors", "input_lens"):
        values = getattr(found, name)
        if len(values) != count and (values or name in ("itls", "output_lens")):
            raise ParseError(f"{path}: ttfts has {count} values, {name} {len(values)}.", _NOT_DETAILED)
    requests, kept = [], Kept(path)
    for number in range(count):
        try:
            requests.append(request := _request(found, number))
        except ValueError as error:
            raise refused(path, f"request {number}", error) from error
        kept.add(len(request.token_ns), request.error)
    requests.sort(key=lambda request: request.sent_ns)
    try:
        asked, kind, arrival = _load_of(found)
    except ValueError as error:
        raise refused(path, "its load", error) from error
    return [
        LoadRecords(
            generator=NAME,
            requests=tuple(requests),
            asked=asked,
            kind=kind,
            arrival=arrival,
            own=_own(path, found),
            clock="monotonic" if found.start_times else "none",
            model=text_of(found.model_id),
            duration_s=seconds_of(found.duration),
        )
    ]


def _request(found: _Result, number: int) -> ServedRequest:
    sent = ns_of(found.start_times[number], "start_times") if found.start_times else 0
    first_s, gaps = found.ttfts[number] or 0.0, found.itls[number]
    if gaps and found.ttfts[number] is None:
        raise ValueError("ttfts is not a number, and itls has the gaps after it")
    tokens = [sent + ns_of(first_s, "ttfts")]
    for gap in gaps:
        tokens.append(tokens[-1] + ns_of(gap, "itls"))
    latency = found.latencies[number] if found.latencies else None
    end = tokens[-1] if latency is None else sent + ns_of(latency, "latencies")
    checked_ns(max(end, tokens[-1]), "its end")
    output = count_of(found.output_lens[number])
    error = (found.errors[number] if found.errors else "") or ("" if output else "failed without a message")
    return ServedRequest(
        id=str(number),
        sent_ns=sent,
        end_ns=end,
        token_ns=tuple(tokens) if first_s > 0 else (),
        prompt_tokens=count_of(found.input_lens[number]) if found.input_lens else Missing("not recorded"),
        output_tokens=Missing("it failed") if error else output,
        error=error,
    )


def _load_of(found: _Result) -> tuple[Maybe[float], LoadKind, Maybe[Arrival]]:
    """Return the asked load. An infinite rate sends everything at once, or as fast as the concurrency allows."""
    rate = found.request_rate
    if isinstance(rate, float | int) and 0 < rate < math.inf:
        return load_number(rate, "request_rate"), "rate", _gaps(found.burstiness)
    if found.max_concurrency:
        return load_number(found.max_concurrency, "max_concurrency"), "concurrency", "closed"
    return load_number(found.num_prompts, "num_prompts"), "concurrency", "burst"


def _gaps(burstiness: float | msgspec.UnsetType | None) -> Maybe[Arrival]:
    """Return the arrival that a burstiness makes. The gaps are gamma distributed: 1 is Poisson, and infinity makes them even."""
    if burstiness is None:
        return "constant"
    return "poisson" if burstiness in (msgspec.UNSET, 1.0) else Missing(f"its gaps have a burstiness of {burstiness}")


def _own(path: Path, found: _Result) -> dict[str, dict[str, float]]:
    figures = read_json(path, _Figures)

    def number(key: str) -> float | None:
        return number_of(plain(path, getattr(figures, key)))

    own = {}
    for key, name in _OWN.items():
        own[key] = statistics_of({statistic: number(form.format(name)) for statistic, form in _STATISTICS.items()}, _MS)
    own["request_rate"] = statistics_of({"mean": number_of(found.request_throughput)}, 1)
    own["output_rate"] = statistics_of({"mean": number_of(found.output_throughput)}, 1)
    return {key: values for key, values in own.items() if values}
