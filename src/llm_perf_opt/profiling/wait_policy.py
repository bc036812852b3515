"""Decide how the OpenMP threads of a run wait for work.

By default they spin for a while after each parallel region (libgomp: 300,000 rounds, libomp: 200 ms). If other processes use
the processors too, a spinning thread keeps the thread that it waits for from running, and a decode step takes many times
longer. Sleeping threads cost a few microseconds per region instead.
"""

import os
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llm_perf_opt.config.schema import HardwareConfig
from llm_perf_opt.core.host import parse_cpu_list, usable_cpus
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.runners.cpus import default_threads
from llm_perf_opt.runners.measure.host_load import OtherProcesses, wait_policy

SAMPLE_S = 0.25
BUSY_PROCESSORS = 0.5
"""If other processes use more processors than this, threads that spin compete with them."""
VARIABLES: dict[str, dict[str, str]] = {
    "default": {},
    "active": {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "30000000000", "KMP_BLOCKTIME": "infinite"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"},
}
"""Policy → variables of libgomp (GCC) and libomp (LLVM, Intel), read when the library is loaded. The spin count of `active` is
libgomp's own (GCC's manual, GOMP_SPINCOUNT)."""


@dataclass(frozen=True)
class WaitDecision:
    """The wait policy of a run, decided once for all passes."""

    policy: Literal["default", "active", "passive"]
    """default: that of the OpenMP library."""
    why: str
    others: Maybe[float]
    """Mean number of processors that other processes used when the run started."""
    seconds: float
    """Seconds that `others` covers."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the measured processes."""
        return VARIABLES[self.policy]

    def to_env(self) -> dict[str, Any]:
        """Return the decision as recorded in env.json."""
        others = str(self.others) if isinstance(self.others, Missing) else round(self.others, 2)
        return {**asdict(self), "others": others}


def decide(hardware: HardwareConfig, *, gpu: bool, ranks: int = 1) -> WaitDecision:
    """Return the wait policy: as set, or passive if other processes use the processors that the threads need."""
    if hardware.wait_policy != "auto":
        return WaitDecision(hardware.wait_policy, "set by hardware.wait_policy", Missing("not sampled"), 0.0)
    if gpu:
        return WaitDecision("default", "the model runs on a GPU", Missing("not sampled"), 0.0)
    given = wait_policy(os.environ)
    if given != "default":
        return WaitDecision(given, "set by the environment", Missing("not sampled"), 0.0)
    pinned = parse_cpu_list(hardware.cpus) if hardware.cpus else None
    sample = OtherProcesses(pinned)
    time.sleep(SAMPLE_S)
    others, seconds = sample.cpus(), round(sample.seconds, 3)
    usable = len(pinned) if pinned else usable_cpus()
    threads = (hardware.threads or max(1, usable // ranks)) * ranks if ranks > 1 else None
    threads = threads or default_threads(hardware.cpus, hardware.threads) or usable
    if others > BUSY_PROCESSORS and threads > 1 and threads + others > usable:
        why = f"other processes used {others:.2f} of {usable} processors, and the run uses {threads} threads"
        return WaitDecision("passive", why, others, seconds)
    return WaitDecision("default", "the processors were free", others, seconds)
