"""Sample a server's Prometheus metrics while it is under load."""

import re
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from llm_perf_opt.core.inside import open_to_append
from llm_perf_opt.core.serving_records import MetricsSample
from llm_perf_opt.profiling.serving.http import ask
from llm_perf_opt.traces.prometheus import parse_prometheus

EVERY_S = 0.5
_LAST_S = 20.0
"""Timeout of the sample after a whole load. The others may not take long: they would be samples of another moment."""
_LOAD = re.compile(r"request|token|queue|running|waiting|pending|batch|cache|preempt|swap|spec_decode|reject", re.IGNORECASE)
"""Names of series that say something about load, with any engine."""
_DETAIL = re.compile(r"_(bucket|created|info)(\{|$)|^(python|process|http)_")
"""Buckets of histograms, creation times, and the process itself: their sums and counts remain."""


def load_series(text: str) -> dict[str, float]:
    """Return the series of a scrape that say something about load."""
    return {
        name: value for name, value in parse_prometheus(text).series.items() if _LOAD.search(name) and not _DETAIL.search(name)
    }


class MetricsSampler:
    """Writes a `MetricsSample` per line, twice a second, in a thread that sleeps in between."""

    def __init__(self, url: str, file: Path, every_s: float = EVERY_S) -> None:
        self._url, self._file, self._every_s = url, file, every_s
        self._stop = threading.Event()
        self._last_s = every_s * 4
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self.samples = 0
        self._failed, self._last_failure = 0, ""
        self.last: dict[str, float] = {}
        """The latest sample."""

    @property
    def problems(self) -> list[str]:
        """Scrapes that failed, with the reason of the last one."""
        if not self._failed:
            return []
        return [
            f"{self._failed} of {self._failed + self.samples} scrapes of the metrics failed, the last with {self._last_failure}"
        ]

    def __enter__(self) -> "MetricsSampler":
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._last_s = _LAST_S
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with open_to_append(self._file.parent, self._file) as file:
            next_at = time.monotonic()
            while True:
                stopping = self._stop.is_set()
                self._sample(file, self._last_s if stopping else self._every_s * 4)
                if stopping:  # the last sample is taken after the load
                    return
                next_at = max(next_at + self._every_s, time.monotonic())
                self._stop.wait(max(0.0, next_at - time.monotonic()))

    def _sample(self, file: BinaryIO, timeout_s: float) -> None:
        at_ns = time.time_ns()
        answer = ask(self._url, timeout_s=timeout_s)
        series = load_series(answer.body.decode(errors="replace")) if answer.code == 200 else {}
        if not series:
            self._failed += 1
            self._last_failure = (
                "no series about load" if answer.code == 200 else f"{answer.code or 'no answer'} {answer.text}".strip()
            )
        else:
            file.write(msgspec.json.encode(MetricsSample(at_ns, series)) + b"\n")
            file.flush()
            self.samples += 1
            self.last = series
