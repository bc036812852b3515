"""Read the per-request records of AIPerf (`profile_export.jsonl`) and the summary next to them (`…_aiperf.json`).

The times of a record are unix nanoseconds. Its `request_latency` ends with the last response; `request_end_ns`, a little later,
includes closing the request and is used only for failed requests.
"""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import Arrival, LoadKind, LoadRecords, ServedRequest
from llm_perf_opt.core.units import counted
from llm_perf_opt.core.value_limits import number_in
from llm_perf_opt.traces.serving.json_files import (
    NOT_FINISHED,
    NULL,
    Kept,
    checked_ns,
    count_of,
    field_of,
    first_of,
    number_of,
    plain,
    read_json,
    read_lines,
    refused,
    statistics_of,
    text_of,
)

NAME = "AIPerf"
SUMMARY_ENDING = "_aiperf.json"
"""AIPerf writes PREFIX.jsonl and PREFIX_aiperf.json."""
_MS = 1e6
_LONGEST_MS = 1e12
_OWN = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "itl": "inter_chunk_latency",
    "e2e": "request_latency",
}
"""Our figures → its figures with the same definition. Its inter-token latency is one mean per request, which is a TPOT."""
_RATES = {"request_rate": "request_throughput", "output_rate": "output_token_throughput"}
_CUT = "cancelled by external signal"
"""What AIPerf writes about a request that it stopped because the measurement ended (Ctrl-C, its duration). Others were canceled
by themselves, as `--request-cancellation-rate` asks for."""
_ARRIVALS: dict[str, Arrival] = {"poisson": "poisson", "constant": "constant", "concurrency": "closed"}


class _Metadata(msgspec.Struct):
    request_start_ns: int
    request_end_ns: int
    x_request_id: str = ""
    session_num: int = 0
    credit_issued_ns: int | None = None
    benchmark_phase: str = "profiling"
    was_cancelled: bool = False


_MOST_DIGITS = 400


class _Metric(msgspec.Struct, frozen=True):
    value: msgspec.Raw = NULL
    """A number or a list; decoded only where it is used, so that no other takes memory."""


class _Metrics(msgspec.Struct, frozen=True):
    request_latency: _Metric = _Metric()
    time_to_first_token: _Metric = _Metric()
    inter_chunk_latency: _Metric | None = None
    usage_prompt_tokens: _Metric = _Metric()
    input_sequence_length: _Metric = _Metric()
    usage_completion_tokens: _Metric = _Metric()
    output_token_count: _Metric = _Metric()
    output_sequence_length: _Metric = _Metric()


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None
    type: str | None = None


class _Record(msgspec.Struct):
    metadata: _Metadata
    metrics: _Metrics = _Metrics()
    error: _Error | None = None


_SUMMARY = (*_OWN.values(), *_RATES.values(), "input_config", "aiperf_version", "start_time", "end_time")
_Summary = msgspec.defstruct("_Summary", [(name, msgspec.Raw, NULL) for name in _SUMMARY])


def summary_of(path: Path) -> Path:
    """Return where AIPerf writes the summary of these records."""
    return path.with_name(path.name.removesuffix(".gz").removesuffix(".jsonl") + SUMMARY_ENDING)


def read_aiperf(path: Path, cut_short: bool = False) -> list[LoadRecords]:
    """Return the requests of one measurement, without its warm-up."""
    requests, warmup, kept = [], 0, Kept(path)
    for number, record in read_lines(path, _Record, cut_short=cut_short):
        if record.metadata.benchmark_phase == "warmup":
            warmup += 1
            continue
        try:
            requests.append(request := _request(record))
        except ValueError as error:
            raise refused(path, f"line {number}", error) from error
        kept.add(len(request.token_ns), request.id, request.error)
    if not requests:
        raise ParseError(f"{path} has no request.", "The load generator did not finish; repeat the measurement.")
    requests.sort(key=lambda request: request.sent_ns)
    notes = (f"left out: {counted(warmup, 'request')} of the warm-up",) if warmup else ()
    return [_with_summary(LoadRecords(NAME, tuple(requests), notes=notes), summary_of(path))]


def _request(record: _Record) -> ServedRequest:
    about = record.metadata
    sent, ended = about.request_start_ns, about.request_end_ns
    if not 0 < sent <= checked_ns(ended, "request_end_ns"):
        raise ValueError(f"it was sent at {sent} ns and ended at {ended} ns")
    error = _error_of(record)
    latency, first = (_nanoseconds(record, key) for key in ("request_latency", "time_to_first_token"))
    if latency is not None and not error:
        ended = checked_ns(sent + latency, "its end")
    return ServedRequest(
        id=about.x_request_id or f"{about.session_num}",
        sent_ns=sent,
        end_ns=ended,
        token_ns=() if first is None else _arrivals(record, sent + first),
        prompt_tokens=_count(record, "usage_prompt_tokens", "input_sequence_length"),
        output_tokens=_count(record, "usage_completion_tokens", "output_token_count"),
        scheduled_ns=Missing("not recorded")
        if about.credit_issued_ns is None
        else checked_ns(about.credit_issued_ns, "credit_issued_ns"),
        error=error,
        client_tokens=_count(record, "output_sequence_length"),
        cut=_cut(record),
    )


def _cut(record: _Record) -> bool:
    return record.metadata.was_cancelled and record.error is not None and _CUT in record.error.message


