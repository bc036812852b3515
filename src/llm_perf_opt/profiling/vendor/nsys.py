"""Nsight Systems: the command that records a timeline."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.profiling.vendor.gates import Gate, check_gate, on_stage
from llm_perf_opt.profiling.vendor.probe import NsysProbe

REPORT_ENDING = ".nsys-rep"
STREAM_ENDING = ".qdstrm"
"""What nsys leaves when it could not make a report of it."""
DEFAULT_TRACE = ("cuda", "nvtx", "osrt")

_GPU_METRICS_FLAGS = ("--gpu-metrics-devices", "--gpu-metrics-device")
"""The newer spelling first."""


@dataclass(frozen=True)
class NsysRequest:
    """What nsys records, and when."""

    probe: NsysProbe | None = None
    """What this nsys can do. Without it, flags that not every version has are left out."""
    gate: Gate | None = None
    """None: the measured iteration."""
    trace: Sequence[str] = DEFAULT_TRACE
    gpu_metrics: bool = False
    follow_forks: bool = True
    app_environment: Mapping[str, str] | None = None
    """Variables of the program alone."""


def build_nsys_cmd(nsys: Path, out_base: Path, work_argv: Sequence[str], request: NsysRequest | None = None) -> list[str]:
    """Return the command of `nsys profile` around `work_argv`. It writes `out_base` + REPORT_ENDING.

    The program runs on after its range has ended, and gets back the TMPDIR that its tool is deprived of.
    """
    request = request or NsysRequest()
    gate, probe = request.gate or on_stage(), request.probe
    return [
        str(nsys), "profile", f"--trace={','.join(_checked_trace(request.trace, gate, probe))}",
        "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node",
        *_gate_flags(gate), *_varying_flags(probe, request.gpu_metrics, request.follow_forks),
        _environment_flag({"TMPDIR": tempfile.gettempdir(), **_nvtx_environment(gate), **(request.app_environment or {})}),
        "--force-overwrite=true", f"--output={_literal(out_base)}", *work_argv,
    ]  # fmt: skip


def _gate_flags(gate: Gate) -> list[str]:
    if gate.kind == "none":
        return []
    if gate.kind == "cudaProfilerApi":
        return ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    check_gate("nsys", gate.range, ours=gate.ours)
    return ["--capture-range=nvtx", f"--nvtx-capture={gate.range}", "--capture-range-end=stop"]


def _nvtx_environment(gate: Gate) -> dict[str, str]:
    """Other programs than ours may push names that are not registered, as torch.cuda.nvtx does; nsys overlooks those."""
    return {} if gate.kind != "nvtx" or gate.ours else {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}


def _environment_flag(variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        if "," in value:
            raise ConfigError(
                f"nsys cannot hand {name}={value} to the program: it takes the comma for the end of the value.",
                f"Set {name} to a value without a comma.",
            )
    return "--env-var=" + ",".join(f"{name}={value}" for name, value in variables.items())


def _checked_trace(trace: Sequence[str], gate: Gate, probe: NsysProbe | None) -> list[str]:
    """What is traced, with what the gate itself needs."""
    wanted = list(dict.fromkeys(trace))
    needed = {"nvtx": "nvtx", "cudaProfilerApi": "cuda", "none": None}[gate.kind]
    if needed and needed not in wanted:
        wanted.append(needed)
    if not wanted:
        raise ConfigError("nsys was given nothing to trace.", f"The usual is {','.join(DEFAULT_TRACE)}.")
    for name in wanted:
        if probe and probe.trace_modules and name not in probe.trace_modules:
            raise ConfigError(
                f"nsys {probe.version} cannot trace {name!r}.{nearest(name, probe.trace_modules)}",
                f"It traces: {', '.join(probe.trace_modules)}. NVLink is read by GPU metrics sampling or by ncu.",
            )
    return wanted


def _varying_flags(probe: NsysProbe | None, gpu_metrics: bool, follow_forks: bool) -> list[str]:
    flags = []
    if follow_forks and probe and "--trace-fork-before-exec" in probe.flags:
        flags.append("--trace-fork-before-exec=true")
    if gpu_metrics:
        spelling = gpu_metrics_flag(probe)
        if spelling is None:
            raise ConfigError(
                f"nsys {probe.version if probe else ''} has no sampling of GPU metrics.",
                "Use a newer Nsight Systems, or leave GPU metrics out.",
            )
        flags.append(f"{spelling}=all")
    return flags


def gpu_metrics_flag(probe: NsysProbe | None) -> str | None:
    """How this nsys spells the sampling of GPU metrics; None where it has none."""
    if probe is None:
        return _GPU_METRICS_FLAGS[0]
    return next((flag for flag in _GPU_METRICS_FLAGS if flag in probe.flags), None)


def _literal(path: Path) -> str:
    """nsys replaces %h, %n, %p and %q{…} in an output name; a folder may be called so."""
    return str(path).replace("%", "%%")
