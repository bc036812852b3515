"""The options of torch.compile: those of the mode, and coordinate descent tuning on top."""

from typing import Any

import pytest
import torch

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.compilation import NOT_COMPILED, Compilation


def test_a_mode_and_the_tuning_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **given: [function, calls.append(given)][0])  # type: ignore[func-returns-value]
    for made in (Compilation("default"), Compilation("reduce-overhead"), Compilation("reduce-overhead", coordinate_descent=True)):
        made.compiled(torch.sin)
    assert calls == [
        {"mode": None},
        {"mode": "reduce-overhead"},
        {"options": {"triton.cudagraphs": True, "coordinate_descent_tuning": True}},
    ]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_torch_knows_the_options(mode: Any) -> None:
    """torch.compile refuses unknown options when it is called, before anything is compiled."""
    Compilation(mode, coordinate_descent=True).compiled(torch.sin)
    assert Compilation("max-autotune").options() == Compilation("max-autotune", coordinate_descent=True).options(), (
        "it is on there"
    )


def test_settings_are_recorded() -> None:
    assert NOT_COMPILED.words == "none"
    assert NOT_COMPILED.compiled(torch.sin) is torch.sin
    assert Compilation("default", prefill=True).words == "default, with prefill"
    assert Compilation("default", True, True).words == "default, with prefill, coordinate descent tuning"


def test_tuning_needs_a_gpu() -> None:
    tuned = Compilation("default", coordinate_descent=True)
    with pytest.raises(ConfigError, match="no effect on cpu"):
        tuned.check(torch.device("cpu"))
    tuned.check(torch.device("cuda"))
    Compilation("default").check(torch.device("cpu"))


def test_graphs_are_captured_on_a_gpu() -> None:
    assert Compilation("reduce-overhead").captures(torch.device("cuda"))
    assert not Compilation("reduce-overhead").captures(torch.device("cpu"))
    assert not Compilation("default").captures(torch.device("cuda"))
