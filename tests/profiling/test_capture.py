"""One pass that fails leaves the others standing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llm_perf_opt.cli.progress import progress_for
from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.profiling import capture as room

ASKED = ["profiling=stage2", "profiling.nvml.enable=false"]


def failing(error: LlmPerfError) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("kind", [CaptureError, ParseError, ResourceError])
def test_a_timeline_that_cannot_be_had_does_not_cost_the_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[LlmPerfError]
) -> None:
    began = []
    monkeypatch.setattr(room, "run_nsys", failing(kind("It is of an unknown layout.", "")))
    monkeypatch.setattr(room, "run_ncu", lambda *_: began.append("ncu"))
    with progress_for(quiet=True) as progress:
        _, error = room.capture(compose([*ASKED, f"hydra.run.dir={tmp_path / 'run'}"]), ["llm-perf"], progress)
    assert began == ["ncu"]
    assert isinstance(error, kind)


def test_an_interruption_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = []
    monkeypatch.setattr(room, "run_nsys", failing(Interrupted("Interrupted.", "")))
    monkeypatch.setattr(room, "run_ncu", lambda *_: began.append("ncu"))
    with progress_for(quiet=True) as progress:
        _, error = room.capture(compose([*ASKED, f"hydra.run.dir={tmp_path / 'run'}"]), ["llm-perf"], progress)
    assert began == []
    assert isinstance(error, Interrupted)
