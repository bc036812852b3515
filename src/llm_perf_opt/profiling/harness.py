"""The helpers that the profiling guides use in a program of one's own. Each is a thin door to the code behind `llm-perf run`.

from llm_perf_opt.profiling.harness import NVMLSampler, nvtx_range, prof_to_csv, run_torch_profiler

def one_step(_):
    with nvtx_range("prefill"): ...
    with nvtx_range("decode"): ...

prof = run_torch_profiler(one_step, steps=2, warmup=1, out_dir="tb")    # writes tb/trace.json.gz
prof_to_csv(prof, "ops.csv")
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.core.processes import module_argv
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import write_whole
from llm_perf_opt.core.stages import DOMAIN
from llm_perf_opt.profiling.vendor.launch import Companion, build_work_argv
from llm_perf_opt.profiling.vendor.ncu import build_ncu_cmd
from llm_perf_opt.profiling.vendor.nsys import build_nsys_cmd
from llm_perf_opt.report.csv import operators_csv, telemetry_csv
from llm_perf_opt.runners.measure import annotations, nvml, torch_profiler
from llm_perf_opt.runners.measure.gpu import gpu_count
from llm_perf_opt.traces.pass_records import read_telemetry

__all__ = [
    "NVMLSampler",
    "build_ncu_cmd",
    "build_nsys_cmd",
    "build_work_argv",
    "nvtx_range",
    "prof_to_csv",
    "run_torch_profiler",
]


def nvtx_range(name: str, domain: str = DOMAIN) -> AbstractContextManager[None]:
    """Return a context that is an NVTX range, in the domain of llm-perf's stages, and a label of torch.profiler."""
    return annotations.marked(name) if domain == DOMAIN else annotations.nvtx_range(name, domain)


def run_torch_profiler(step: Callable[[int], Any], steps: int = 1, warmup: int = 1, out_dir: str | Path = "tb") -> Any:
    """Profile `steps` calls of `step(number)` after `warmup` others; write the Chrome trace to `out_dir`, return the profiler."""
    return torch_profiler.profile_steps(step, steps, warmup, Path(out_dir) / "trace.json.gz")


def prof_to_csv(prof: Any, path: str | Path) -> None:
    """Write the operators of a torch.profiler as CSV, as `ops.csv` of a run."""
    out = Path(path)
    write_whole(out.parent, out, operators_csv(tuple(torch_profiler.operators_of(prof))).encode())


def _unavailable(gpus: Maybe[int], index: int) -> str:
    """Return why the GPU with this index cannot be sampled; empty if it can."""
    if isinstance(gpus, Missing):
        return gpus.why
    if not gpus:
        return "there is no NVIDIA GPU"
    return "" if 0 <= index < gpus else f"there is no GPU {index}: the last one is GPU {gpus - 1}"


class NVMLSampler:
    """Samples the GPU and the host in a process of its own from `start` to `stop`, then writes a CSV as `nvml.csv` of a run.

    Without an NVIDIA GPU only the host is sampled; `unavailable` then says why.
    """

    def __init__(self, device_index: int = 0, interval_s: float = 0.1, out_csv: str | Path = "nvml.csv") -> None:
        self._index, self._interval_s, self._out = device_index, interval_s, Path(out_csv)
        self._sampler: Companion | None = None
        self._open = ExitStack()
        self.unavailable = ""
        """Why there are no samples of a GPU; empty if there are."""

    def start(self) -> None:
        """Start sampling. The current process is the one whose CPU time and memory are recorded."""
        self.unavailable = _unavailable(gpu_count(), self._index)
        with ExitStack() as opened:  # removes the folder if the sampler does not start
            self._folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="llm-perf-")))
            argv = module_argv(nvml.__name__, "--out", str(self._folder / "samples.jsonl"))
            argv += ["--interval", str(self._interval_s), "--gpu", "none" if self.unavailable else str(self._index)]
            try:
                self._sampler = Companion(argv, self._folder / "log.txt", nvml.READY)
            except CaptureError as error:
                raise CaptureError(error.fact, self._log()) from error
            self._open = opened.pop_all()
        self._sampler.tell(str(os.getpid()))

    def stop(self) -> None:
        """Stop sampling and write the CSV."""
        if self._sampler is None:
            return
        finished, self._sampler = self._sampler.stop(), None
        with self._open:
            if finished.exit_code:
                raise CaptureError(f"The sampler ended with exit code {finished.exit_code}: {self._log()}")
            write_whole(self._out.parent, self._out, telemetry_csv(read_telemetry(self._folder / "samples.jsonl")).encode())

    def _log(self) -> str:
        """Return the last words of the sampler."""
        return (self._folder / "log.txt").read_text(errors="replace").strip()[-300:]

    def join(self) -> None:
        """Do nothing: `stop` has waited for the sampler."""

    def __enter__(self) -> "NVMLSampler":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
