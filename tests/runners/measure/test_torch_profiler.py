"""What each preset of the torch pass records of operators."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from builders import iteration
from llm_perf_opt.core.records import NO_FLOPS, NO_FORMULA, Iteration, Missing
from llm_perf_opt.runners.measure import torch_profiler


@pytest.mark.parametrize("preset", ["minimal", "default", "full", "max"])
def test_flops_and_memory_of_operators(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler, "profiler_cost", lambda _: None)
    left, right = torch.ones(4, 8), torch.ones(8, 16)

    def iterate() -> Iteration:
        torch.mm(left, right)
        torch.mm(left, right)
        torch.relu(left)
        return iteration()

    found = torch_profiler.profile_iteration(iterate, preset, False, tmp_path / "trace.json.gz")  # type: ignore[arg-type]
    rows = {row.name: row for row in found.operators}
    recorded = preset in ("full", "max")
    assert rows["aten::mm"].flops == (2 * 2 * 4 * 8 * 16 if recorded else NO_FLOPS)
    assert rows["aten::relu"].flops == (NO_FORMULA if recorded else NO_FLOPS)
    assert isinstance(rows["aten::mm"].cpu_memory_bytes, Missing) == (preset == "minimal")


def test_a_module_imported_under_the_profiler_does_not_end_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler, "profiler_cost", lambda _: None)
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    ran = []

    def iterate() -> Iteration:
        ran.append(import_module("imported_late").value)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        return iteration()

    found = torch_profiler.profile_iteration(iterate, "max", False, tmp_path / "trace.json.gz")
    assert "aten::mm" in {row.name for row in found.operators}
    assert len(ran) in (2, 4)


def test_names_that_torch_lost_do_not_lose_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler, "profiler_cost", lambda _: None)

    def lost(*_: object) -> list[object]:
        raise UnicodeDecodeError("utf-8", b"\x95", 0, 1, "invalid start byte")

    monkeypatch.setattr(torch.profiler.profile, "key_averages", lost)
    monkeypatch.setattr(torch_profiler, "_events", lost)
    left, right = torch.ones(4, 8), torch.ones(8, 16)
    ran = []

    def iterate() -> Iteration:
        ran.append(torch.mm(left, right))
        return iteration()

    found = torch_profiler.profile_iteration(iterate, "max", False, tmp_path / "trace.json.gz")
    assert (tmp_path / "trace.json.gz").stat().st_size > 0
    assert len(ran) == 4, "two iterations, twice: what is imported during the first attempt is there during the second"
    row = next(row for row in found.operators if row.name == "aten::mm")
    assert row.calls == 1
    assert row.flops == row.cpu_memory_bytes == found.parts
    assert isinstance(found.parts, Missing)
