"""A small run folder with a file of every kind that a run can hold, as its passes leave them."""

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import yaml

from builders import MS, clean_timings, cpu_sample, default_config, gpu_sample, manifest, model_facts, operator, torch_pass
from llm_perf_opt.analysis.kernels.counter_selftest import SelfTest
from llm_perf_opt.analysis.kernels.selection import SelectedKernel, Selection
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.analysis.verification import Trial, Verification
from llm_perf_opt.config.composition import config_to_yaml
from llm_perf_opt.core.machine_records import CeilingRow, Ceilings, FoundCeilings, TelemetryHeader
from llm_perf_opt.core.records import Missing, PartTime, PassRecord, StageActivity, WrappedPass
from llm_perf_opt.core.run_folder import RunFolder
from nsys_databases import cut_small
from synthetic_traces import Recipe, write_trace
from writing import write_record

PASSES = ("clean", "ceilings", "torch", "nvml", "nsys", "ncu_decode", "ncu_selftest")
ENVIRONMENT = {
    "host": "node1",
    "system": "Linux 6.1",
    "machine": "x86_64",
    "python": "3.11.7",
    "cpu": {"name": "a processor", "usable": 2, "logical": 4, "flags": ["avx2"]},
    "memory": {"total_bytes": 8 * 2**30, "available_bytes": 2**30},
    "gpu": {"name": "NVIDIA H200", "memory_bytes": 140 * 2**30, "sm_clock_mhz": 1980, "power_limit_w": 700.0},
    "gpu_driver": "580",
    "gpu_driver_cuda": "13.0",
    "packages": {"torch": "2.11.0"},
    "tool": {"version": "0.1.0", "commit": "0123456789abcdef", "dirty": True},
    "variables": {"OMP_NUM_THREADS": "1"},
}


def whole_run(path: Path, name: str = "tiny", reason: str = "", *, traces: bool = True) -> RunFolder:
    """A complete run; `name` stands wherever a name comes from a model or a trace, `reason` wherever a pass says something.

    Without its `traces` it is read far faster.
    """
    folder = RunFolder.create(path)
    passes = tuple(PassRecord(one, "complete", ("python", "--config", "x"), 0, 1.5, "1.0", reason) for one in PASSES)
    folder.write_manifest(replace(manifest(command=("llm-perf", "run", f"model={name}")), passes=passes, why=reason))
    folder.config_file.write_text(config_to_yaml(default_config()), encoding="utf-8")
    folder.env_file.write_text(json.dumps({**ENVIRONMENT, "host": f"node1 {name}"}))
    folder.inputs_file.write_text(yaml.safe_dump({"source": "synthetic", "prompts": [[1, 2], [3, 4]]}))
    facts = model_facts(name=name, device_name="NVIDIA H200", dtype="bf16", architecture=default_config().model.architecture)
    write_record(folder.clean_file, clean_timings(model=facts))
    write_record(folder.clean_inputs_file, {"sha256": "a" * 64})
    _write_torch(folder, name, traces)
    _write_telemetry(folder, reason)
    write_record(folder.ceilings_file, _ceilings(name))
    if traces:
        folder.timeline_file("nsys").parent.mkdir(parents=True)
        folder.timeline_file("nsys").write_bytes(_small_timeline())
    write_record(folder.wrapped_file("nsys"), WrappedPass({"prefill": 100 * MS, "decode": 60 * MS}, (20 * MS,) * 3))
    folder.counters_file("ncu_decode").parent.mkdir(parents=True)
    folder.counters_file("ncu_decode").write_bytes(_FIXTURE.read_bytes())
    chosen = SelectedKernel("nvjet_sm90_tst_128x64", 3, MS, 0.5)
    write_record(folder.selection_file("ncu_decode"), Selection("decode", "nsys", 1, (chosen,), 0.8, 0, 3, 2, 3, 1.0, (reason,)))
    write_record(folder.selftest_file, SelfTest(True, (), "every count is right"))
    trial = Trial("launch_bound_decode", ("runtime.compile=x",), "token", "trial", reason, MS, MS, MS, 3 * MS, 2 * MS, 1000)
    write_record(folder.verify_file, Verification(name, reason, (trial,)))
    return folder


_FIXTURE = Path(__file__).parent / "fixtures" / "h200" / "ncu_gemm_copy_gemv_raw.csv"


def _write_torch(folder: RunFolder, name: str, traces: bool) -> None:
    parts = tuple(PartTime(stage, part, 1, 5 * MS) for stage in ("prefill", "decode") for part in ("mlp", "attention_core"))
    activity = tuple(StageActivity(stage, 10, 10, 20 * MS) for stage in ("prefill", "decode"))
    operators = (operator("aten::mm"), operator(name, device_self_ns=2 * MS))
    write_record(folder.torch_file, torch_pass(parts=parts, activity=activity, operators=operators))
    if not traces:
        return
    plain = folder.torch_file.with_name("trace.json")
    write_trace(plain, Recipe(steps=3, kernels_per_step=4))
    kernel = json.dumps("void at::native::elementwise")[1:-1]
    text = plain.read_text(encoding="utf-8").replace(kernel, json.dumps(f"{name} {kernel}")[1:-1])
    folder.torch_trace_file.write_bytes(gzip.compress(text.encode()))
    plain.unlink()


def _write_telemetry(folder: RunFolder, reason: str) -> None:
    lines = [{"header": TelemetryHeader(0.1, 2, reason)}]
    lines += [{"gpu": gpu_sample(number * 100 * MS)} for number in range(17)]  # type: ignore[dict-item]
    lines += [{"cpu": cpu_sample(number * 100 * MS)} for number in range(17)]  # type: ignore[dict-item]
    folder.telemetry_file.parent.mkdir(parents=True)
    folder.telemetry_file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _ceilings(name: str) -> FoundCeilings:
    rows = (
        CeilingRow("gemm_bf16", "GEMM bf16", "FLOP/s", summarize([796e12] * 9), name),
        CeilingRow("gemm_fp8", "GEMM fp8", "FLOP/s", Missing("it has none"), ""),
        CeilingRow("read", "read bandwidth", "B/s", summarize([4348e9] * 9), name),
    )
    ceilings = Ceilings("cuda", "NVIDIA H200", "GPU-1", "580", "2.11.0", 1, "2026-01-02", 9.0, 9.0, (name,), rows)
    return FoundCeilings(ceilings, False, Missing("not kept"), (name,))


@cache
def _small_timeline() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        return cut_small(Path(scratch) / "run.sqlite").read_bytes()
