"""Ranks are watched: one that dies, fails or hangs ends all, and the error names it. Real processes that compute nothing."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from builders import default_config, with_value
from llm_perf_opt.core.errors import CaptureError, LlmPerfError
from llm_perf_opt.core.processes import Process, start_member
from llm_perf_opt.runners import rank_supervisor
from llm_perf_opt.runners.rank_supervisor import supervise

STUBS = Path(__file__).parents[1] / "stand_ins"


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_supervisor, "_MODULE", "rank_stub")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STUBS), os.environ.get("PYTHONPATH", "")]))


def watched(monkeypatch: pytest.MonkeyPatch, out: Path, *words: Sequence[str], limit_s: float = 600.0) -> int:
    """Run one stub per list of words; afterwards none of them runs."""
    monkeypatch.setenv("STUB", json.dumps(words))
    config = with_value(with_value(default_config(), "runtime.tensor_parallel", len(words)), "runtime.rank_timeout_s", limit_s)
    try:
        return supervise(config, [], out)
    finally:
        ours = [process for process in psutil.Process().children() if "rank_stub" in " ".join(process.cmdline())]
        assert ours == []


def test_a_credential_in_the_environment_is_not_in_the_logs_of_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "zq7oHwLMe9")
    assert watched(monkeypatch, tmp_path, ["loading", "print:I am zq7oHwLMe9"]) == 0
    assert (tmp_path / "rank0.log").read_text() == "I am ***\n"
    assert "zq7oHwLMe9" not in capsys.readouterr().out


class Clock:
    """Stands still until so many ranks have ended and these have written "here" to their logs, however long that takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path, *, ended: int = 0, here: Sequence[int] = ()) -> None:
        self._logs, self._ended = [out / f"rank{rank}.log" for rank in here], ended
        self._ranks: list[Process] = []
        self._begun: float | None = None
        monkeypatch.setattr(rank_supervisor, "time", self)
        monkeypatch.setattr(rank_supervisor, "start_member", self._start)
        monkeypatch.setattr(rank_supervisor, "_SETTLE_S", 0.2)

    def _start(self, argv: Sequence[str], environment: Mapping[str, str]) -> Process:
        self._ranks.append(start_member(argv, environment))
        return self._ranks[-1]

    def monotonic(self) -> float:
        ended = sum(rank.returncode is not None for rank in self._ranks) >= self._ended
        if self._begun is None and ended and all("here" in log.read_text() for log in self._logs):
            self._begun = time.monotonic()
        return 100.0 if self._begun is None else 100.0 + time.monotonic() - self._begun


def failure(monkeypatch: pytest.MonkeyPatch, out: Path, *words: Sequence[str], limit_s: float = 600.0) -> LlmPerfError:
    with pytest.raises(CaptureError) as caught:
        watched(monkeypatch, out, *words, limit_s=limit_s)
    return caught.value


def test_ranks_that_end_well_end_the_pass_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watched(monkeypatch, tmp_path, ["loading", "print:from zero"], ["loading", "print:from one"]) == 0
    assert (tmp_path / "rank0.log").read_text() == "from zero\n"
    assert (tmp_path / "rank1.log").read_text() == "from one\n"
    printed = capsys.readouterr().out
    assert "from zero" in printed
    assert "from one" not in printed
    pids = json.loads(next(line for line in printed.splitlines() if '"workers"' in line).removeprefix("@llm-perf "))["pids"]
    assert len(pids) == 2


def test_an_interruption_of_the_ranks_is_one_of_the_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert watched(monkeypatch, tmp_path, ["exit:130"], ["exit:130"]) == 130


def test_a_killed_rank_is_named_with_its_log_and_the_state_of_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Clock(monkeypatch, tmp_path, ended=2, here=[0])
    killed = ["request 1", "words:its last words", "kill"]
    error = failure(monkeypatch, tmp_path, ["request 1", "print:here", "hang"], killed, ["lost:1"])
    assert "Rank 1 of 3 was killed by SIGKILL (request 1)" in error.fact
    assert "its last words" in error.fact
    assert "rank 0 was running (request 1)" in error.fact
    assert str(tmp_path / "rank1.log") in error.remedy


def test_a_rank_that_fails_takes_precedence_over_those_that_lost_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Clock(monkeypatch, tmp_path, ended=2)
    error = failure(monkeypatch, tmp_path, ["lost:1"], ["error:The disk is full."])
    assert "Rank 1 of 2 failed: The disk is full." in error.fact
    assert "rank 0 ended with exit code 4" in error.fact


def test_an_error_of_every_rank_is_not_about_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Clock(monkeypatch, tmp_path, ended=2)
    error = failure(monkeypatch, tmp_path, ["error:It does not fit."], ["error:It does not fit."])
    assert error.fact == "It does not fit."


def test_a_rank_that_others_gave_up_on_hangs_and_shows_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Clock(monkeypatch, tmp_path, ended=2, here=[2])
    error = failure(monkeypatch, tmp_path, ["request 3", "lost:2"], ["request 3", "lost:2"], ["request 3", "print:here", "hang"])
    assert "Rank 2 of 3 hangs (request 3): rank 0 gave up" in error.fact
    assert "rank_stub.py" in error.fact
    assert "in act" in (tmp_path / "rank2.log").read_text()


def test_a_rank_that_writes_no_stack_shows_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The errors of PyTorch's C++ code have stacks, too; they are older than the request."""
    Clock(monkeypatch, tmp_path, ended=1, here=[1])
    monkeypatch.setattr(rank_supervisor, "_STACK_S", 1.0)
    older = "print:Exception raised (most recent call first):"
    error = failure(monkeypatch, tmp_path, ["lost:1"], ["deaf", older, "print:frame #0", "print:here", "hang"])
    assert "The end of its log: Exception raised (most recent call first): | frame #0 | here." in error.fact
    assert "stack" not in error.remedy


def test_a_rank_that_falls_behind_for_too_long_hangs_even_if_no_other_complains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Clock(monkeypatch, tmp_path, here=[0, 1])
    ranks = ["loading", "the model is loaded", "print:here", "hang"], ["loading", "print:here", "hang"]
    error = failure(monkeypatch, tmp_path, *ranks, limit_s=1.0)
    assert "Rank 1 of 2 hangs (loading): the others have waited for it for 1 s" in error.fact
    assert "rank 0 was running (the model is loaded)" in error.fact


def test_a_rank_that_does_not_end_when_the_others_have_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Clock(monkeypatch, tmp_path, ended=1, here=[1])
    error = failure(monkeypatch, tmp_path, ["finished"], ["finished", "print:here", "hang"], limit_s=1.0)
    assert "Rank 1 of 2 hangs (finished)" in error.fact
    assert "rank 0 has finished" in error.fact


def test_a_first_rank_that_is_stopped_is_noticed_although_the_others_cannot_give_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Clock(monkeypatch, tmp_path, here=[0, 1])
    ranks = ["request 1", "print:here", "stop"], ["request 1", "print:here", "hang"]
    error = failure(monkeypatch, tmp_path, *ranks, limit_s=1.0)
    assert "Rank 0 of 2 hangs (request 1): its process has been stopped for 1 s." in error.fact
    assert "rank 1 was running (request 1)" in error.fact


def test_ranks_end_with_the_process_that_watches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only with the command: it goes on after a pass whose process was killed, and ranks would load the device."""
    monkeypatch.setenv("LLM_PERF_PARENT_PID", "1")
    environment = rank_supervisor._environment(default_config(), 0)
    assert environment["LLM_PERF_PARENT_PID"] == str(os.getpid())
