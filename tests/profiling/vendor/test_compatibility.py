"""Incompatible versions."""

import pytest

from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.profiling.vendor import compatibility
from llm_perf_opt.profiling.vendor.compatibility import blind_to_ranges, check_ranges_visible, cuda_runtime, too_old_for


@pytest.mark.parametrize(
    ("nsys", "cuda", "old"),
    [
        ("2023.4.4.54-234433681190v0", (12, 4), False),
        ("2023.4.4.54-234433681190v0", (13, 0), True),  # stopped half-way on the H200
        ("2023.4.4.54-234433681190v0", (12, 5), True),
        ("2025.3.2.474", (13, 0), False),
        ("2025.3.2.474", (12, 4), False),
        ("2024.6.2", (12, 7), False),
        ("2024.2.3", (12, 7), True),  # between two of the table: as the one before
        ("2025.3.2", (14, 0), False),  # newer than the table: the last of it is the least
        ("2021.1.1", (11, 0), False),  # older than the table
    ],
)
def test_an_nsys_older_than_cuda_is_told(nsys: str, cuda: tuple[int, int], old: bool) -> None:
    assert bool(too_old_for(nsys, cuda)) == old


def test_what_is_not_known_is_not_doubted() -> None:
    assert too_old_for("2023.4.4", Missing("no CUDA")) == ""
    assert too_old_for("", (13, 0)) == ""
    assert not blind_to_ranges("2023.4.4", Missing("not installed"))
    assert not blind_to_ranges("", "0.2.13")


@pytest.mark.parametrize(
    ("nsys", "nvtx", "blind"),
    [
        ("2023.4.4.54", "0.2.11", False),
        ("2023.4.4.54", "0.2.12", True),
        ("2023.4.4.54", "0.3.0", True),
        ("2022.4.2", "0.2.13", True),
        ("2024.1.1", "0.2.13", False),
    ],
)
def test_ranges_that_nsys_does_not_see(monkeypatch: pytest.MonkeyPatch, nsys: str, nvtx: str, blind: bool) -> None:
    assert blind_to_ranges(nsys, nvtx) == blind
    monkeypatch.setattr(compatibility, "nvtx_version", lambda: nvtx)
    if blind:
        with pytest.raises(ResourceError, match="does not see the ranges") as refused:
            check_ranges_visible(nsys)
        assert "pip install" in refused.value.remedy
    else:
        check_ranges_visible(nsys)


def test_without_nvtx_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "nvtx_version", lambda: Missing("not installed"))
    with pytest.raises(ResourceError, match="not installed"):
        check_ranges_visible("2025.1.1")


def test_the_cuda_of_torch_is_read_without_importing_it() -> None:
    import torch

    found = cuda_runtime()
    if torch.version.cuda is None:
        assert isinstance(found, Missing)
    else:
        assert not isinstance(found, Missing)
        assert ".".join(map(str, found)) == ".".join(torch.version.cuda.split(".")[:2])
