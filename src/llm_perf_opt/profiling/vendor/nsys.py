"""Nsight Systems: the command that records a timeline."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llm_perf_opt.config.schema import NsysSample
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.profiling.vendor.gates import Gate, check_gate, on_stage
from llm_perf_opt.profiling.vendor.guide_calls import nsys_options, takes_guide_calls
from llm_perf_opt.profiling.vendor.probe import NsysProbe

REPORT_ENDING = ".nsys-rep"
STREAM_ENDING = ".qdstrm"
"""What nsys leaves if it cannot create the report."""
DEFAULT_TRACE = ("cuda", "nvtx", "osrt")

_GPU_METRICS_FLAGS = ("--gpu-metrics-devices", "--gpu-metrics-device")
"""The newer name first."""


@dataclass(frozen=True)
class NsysRequest:
    """What nsys records, and when."""

    probe: NsysProbe | None = None
    """What this nsys supports. Without it, flags that not every version has are left out."""
    gate: Gate | None = None
    """None: the measured iteration."""
    trace: Sequence[str] = DEFAULT_TRACE
    gpu_metrics: bool = False
    follow_forks: bool = True
    app_environment: Mapping[str, str] | None = None
    """Environment variables of the program only."""
    sample: NsysSample = "none"
    """The processes whose call stacks and context switches are sampled on the CPU."""
    args: Sequence[str] = ()
    """More options, as `own_options` returns them."""


@takes_guide_calls("nsys", nsys_options)
def build_nsys_cmd(
    nsys: Path, out_base: Path, work_argv: Sequence[str], request: NsysRequest | None = None, **options: Any
) -> list[str]:
    """Return the command of `nsys profile` around `work_argv`. It writes `out_base` + REPORT_ENDING.

    `options` are fields of the request. The program continues after its range has ended, and gets its own TMPDIR, which differs
    from the tool's. Calls in the form of the profiling guides are accepted too: see `guide_calls`.
    """
    request = replace(request or NsysRequest(), **options)
    gate, probe = request.gate or on_stage(), request.probe
    return [
        str(nsys), "profile", f"--trace={','.join(_checked_trace(request.trace, gate, probe))}",
        f"--sample={request.sample}", f"--cpuctxsw={request.sample}", "--cuda-graph-trace=node",
        *_gate_flags(gate), *_varying_flags(probe, request.gpu_metrics, request.follow_forks), *request.args,
        _environment_flag({"TMPDIR": tempfile.gettempdir(), **_nvtx_environment(gate), **(request.app_environment or {})}),
        "--force-overwrite=true", f"--output={_literal(out_base)}", *work_argv,
    ]  # fmt: skip


def _gate_flags(gate: Gate) -> list[str]:
    if gate.kind == "none":
        return []
    if gate.kind == "cudaProfilerApi":
        return ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    check_gate("nsys", gate.range, ours=gate.ours, substages=[gate.substage] if gate.substage else [])
    return ["--capture-range=nvtx", f"--nvtx-capture={gate.range}", "--capture-range-end=stop"]


def _nvtx_environment(gate: Gate) -> dict[str, str]:
    """Let nsys see names that are not registered, as a user's program may push them with torch.cuda.nvtx."""
    return {} if gate.kind != "nvtx" or gate.ours else {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}


def _environment_flag(variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        if "," in value:
            raise ConfigError(
                f"nsys cannot pass {name}={value} to the program: a comma ends the value.",
                f"Set {name} to a value without a comma.",
            )
    return "--env-var=" + ",".join(f"{name}={value}" for name, value in variables.items())


def _checked_trace(trace: Sequence[str], gate: Gate, probe: NsysProbe | None) -> list[str]:
    """Return what to trace, including what the gate needs."""
    wanted = list(dict.fromkeys(trace))
    needed = {"nvtx": "nvtx", "cudaProfilerApi": "cuda", "none": None}[gate.kind]
    if needed and needed not in wanted:
        wanted.append(needed)
    if not wanted:
        raise ConfigError("nsys has nothing to trace.", f"The default is {','.join(DEFAULT_TRACE)}.")
    for name in wanted:
        if probe and probe.trace_modules and name not in probe.trace_modules:
            raise ConfigError(
                f"nsys {probe.version} cannot trace {name!r}.{nearest(name, probe.trace_modules)}",
                f"It traces: {', '.join(probe.trace_modules)}. For NVLink use GPU metrics sampling or ncu.",
            )
    return wanted


def _varying_flags(probe: NsysProbe | None, gpu_metrics: bool, follow_forks: bool) -> list[str]:
    flags = []
    if follow_forks and probe and "--trace-fork-before-exec" in probe.flags:
        flags.append("--trace-fork-before-exec=true")
    if gpu_metrics:
        flag = gpu_metrics_flag(probe)
        if flag is None:
            raise ConfigError(
                f"nsys {probe.version if probe else ''} cannot sample GPU metrics.",
                "Use a newer Nsight Systems, or leave GPU metrics out.",
            )
        flags.append(f"{flag}=all")
    return flags


def gpu_metrics_flag(probe: NsysProbe | None) -> str | None:
    """Return this nsys's option for GPU metrics sampling; None if it has none."""
    if probe is None:
        return _GPU_METRICS_FLAGS[0]
    return next((flag for flag in _GPU_METRICS_FLAGS if flag in probe.flags), None)


def _literal(path: Path) -> str:
    """Escape the path: nsys replaces %h, %n, %p and %q{…} in an output name."""
    return str(path).replace("%", "%%")
