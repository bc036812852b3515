"""The load of the machine, from files like those of Linux."""

import os
import threading
import time
from pathlib import Path

import pytest

from llm_perf_opt.core.missing import Missing
from llm_perf_opt.runners.measure import host_load
from llm_perf_opt.runners.measure.host_load import BusyBefore, HostWatch, OtherProcesses, wait_policy

MAIN = os.getpid()
STATUS = "Name:\tpython\nvoluntary_ctxt_switches:\t{}\nnonvoluntary_ctxt_switches:\t{}\n"


def write_task(tasks: Path, number: int, delay_ns: int, voluntary: int, involuntary: int) -> None:
    folder = tasks / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedstat").write_text(f"1000 {delay_ns} 7\n")
    (folder / "status").write_text(STATUS.format(voluntary, involuntary))


def test_delays_and_switches_are_those_of_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loadavg").write_text("2.67 2.22 2.14 8/95 6007\n")
    tasks = tmp_path / "task"
    write_task(tasks, MAIN, 500, 10, 1)
    write_task(tasks, MAIN + 1, 900, 20, 2)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    watch = HostWatch(BusyBefore(1.5, 4.0), tasks, tmp_path / "loadavg")
    with watch.watching():
        write_task(tasks, MAIN, 700, 11, 4)
        write_task(tasks, MAIN + 1, 1000, 25, 2)
        write_task(tasks, MAIN + 2, 50, 1, 1)  # a thread that began meanwhile
    load = watch.load
    assert load is not None
    assert (load.main_delay_ns, load.other_delay_ns) == (200, 150)
    assert (load.voluntary_switches, load.involuntary_switches, load.threads) == (7, 4, 3)
    assert (load.runnable_before, load.others_before, load.others_before_s) == (8, 1.5, 4.0)
    assert load.wait_policy == "passive"
    assert load.processors >= 1


def test_a_system_without_the_counters_gives_reasons(tmp_path: Path) -> None:
    watch = HostWatch(BusyBefore(Missing("not sampled"), 0.0), tmp_path / "none", tmp_path / "none")
    with watch.watching():
        pass
    assert watch.load is not None
    for value in (watch.load.main_delay_ns, watch.load.threads, watch.load.runnable_before, watch.load.delay_share(1)):
        assert isinstance(value, Missing)


def test_a_kernel_without_schedstat_gives_a_reason(tmp_path: Path) -> None:
    write_task(tmp_path, MAIN, 1, 1, 1)
    (tmp_path / str(MAIN) / "schedstat").unlink()
    watch = HostWatch(BusyBefore(0.0, 1.0), tmp_path, tmp_path / "none")
    with watch.watching():
        pass
    assert watch.load is not None
    assert isinstance(watch.load.main_delay_ns, Missing)


@pytest.mark.skipif(not host_load.TASKS.is_dir(), reason="not Linux")
def test_the_counters_of_this_process_can_be_read() -> None:
    watch = HostWatch(BusyBefore(0.0, 1.0))
    with watch.watching():
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        done.set()
        thread.join()
    assert watch.load is not None
    assert watch.load.wall_ns > 0
    assert isinstance(watch.load.voluntary_switches, int)


@pytest.mark.parametrize(
    ("variables", "policy"),
    [
        ({}, "default"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "active"),
        ({"OMP_WAIT_POLICY": "passive"}, "passive"),
        ({"KMP_BLOCKTIME": "0"}, "passive"),
        ({"GOMP_SPINCOUNT": "0"}, "passive"),
        ({"GOMP_SPINCOUNT": "1000"}, "default"),
    ],
)
def test_the_wait_policy_is_read_from_the_environment(variables: dict[str, str], policy: str) -> None:
    assert wait_policy(variables) == policy


def test_other_processes_are_the_rest_of_what_the_cpus_did(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    times = type("Times", (), {"_asdict": lambda self: {"user": self.user, "idle": 99.0}})

    def cpus(user: float) -> list[object]:
        made = [times(), times()]
        for one in made:
            one.user = user
        return made

    readings = iter([cpus(10.0), cpus(12.0)])  # two seconds on each of two CPUs
    clock, ours = iter([100.0, 102.0]), iter([1.0, 2.0])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: next(readings))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: next(ours))
    assert OtherProcesses([0, 1]).cpus() == pytest.approx((4.0 - 1.0) / 2.0)
