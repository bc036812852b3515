"""How busy the machine is, and how the system schedules this process. Linux counts; other systems give Missing."""

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.host import allowed_cpus, cpu_list, usable_cpus
from llm_perf_opt.core.host_records import HostLoad
from llm_perf_opt.core.missing import Maybe, Missing

TASKS = Path("/proc/self/task")
LOADAVG = Path("/proc/loadavg")
LEAST_SAMPLE_S = 0.2
"""Shorter samples of the processors are too coarse: the kernel counts in ticks of 10 ms."""
_NO_COUNTERS = Missing("the system does not count the delays of threads")


class OtherProcesses:
    """CPU use of other processes since construction, on some CPUs; by default, on those that this one may use."""

    def __init__(self, cpus: Collection[int] | None = None) -> None:
        self._cpus = cpus
        self._begun = time.monotonic()
        self._busy_s = self._busy()
        self._ours_s = time.process_time()

    @property
    def seconds(self) -> float:
        """Return the time since construction."""
        return time.monotonic() - self._begun

    def cpus(self) -> float:
        """Return the average, in CPUs."""
        seconds = self.seconds
        others = self._busy() - self._busy_s - (time.process_time() - self._ours_s)
        return max(0.0, others / seconds) if seconds else 0.0

    def _busy(self) -> float:
        import psutil

        allowed = allowed_cpus() if self._cpus is None else self._cpus
        every = psutil.cpu_times(percpu=True)
        # iowait is part of idle, and guest time is part of user and nice.
        not_busy = ("idle", "iowait", "guest", "guest_nice")
        counted = [times for number, times in enumerate(every) if isinstance(allowed, Missing) or number in allowed]
        return float(sum(value for times in counted for name, value in times._asdict().items() if name not in not_busy))


@dataclass(frozen=True)
class BusyBefore:
    """The load of other processes before the repeats."""

    cpus: Maybe[float]
    seconds: float


def sampled(others: OtherProcesses) -> BusyBefore:
    """Return the load since `others` was constructed; wait if that was too short for a sample."""
    time.sleep(max(0.0, LEAST_SAMPLE_S - others.seconds))
    return BusyBefore(others.cpus(), others.seconds)


def wait_policy(variables: Mapping[str, str] = os.environ) -> Literal["default", "active", "passive"]:
    """Return how OpenMP threads wait for work according to these environment variables."""
    word = variables.get("OMP_WAIT_POLICY", "").strip().lower()
    if word in ("active", "passive"):
        return "active" if word == "active" else "passive"
    if variables.get("GOMP_SPINCOUNT", "").strip() == "0" or variables.get("KMP_BLOCKTIME", "").strip() == "0":
        return "passive"
    return "default"


@dataclass(frozen=True)
class _Thread:
    """The counters of one thread."""

    delay_ns: int
    involuntary: int
    voluntary: int


def _threads(tasks: Path) -> Maybe[dict[int, _Thread]]:
    """Return the counters of every thread of this process by id."""
    found: dict[int, _Thread] = {}
    try:
        for folder in tasks.iterdir():
            try:
                delay = int((folder / "schedstat").read_text().split()[1])
                lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
            except FileNotFoundError:
                if folder.exists():
                    return _NO_COUNTERS
                continue  # the thread has ended
            found[int(folder.name)] = _Thread(
                delay, int(lines["nonvoluntary_ctxt_switches"]), int(lines["voluntary_ctxt_switches"])
            )
    except (OSError, ValueError, IndexError, KeyError):
        return _NO_COUNTERS
    return found or _NO_COUNTERS


def _runnable(file: Path) -> Maybe[int]:
    try:
        return int(file.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return Missing("the system does not report its runnable tasks")


class HostWatch:
    """Counts how the threads of this process are scheduled while `watching`."""

    def __init__(self, before: BusyBefore, tasks: Path = TASKS, loadavg: Path = LOADAVG) -> None:
        self._before = before
        self._tasks = tasks
        self._loadavg = loadavg
        self.load: HostLoad | None = None
        """The result; None before `watching` has ended."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Read the counters before and after the context."""
        runnable, first, begun = _runnable(self._loadavg), _threads(self._tasks), time.monotonic_ns()
        try:
            yield
        finally:
            wall_ns = time.monotonic_ns() - begun
            self.load = self._result(wall_ns, runnable, first, _threads(self._tasks))

    def _result(
        self, wall_ns: int, runnable: Maybe[int], first: Maybe[dict[int, _Thread]], last: Maybe[dict[int, _Thread]]
    ) -> HostLoad:
        main = others = involuntary = voluntary = threads = _NO_COUNTERS  # type: Maybe[int]
        if not isinstance(first, Missing) and not isinstance(last, Missing):
            zero = _Thread(0, 0, 0)
            pairs = {number: (first.get(number, zero), thread) for number, thread in last.items()}
            delays = {number: after.delay_ns - before.delay_ns for number, (before, after) in pairs.items()}
            main, others = delays.pop(os.getpid(), 0), sum(delays.values())
            involuntary = sum(after.involuntary - before.involuntary for before, after in pairs.values())
            voluntary = sum(after.voluntary - before.voluntary for before, after in pairs.values())
            threads = len(last)
        allowed = allowed_cpus()
        return HostLoad(
            wall_ns=wall_ns,
            processors=usable_cpus(),
            cpus=allowed if isinstance(allowed, Missing) else cpu_list(allowed),
            threads=threads,
            main_delay_ns=main,
            other_delay_ns=others,
            involuntary_switches=involuntary,
            voluntary_switches=voluntary,
            runnable_before=runnable,
            others_before=self._before.cpus,
            others_before_s=round(self._before.seconds, 3),
            wait_policy=wait_policy(),
        )
