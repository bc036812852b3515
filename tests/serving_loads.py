"""A simulated server with continuous batching, and run folders of loads that were put on it.

The server runs steps: each takes `step_ns` plus `per_request_ns` for every request that runs and `prefill_ns` for every one that
joins; at its end, each running request gets a token. At most `slots` requests run; the others wait. So its capacity is known:
`Server.capacity` requests per second.
"""

import gzip
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llm_perf_opt.core.records import SCHEMA, Manifest, PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.serving_records import LoadPoint, MetricsSample, ServerFacts
from writing import write_record

BASE_NS = 1_794_786_000_000_000_000
"""Unix time at which the first load starts."""
TOKENS = 16


@dataclass(frozen=True)
class Server:
    """The server that is simulated."""

    slots: int = 8
    step_ns: int = 10_000_000
    per_request_ns: int = 1_000_000
    prefill_ns: int = 5_000_000
    network_ns: int = 400_000
    front_ns: int = 600_000

    @property
    def capacity(self) -> float:
        """Requests per second with a full batch."""
        steps = TOKENS * (self.step_ns + self.slots * self.per_request_ns) / self.slots
        return 1e9 / (steps + self.prefill_ns)


SIMULATED = Server()


@dataclass
class Request:
    """One simulated request; times are nanoseconds since the start of the load."""

    number: int
    sent: int
    admitted: int = 0
    first: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def id(self) -> str:
        """An id such as AIPerf's."""
        return f"00000000-0000-4000-8000-{self.number:012}"


@dataclass(frozen=True)
class Load:
    """What one simulated load left."""

    requests: list[Request]
    samples: list[MetricsSample]
    steps: list[tuple[int, int, int]]
    """Start, end and batch of each step."""


def simulate(server: Server, rate: float, count: int, seed: int = 1, start_ns: int = BASE_NS) -> Load:
    """Put Poisson arrivals on the server."""
    draw = random.Random(seed)
    at, waiting = 0.0, []
    for number in range(count):
        waiting.append(Request(number + seed * 100_000, round(at)))
        at += draw.expovariate(rate) * 1e9
    running: list[Request] = []
    requests, steps, samples = list(waiting), [], []
    now, sampled = 0, 0
    while waiting or running:
        arrived = [request for request in waiting if request.sent + server.network_ns <= now]
        if not running and not arrived:
            now = waiting[0].sent + server.network_ns
            continue
        joining = arrived[: server.slots - len(running)]
        for request in joining:
            request.admitted = now
        waiting = [request for request in waiting if request not in joining]
        running += joining
        while sampled <= now:
            queued = sum(request.sent <= sampled for request in waiting)
            samples.append(_sample(start_ns + sampled, len(running), queued, len(running) / server.slots * 0.6))
            sampled += 250_000_000
        end = now + server.step_ns + len(running) * server.per_request_ns + len(joining) * server.prefill_ns
        steps.append((now, end, len(running)))
        now = end
        for request in running:
            request.tokens.append(now + server.front_ns)
        running = [request for request in running if len(request.tokens) < TOKENS]
    return Load(requests, samples, steps)


def _sample(at_ns: int, running: int, waiting: int, usage: float) -> MetricsSample:
    labels = '{engine="0",model_name="tiny"}'
    values = {"num_requests_running": running, "num_requests_waiting": waiting, "kv_cache_usage_perc": usage}
    counters = {"num_preemptions_total": 0.0}
    return MetricsSample(at_ns, {f"vllm:{name}{labels}": float(value) for name, value in (values | counters).items()})


# --- files ----------------------------------------------------------------------------------------------------------------


def aiperf_record(request: Request, start_ns: int, error: str = "") -> dict[str, Any]:
    """Return a request as AIPerf writes it."""
    sent = start_ns + request.sent
    last = request.tokens[-1] - request.sent
    gaps = [(later - earlier) / 1e6 for earlier, later in zip(request.tokens[:-1], request.tokens[1:], strict=True)]
    about = {
        "session_num": request.number, "x_request_id": request.id, "credit_issued_ns": sent - 100_000, "request_start_ns": sent,
        "request_end_ns": sent + last + 50_000, "benchmark_phase": "profiling", "was_cancelled": False,
    }  # fmt: skip
    values = {
        "time_to_first_token": (request.tokens[0] - request.sent) / 1e6, "request_latency": last / 1e6,
        "inter_chunk_latency": gaps,
        "usage_prompt_tokens": 64, "usage_completion_tokens": TOKENS, "output_sequence_length": TOKENS,
    }  # fmt: skip
    if error:
        return {"metadata": about, "metrics": {}, "error": {"code": 429, "type": "Too Many Requests", "message": error}}
    return {"metadata": about, "metrics": {name: {"value": value, "unit": ""} for name, value in values.items()}}


