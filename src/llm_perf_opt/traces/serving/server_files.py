"""Read what a server left: OpenTelemetry spans in OTLP JSON lines, and scrapes of its metrics.

The spans follow the semantic conventions for generative AI, with the attributes `gen_ai.latency.*` in seconds.
"""

from pathlib import Path
from typing import Any

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import MetricsSample, RequestSpan
from llm_perf_opt.core.value_limits import number_in
from llm_perf_opt.traces.prometheus import read_prometheus
from llm_perf_opt.traces.serving.json_files import Kept, checked_ns, head_of, ns_of, number_of, read_lines, refused

_ID = "gen_ai.request.id"
_QUEUE, _PREFILL, _DECODE = (f"gen_ai.latency.time_in_{name}" for name in ("queue", "model_prefill", "model_decode"))
_LONGEST_S = 1e6
_TTFT, _E2E = "gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"


class _Attribute(msgspec.Struct):
    key: str = ""
    value: dict[str, Any] = {}


class _Span(msgspec.Struct):
    startTimeUnixNano: int | str = 0  # noqa: N815 - as OTLP names it
    endTimeUnixNano: int | str = 0  # noqa: N815
    attributes: list[_Attribute] = []


class _Scope(msgspec.Struct):
    spans: list[_Span] = []


class _Resource(msgspec.Struct):
    scopeSpans: list[_Scope] = []  # noqa: N815


class _Line(msgspec.Struct):
    resourceSpans: list[_Resource] = []  # noqa: N815


def read_spans(path: Path, *, cut_short: bool = False) -> tuple[RequestSpan, ...]:
    """Return the spans of requests, in order of their start; other spans, such as loading the model, are left out."""
    found, kept = [], Kept(path)
    for number, line in read_lines(path, _Line, cut_short=cut_short):
        for span in (span for resource in line.resourceSpans for scope in resource.scopeSpans for span in scope.spans):
            try:
                made = _span(span)
            except ValueError as error:
                raise refused(path, f"line {number}", error) from error
            if made is not None:
                kept.add(0, made.id)
                found.append(made)
    return tuple(sorted(found, key=lambda span: (span.start_ns, span.id)))


def _span(span: _Span) -> RequestSpan | None:
    """Return the span of a request; None for any other."""
    values = {entry.key: next(iter(entry.value.values()), None) for entry in span.attributes}
    times = [number_of(values.get(key)) for key in (_QUEUE, _PREFILL, _DECODE)]
    name = values.get(_ID)
    if not isinstance(name, str) or any(time is None for time in times):
        return None
    start, end = (_nanoseconds(time) for time in (span.startTimeUnixNano, span.endTimeUnixNano))
    queue, prefill, decode = (_duration(time) for time in times if time is not None)
    return RequestSpan(name[:500], start, end, queue, prefill, decode, _optional(values.get(_TTFT)), _optional(values.get(_E2E)))


def _nanoseconds(time: int | str) -> int:
    text = str(time)
    if not text.isdigit() or len(text) > 19:
        raise ValueError(f"{text[:40]!r} is not a time in nanoseconds")
    return checked_ns(int(text), "a time of a span")


def _duration(seconds: float) -> int:
    if seconds > _LONGEST_S:
        raise ValueError(f"a request took {seconds:g} s, which is too long to be real")
    return ns_of(seconds, "a time of a span")


def _optional(value: Any) -> Maybe[int]:
    number = number_of(value)
    return Missing("not recorded") if number is None or number < 0 else _duration(number)


def read_samples(path: Path, *, cut_short: bool = False) -> tuple[MetricsSample, ...]:
    """Return scrapes of a server's metrics in order of time, from JSON lines of `MetricsSample`."""
    found, kept = [], Kept(path)
    for number, sample in read_lines(path, MetricsSample, cut_short=cut_short):
        try:
            checked_ns(sample.at_ns, "at_ns")
        except ValueError as error:
            raise refused(path, f"line {number}", error) from error
        series = {name: value for name, value in sample.series.items() if number_in(value) is not None}
        kept.add(len(series), *series)
        found.append(MetricsSample(sample.at_ns, series))
    return tuple(sorted(found, key=lambda sample: sample.at_ns))


def read_scrape(path: Path, at_ns: int) -> tuple[MetricsSample, ...]:
    """Return metrics that a user saved: JSON lines of `MetricsSample`, or one answer of /metrics, taken as of `at_ns`."""
    if head_of(path).lstrip().startswith(b"{"):
        found = read_samples(path)
        if not found:
            raise ParseError(f"{path} has no sample.", "Give JSON lines with at_ns and series, or the answer of /metrics.")
        return found
    return (MetricsSample(at_ns, read_prometheus(path).series),)
