"""Calls of `build_nsys_cmd` and `build_ncu_cmd` as the profiling guides write them: without the tool, gates as plain text.

    build_nsys_cmd(out / "run", work, trace="cuda,nvtx,osrt", sample="none", capture="nvtx", nvtx_capture="range@LLM")
    build_ncu_cmd(out / "decode", work, nvtx_expr="decode*")

Around llm-perf's own runners, a gate that would record nothing is replaced by the stage that it means. Around another program
it is refused: a tool whose range never occurs records nothing and exits with 0.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from llm_perf_opt.config.choices import packaged_options
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.stages import DOMAIN, STAGE_NAMES, Stage, ncu_range
from llm_perf_opt.counters.catalog import chip_of_device, roles
from llm_perf_opt.profiling.vendor.gates import CUDA_PROFILER_API, WHOLE_PROGRAM, Gate, check_gate, on_range, on_stage
from llm_perf_opt.profiling.vendor.probe import find_tool
from llm_perf_opt.runners.measure.gpu import gpu_name
from llm_perf_opt.runners.vision_families import FAMILIES, default_substages

_OURS = "llm_perf_opt.runners."
_SUBSTAGE = "model.substages."
_MODEL = "model="
_MEANT = {"range": Stage.PROFILE, "decode_all": Stage.DECODE}
"""Ranges of the guides → the stage."""
_OPERATIONS = ("fadd", "fmul", "ffma", "hadd", "hmul", "hfma")
DEFAULT_METRICS = ",".join(
    (
        *(f"smsp__sass_thread_inst_executed_op_{operation}_pred_on.sum" for operation in _OPERATIONS),
        "gpu__time_duration.sum",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    )
)
"""Counters that every chip has. `flop_count_sp` and `flop_count_hp`, which none has any more, are counts of instructions here."""
SPEED_OF_LIGHT = ("regex:.*SpeedOfLight.*",)
"""Without `regex:` ncu looks for a section of that very name."""

Build = Callable[..., list[str]]


def takes_guide_calls(tool: str, options_of: Callable[..., dict[str, Any]]) -> Callable[[Build], Build]:
    """Let a function `build(tool, out_base, work_argv, request, **options)` also take a call without the tool.

    `options_of` takes the program and the keywords of such a call, and returns the options of `build`.
    """

    def decorate(build: Build) -> Build:
        @wraps(build)
        def call(*places: Any, **options: Any) -> list[str]:
            named = [name for name in ("out_base", "work_argv") if name in options]
            if tool in options or len(places) + len(named) != 2:
                return build(*places, **options)
            out_base, work_argv = [*places, *(options.pop(name) for name in named)]
            return build(find_tool(tool) or Path(tool), Path(out_base), list(work_argv), **options_of(work_argv, **options))

        return call

    return decorate


def nsys_options(
    work_argv: Sequence[str],
    *,
    trace: str | Sequence[str] = "cuda,nvtx,osrt",
    sample: str = "none",
    capture: str = "nvtx",
    nvtx_capture: str = "range@LLM",
) -> dict[str, Any]:
    """Return the fields of an `NsysRequest`."""
    modules = trace.split(",") if isinstance(trace, str) else list(trace)
    gates = {"none": WHOLE_PROGRAM, "cudaProfilerApi": CUDA_PROFILER_API}
    if capture not in (*gates, "nvtx"):
        raise ConfigError(f"capture={capture!r} is not known.", f"Known: nvtx, {', '.join(gates)}.")
    gate = gates[capture] if capture in gates else _nsys_gate(work_argv, nvtx_capture)
    return {"trace": tuple(name.strip() for name in modules if name.strip()), "sample": sample, "gate": gate}


def ncu_options(work_argv: Sequence[str], *, nvtx_expr: str | Sequence[str]) -> dict[str, Any]:
    """Return the fields of an `NcuRequest`: roofline, speed of light, time and floating-point operations."""
    expressions = [nvtx_expr] if isinstance(nvtx_expr, str) else list(nvtx_expr)
    ours = _is_ours(work_argv)
    if ours:
        expressions = [_ncu_range(stage) if (stage := _stage(text)) else text for text in expressions]
    return {
        "ranges": tuple(dict.fromkeys(expressions)),
        "ours": ours,
        "substages": _substages(work_argv),
        "section_set": "roofline",
        "sections": SPEED_OF_LIGHT,
        "metrics": (*DEFAULT_METRICS.split(","), *_tensor_counters()),
    }


def _ncu_range(stage: Stage) -> str:
    """Return the range in ncu syntax; the kernels of decode are launched in its steps."""
    return ncu_range(Stage.DECODE_STEP if stage is Stage.DECODE else stage)


def _tensor_counters() -> tuple[str, ...]:
    """Return the counters of tensor cores, which differ from chip to chip; none without a GPU whose counters are known."""
    name = gpu_name()
    chip = name if isinstance(name, Missing) else chip_of_device(name)
    return () if isinstance(chip, Missing) else tuple(roles(chip).tensor_flops)


def _nsys_gate(work_argv: Sequence[str], expression: str) -> Gate:
    if _is_ours(work_argv):
        stage = _stage(expression)
        if stage is None:
            check_gate("nsys", expression, substages=_substages(work_argv))
        return on_stage(stage) if stage else on_range(expression)
    if expression in ("range", f"range@{DOMAIN}"):
        raise ConfigError(
            f"nsys --nvtx-capture {expression!r} waits for a range whose name is 'range', and records nothing without it.",
            f"Give the literal name of a range of the program: nvtx_capture='NAME@{DOMAIN}'.",
        )
    return on_range(expression)


def _stage(expression: str) -> Stage | None:
    """Return the stage that a gate means in the syntax of either tool, with or without a wildcard; None if none."""
    words = [word.strip("*") for part in expression.split("@") for word in part.split("/") if word.strip("*")]
    names = [word for word in words if word != DOMAIN]
    last = names[-1] if names else ""
    return Stage(last) if last in STAGE_NAMES else _MEANT.get(last)


def _substages(work_argv: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the sub-stages that the program marks: those in its overrides, and those of its model's family."""
    words = [str(word).lstrip("+") for word in work_argv]
    added = [word.partition("=")[0].removeprefix(_SUBSTAGE) for word in words if word.startswith(_SUBSTAGE)]
    models = [word.removeprefix(_MODEL) for word in words if word.startswith(_MODEL)]
    families = _families(models[-1] if models else "")
    return tuple(dict.fromkeys([*added, *(name for family in families for name in default_substages(family))]))


def _families(model: str) -> Sequence[str]:
    """Return the family of a packaged model; any may be that of another one, such as a folder of weights."""
    if model not in packaged_options("model") - {"hf", "random"}:
        return tuple(FAMILIES)
    from llm_perf_opt.config.project_files import packaged_option

    return (str(packaged_option("model", model)["architecture"]["model_type"]),)


def _is_ours(work_argv: Sequence[str]) -> bool:
    return any(str(word).startswith(_OURS) for word in work_argv)
