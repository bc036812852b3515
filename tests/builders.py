"""Hand-made records for tests. Every figure is small enough to be checked by eye."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llm_perf_opt.analysis.limits.efficiency import efficiency
from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.metrics import context_drift, metrics, stage_timings
from llm_perf_opt.analysis.overhead import overheads
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.telemetry import summarize_telemetry
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.machine_records import CpuSample, GpuSample, Telemetry, TelemetryHeader
from llm_perf_opt.core.rank_records import RankFacts
from llm_perf_opt.core.records import (
    CleanTimings,
    Iteration,
    Manifest,
    MemoryPeaks,
    Missing,
    ModelFacts,
    OperatorRow,
    PassRecord,
    SubstageSpan,
    TorchPass,
    Workload,
)

MS = 1_000_000
"""Nanoseconds in a millisecond."""
SECOND = 1_000_000_000
"""Nanoseconds in a second."""

HOSTILE_NAMES = (
    "<script>alert(1)</script>",
    "a|b||c",
    "`code` ```fence```",
    "line\nbreak\r\nand\ttab",
    "# heading",
    "**bold** _it_ ~~gone~~ [link](http://x) ![img](y)",
    "=cmd()|'/C calc'!A0",
    "&lt;b&gt; &amp;",
    "\\`|",
    "$x^2$ \x00\x07\u2028\u202e",
    "--- | --- |",
    "",
)
"""Names that would be markup, a formula or a broken table if they were not treated as data."""


@functools.cache
def default_config() -> RunConfig:
    """The packaged defaults, composed once."""
    return compose([]).config


def with_value(config: RunConfig, key: str, value: Any) -> RunConfig:
    """The same configuration with the value at a dotted key replaced, unchecked."""
    changed: RunConfig = _replaced(config, key.split("."), value)
    return changed


def _replaced(record: Any, path: Sequence[str], value: Any) -> Any:
    head, *rest = path
    return replace(record, **{head: _replaced(getattr(record, head), rest, value) if rest else value})


# --- what was measured ------------------------------------------------------------------------------------------------


def model_facts(**changes: Any) -> ModelFacts:
    facts = ModelFacts(
        name="tiny",
        model_class="Qwen2ForCausalLM",
        model_type="qwen2",
        parameters=5_000_000,
        weight_bytes=20_000_000,
        dtype="fp32",
        device="cpu",
        device_name="a processor",
        attention="sdpa",
        cache="dynamic",
        compile="none",
        logits="last token",
        architecture={"model_type": "qwen2"},
    )
    return replace(facts, **changes)


def workload(**changes: Any) -> Workload:
    work = Workload(batch_size=2, prompt_tokens=(10, 6), padded_tokens=10, new_tokens=4, source="synthetic ids, seed 0")
    return replace(work, **changes)


def iteration(
    prefill_ns: int = 100 * MS,
    steps_ns: Sequence[int] = (10 * MS, 20 * MS, 30 * MS),
    started_ns: int = 0,
    wall_ns: int | None = None,
    substages: Sequence[SubstageSpan] = (),
) -> Iteration:
    """One request; unless told otherwise the wall clock agrees with the stages."""
    wall = prefill_ns + sum(steps_ns) if wall_ns is None else wall_ns
    return Iteration(started_ns, wall, prefill_ns, tuple(steps_ns), tuple(substages))


def in_a_row(count: int, prefill_ns: int = 100 * MS, steps_ns: Sequence[int] = (10 * MS, 20 * MS, 30 * MS)) -> list[Iteration]:
    """Equal iterations, each beginning where the one before ended."""
    length = prefill_ns + sum(steps_ns)
    return [iteration(prefill_ns, steps_ns, started_ns=number * length) for number in range(count)]


def clean_timings(iterations: Sequence[Iteration] | None = None, **changes: Any) -> CleanTimings:
    """Ten equal repeats, unless told otherwise; the workload follows the number of steps."""
    repeats = tuple(in_a_row(10) if iterations is None else iterations)
    steps = len(repeats[0].steps_ns) if repeats else 3
    timings = CleanTimings(
        model=model_facts(),
        workload=workload(new_tokens=steps + 1),
        clock="host clock",
        load_s=0.5,
        warmup=(iteration(prefill_ns=900 * MS), iteration()),
        iterations=repeats,
        stopped="the target of ±2.0 % was reached after 10 repeats",
        stable=True,
        memory=MemoryPeaks(
            allocated_bytes=Missing("the run is on the CPU"),
            reserved_bytes=Missing("the run is on the CPU"),
            device_used_bytes=Missing("the run is on the CPU"),
            process_rss_bytes=3 * 2**30,
        ),
        tokens_sha256="0" * 64,
        tokens_repeat=True,
        threads=2,
        framework={"torch": "2.13.0"},
        settled=True,
        device_untouched_until_ns=0,
    )
    return replace(timings, **changes)


def rank_facts(number: int, device: str = "cuda:0", **changes: Any) -> RankFacts:
    facts = RankFacts(number, 100 + number, device, "gloo", 1, "0-1", 0.5, (10 * MS, 20 * MS), 10**7, 10**6, 10**8, 0)
    return replace(facts, **changes)


def operator(name: str = "aten::mm", **changes: Any) -> OperatorRow:
    none = Missing("the run is on the CPU")
    row = OperatorRow(
        name=name,
        calls=4,
        cpu_total_ns=8 * MS,
        cpu_self_ns=6 * MS,
        device_total_ns=none,
        device_self_ns=none,
        cpu_memory_bytes=none,
        device_memory_bytes=none,
    )
    return replace(row, **changes)


def torch_pass(**changes: Any) -> TorchPass:
    record = TorchPass(
        preset="minimal",
        stage_wall_ns={"profile": 320 * MS, "prefill": 200 * MS, "decode": 120 * MS, "decode_step": 40 * MS},
        decode_steps=3,
        activity=Missing("the run is on the CPU"),
        parts=Missing("the parts were not labeled"),
        operators=(operator("aten::mm"), operator("aten::add", cpu_self_ns=2 * MS)),
        trace_file="trace.json.gz",
        trace_bytes=1000,
    )
    return replace(record, **changes)


# --- telemetry --------------------------------------------------------------------------------------------------------


def gpu_sample(at_ns: int, **changes: Any) -> GpuSample:
    sample = GpuSample(
        at_ns=at_ns,
        power_mw=300_000,
        sm_clock_mhz=1980,
        memory_clock_mhz=3201,
        temperature_c=40,
        gpu_utilisation_pct=90,
        memory_utilisation_pct=50,
        memory_used_bytes=2**30,
        throttle_bits=0,
        energy_mj=0,
        processes=1,
    )
    return replace(sample, **changes)


def cpu_sample(at_ns: int, **changes: Any) -> CpuSample:
    sample = CpuSample(at_ns=at_ns, machine_pct=200.0, ours_pct=195.0, rss_bytes=2**30, frequency_mhz=2400.0)
    return replace(sample, **changes)


def telemetry(
    gpu: Sequence[GpuSample] = (), cpu: Sequence[CpuSample] = (), interval_s: float = 0.1, gpu_note: str = ""
) -> Telemetry:
    note = gpu_note or ("" if gpu else "NVML: Driver Not Loaded")
    return Telemetry(TelemetryHeader(interval_s, 2, note), tuple(gpu), tuple(cpu))


# --- the run ----------------------------------------------------------------------------------------------------------


def manifest(**changes: Any) -> Manifest:
    record = Manifest(
        schema=1,
        tool_version="0.1.0",
        status="complete",
        created="2026-01-02T03:04:05+00:00",
        command=("llm-perf", "run", "model=tiny"),
        passes=(PassRecord("clean", "complete", ("python",), 0, 12.3), PassRecord("torch", "complete", ("python",), 0, 4.5)),
    )
    return replace(record, **changes)


def run_analysis(**changes: Any) -> RunAnalysis:
    """A run with everything in it, on a CPU; figures follow from `clean_timings` and `torch_pass`."""
    timings = clean_timings(model=model_facts(architecture=default_config().model.architecture))
    readings = telemetry(cpu=[cpu_sample(number * 100 * MS) for number in range(17)])
    analysis = RunAnalysis(
        run="baseline/tiny/2026-01-02_03-04-05",
        manifest=manifest(),
        config={"experiment": "baseline"},
        env={
            "host": "node1",
            "system": "Linux 6.1",
            "machine": "x86_64",
            "python": "3.11.7",
            "cpu": {"name": "a processor", "usable": 2, "logical": 4},
            "memory": {"total_bytes": 8 * 2**30},
            "gpu": "n/a: NVML: Driver Not Loaded",
            "gpu_driver": "n/a: NVML: Driver Not Loaded",
            "packages": {"torch": "2.13.0"},
            "tool": {"version": "0.1.0", "commit": "0123456789abcdef", "dirty": True},
        },
        timings=timings,
        metrics=metrics(timings),
        stages=stage_timings(timings, torch_pass()),
        drift=context_drift(timings),
        efficiency=efficiency(timings, torch_pass(), hardware_named("h100_sxm"), Missing("no ceilings were measured")),
        torch=torch_pass(),
        telemetry=summarize_telemetry(readings, timings),
        kernels=Missing("the run was made without a pass that records kernels"),
        overheads=overheads(timings, torch_pass(), {}),
        warnings=(),
        assumptions=("Decoding is greedy.",),
        prompts_sha256="a" * 64,
    )
    return replace(analysis, **changes)


def empty_analysis(why: str = "The unprofiled reference pass was killed (SIGKILL).") -> RunAnalysis:
    """A run that failed before anything was measured: everything that can be missing is."""
    nothing = Missing(f"the clean pass is failed: {why}")
    return RunAnalysis(
        run="baseline/tiny/2026-01-02_03-04-05",
        manifest=manifest(status="failed", passes=(), why=why, remedy="Try a smaller model."),
        config={},
        env={},
        timings=nothing,
        metrics=(),
        stages=(),
        drift=nothing,
        efficiency=nothing,
        torch=nothing,
        telemetry=nothing,
        kernels=nothing,
        overheads=(),
        warnings=(),
        assumptions=(),
    )
