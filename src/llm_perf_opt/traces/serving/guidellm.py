"""Read the JSON of GuideLLM: one benchmark per load, its requests by outcome.

Times are unix seconds. It records the first and the last token of a request, not those between, so there is no ITL.
"""

from pathlib import Path
from typing import Any

import msgspec

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import Arrival, LoadKind, LoadRecords, ServedRequest
from llm_perf_opt.traces.serving.json_files import (
    NOT_FINISHED,
    NULL,
    Kept,
    count_of,
    field_of,
    ns_of,
    number_of,
    plain,
    read_json,
    refused,
    seconds_of,
    statistics_of,
    text_of,
)

NAME = "GuideLLM"
_MS, _S = 1e6, 1e9
_OWN = {
    "ttft": ("time_to_first_token_ms", _MS),
    "tpot": ("inter_token_latency_ms", _MS),
    "e2e": ("request_latency", _S),
}
"""Our figures → its figures with the same definition. Its `time_per_output_token_ms` includes the first token."""
_RATES = {"request_rate": "requests_per_second", "output_rate": "output_tokens_per_second"}
_ARRIVALS: dict[str, Arrival] = {
    "poisson": "poisson",
    "constant": "constant",
    "concurrent": "closed",
    "synchronous": "closed",
    "throughput": "burst",
}
SHARED_SEED = "its workers draw gaps from one seed, so its Poisson arrivals come in bursts and not at the asked rate"
"""Measured: 31 requests per second where 20 were asked."""
SHARING_VERSION = "0.8.1"
"""The version that was measured; others may do the same, which the checks of the generator show."""


MOST_LOADS = 1000


class _Timings(msgspec.Struct, frozen=True, gc=False):
    request_start: float | None = None
    request_end: float | None = None
    resolve_end: float | None = None
    targeted_start: float | None = None
    first_token_iteration: float | None = None
    last_token_iteration: float | None = None
    first_iteration: float | None = None
    last_iteration: float | None = None


class _Info(msgspec.Struct, frozen=True, gc=False):
    timings: _Timings = _Timings()  # shared, because millions of empty ones would take much memory
    error: str | None = None


class _Request(msgspec.Struct, frozen=True, gc=False):
    request_id: str = ""
    info: _Info = _Info()
    prompt_tokens: float | None = None
    output_tokens: float | None = None


class _Requests(msgspec.Struct):
    successful: tuple[_Request, ...] = ()
    errored: tuple[_Request, ...] = ()
    incomplete: tuple[_Request, ...] = ()


class _Benchmark(msgspec.Struct):
    requests: _Requests
    config: msgspec.Raw = NULL
    metrics: msgspec.Raw = NULL
    duration: float | None = None


class _File(msgspec.Struct):
    benchmarks: list[_Benchmark]
    metadata: msgspec.Raw = NULL


def read_guidellm(path: Path, cut_short: bool = False) -> list[LoadRecords]:
    """Return the requests of each load. The file is written at the end, so a part of one is never valid."""
    found = read_json(path, _File)
    if len(found.benchmarks) > MOST_LOADS:
        raise ResourceError(f"{path} has more than {MOST_LOADS:,} loads.", "Import a measurement with fewer.")
    kept, version = Kept(path), text_of(field_of(plain(path, found.metadata), "guidellm_version"))
    loads = [_load(path, benchmark, number, version, kept) for number, benchmark in enumerate(found.benchmarks)]
    if not any(load.requests for load in loads):
        raise ParseError(f"{path} has no request.", "The load generator did not finish; repeat the measurement.")
    return loads


def _load(path: Path, benchmark: _Benchmark, number: int, version: Maybe[str], kept: Kept) -> LoadRecords:
    requests: list[ServedRequest] = []
    for outcome in ("successful", "errored", "incomplete"):
        for place, request in enumerate(getattr(benchmark.requests, outcome)):
            try:
                made = _request(request, outcome, place)
            except ValueError as error:
                raise refused(path, f"benchmark {number}, {outcome} request {place}", error) from error
            if made is not None:
                kept.add(len(made.token_ns), made.id, made.error)
                requests.append(made)
    requests.sort(key=lambda request: request.sent_ns)
    config = plain(path, benchmark.config)
    asked, kind, arrival = _asked(config)
    return LoadRecords(
        generator=NAME,
        requests=tuple(requests),
        version=version,
        asked=asked,
        kind=kind,
        arrival=arrival,
        own=_own(plain(path, benchmark.metrics)),
        notes=(SHARED_SEED,) if arrival == "poisson" and version == SHARING_VERSION else (),
        model=text_of(field_of(config, "backend", "model")),
        url=text_of(field_of(config, "backend", "target")),
        duration_s=seconds_of(benchmark.duration),
    )


def _request(request: _Request, outcome: str, number: int) -> ServedRequest | None:
    """Return a request; None if it was never sent."""
    at = request.info.timings
    if at.request_start is None:
        return None
    sent = ns_of(at.request_start, "request_start")
    end = next((time for time in (at.request_end, at.resolve_end) if time is not None), at.request_start)
    first = at.first_token_iteration if at.first_token_iteration is not None else at.first_iteration
    last = at.last_token_iteration if at.last_token_iteration is not None else at.last_iteration
    cut = outcome == "incomplete"
    failed = "" if outcome == "successful" else NOT_FINISHED if cut else "failed without a message"
    return ServedRequest(
        id=request.request_id or str(number),
        sent_ns=sent,
        end_ns=max(sent, ns_of(end, "request_end")),
        token_ns=() if first is None else (ns_of(first, "first_token_iteration"),),
        prompt_tokens=count_of(request.prompt_tokens),
        output_tokens=count_of(request.output_tokens),
        scheduled_ns=Missing("not recorded") if at.targeted_start is None else ns_of(at.targeted_start, "targeted_start"),
        error=(request.info.error or failed) if failed else "",
        last_token_ns=Missing("not recorded") if last is None else ns_of(last, "last_token_iteration"),
        cut=cut,
    )


def _asked(config: Any) -> tuple[Maybe[float], LoadKind, Maybe[Arrival]]:
    strategy = field_of(config, "strategy")
    kind = str(field_of(strategy, "type_"))
    arrival = _ARRIVALS.get(kind, Missing(f"its strategy is {kind[:40]!r}"))
    rate, streams = (number_of(field_of(strategy, key)) for key in ("rate", "streams"))
    if kind == "synchronous":
        return 1.0, "concurrency", arrival
    if rate is not None and rate > 0:
        return rate, "rate", arrival
    if streams is not None and streams > 0:
        return streams, "concurrency", arrival
    return Missing("the file names no rate and no concurrency"), "rate", arrival


def _own(metrics: Any) -> dict[str, dict[str, float]]:
    own = {}
    for key, (name, scale) in _OWN.items():
        own[key] = statistics_of(_statistics(field_of(metrics, name, "successful")), scale)
    for key, name in _RATES.items():
        own[key] = statistics_of({"mean": number_of(field_of(metrics, name, "successful", "mean"))}, 1)
    return {key: values for key, values in own.items() if values}


def _statistics(found: Any) -> dict[str, float | None]:
    if not number_of(field_of(found, "count")):
        return {}
    percentiles = {name: number_of(field_of(found, "percentiles", name)) for name in ("p50", "p90", "p99")}
    return {"mean": number_of(field_of(found, "mean")), **percentiles}
