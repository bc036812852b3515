"""A failed pass does not affect the others."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llm_perf_opt.cli.progress import progress_for
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.passes import known_passes
from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.profiling import capture as room
from llm_perf_opt.profiling.passes import closed

ASKED = ["profiling=stage2", "profiling.clean=false", "profiling.torch.enable=false"]


def failing(error: LlmPerfError) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def launched_by(monkeypatch: pytest.MonkeyPatch, launches: dict[str, Callable[..., None]]) -> None:
    """Put other launches in the place of the passes' own."""
    passes = tuple(replace(one, launch=launches.get(one.name, one.launch)) for one in known_passes())
    monkeypatch.setattr(room, "known_passes", lambda: passes)


@pytest.mark.parametrize("kind", [CaptureError, ParseError, ResourceError])
def test_a_timeline_that_cannot_be_had_does_not_cost_the_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[LlmPerfError]
) -> None:
    began = []
    nsys = failing(kind("It is of an unknown layout.", ""))
    launched_by(monkeypatch, {"nsys": nsys, "ncu_selftest": lambda _: began.append("ncu")})
    with progress_for(quiet=True) as progress:
        _, error = room.capture(compose([*ASKED, f"hydra.run.dir={tmp_path / 'run'}"]), ["llm-perf"], progress)
    assert began == ["ncu"]
    assert isinstance(error, kind)


def test_an_interruption_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = []
    nsys = failing(Interrupted("Interrupted.", ""))
    launched_by(monkeypatch, {"nsys": nsys, "ncu_selftest": lambda _: began.append("ncu")})
    with progress_for(quiet=True) as progress:
        _, error = room.capture(compose([*ASKED, f"hydra.run.dir={tmp_path / 'run'}"]), ["llm-perf"], progress)
    assert began == []
    assert isinstance(error, Interrupted)


def test_an_interruption_while_a_run_is_closed_waits_until_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(passes: tuple[PassRecord, ...]) -> tuple[PassRecord, ...]:
        signal.raise_signal(signal.SIGINT)
        return closed(passes)

    monkeypatch.setattr(room, "closed", pressed)
    launched_by(monkeypatch, {"nsys": lambda _: None, "ncu_selftest": lambda _: None})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with progress_for(quiet=True) as progress:
            folder, error = room.capture(compose([*ASKED, f"hydra.run.dir={tmp_path / 'run'}"]), ["llm-perf"], progress)
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(error, Interrupted)
    assert folder.manifest().why != "The run has not ended."