def _error_of(record: _Record) -> str:
    if _cut(record):
        return NOT_FINISHED
    if record.error is None:
        return "canceled without a message" if record.metadata.was_cancelled else ""
    words = (record.error.code, record.error.type, record.error.message)
    return " ".join(str(word) for word in words if word not in (None, "")) or "failed without a message"


def _nanoseconds(record: _Record, key: str) -> int | None:
    value = _number(record, key)
    return None if value is None else _milliseconds(value, key)


def _number(record: _Record, key: str) -> Any:
    """Return the value of a metric that should be a number; a text for one that is too long to be one."""
    value = getattr(record.metrics, key).value
    return msgspec.json.decode(value) if memoryview(value).nbytes <= _MOST_DIGITS else "very long"


def _milliseconds(value: Any, key: str) -> int:
    number = number_in(value, _LONGEST_MS)
    if number is None or number < 0:
        raise ValueError(f"{key} is {str(value)[:40]}, which is not a time in milliseconds")
    return round(number * _MS)


def _arrivals(record: _Record, first_ns: int) -> tuple[int, ...]:
    """Return when each chunk arrived: its gaps are recorded, the first token has a time of its own."""
    metric = record.metrics.inter_chunk_latency
    found = [first_ns]
    try:
        gaps = [] if metric is None else msgspec.json.decode(metric.value, type=list[float])
    except msgspec.ValidationError as error:
        raise ValueError(f"inter_chunk_latency is not a list of numbers ({error})") from error
    for gap in gaps:
        found.append(found[-1] + _milliseconds(gap, "inter_chunk_latency"))
    checked_ns(found[-1], "its last chunk")
    return tuple(found)


def _count(record: _Record, *keys: str) -> Maybe[int]:
    """Return the first of these counts that was recorded: the server's before the generator's own."""
    for key in keys:
        value = _number(record, key)
        if isinstance(value, int | float):
            return count_of(value)
    return Missing("not recorded")


def _with_summary(found: LoadRecords, file: Path) -> LoadRecords:
    if not file.is_file():
        return _without_summary(found, file)
    parts = read_json(file, _Summary)
    summary = {name: plain(file, getattr(parts, name)) for name in _SUMMARY}
    own = {key: _statistics(summary.get(name)) for key, name in _OWN.items()}
    for key, name in _RATES.items():
        own[key] = statistics_of({"mean": number_of(field_of(summary, name, "avg"))}, 1)
    asked, kind, arrival = _load_of(summary)
    url = first_of(field_of(summary, "input_config", "endpoint", "urls"))
    model = field_of(first_of(field_of(summary, "input_config", "models", "items")), "name")
    return LoadRecords(
        generator=NAME,
        requests=found.requests,
        version=text_of(summary.get("aiperf_version")),
        asked=asked,
        kind=kind,
        arrival=arrival,
        own={key: values for key, values in own.items() if values},
        notes=(*found.notes, *_unwritten(summary)),
        model=text_of(model),
        url=text_of(url),
        duration_s=_duration_of(summary),
    )


def _unwritten(summary: dict[str, Any]) -> tuple[str, ...]:
    """Return a note if the measurement ended while requests may have been running: AIPerf 0.13 does not write those."""
    phase, took = _measured_phase(summary), _duration_of(summary)
    duration, grace = (number_of(field_of(phase, key)) for key in ("duration", "grace_period"))
    if duration is None or grace is None or isinstance(took, Missing) or took < duration + grace:
        return ()
    return (f"requests that were still running after {duration + grace:g} s were stopped and are not in the file",)


def _measured_phase(summary: dict[str, Any]) -> Any:
    phases = field_of(summary, "input_config", "phases")
    measured = [phase for phase in phases if field_of(phase, "kind") != "warmup"] if isinstance(phases, list) else []
    return measured[-1] if measured else None


def _duration_of(summary: dict[str, Any]) -> Maybe[float]:
    """Return the time from the start to the end that the summary names; its throughput is over this time."""
    try:
        start, end = (datetime.fromisoformat(str(summary.get(key))) for key in ("start_time", "end_time"))
        seconds = (end - start).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return Missing("not recorded")
    return seconds if seconds > 0 else Missing("not recorded")


def _without_summary(found: LoadRecords, file: Path) -> LoadRecords:
    why = f"{file.name} is not next to the records"
    return replace(found, asked=Missing(why), arrival=Missing(why), notes=(*found.notes, f"{why}: no load and no summary"))


def _statistics(metric: Any) -> dict[str, float]:
    names = {"mean": "avg", "p50": "p50", "p90": "p90", "p99": "p99"}
    return statistics_of({name: number_of(field_of(metric, key)) for name, key in names.items()}, _MS)


def _load_of(summary: dict[str, Any]) -> tuple[Maybe[float], LoadKind, Maybe[Arrival]]:
    """Return the load of the measured phase: a rate, or a number of requests at a time."""
    phase = _measured_phase(summary)
    arrival = _ARRIVALS.get(str(field_of(phase, "type")), Missing(f"its pattern is {str(field_of(phase, 'type'))[:40]!r}"))
    rate, concurrency = (number_of(field_of(phase, key)) for key in ("rate", "concurrency"))
    if rate is not None and rate > 0:
        return rate, "rate", arrival
    if concurrency is not None and concurrency > 0:
        return concurrency, "concurrency", "closed"
    return Missing("the summary names no rate and no concurrency"), "rate", arrival
