"""An OpenAI-compatible server that computes nothing and fails on request. It listens on 127.0.0.1.

    python fault_server.py --port N [--fault die|429|500|504|hang|no-profiler] [--after N] [--token-ms MS] [--workers N]
                           [--traces DIR]

The fault begins after `--after` streamed requests. `--workers` limits the requests that run at a time: others wait.
"""

import argparse
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class FaultServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", options.port), Handler)
        self.options = options
        self.served = self.running = self.waiting = 0
        self.lock = threading.Lock()
        self.slots = threading.Semaphore(options.workers)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultServer

    def log_message(self, *words: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            about = {"id": "pretend", "owned_by": "nobody", "root": self.server.options.root, "max_model_len": 4096}
            self.whole(json.dumps({"data": [about]}))
        elif self.path == "/metrics":
            counts = self.server.running, self.server.waiting, self.server.served
            self.whole("fault:requests_running {}\nfault:requests_waiting {}\nfault:request_success_total {}\n".format(*counts))
        elif self.path == "/health":
            self.whole("")
        else:
            self.whole("not here", 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/stop_profile" and self.server.options.fault != "no-profiler":
            (Path(self.server.options.traces) / "rank0.trace.json").write_text('{"traceEvents": []}')
        if self.path in ("/start_profile", "/stop_profile"):
            self.whole("", 404 if self.server.options.fault == "no-profiler" else 200)
            return
        asked = json.loads(body)
        if not asked.get("stream"):
            time.sleep(self.server.options.token_ms / 1000 * asked["max_tokens"])
            self.whole(json.dumps({"choices": [{"text": "a"}]}))
            return
        with self.server.lock:
            self.server.served += 1
            fault = self.server.options.fault if self.server.served > self.server.options.after else ""
        self.stream(asked, fault)

    def stream(self, asked: dict[str, Any], fault: str) -> None:
        options = self.server.options
        if fault in ("429", "500", "504"):
            self.whole(json.dumps({"error": {"message": "as told"}}), int(fault))
            return
        self.server.waiting += 1
        with self.server.slots:
            self.server.waiting -= 1
            self.server.running += 1
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for number in range(asked["max_tokens"]):
                time.sleep(options.token_ms / 1000)
                if fault in ("die", "hang") and number == 1:
                    if fault == "die":
                        print("fault: out of luck", flush=True)
                        os._exit(7)
                    time.sleep(10_000)
                self.event({"choices": [{"index": 0, "text": "a", "finish_reason": None}]})
            self.server.running -= 1
        count = asked["max_tokens"]
        usage = {"prompt_tokens": 8, "completion_tokens": count, "total_tokens": 8 + count}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, content: dict[str, Any]) -> None:
        shared = {"id": "c", "object": "text_completion", "created": 1, "model": "pretend"}
        self.wfile.write(b"data: " + json.dumps({**shared, **content}).encode() + b"\n\n")
        self.wfile.flush()

    def whole(self, text: str, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fault", default="")
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--token-ms", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--traces", default="")
    parser.add_argument("--root", default="")
    return parser.parse_args(words)


def main() -> None:
    options = options_of()
    about: dict[str, Any] = {
        "event": "server",
        "argv": ["fault"],
        "model": "pretend",
        "tokenizer": ".",
        "version": "1",
        "notes": ["a note"],
    }
    about["random_ids"] = True
    server = FaultServer(options)
    print("@llm-perf " + json.dumps(about), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
