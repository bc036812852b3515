"""Nsight Systems: the command that captures the one measured iteration."""

from collections.abc import Sequence
from pathlib import Path

from llm_perf_opt.stages import Stage, nsys_range

REPORT_ENDING = ".nsys-rep"


def build_nsys_cmd(nsys: Path, out_base: Path, work_argv: Sequence[str], *, trace: str = "cuda,nvtx,osrt") -> list[str]:
    """`nsys profile` around `work_argv`, gated on the range `profile`; the program runs on to its own end afterwards."""
    return [
        str(nsys), "profile", f"--trace={trace}", "--sample=none", "--cpuctxsw=none",
        "--capture-range=nvtx", f"--nvtx-capture={nsys_range(Stage.PROFILE)}", "--capture-range-end=stop",
        "--cuda-graph-trace=node", "-o", str(out_base), *work_argv,
    ]  # fmt: skip
