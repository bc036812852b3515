"""Sends requests as AIPerf does and writes the same records, in a second instead of ten: for tests of faults.

It takes the options that llm-perf gives AIPerf and ignores those that it does not need.
"""

import argparse
import itertools
import json
import random
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any


def one(options: argparse.Namespace) -> dict[str, Any]:
    body = {"model": options.model, "prompt": "a", "max_tokens": options.osl, "stream": True}
    about: dict[str, Any] = {
        "x_request_id": str(uuid.uuid4()),
        "request_start_ns": time.time_ns(),
        "benchmark_phase": "profiling",
    }
    request = urllib.request.Request(
        f"{options.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    arrivals, error = [], None
    try:
        with urllib.request.urlopen(request, timeout=options.request_timeout_seconds) as response:
            for line in response:
                if b'"text"' in line:
                    arrivals.append(time.time_ns())
    except urllib.error.HTTPError as failed:
        error = {"code": failed.code, "type": "HTTPError", "message": str(failed.reason)}
    except OSError as failed:
        error = {"code": None, "type": type(failed).__name__, "message": str(failed)}
    metrics = {}
    if arrivals:
        gaps = [(later - earlier) / 1e6 for earlier, later in itertools.pairwise(arrivals)]
        metrics["time_to_first_token"] = {"value": (arrivals[0] - about["request_start_ns"]) / 1e6, "unit": "ms"}
        metrics["inter_chunk_latency"] = {"value": gaps, "unit": "ms"}
        metrics["usage_completion_tokens"] = {"value": len(arrivals), "unit": "tokens"}
    record = {"metadata": {**about, "request_end_ns": time.time_ns()}, "metrics": metrics}
    return {**record, "error": error} if error else record


def main() -> None:
    parser = argparse.ArgumentParser()
    kinds: dict[str, Any] = {"model": str, "url": str, "request-rate": float, "request-count": int, "osl": int}
    kinds |= {"random-seed": int, "request-timeout-seconds": float, "artifact-dir": Path, "concurrency": int}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind)
    options, _ = parser.parse_known_args()
    drawn = random.Random(options.random_seed)
    lock = threading.Lock()
    slots = threading.Semaphore(options.concurrency or options.request_count)
    failures = []

    def send(file: Any) -> None:
        with slots:
            record = one(options)
        with lock:
            file.write(json.dumps(record) + "\n")
            file.flush()
            failures.extend([1] if "error" in record else [])

    with (options.artifact_dir / "profile_export.jsonl").open("w") as file:
        threads = [threading.Thread(target=send, args=(file,), daemon=True) for _ in range(options.request_count)]
        for thread in threads:
            thread.start()
            if options.request_rate:
                time.sleep(drawn.expovariate(options.request_rate))
        for thread in threads:
            thread.join()
    sys.exit(len(failures) == options.request_count)


if __name__ == "__main__":
    main()
