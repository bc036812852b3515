"""OpenTelemetry spans that vLLM sent, and scrapes of its metrics."""

import gzip
import json
from pathlib import Path

import pytest

from llm_perf_opt.analysis.serving.server import state_of
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.serving.server_files import read_samples, read_scrape, read_spans

FILES = Path(__file__).parents[2] / "fixtures" / "serving"


def test_spans_of_requests() -> None:
    spans = read_spans(FILES / "vllm_otlp.jsonl.gz")
    assert len(spans) == 675
    assert [span.start_ns for span in spans] == sorted(span.start_ns for span in spans)
    for span in spans:
        assert span.id.startswith("cmpl-")
        assert span.prefill_ns > 0
        assert span.queue_ns + span.prefill_ns + span.decode_ns < span.end_ns - span.start_ns


def test_damaged_spans_name_the_line(tmp_path: Path) -> None:
    lines = gzip.decompress((FILES / "vllm_otlp.jsonl.gz").read_bytes()).splitlines(keepends=True)
    file = tmp_path / "spans.jsonl"
    file.write_bytes(lines[0] + lines[1][:100])
    with pytest.raises(ParseError, match="line 2"):
        read_spans(file)
    assert read_spans(file, cut_short=True) == ()
    span = {"startTimeUnixNano": "-5", "attributes": [{"key": "gen_ai.request.id", "value": {"stringValue": "x"}}]}
    for name in ("queue", "model_prefill", "model_decode"):
        span["attributes"].append({"key": f"gen_ai.latency.time_in_{name}", "value": {"doubleValue": 1.0}})  # type: ignore[attr-defined]
    file.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    with pytest.raises(ParseError, match="line 1"):
        read_spans(file)


def test_a_scrape_of_a_real_server() -> None:
    (sample,) = read_scrape(FILES / "vllm_prometheus.txt", 5)
    state = state_of(sample)
    assert (state.at_ns, state.running, state.waiting, state.kv_usage, state.preemptions, state.generated) == (5, 0, 0, 0, 0, 4)


def test_samples_in_order_of_time(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [{"at_ns": at, "series": {"sglang:num_running_reqs": at, "sglang:num_queue_reqs": 1}} for at in (3, 1, 2)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert [sample.at_ns for sample in read_samples(file)] == [1, 2, 3]
    assert read_scrape(file, 0) == read_samples(file)
    assert state_of(read_samples(file)[0]).waiting == 1
    file.write_text('{"at_ns": 1}\n')
    with pytest.raises(ParseError, match="line 1"):
        read_samples(file)
