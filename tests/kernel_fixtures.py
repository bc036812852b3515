"""Kernels of the recorded model, by stage, and what Nsight Compute counted of them on the same card."""

import gzip
import json
from collections import defaultdict
from functools import cache
from math import prod
from pathlib import Path

from llm_perf_opt.core.machine_records import CountedKernel, CounterReport, KernelUse
from llm_perf_opt.core.records import Maybe
from llm_perf_opt.traces.ncu_csv import read_ncu

H200 = Path(__file__).parent / "fixtures" / "h200"


@cache
def traced_uses() -> tuple[KernelUse, ...]:
    """Of prefill (512 tokens) and 8 decode steps, as the framework's profiler recorded them."""
    events = json.loads(gzip.decompress((H200 / "torch_trace.json.gz").read_bytes()))["traceEvents"]
    stages = [
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in ("prefill", "decode")
    ]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            at = launched[event["args"]["correlation"]]
            stage = next(name for start, end, name in stages if start <= at < end)
            key = (stage, event["name"], prod(event["args"]["grid"]), prod(event["args"]["block"]))
            found[key].append(round(event["dur"] * 1000))
    return tuple(KernelUse(*key, len(times), sum(times)) for key, times in found.items())


@cache
def counted() -> dict[str, CounterReport]:
    """Stage → report."""
    return {
        "prefill": read_ncu(H200 / "ncu_prefill_aborted_raw.csv.gz"),
        "decode": read_ncu(H200 / "ncu_decode_step_raw.csv.gz"),
    }


def launch(name: str, grid: int, block: int = 128, **counters: float) -> CountedKernel:
    """A sampled launch; `tensor`, `vector`, `half`, `read`, `write`, `time`, `sm` stand for their counters on Hopper."""
    names = {
        "tensor": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
        "vector": "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",
        "half": "smsp__sass_thread_inst_executed_op_hfma_pred_on.sum",
        "read": "dram__bytes_read.sum",
        "write": "dram__bytes_write.sum",
        "time": "gpu__time_duration.sum",
        "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    }
    values: dict[str, Maybe[float]] = {names[short]: float(value) for short, value in counters.items()}
    return CountedKernel(name, 1, 0, 7, (grid, 1, 1), (block, 1, 1), (), values)


def report_of(*kernels: CountedKernel) -> CounterReport:
    """A sound report."""
    return CounterReport(tuple(kernels), {})
