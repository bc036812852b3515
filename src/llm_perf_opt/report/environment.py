"""The machine and the software of a run, in rows of plain text."""

from collections.abc import Mapping
from typing import Any

from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.report.runtime import runtime_rows
from llm_perf_opt.report.text import gibibytes


def environment_rows(env: Mapping[str, Any], timings: Maybe[CleanTimings]) -> list[tuple[str, str]]:
    """What it is, and its value as text that is not escaped for anything."""
    cpu, gpu = env.get("cpu", {}), env.get("gpu")
    cuda = f" (CUDA {env['gpu_driver_cuda']})" if "gpu_driver_cuda" in env else ""
    total = env.get("memory", {}).get("total_bytes")
    rows = [
        ("Host", f"{env.get('host')}, {env.get('system')}, {env.get('machine')}"),
        ("CPU", f"{cpu.get('name')}, {cpu.get('usable')} usable of {cpu.get('logical')} logical processors"),
        ("Memory", gibibytes(total) if isinstance(total, int) else "n/a: not recorded"),
        ("GPU", _gpu_words(gpu)),
        ("Driver", f"{env.get('gpu_driver')}{cuda}"),
        ("Python", str(env.get("python"))),
        ("Packages", ", ".join(f"{name} {version}" for name, version in env.get("packages", {}).items())),
        ("llm-perf-opt", _tool_words(env.get("tool", {}))),
    ]
    if not isinstance(timings, Missing):
        framework = ", ".join(f"{name} {version}" for name, version in timings.framework.items())
        rows.append(("Measured process", f"{framework}, {timings.threads} threads"))
        rows += runtime_rows(timings)
    return rows


def _gpu_words(gpu: Any) -> str:
    if not isinstance(gpu, Mapping):
        return str(gpu)
    memory = gpu.get("memory_bytes")
    size = gibibytes(memory) if isinstance(memory, int) else str(memory)
    return (
        f"{gpu.get('name')}, {size}, SM clock {gpu.get('sm_clock_mhz')} of {gpu.get('sm_clock_max_mhz')} MHz, "
        f"power limit {gpu.get('power_limit_w')} W"
    )


def _tool_words(tool: Mapping[str, Any]) -> str:
    commit = f", commit {str(tool['commit'])[:12]}{' with changes' if tool.get('dirty') else ''}" if "commit" in tool else ""
    return f"{tool.get('version')}{commit}"
