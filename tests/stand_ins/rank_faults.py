"""A runtime like PyTorch whose ranks misbehave on request: RANK_FAULT=WHAT:RANK[:MILLISECONDS].

kill_early, hang_early    before the rank has met the others
hang_load                 before it builds the model
hang_between, hang_step   before its third request, in the second decode step
kill_step                 the same, by SIGKILL
tokens                    it reports other tokens
late                      it sleeps before every decode step
"""

import os
import signal
import time
from typing import Any

from llm_perf_opt.config.runtimes import Runtime

RUNTIME = Runtime(
    "rank_faults",
    "rank_faults:open_runner",
    engine=False,
    steppable=True,
    packages=("torch",),
    marks_stages=lambda _: True,
    ranks=True,
)
_WHAT, _WHO, _MS = (*os.environ.get("RANK_FAULT", "::").split(":"), "")[:3]
MINE = _WHO != "" and os.environ.get("RANK") == _WHO
_FOREVER_S = 3600


def fault(*names: str) -> bool:
    return MINE and _WHAT in names


def kill_or_hang() -> None:
    if _WHAT.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_FOREVER_S)


if fault("kill_early", "hang_early"):
    kill_or_hang()


def open_runner(request: Any) -> Any:
    from llm_perf_opt.runners.pytorch_runner import open_pytorch

    if fault("hang_load"):
        kill_or_hang()
    runner: Any = open_pytorch(request)
    calls = {"begin": 0, "step": 0}
    begin, step, to_lists = runner.begin, runner.decode_step, runner.to_lists

    def faulty_begin() -> None:
        calls["begin"] += 1
        if fault("hang_between") and calls["begin"] == 3:
            kill_or_hang()
        begin()

    def faulty_step(token: Any) -> Any:
        calls["step"] += 1
        if fault("hang_step", "kill_step") and calls["step"] == 2:
            kill_or_hang()
        if fault("late"):
            time.sleep(int(_MS) / 1000)
        return step(token)

    def faulty_lists(tokens: Any) -> list[list[int]]:
        found: list[list[int]] = to_lists(tokens)
        return [[*row[:-1], row[-1] + 1] for row in found] if fault("tokens") else found

    runner.begin, runner.decode_step, runner.to_lists = faulty_begin, faulty_step, faulty_lists
    return runner
