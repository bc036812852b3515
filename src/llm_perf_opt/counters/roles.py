"""Which counters of a chip mean what: time, executed FLOPs, bytes moved, distance from the peaks.

Tensor work is read from `sm__ops_path_tensor_src_*`, which the tool describes as math operations on every chip here, so one
count is one FLOP. That was measured on Hopper: a 4096³ bf16 GEMM reads 2·4096³ exactly. On the other chips it rests on the
tool's description, and `note` says so: a GEMM of known size must confirm it before its figures are believed.
"""

from dataclasses import dataclass

from llm_perf_opt.core.errors import ConfigError

_SASS = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"
_TENSOR = "sm__ops_path_tensor_src_{}.sum"

# Scalar single and double precision: an addition or a multiplication is one FLOP, a fused multiply-add two.
_SCALAR = {_SASS.format(kind + op): flops for kind in "fd" for op, flops in (("add", 1), ("mul", 1), ("fma", 2))}
# Half precision (fp16, bf16) has packed instructions alone (HADD2, HMUL2, HFMA2), two lanes each, so newer releases of the tool
# weigh them by 2, 2 and 4 in their own roofline (2024.1 still by 1, 1 and 2). A kernel that fills one lane is counted as if it
# filled both, and compilers move constants with HFMA2 in kernels that compute nothing: an upper bound, so a kind of its own.
_PACKED_HALF = {_SASS.format("h" + op): flops for op, flops in (("add", 2), ("mul", 2), ("fma", 4))}
# B200 has packed single precision beside the scalar one.
_PACKED_SINGLE = {_SASS.format(op): flops for op, flops in (("fadd2", 2), ("fmul2", 2), ("ffma2", 4))}

# Parents only: `_op_*`, `_sparsity_*` and `_realtime` counters are parts or copies of these; adding one counts work twice.
_FLOAT_SOURCES: dict[str, tuple[str, ...]] = {
    "ga100": ("bf16_dst_fp32", "fp16_dst_fp16", "fp16_dst_fp32", "tf32_dst_fp32", "fp64"),
    "ad102": ("bf16_dst_fp32", "fp16_dst_fp16", "fp16_dst_fp32", "tf32_dst_fp32", "fp8", "fp64"),
    "gh100": ("bf16_dst_fp32", "fp16", "tf32_dst_fp32", "fp8", "fp64"),
    "gb100": (
        *("bf16_dst_fp32", "fp16_dst_fp16", "fp16_dst_fp32", "tf32_dst_fp32"),
        *("fp4_dst_fp32", "fp4_fp6_fp8_dst_fp16", "fp4_fp6_fp8_dst_fp32", "fp64"),
    ),
    "gb202": (
        *("bf16_dst_fp32", "fp16_dst_fp16", "fp16_dst_fp32", "tf32_dst_fp32", "fp8_dst_fp16", "fp8_dst_fp32"),
        *("fp4_dst_fp32", "fp4_fp6_dst_fp16", "fp4_fp6_dst_fp32", "fp64"),
    ),
}
_INTEGER_SOURCES: dict[str, tuple[str, ...]] = {
    "ga100": ("int8", "int4", "int1"),
    "ad102": ("int8", "int4", "int1"),
    "gh100": ("int8", "int1"),
    "gb100": ("int8",),
    "gb202": ("int8",),
}
_MEASURED_ON = "gh100"


@dataclass(frozen=True)
class CounterRoles:
    """The counters of one chip by meaning; every name carries its suffix."""

    chip: str
    time_ns: str
    tensor_flops: dict[str, int]
    """Counter → FLOPs per count; no counter is part of another, so they may be added. Empty where FLOPs cannot be had."""
    vector_flops: dict[str, int]
    """Counter → FLOPs per count, outside the tensor cores, in single and double precision."""
    half_flops: dict[str, int]
    """Counter → FLOPs per count at most, outside the tensor cores, in packed half precision."""
    dram_read_bytes: str
    dram_write_bytes: str
    l2_bytes: str
    sm_pct: str
    dram_pct: str
    occupancy_pct: str
    tensor_pct: str | None
    tensor_int_ops: dict[str, int]
    """Counter → integer operations per count on the tensor cores: work, but not FLOPs."""
    note: str = ""
    """What the FLOP counts of this chip rest on, or why they cannot be had."""


def roles(chip: str) -> CounterRoles:
    """What to ask of this chip, by meaning."""
    if chip not in _FLOAT_SOURCES:
        raise ConfigError(f"No counters are known for the chip {chip!r}.", f"Known chips: {', '.join(_FLOAT_SOURCES)}.")
    operation = "op_" if chip == "gb202" else ""
    return CounterRoles(
        chip=chip,
        time_ns="gpu__time_duration.sum",
        tensor_flops={_TENSOR.format(source): 1 for source in _FLOAT_SOURCES[chip]},
        vector_flops={**_SCALAR, **(_PACKED_SINGLE if chip == "gb100" else {})},
        half_flops=dict(_PACKED_HALF),
        dram_read_bytes=f"dram__bytes_{operation}read.sum",
        dram_write_bytes=f"dram__bytes_{operation}write.sum",
        l2_bytes="lts__t_bytes.sum",
        sm_pct="sm__throughput.avg.pct_of_peak_sustained_elapsed",
        dram_pct="dram__throughput.avg.pct_of_peak_sustained_elapsed",
        occupancy_pct="sm__warps_active.avg.pct_of_peak_sustained_active",
        tensor_pct="sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        tensor_int_ops={_TENSOR.format(source): 1 for source in _INTEGER_SOURCES[chip]},
        note=_note(chip),
    )


def _note(chip: str) -> str:
    if chip == _MEASURED_ON:
        return "One count of a tensor counter is one FLOP: a 4096³ bf16 GEMM was measured to read 2·4096³ exactly."
    return (
        f"One count of a tensor counter is assumed to be one FLOP, as the tool describes it; measured on {_MEASURED_ON} only. "
        "A GEMM of known size must confirm it on this chip."
    )
