"""The benchmark of variants reports when memory grows."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def benchmark() -> Any:
    file = Path(__file__).parents[2] / "benchmarks" / "data_speed.py"
    spec = importlib.util.spec_from_file_location("data_speed", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_growth_is_against_the_smallest_input_wherever_the_peak_is(benchmark: Any) -> None:
    found = benchmark.growth({"flat": {100: 60.0, 2000: 61.0}, "hump": {2000: 60.0, 500: 90.0, 100: 60.0}, "less": {1: 9, 2: 8}})
    assert found == {"flat": pytest.approx(61 / 60), "hump": 1.5, "less": 1.0}
    assert found["flat"] <= benchmark.FLAT == 1.1 < found["hump"]
