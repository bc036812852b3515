"""Every counter name per chip, as Nsight Compute lists them, and what may be appended to each.

A wrong name is never harmless: without a dot it ends the profiled program, with one it reads n/a and the exit code is 0.
"""

import difflib
import gzip
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import resources

from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.core.records import Maybe, Missing

LISTED_BY = "Nsight Compute 2025.3.1"
"""The tool whose lists these are. An older one may lack some of the names: ask it, and pass its answer as `known`."""

DEFAULT_CHIP = "gh100"
_CHIPS = {
    "ga100": "A100, A800, A30",
    "ad102": "L4, L40, L40S, RTX 40, RTX Ada",
    "gh100": "H100, H200, H800, H20, GH200",
    "gb100": "B100, B200, GB200",
    "gb202": "RTX 50, RTX PRO Blackwell",
}
# The first pattern found in a device's name decides. The lists of one family differ little; `ncu --list-chips` names its members.
_DEVICES = (
    (r"\bG?B300\b", Missing("no counter list of its chip (Blackwell Ultra) is shipped")),
    (r"\bGB10\b|\bThor\b|\bOrin\b", Missing("no counter list of its integrated chip is shipped")),
    (r"\bG?B[12]00\b", "gb100"),
    (r"\bRTX PRO \d+\b.*\bBlackwell\b|\bRTX 50[5-9]0\b", "gb202"),
    (r"\bGH200\b|\bH(100|200|800|20)\b", "gh100"),
    (r"\bL(4|20|40S?|40G)\b|\bRTX 40[5-9]0\b|\bRTX \d+\b.*\bAda\b", "ad102"),
    (r"\bA(100|800|30)X?\b", "ga100"),
    (r"\bA(2|10|10G|16|40)\b|\bRTX 30\d0\b|\bRTX A\d+\b", Missing("no counter list of its chip (Ampere, GA10x) is shipped")),
    (r"\bT4\b|\bRTX 20\d0\b|\bV100\b", Missing("its chip is older than those whose counters are known here")),
)

_ROLLUPS = ("sum", "avg", "min", "max")
_PEAKS = ("pct_of_peak_sustained_active", "pct_of_peak_sustained_elapsed")
_OF_A_COUNTER = (
    *("", "per_second", "per_cycle_active", "per_cycle_elapsed", *_PEAKS, "peak_sustained"),
    *("peak_sustained_active", "peak_sustained_active.per_second"),
    *("peak_sustained_elapsed", "peak_sustained_elapsed.per_second"),
)
_RATIO_NAME = re.compile(r"average_|amortized_|_rate(_|$)|_pct$|_ratio$|_per_warp(s?_active)?$|_per_(issue|inst)_")
_BREAKDOWN = "breakdown:"


class Kind(Enum):
    """What a name stands for decides which suffixes it takes. The tool's own lists bear the rule out, name by name."""

    COUNTER = "counter"
    RATIO = "ratio"
    THROUGHPUT = "throughput"
    LAUNCH = "launch"
    """A fact of the launch or of the device; it takes none."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Everything that may follow such a name, without the dot; the one people mean first."""
        if self is Kind.COUNTER:
            return tuple(f"{rollup}.{rest}".rstrip(".") for rollup in _ROLLUPS for rest in _OF_A_COUNTER)
        if self is Kind.RATIO:
            return ("pct", "ratio", "max_rate")
        if self is Kind.THROUGHPUT:
            rollups = ("avg", "sum", "min", "max")
            return tuple(f"{rollup}.{peak}" for peak in reversed(_PEAKS) for rollup in rollups)
        return ()


def chips() -> dict[str, str]:
    """The chips whose counters are known → the products that carry them."""
    return dict(_CHIPS)


def chip_of_device(device_name: str) -> Maybe[str]:
    """The chip of a device as the driver names it (`NVIDIA H200`), or why its counters are not known."""
    for pattern, chip in _DEVICES:
        if re.search(pattern, device_name):
            return chip
    return Missing(f"no counter list is known for {device_name!r}")


@lru_cache
def base_names(chip: str) -> frozenset[str]:
    """Every counter of this chip, without suffix."""
    if chip not in _CHIPS:
        raise ConfigError(f"No counters are known for the chip {chip!r}.", f"Known chips: {', '.join(_CHIPS)}.")
    return _shipped(chip)


@lru_cache
def launch_names() -> frozenset[str]:
    """Facts that every report holds of a launch and its device; on every chip, without suffix."""
    return _shipped("launch")


def _shipped(name: str) -> frozenset[str]:
    packed = resources.files("llm_perf_opt.counters").joinpath(f"names/{name}.txt.gz").read_bytes()
    return frozenset(line for line in gzip.decompress(packed).decode().splitlines() if not line.startswith("#"))


