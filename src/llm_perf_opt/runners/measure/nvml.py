"""The telemetry sampler, a separate process next to the unprofiled pass.

`python -m llm_perf_opt.runners.measure.nvml --out FILE --interval S --gpu N,M|none [--prometheus FILE]` writes one JSON line per
reading. The file of an exporter is read whenever it has changed.
A line on standard input is the pid to watch, `+PID` another that belongs to it; end of input ends the sampler, so it cannot
outlive its parent.
"""

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import psutil

from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.core.host import cpu_frequency_mhz, usable_cpus
from llm_perf_opt.core.machine_records import CpuSample, ExporterReading, TelemetryHeader
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.runners.measure.gpu import handle_of, nvml, sample
from llm_perf_opt.traces.prometheus import read_prometheus

READY = "ready"
LOOK_S = 5.0
"""Seconds between two searches for children of the measured process, which an engine starts before it is measured."""


class HostReader:
    """Reads CPU use and, once it is known, the watched process and its children."""

    def __init__(self) -> None:
        self._watched: dict[int, psutil.Process] = {}
        self._root: psutil.Process | None = None
        self._look_at = 0.0
        psutil.cpu_percent()  # the first reading is meaningless

    @property
    def pids(self) -> frozenset[int]:
        """The watched process and its children."""
        return frozenset(self._watched)

    def watch(self, pid: int) -> None:
        """Watch this process."""
        self._watched = {}
        try:
            self._root = psutil.Process(pid)
        except psutil.Error:
            self._root = None
        self._look()

    def add(self, pid: int) -> None:
        """Watch this process too."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            process.cpu_percent()
            self._watched.setdefault(pid, process)

    def sample(self, at_ns: int) -> CpuSample:
        """Return CPU use in percent of one CPU, and the memory of the watched processes."""
        if self._root is not None and time.monotonic() >= self._look_at:
            self._look()
        ours, rss = 0.0, 0
        for pid, process in list(self._watched.items()):
            try:
                ours += process.cpu_percent()
                rss += int(process.memory_info().rss)
            except psutil.Error:
                del self._watched[pid]
        machine = psutil.cpu_percent() * (psutil.cpu_count() or 1)
        return CpuSample(at_ns, machine, ours, rss, cpu_frequency_mhz("current"))

    def _look(self) -> None:
        """Find new processes; seldom, because that reads the state of every process of the machine."""
        self._look_at = time.monotonic() + LOOK_S
        try:
            found = [self._root, *self._root.children(recursive=True)] if self._root is not None else []
        except psutil.Error:
            return
        for process in found:
            if process.pid not in self._watched:
                try:
                    process.cpu_percent()
                except psutil.Error:
                    continue
                self._watched[process.pid] = process


class ExporterFile:
    """The file of an exporter, which may change while the sampler runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def changed(self, at_ns: int) -> ExporterReading | None:
        """Return the content of the file if it has changed since the last call."""
        try:
            state = self._path.stat()
            stamp = state.st_mtime_ns, state.st_size
        except OSError:
            stamp = 0, -1
        if stamp == self._seen:
            return None
        self._seen = stamp
        try:
            found = read_prometheus(self._path)
        except LlmPerfError as error:
            return ExporterReading(at_ns, stamp[0], {}, why=error.fact)
        return ExporterReading(at_ns, stamp[0], found.series, found.kinds, found.note)


def run(out: Path, interval_s: float, gpus: Sequence[int], prometheus: Path | None = None) -> None:
    """Sample the host and these GPUs until standard input ends."""
    with (
        out.open("wb") as file,
        nvml() if gpus else contextlib.nullcontext(Missing("the run is on the CPU")) as library,
    ):
        handles, note = _handles(library, gpus)
        _write(file, header=TelemetryHeader(interval_s, usable_cpus(), note))
        host = HostReader()
        exporter = ExporterFile(prometheus) if prometheus else None
        print(READY, flush=True)
        due = time.monotonic()
        while _wait(host, due):
            now = time.monotonic_ns()
            _write(file, cpu=host.sample(now))
            for index, handle in handles.items():
                _write(file, gpu=replace(sample(library, handle, time.monotonic_ns(), host.pids), device=index))
            if exporter and (reading := exporter.changed(time.monotonic_ns())):
                _write(file, exporter=reading)
            due = max(due + interval_s, time.monotonic())


def _handles(library: Maybe[Any], gpus: Sequence[int]) -> tuple[dict[int, Any], str]:
    """Return the handles of the GPUs that can be read, and why another cannot."""
    if isinstance(library, Missing):
        return {}, library.why
    found = {index: handle_of(library, index) for index in gpus}
    note = next((handle.why for handle in found.values() if isinstance(handle, Missing)), "")
    return {index: handle for index, handle in found.items() if not isinstance(handle, Missing)}, note


def _wait(host: HostReader, due: float) -> bool:
    """Sleep until the next reading is due, reading pids to watch; return False at the end of input."""
    while True:
        wait = max(0.0, due - time.monotonic())
        if not select.select([sys.stdin], [], [], wait)[0]:
            return True
        line = os.read(sys.stdin.fileno(), 4096).decode(errors="replace")
        if not line:
            return False
        for word in line.split():
            if word.isdigit():
                host.watch(int(word))
            elif word[:1] == "+" and word[1:].isdigit():
                host.add(int(word[1:]))


def _write(file: BinaryIO, **record: Any) -> None:
    file.write(msgspec.json.encode(record) + b"\n")
    file.flush()


def main() -> None:
    """Command line of the sampler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--gpu", required=True, help="indices, or none")
    parser.add_argument("--prometheus", type=Path, help="a file in the Prometheus text format")
    arguments = parser.parse_args()
    gpus = [] if arguments.gpu == "none" else [int(index) for index in arguments.gpu.split(",")]
    run(arguments.out, arguments.interval, gpus, arguments.prometheus)


if __name__ == "__main__":
    main()
