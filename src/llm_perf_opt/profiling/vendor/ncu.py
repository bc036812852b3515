"""Nsight Compute: the command that reads counters of the decode step's kernels."""

from collections.abc import Sequence
from pathlib import Path

from llm_perf_opt.stages import Stage, ncu_range

REPORT_ENDING = ".ncu-rep"


def build_ncu_cmd(
    ncu: Path, out_base: Path, work_argv: Sequence[str], *, launches: int, stage: Stage = Stage.DECODE_STEP
) -> list[str]:
    """`ncu` around `work_argv`, on at most `launches` kernels of one stage; clocks and caches are left as the run has them."""
    return [
        str(ncu), "--target-processes", "all", "--nvtx", "--nvtx-include", ncu_range(stage), "--set", "basic",
        "--launch-count", str(launches), "--clock-control", "none", "--cache-control", "none",
        "-o", str(out_base), *work_argv,
    ]  # fmt: skip