def names_listed(text: str) -> frozenset[str]:
    """The base names in what `ncu --query-metrics --chips CHIP` printed."""
    names = frozenset(re.findall(r"^((?:\w+\.)*\w+__\w+)\s+(?:Counter|Ratio|Throughput)\b", text, re.MULTILINE))
    if not names:
        shown = " ".join(text.split())[:200]
        raise ParseError(f"ncu listed no counters; it said: {shown!r}.", "An older ncu does not know a newer chip: update it.")
    return names


def kind_of(base: str) -> Kind:
    """What a name without suffix stands for."""
    own = base.rsplit(".", 1)[-1]  # `LTS.TriageCompute.lts__…` carries the group it belongs to
    if base in launch_names():
        return Kind.LAUNCH
    if "throughput" in own:
        return Kind.THROUGHPUT
    return Kind.RATIO if _RATIO_NAME.search(own) else Kind.COUNTER


def split_name(chip: str, name: str) -> tuple[str, str]:
    """Base name and suffix: the longest beginning that the chip knows, else what stands before the first dot after `__`."""
    known = base_names(chip)
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        base = ".".join(parts[:length])
        if base in known or base in launch_names():
            return base, ".".join(parts[length:])
    match = re.match(r"(.*?__[^.]*|[^.]*)\.?(.*)", name, re.DOTALL)
    return (match[1], match[2]) if match else (name, "")


def problem(chip: str, name: str, known: Collection[str] | None = None) -> str:
    """Why the tool would not collect this name on this chip, or an empty string.

    `known` holds the base names that the installed tool itself lists; without it the shipped list alone decides.
    """
    if name.startswith(_BREAKDOWN):
        whole = name.removeprefix(_BREAKDOWN)
        if kind_of(split_name(chip, whole)[0]) is not Kind.THROUGHPUT:
            return "only a throughput has a breakdown"
        return problem(chip, whole, known)
    if re.match(r"(regex|group):", name):
        return "an expression cannot be checked beforehand; name the counters one by one"
    base, suffix = split_name(chip, name)
    if base in launch_names():
        return f"it is a fact of the launch and takes no suffix, so not '.{suffix}'" if suffix else ""
    if base not in base_names(chip):
        return f"{chip} has no counter of this name"
    if known is not None and base not in known:
        return f"the installed ncu does not list it for {chip}, though {LISTED_BY} does; a newer ncu has it"
    return _suffix_problem(kind_of(base), suffix)


def _suffix_problem(kind: Kind, suffix: str) -> str:
    if suffix in kind.suffixes:
        return ""
    first = ", ".join(f".{one}" for one in kind.suffixes[:3])
    fault = f"does not take the suffix '.{suffix}'" if suffix else "needs a suffix"
    return f"a {kind.value} {fault}; it takes {first}{' …' if len(kind.suffixes) > 3 else ''}"


def has(chip: str, name: str) -> bool:
    """Whether this chip has a counter of this full name, suffix included."""
    return not problem(chip, name)


def near(chip: str, name: str, *, n: int = 3) -> tuple[str, ...]:
    """The closest other full names on this chip, best first; none when nothing is close."""
    base, suffix = split_name(chip, name.removeprefix(_BREAKDOWN))
    if base in base_names(chip) or base in launch_names():
        return _nearest_suffixes(base, suffix, n)
    wanted = _trigrams(base)
    if not wanted:
        return ()
    scored = sorted(((_likeness(wanted, grams), one) for one, grams in _index(chip)), key=lambda item: (-item[0], item[1]))
    ranked = sorted(
        ((0.5 * score + 0.5 * difflib.SequenceMatcher(None, base, one).ratio(), one) for score, one in scored[:40]),
        key=lambda item: (-item[0], len(item[1]), item[1]),
    )
    return tuple(_with_suffix(one, suffix) for score, one in ranked[:n] if score >= 0.5)


def _nearest_suffixes(base: str, suffix: str, n: int) -> tuple[str, ...]:
    choices = kind_of(base).suffixes
    if not choices:
        return (base,) if suffix else ()
    close = difflib.get_close_matches(suffix, choices, n=n, cutoff=0.6) if suffix else []
    return tuple(f"{base}.{one}" for one in close or choices[:1] if one != suffix)


def _with_suffix(base: str, suffix: str) -> str:
    choices = kind_of(base).suffixes
    if not choices:
        return base
    return f"{base}.{suffix if suffix in choices else choices[0]}"


def _trigrams(name: str) -> frozenset[str]:
    return frozenset(name[at : at + 3].lower() for at in range(len(name) - 2))


def _likeness(one: frozenset[str], other: frozenset[str]) -> float:
    return 2 * len(one & other) / (len(one) + len(other))


@lru_cache
def _index(chip: str) -> tuple[tuple[str, frozenset[str]], ...]:
    return tuple((name, _trigrams(name)) for name in sorted(base_names(chip) | launch_names()))


# --- roles ------------------------------------------------------------------------------------------------------------


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
