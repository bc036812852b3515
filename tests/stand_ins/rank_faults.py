"""A runtime like PyTorch whose ranks misbehave on request: RANK_FAULT=WHAT:RANK[:MILLISECONDS].

kill_early   before the rank has met the others
hang_step    in the second decode step
tokens       it reports other tokens
late         it sleeps before every decode step
"""

import os
import signal
import time
from itertools import count
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


def fault(name: str) -> bool:
    return MINE and name == _WHAT


if fault("kill_early"):
    os.kill(os.getpid(), signal.SIGKILL)


def open_runner(request: Any) -> Any:
    from llm_perf_opt.runners.pytorch_runner import open_pytorch

    runner: Any = open_pytorch(request)
    step, to_lists = runner.decode_step, runner.to_lists
    steps = count(1)

    def faulty_step(token: Any) -> Any:
        if next(steps) == 2 and fault("hang_step"):
            time.sleep(_FOREVER_S)
        if fault("late"):
            time.sleep(int(_MS) / 1000)
        return step(token)

    def faulty_lists(tokens: Any) -> list[list[int]]:
        found: list[list[int]] = to_lists(tokens)
        return [[*row[:-1], row[-1] + 1] for row in found] if fault("tokens") else found

    runner.decode_step, runner.to_lists = faulty_step, faulty_lists
    return runner
