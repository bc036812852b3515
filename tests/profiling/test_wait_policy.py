"""How OpenMP threads wait, by what other processes do."""

from dataclasses import replace

import pytest

from builders import default_config
from llm_perf_opt.config.schema import HardwareConfig
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.profiling import wait_policy
from llm_perf_opt.profiling.wait_policy import decide
from llm_perf_opt.runners.measure.host_load import OtherProcesses

HARDWARE = default_config().hardware


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(wait_policy, "usable_cpus", lambda: 4)
    monkeypatch.setattr(wait_policy, "SAMPLE_S", 0.0)


def with_others(monkeypatch: pytest.MonkeyPatch, cpus: float) -> None:
    monkeypatch.setattr(OtherProcesses, "cpus", lambda _: cpus)


@pytest.mark.parametrize(
    ("others", "threads", "policy"),
    [
        (0.0, None, "default"),
        (0.4, None, "default"),
        (0.6, None, "passive"),
        (4.0, 2, "passive"),
        (1.0, 3, "default"),
        (3.0, 1, "default"),
    ],
)
def test_threads_sleep_if_they_and_others_are_more_than_the_processors(
    monkeypatch: pytest.MonkeyPatch, others: float, threads: int | None, policy: str
) -> None:
    with_others(monkeypatch, others)
    found = decide(replace(HARDWARE, threads=threads), gpu=False)
    assert (found.policy, found.others) == (policy, others)
    assert ("OMP_WAIT_POLICY" in found.variables) == (policy == "passive")


def test_pinned_cpus_are_the_processors_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with_others(monkeypatch, 1.0)
    assert decide(replace(HARDWARE, cpus="0-1"), gpu=False).policy == "passive"


def test_what_is_set_is_used_without_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    with_others(monkeypatch, 4.0)
    active: HardwareConfig = replace(HARDWARE, wait_policy="active")
    found = decide(active, gpu=False)
    assert (found.policy, found.variables["OMP_WAIT_POLICY"]) == ("active", "ACTIVE")
    assert isinstance(found.others, Missing)
    assert decide(HARDWARE, gpu=True).policy == "default"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert decide(HARDWARE, gpu=False).policy == "active"


def test_the_decision_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with_others(monkeypatch, 1.234)
    assert decide(HARDWARE, gpu=False).to_env()["others"] == 1.23
    assert decide(HARDWARE, gpu=True).to_env()["others"].startswith("n/a: ")
