"""A capture as it is shown: it moves while the child is silent, and costs little."""

import io
import re
from typing import Any

import pytest

from llm_perf_opt.cli.progress import BarProgress, PlainProgress
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.profiling.passes import TICK


class Clock:
    """Time as the test tells it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def repeats(done: int) -> dict[str, Any]:
    return {"event": "progress", "phase": "repeats", "done": done, "at_most": 60, "estimate_ns": 50_000_000}


class Screen(io.StringIO):
    """A terminal that remembers what was drawn."""

    def drawn(self) -> list[str]:
        """What was written since it was last asked, one entry for each time."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return [part for part in re.split(r"\x1b\[\?25[lh]|\r", text) if part.strip()]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def shown(clock: Clock) -> tuple[BarProgress, Screen]:
    screen = Screen()
    return BarProgress(screen, clock), screen


def test_the_bar_moves_every_second_while_the_child_is_silent() -> None:
    clock = Clock()
    progress, screen = shown(clock)
    with progress:
        progress.pass_started("clean", "unprofiled reference")
        progress.pass_message("clean", {"event": "phase", "text": "loading"})
        for second in range(1, 21):
            clock.now += 1.0
            screen.drawn()
            progress.pass_message("clean", TICK)
            assert f"0:00:{second:02d}" in "".join(screen.drawn())


def test_it_is_drawn_at_most_once_a_second_however_much_the_child_says() -> None:
    clock = Clock()
    progress, screen = shown(clock)
    drawings = 0
    with progress:
        progress.pass_started("clean", "unprofiled reference")
        screen.drawn()
        for done in range(1, 17):
            clock.now += 0.125
            progress.pass_message("clean", repeats(done))
            drawings += bool(screen.drawn())
        assert drawings == 2
        clock.now += 1.0
        progress.pass_message("clean", TICK)
        assert "16 of at most 60" in "".join(screen.drawn()), "what came between is not lost"
        progress.pass_ended(PassRecord("clean", "complete"))
        assert "complete" in "".join(screen.drawn()), "an end is shown at once"


def test_without_a_terminal_a_silent_child_is_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = PlainProgress(clock)
    progress.pass_started("clean", "unprofiled reference")
    progress.pass_message("clean", {"event": "phase", "text": "loading"})
    capsys.readouterr()
    for _ in range(60):
        clock.now += 1.0
        progress.pass_message("clean", TICK)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("clean: loading (") for line in lines)


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")


def test_a_terminal_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Gone())
    for progress in (PlainProgress(), BarProgress(Gone())):
        with progress:
            progress.pass_started("clean", "unprofiled reference")
            progress.pass_message("clean", repeats(1))
            progress.pass_ended(PassRecord("clean", "complete", seconds=1.0))
