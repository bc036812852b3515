"""Warnings about what a run requested and did not collect."""

from typing import Any

import pytest

from llm_perf_opt.core.records import SCHEMA, Manifest, PassRecord
from llm_perf_opt.core.warnings import WarningId
from llm_perf_opt.workflows.run_warnings import partly_collected


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