def aiperf_summary(rate: float) -> dict[str, Any]:
    """Return the part of AIPerf's summary that says what was asked."""
    phase = {"name": "profiling", "kind": "profiling", "type": "poisson", "rate": rate}
    endpoint = {"urls": ["http://127.0.0.1:8000"]}
    return {
        "aiperf_version": "0.13.0",
        "input_config": {"phases": [phase], "endpoint": endpoint, "models": {"items": [{"name": "tiny"}]}},
    }


def write_load(
    place: Path, load: Load, rate: float, number: int, start_ns: int, *, profiled: bool = False, failed: int = 0
) -> LoadPoint:
    """Write a load as `llm-perf serve` does; the last `failed` requests fail."""
    place.mkdir(parents=True)
    whole = len(load.requests) - failed
    records = [aiperf_record(request, start_ns, "" if place < whole else "busy") for place, request in enumerate(load.requests)]
    (place / "profile_export.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (place / "profile_export_aiperf.json").write_text(json.dumps(aiperf_summary(rate)))
    (place / "metrics.jsonl").write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in load.samples))
    if profiled:
        (place / "spans.jsonl").write_text(json.dumps(otlp(load, start_ns)) + "\n")
        with gzip.open(place / "server.trace.json.gz", "wt") as file:
            json.dump(torch_trace(load, start_ns), file)
    point = LoadPoint(
        number, "rate", rate, "poisson", "AIPerf", "profile_export.jsonl", len(load.requests), start_ns,
        start_ns + load.steps[-1][1], "complete", profiled=profiled, metrics="metrics.jsonl",
        spans="spans.jsonl" if profiled else "", trace="server.trace.json.gz" if profiled else "",
    )  # fmt: skip
    write_record(place / "point.json", point)
    return point


def otlp(load: Load, start_ns: int, server: Server = SIMULATED) -> dict[str, Any]:
    """Return the spans of a load as OTLP JSON."""
    return {"resourceSpans": [{"scopeSpans": [{"spans": [_span(request, start_ns, server) for request in load.requests]}]}]}


def _span(request: Request, start_ns: int, server: Server) -> dict[str, Any]:
    arrived, first, last = (
        request.sent + server.network_ns,
        request.tokens[0] - server.front_ns,
        request.tokens[-1] - server.front_ns,
    )
    seconds = {
        "time_in_queue": request.admitted - arrived, "time_in_model_prefill": first - request.admitted,
        "time_in_model_decode": last - first, "time_to_first_token": first - arrived, "e2e": request.tokens[-1] - arrived,
    }  # fmt: skip
    attributes = [{"key": f"gen_ai.latency.{name}", "value": {"doubleValue": value / 1e9}} for name, value in seconds.items()]
    attributes.append({"key": "gen_ai.request.id", "value": {"stringValue": f"cmpl-{request.id}-0"}})
    start, end = start_ns + arrived, start_ns + request.tokens[-1]
    return {"name": "llm_request", "startTimeUnixNano": str(start), "endTimeUnixNano": str(end), "attributes": attributes}


def torch_trace(load: Load, start_ns: int) -> dict[str, Any]:
    """Return the steps of a load as a torch trace; its times count from a base, and between two steps a millisecond passes."""
    base = start_ns - 5_000_000_000
    events = [
        {
            "ph": "X", "cat": "user_annotation", "name": f"execute_context_0(0)_generation_{batch}({batch})", "pid": 1, "tid": 1,
            "ts": (start_ns - base + start) / 1e3, "dur": (end - start - 1_000_000) / 1e3,
        }
        for start, end, batch in load.steps
    ]  # fmt: skip
    return {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": events}


def write_serving_run(
    path: Path,
    rates: list[float],
    *,
    count: int = 120,
    server: Server = SIMULATED,
    seed: int = 1,
    slo: dict[str, int] | None = None,
    profiled: float = 0.0,
) -> RunFolder:
    """Write a run folder of kind serving: one load per rate, and a profiled one."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    argv = ("python", "-m", "server", "--max-num-seqs", str(server.slots))
    folder.server_file.parent.mkdir(parents=True)
    write_record(folder.server_file, ServerFacts("http://127.0.0.1:8000", "tiny", argv, "simulated", "1.0", slo_ns=slo or {}))
    (path / "config.yaml").write_text("experiment: serve\nmodel:\n  name: tiny\n")
    start = BASE_NS
    for number, rate in enumerate([*rates, *([profiled] if profiled else [])]):
        load = simulate(server, rate, count, seed + number, start)
        write_load(folder.raw(f"load_{number:02}"), load, rate, number, start, profiled=number >= len(rates))
        start += load.steps[-1][1] + 3_000_000_000
    entries = tuple(PassRecord(place.name, "complete") for place in folder.load_folders())
    created = f"2026-11-16T12:00:{seed % 60:02}+00:00"
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", created, ("llm-perf", "serve"), entries, kind="serving"))
    return folder
