"""A real server (vLLM on the CPU) under the load of a real generator (AIPerf), as a user runs it."""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from command import HANG_S
from serve_command import NEW_TOKENS, environment, serve_argv

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RATES = (8, 32, 128)
REQUESTS = 8


@pytest.fixture(scope="module")
def served(vllm_python: Path, aiperf_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over three rates and a profiled load."""
    folder = tmp_path_factory.mktemp("served") / "run"
    rates = ",".join(map(str, RATES))
    loads = ("--rates", rates, "--requests", str(REQUESTS), "--least-s", "0", "--warmup", "2", "--profile", "8")
    argv = serve_argv(vllm_python, aiperf_python, folder, *loads, "-q", "--json")
    done = subprocess.run(argv, cwd=folder.parent, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "complete"
    return folder


def point(folder: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"raw/load_{number:02d}/point.json").read_text())
    return found


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def requests_of(folder: Path, number: int) -> list[dict[str, Any]]:
    found = lines(folder / f"raw/load_{number:02d}/profile_export.jsonl")
    return [record for record in found if record["metadata"]["benchmark_phase"] == "profiling"]


def span_ids(folder: Path, number: int) -> set[str]:
    attributes = [
        attribute
        for line in lines(folder / f"raw/load_{number:02d}/spans.jsonl")
        for resource in line["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
        for attribute in span["attributes"]
    ]
    return {one["value"]["stringValue"] for one in attributes if one["key"] == "gen_ai.request.id"}


def test_every_rate_was_driven(served: Path) -> None:
    points = [point(served, number) for number in range(1, len(RATES) + 1)]
    assert [one["asked"] for one in points] == list(RATES)
    assert {(one["status"], one["requests"], one["profiled"]) for one in points} == {("complete", REQUESTS, False)}
    for number in range(1, len(RATES) + 1):
        records = requests_of(served, number)
        assert len(records) == REQUESTS
        assert {record["metrics"]["usage_completion_tokens"]["value"] for record in records} == {NEW_TOKENS}


def test_requests_stream_their_tokens(served: Path) -> None:
    """With the tokenizer of a model without one. A busy server may send several tokens together, or all of them."""
    found = [record["metrics"] for number in range(1, len(RATES) + 1) for record in requests_of(served, number)]
    gaps = [len(metrics["inter_chunk_latency"]["value"]) for metrics in found if "inter_chunk_latency" in metrics]
    assert 1 <= max(gaps, default=0) <= NEW_TOKENS - 1


def test_the_servers_spans_and_metrics_belong_to_the_load(served: Path) -> None:
    for number in range(1, len(RATES) + 1):
        sent = {record["metadata"]["x_request_id"] for record in requests_of(served, number)}
        seen = span_ids(served, number)
        assert {one for one in sent if any(one in span for span in seen)} == sent
        one = point(served, number)
        samples = lines(served / f"raw/load_{number:02d}" / one["metrics"])
        assert all(one["started_ns"] <= sample["at_ns"] <= one["ended_ns"] for sample in samples)
        done = [sum(value for name, value in sample["series"].items() if "request_success" in name) for sample in samples]
        assert done[-1] - done[0] >= REQUESTS


def test_the_profiled_load_has_a_trace_of_the_engines_steps(served: Path) -> None:
    last = point(served, len(RATES) + 1)
    assert (last["profiled"], last["asked"], last["status"]) == (True, 8, "complete")
    with gzip.open(served / f"raw/load_{len(RATES) + 1:02d}" / last["trace"]) as file:
        trace = json.load(file)
    steps = [event for event in trace["traceEvents"] if event.get("name", "").startswith("execute_")]
    began = [trace["baseTimeNanoseconds"] + event["ts"] * 1000 for event in steps]  # unix time, as that of the requests
    sent = [record["metadata"]["request_start_ns"] for record in requests_of(served, len(RATES) + 1)]
    assert len(steps) >= NEW_TOKENS
    assert min(began) < max(sent) < max(began)


def test_the_server_is_what_the_settings_say(served: Path) -> None:
    server = json.loads((served / "raw/server/server.json").read_text())
    assert (server["model"], server["engine"]) == ("tiny", "vllm")
    words = server["argv"]
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert {"--enforce-eager", "--no-enable-prefix-caching"} <= set(words)
    assert words[words.index("--load-format") + 1] == "dummy"
    assert not Path(words[words.index("--model") + 1]).exists()  # the folder of the model was temporary
