"""What ran on what: the model, the machine and the software of a run, as plain text."""

from collections.abc import Mapping
from typing import Any

from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.report.text import count, gibibytes


def what_ran(timings: CleanTimings) -> str:
    """Return model, device and workload in a sentence."""
    model, work = timings.model, timings.workload
    lengths = sorted(set(work.prompt_tokens))
    prompt = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return (
        f"{model.name} ({count(model.parameters)} parameters, {model.dtype}) on {model.device_name}: "
        f"batch {work.batch_size}, {prompt} prompt tokens, {work.new_tokens} new tokens, "
        f"{model.cache} cache, compile {model.compile}, attention {model.attention}{_ran_by(timings)}."
    )


def environment_rows(env: Mapping[str, Any], timings: Maybe[CleanTimings]) -> list[tuple[str, str]]:
    """Return names and values of the machine and the software."""
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
        rows += _runtime_rows(timings)
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


def _ran_by(timings: CleanTimings) -> str:
    """`, run by NAME VERSION`; nothing for plain PyTorch."""
    runtime = timings.runtime
    return "" if runtime is None or runtime.type == PYTORCH else f", run by {runtime.type} {runtime.version}"


def _runtime_rows(timings: CleanTimings) -> list[tuple[str, str]]:
    """The runtime, how its stages were separated, and every argument it was given."""
    runtime = timings.runtime
    if runtime is None or runtime.type == PYTORCH:
        return []
    apart = f"not separated: {runtime.inseparable}" if runtime.inseparable else runtime.method
    given = {"Engine arguments": runtime.engine, "Engine's variables": runtime.variables}
    return [
        ("Runtime", f"{runtime.type} {runtime.version}"),
        ("Prefill and decode", apart),
        *[(name, ", ".join(f"{key}={value}" for key, value in held.items())) for name, held in given.items() if held],
    ]
