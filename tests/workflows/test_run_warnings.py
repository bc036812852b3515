"""Warnings about what a run requested and did not collect."""

from typing import Any

import pytest

from builders import clean_timings, rank_facts
from llm_perf_opt.analysis.rank_run import rank_run
from llm_perf_opt.core.records import SCHEMA, Manifest, Missing, PassRecord
from llm_perf_opt.core.warnings import WarningId
from llm_perf_opt.workflows.run_warnings import partly_collected, rank_warnings


def manifest(*passes: str) -> Manifest:
    return Manifest(SCHEMA, "0", "complete", "", (), tuple(PassRecord(name, "complete") for name in passes))


def settings(*sets: str, **defined: Any) -> dict[str, Any]:
    return {"profiling": {"metrics": {"sets": list(sets), "defined": defined}}}


@pytest.mark.parametrize(
    ("passes", "sets", "said"),
    [
        (("clean", "torch", "nsys"), ("ch13",), []),
        (("clean", "torch"), ("ch13", "ch02"), ["Nsight Systems"]),
        (("nsys", "ncu_prefill"), ("ch04",), []),
        (("nsys",), ("ch04", "ch18"), ["Nsight Compute", "Nsight Compute"]),
    ],
)
def test_a_set_that_was_collected_in_part(passes: tuple[str, ...], sets: tuple[str, ...], said: list[str]) -> None:
    found = partly_collected(manifest(*passes), settings(*sets))
    assert {warning.id for warning in found} <= {WarningId.METRICS_PARTLY_COLLECTED}
    assert [label for label in said if any(label in warning.text for warning in found)] == said
    assert len(found) == len(said)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"profiling": 3},
        {"profiling": {"metrics": []}},
        settings("gone"),
        {"profiling": {"metrics": {"sets": None}}},
        {"profiling": {"metrics": {"sets": ["ch09"], "defined": 5}}},
        {"profiling": {"metrics": {"sets": ["ch09"], "defined": "x"}}},
    ],
)
def test_settings_of_other_versions_cause_none(config: dict[str, Any]) -> None:
    assert partly_collected(manifest("clean"), config) == []


@pytest.mark.parametrize(
    ("devices", "size", "shared"),
    [
        (("cpu", "cpu"), 2, "2 ranks on cpu"),
        (("cpu",), 2, "2 ranks on cpu"),  # interrupted: the facts of one rank
        (("cuda:0", "cuda:0"), 2, "2 ranks on cuda:0"),
        (("cuda:0", "cuda:1"), 2, ""),
        ((), 0, ""),
    ],
)
def test_ranks_that_share_a_device_are_a_warning(devices: tuple[str, ...], size: int, shared: str) -> None:
    ranks = tuple(rank_facts(number, device, size=size) for number, device in enumerate(devices))
    found = rank_warnings(rank_run(clean_timings(ranks=ranks), Missing("no traces")))
    assert [warning.id for warning in found] == ([WarningId.RANKS_SHARE_DEVICE] if shared else [])
    assert all(shared in warning.text for warning in found)
