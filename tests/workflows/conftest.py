"""Shared by the tests of searches."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from llm_perf_opt.analysis.comparison import statistics
from tuning_builders import fake_runtime, fake_settings


@pytest.fixture(scope="module")
def fake_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The fake runtime, and fewer draws for intervals than in use."""
    with fake_runtime(tmp_path_factory.mktemp("fake") / "site"), patch.object(statistics, "DRAWS", 100):
        yield


@pytest.fixture(scope="module")
def values(fake_engine: None) -> dict[str, Any]:
    """The settings of a run of the fake runtime, composed once."""
    return fake_settings()
