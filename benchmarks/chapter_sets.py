"""Collect every chapter's metric set once on this machine's GPU: what was asked for, and what came back.

    python benchmarks/chapter_sets.py [--sets ch07,ch09] [--device-index 0] [--keep DIR]

Runs a small CUDA program under Nsight Compute, Nsight Systems and torch.profiler, once per different request that
the sets make. Prints a Markdown table. Fails if a counter that the chip and the tool know does not come back.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from llm_perf_opt.config.schema import MetricsConfig, TorchPreset
from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.counters.manifest import ResolvedMetrics, resolve
from llm_perf_opt.counters.set_file import shipped_sets
from llm_perf_opt.profiling.python_program import PythonProgram, profiled_argv
from llm_perf_opt.profiling.requested_metrics import ANY_CHIP, counted_metrics, nsys_traces
from llm_perf_opt.profiling.vendor.gates import CUDA_PROFILER_API
from llm_perf_opt.profiling.vendor.launch import Callbacks, program_environment, run_child
from llm_perf_opt.profiling.vendor.logs import log_error
from llm_perf_opt.profiling.vendor.ncu import NcuRequest, build_ncu_cmd
from llm_perf_opt.profiling.vendor.nsys import NsysRequest, build_nsys_cmd
from llm_perf_opt.profiling.vendor.probe import find_tool, probe_nsys, tool_version
from llm_perf_opt.profiling.vendor.tool_pass import ToolLimits, export_nsys, import_ncu_csv, run_tool
from llm_perf_opt.report.markdown import table
from llm_perf_opt.traces.ncu_csv import read_ncu
from llm_perf_opt.traces.nsys_sqlite import read_nsys

LAUNCHES = 8
TIMEOUT_S = 600.0
SILENT = Callbacks(on_message=lambda _: None)
R = TypeVar("R")


def work(device_index: int) -> None:
    """Run matrix products, a reduction through shared memory, a normalization and a copy, between the profiler calls."""
    import torch

    torch.cuda.set_device(device_index)
    left, right = (torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    single = torch.randn(1024, 1024, device="cuda")

    def once() -> None:
        torch.mm(left, right)
        torch.mm(left.half(), right.half())
        torch.mm(single, single)
        torch.softmax(single, -1)
        torch.nn.functional.layer_norm(single, (1024,))
        torch.mul(single, 2.0)

    with torch.inference_mode():
        once()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        once()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


@dataclass(frozen=True)
class Counted:
    """What Nsight Compute returned for one set."""

    first: str
    """The first set with this request."""
    asked: tuple[str, ...]
    came: tuple[str, ...]
    sections: tuple[str, ...]
    reported: int
    """All counters in the report, those of the sections included."""
    kernels: int
    seconds: float

    @property
    def missing(self) -> tuple[str, ...]:
        """The counters that did not come back."""
        return tuple(name for name in self.asked if name not in self.came)


@dataclass
class Collector:
    """Runs the tools, each request once."""

    folder: Path
    device_index: int
    _kept: dict[tuple[object, ...], str] = field(default_factory=dict)
    _counted: dict[tuple[tuple[str, ...], tuple[str, ...]], Counted] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        """The program."""
        return [sys.executable, str(Path(__file__).resolve()), "--work", "--device-index", str(self.device_index)]

    @cached_property
    def ncu(self) -> Path:
        """Nsight Compute."""
        path = find_tool("ncu")
        if path is None:
            raise SystemExit("there is no ncu here")
        return path

    def count(self, name: str, metrics: ResolvedMetrics) -> Counted:
        """Return what the set of this name returns; sets that request the same counters are counted once."""
        key = (metrics.names, metrics.sections)
        if key not in self._counted:
            self._counted[key] = self._count(name, metrics)
        return self._counted[key]

    def _count(self, name: str, metrics: ResolvedMetrics) -> Counted:
        """Count the kernels of the work with one set."""
        base, log = self.folder / name / "ncu", self.folder / name / "ncu.txt"
        base.parent.mkdir(parents=True, exist_ok=True)
        request = NcuRequest(
            metrics=metrics.names, sections=metrics.sections, gate=CUDA_PROFILER_API, launch_count=LAUNCHES, ours=False
        )
        begun = time.monotonic()
        report = self._run("ncu", build_ncu_cmd(self.ncu, base, self.argv, request), base, log)
        import_ncu_csv(self.ncu, report, "raw", base.with_suffix(".csv"), log=log)
        found = read_ncu(base.with_suffix(".csv"))
        have = {name for kernel in found.kernels for name, value in kernel.counters.items() if not isinstance(value, Missing)}
        came = tuple(name for name in metrics.names if name in have)
        seconds = time.monotonic() - begun
        return Counted(name, metrics.names, came, metrics.sections, len(have), len(found.kernels), seconds)

    def trace(self, name: str) -> str:
        """Record the timeline of the work that a set requests, and return what is in it."""
        path = find_tool("nsys")
        probe = probe_nsys(path) if path else Missing("there is no nsys here")
        if path is None or isinstance(probe, Missing):
            return str(probe)
        traces = nsys_traces(resolve([name], chip=ANY_CHIP), probe, gpu=True)

        def record() -> str:
            base = self.folder / f"nsys{len(self._kept)}"
            log = base.with_suffix(".txt")
            request = NsysRequest(probe=probe, gate=CUDA_PROFILER_API, trace=traces.modules, gpu_metrics=traces.gpu_metrics)
            begun = time.monotonic()
            report = self._run("nsys", build_nsys_cmd(path, base, self.argv, request), base, log)
            export_nsys(path, report, base.with_suffix(".sqlite"), log=log)
            found = read_nsys(base.with_suffix(".sqlite"))
            metrics = len(set(found.samples.metric.tolist())) if len(found.samples) else 0
            sampled = f", {metrics} GPU metrics" if traces.gpu_metrics else ""
            seconds = time.monotonic() - begun
            return f"`{','.join(traces.modules)}`: {len(found.work)} kernels and copies{sampled}, {seconds:.0f} s. {traces.note}"

        return self._once(("nsys", traces.modules, traces.gpu_metrics), record)

    def profile(self, preset: TorchPreset) -> str:
        """Run the work under torch.profiler and return what is in its record."""

        def record() -> str:
            folder = self.folder / f"torch-{preset}"
            folder.mkdir(parents=True)
            program = PythonProgram((sys.executable,), tuple(self.argv[1:]))
            argv = profiled_argv(program, folder, preset)
            done = run_child(
                argv, log=folder / "log.txt", timeout_s=TIMEOUT_S, callbacks=SILENT, environment=program_environment()
            )
            if done.exit_code:
                return f"`{preset}`: failed, see {folder / 'log.txt'}"
            found = json.loads((folder / "program.json").read_text())["operators"]
            counted = sum(1 for row in found.values() if row["flops"])
            return f"`{preset}`: {len(found)} operators, {counted} with FLOPs, {done.seconds:.0f} s"

        return self._once(("torch", preset), record)

    def _once(self, key: tuple[object, ...], record: Callable[[], str]) -> str:
        if key not in self._kept:
            try:
                self._kept[key] = record()
            except LlmPerfError as error:
                self._kept[key] = f"failed: {error.fact}"
        return self._kept[key]

    def _run(self, tool: str, argv: list[str], base: Path, log: Path) -> Path:
        assert tool in ("ncu", "nsys")
        result = run_tool(
            "ncu" if tool == "ncu" else "nsys",
            argv,
            base,
            log=log,
            limits=ToolLimits(timeout_s=TIMEOUT_S, max_trace_gb=2),
            callbacks=SILENT,
            environment=program_environment(),
        )
        error = log_error(result.problems)
        if isinstance(result.report, Missing):
            raise error or LlmPerfError(f"{result.report.why}; see {log}.")
        return result.report


def row(collector: Collector, name: str) -> tuple[list[str], bool]:
    """Return the row of one set, and whether everything that was asked for came back."""
    preset = shipped_sets()[name].torch
    others = [collector.trace(name), collector.profile(preset) if preset else ""]
    try:
        asked = counted_metrics(MetricsConfig((name,), (), ()), collector.device_index, collector.ncu)
        counted = collector.count(name, asked)
    except LlmPerfError as error:
        return [f"`{name}`", "", "", f"failed: {error.fact}", "", *others], False
    sections = f"{', '.join(counted.sections)}: {counted.reported} counters in the report" if counted.sections else ""
    dropped = [f"{gone.name} ({gone.why})" for gone in asked.dropped]
    cells = [
        f"`{name}`",
        str(len(counted.asked)),
        f"{len(counted.came)} in {counted.kernels} kernels",
        "; ".join(filter(None, [", ".join(counted.missing), *dropped, sections])),
        f"{counted.seconds:.0f}" if counted.first == name else f"as `{counted.first}`",
        *others,
    ]
    return cells, not counted.missing and bool(counted.kernels)


def main() -> None:
    """Collect the sets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(name for name in shipped_sets() if name.startswith("ch")))
    parser.add_argument("--device-index", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the reports in this folder")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.work:
        work(wanted.device_index)
        return
    with tempfile.TemporaryDirectory() as temporary:
        collector = Collector((wanted.keep or Path(temporary)).resolve(), wanted.device_index)
        nsys = find_tool("nsys")
        print(f"ncu {tool_version(collector.ncu)}, nsys {tool_version(nsys) if nsys else 'n/a'}\n", flush=True)
        rows = [row(collector, name) for name in wanted.sets.split(",")]
    heads = ["set", "counters asked", "came back", "missing, sections", "seconds", "Nsight Systems", "torch.profiler"]
    print(table(heads, [cells for cells, _ in rows], "lrlllll"))
    sys.exit(0 if all(complete for _, complete in rows) else 1)


if __name__ == "__main__":
    main()
