"""The counter names of each chip, as Nsight Compute lists them, and the suffixes that each takes.

ncu does not report a wrong name well: without a dot it ends the profiled program, with a dot it reads n/a and exits with 0.
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
"""The release that produced the lists. An older one may not know every name: query it, and pass its names as `known`."""

DEFAULT_CHIP = "gh100"
_CHIPS = {
    "ga100": "A100, A800, A30",
    "ad102": "L4, L40, L40S, RTX 40, RTX Ada",
    "gh100": "H100, H200, H800, H20, GH200",
    "gb100": "B100, B200, GB200",
    "gb202": "RTX 50, RTX PRO Blackwell",
}
# The first pattern that matches a device name decides. Chips of one family have similar lists; see `ncu --list-chips`.
_DEVICES = (
    (r"\bG?B300\b", Missing("no counter list of its chip (Blackwell Ultra) is shipped")),
    (r"\bGB10\b|\bThor\b|\bOrin\b", Missing("no counter list of its integrated chip is shipped")),
    (r"\bG?B[12]00\b", "gb100"),
    (r"\bRTX PRO \d+\b.*\bBlackwell\b|\bRTX 50[5-9]0\b", "gb202"),
    (r"\bGH200\b|\bH(100|200|800|20)\b", "gh100"),
    (r"\bL(4|20|40S?|40G)\b|\bRTX 40[5-9]0\b|\bRTX \d+\b.*\bAda\b", "ad102"),
    (r"\bA(100|800|30)X?\b", "ga100"),
    (r"\bA(2|10|10G|16|40)\b|\bRTX 30\d0\b|\bRTX A\d+\b", Missing("no counter list of its chip (Ampere, GA10x) is shipped")),
    (r"\bT4\b|\bRTX 20\d0\b|\bV100\b", Missing("no counter list of its chip (older than Ampere) is shipped")),
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
    """The kind of a counter, which decides its suffixes. A test checks this against the lists of Nsight Compute."""

    COUNTER = "counter"
    RATIO = "ratio"
    THROUGHPUT = "throughput"
    LAUNCH = "launch"
    """A property of the launch or the device; takes no suffix."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Every suffix of such a name, without the dot, the most common first."""
        if self is Kind.COUNTER:
            return tuple(f"{rollup}.{rest}".rstrip(".") for rollup in _ROLLUPS for rest in _OF_A_COUNTER)
        if self is Kind.RATIO:
            return ("pct", "ratio", "max_rate")
        if self is Kind.THROUGHPUT:
            rollups = ("avg", "sum", "min", "max")
            return tuple(f"{rollup}.{peak}" for peak in reversed(_PEAKS) for rollup in rollups)
        return ()


def chips() -> dict[str, str]:
    """Return each known chip and the products that use it."""
    return dict(_CHIPS)


def chip_of_device(device_name: str) -> Maybe[str]:
    """Return the chip of a device by the name that the driver reports (`NVIDIA H200`), or why its counters are unknown."""
    for pattern, chip in _DEVICES:
        if re.search(pattern, device_name):
            return chip
    return Missing(f"no counter list is shipped for {device_name!r}")


@lru_cache
def base_names(chip: str) -> frozenset[str]:
    """Return every counter of a chip, without suffix."""
    if chip not in _CHIPS:
        raise ConfigError(f"No counters are known for the chip {chip!r}.", f"Known chips: {', '.join(_CHIPS)}.")
    return _shipped(chip)


@lru_cache
def launch_names() -> frozenset[str]:
    """Return the properties of a launch and its device that every report contains, on every chip."""
    return _shipped("launch")


def _shipped(name: str) -> frozenset[str]:
    packed = resources.files("llm_perf_opt.counters").joinpath(f"names/{name}.txt.gz").read_bytes()
    return frozenset(line for line in gzip.decompress(packed).decode().splitlines() if not line.startswith("#"))


def names_listed(text: str) -> frozenset[str]:
    """Return the base names in the output of `ncu --query-metrics --chips CHIP`."""
    names = frozenset(re.findall(r"^((?:\w+\.)*\w+__\w+)\s+(?:Counter|Ratio|Throughput)\b", text, re.MULTILINE))
    if not names:
        shown = " ".join(text.split())[:200]
        raise ParseError(f"ncu listed no counters; it printed: {shown!r}.", "An older ncu does not know a newer chip: update it.")
    return names


def kind_of(base: str) -> Kind:
    """Return the kind of a name without suffix."""
    own = base.rsplit(".", 1)[-1]  # `LTS.TriageCompute.lts__…` starts with its group
    if base in launch_names():
        return Kind.LAUNCH
    if "throughput" in own:
        return Kind.THROUGHPUT
    return Kind.RATIO if _RATIO_NAME.search(own) else Kind.COUNTER


def split_name(chip: str, name: str) -> tuple[str, str]:
    """Return base name and suffix: the longest prefix that the chip knows, else the part before the first dot after `__`."""
    known = base_names(chip)
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        base = ".".join(parts[:length])
        if base in known or base in launch_names():
            return base, ".".join(parts[length:])
    match = re.match(r"(.*?__[^.]*|[^.]*)\.?(.*)", name, re.DOTALL)
    return (match[1], match[2]) if match else (name, "")


def problem(chip: str, name: str, known: Collection[str] | None = None) -> str:
    """Return why ncu cannot collect this name on this chip, or an empty string.

    `known` contains the base names that the installed ncu lists; without it, only the shipped list decides.
    """
    if name.startswith(_BREAKDOWN):
        whole = name.removeprefix(_BREAKDOWN)
        if kind_of(split_name(chip, whole)[0]) is not Kind.THROUGHPUT:
            return "only a throughput has a breakdown"
        return problem(chip, whole, known)
    if re.match(r"(regex|group):", name):
        return "an expression cannot be checked in advance; list the counters one by one"
    base, suffix = split_name(chip, name)
    if base in launch_names():
        return f"it is a property of the launch and takes no suffix, so not '.{suffix}'" if suffix else ""
    if base not in base_names(chip):
        return f"{chip} has no counter of this name"
    if known is not None and base not in known:
        return f"the installed ncu does not list it for {chip}, though {LISTED_BY} does; a newer ncu has it"
    return _suffix_problem(kind_of(base), suffix)


def _suffix_problem(kind: Kind, suffix: str) -> str:
    if suffix in kind.suffixes:
        return ""
    first = ", ".join(f".{known}" for known in kind.suffixes[:3])
    fault = f"does not take the suffix '.{suffix}'" if suffix else "needs a suffix"
    return f"a {kind.value} {fault}; it takes {first}{' …' if len(kind.suffixes) > 3 else ''}"


def has(chip: str, name: str) -> bool:
    """Return whether this chip has a counter of this full name, including the suffix."""
    return not problem(chip, name)


def near(chip: str, name: str, *, n: int = 3) -> tuple[str, ...]:
    """Return the most similar full names on this chip, best first; empty if none is similar."""
    base, suffix = split_name(chip, name.removeprefix(_BREAKDOWN))
    if base in base_names(chip) or base in launch_names():
        return _nearest_suffixes(base, suffix, n)
    wanted = _trigrams(base)
    if not wanted:
        return ()
    scored = sorted(((_similarity(wanted, grams), known) for known, grams in _index(chip)), key=lambda item: (-item[0], item[1]))
    ranked = sorted(
        ((0.5 * score + 0.5 * difflib.SequenceMatcher(None, base, known).ratio(), known) for score, known in scored[:40]),
        key=lambda item: (-item[0], len(item[1]), item[1]),
    )
    return tuple(_with_suffix(known, suffix) for score, known in ranked[:n] if score >= 0.5)


def _nearest_suffixes(base: str, suffix: str, n: int) -> tuple[str, ...]:
    choices = kind_of(base).suffixes
    if not choices:
        return (base,) if suffix else ()
    close = difflib.get_close_matches(suffix, choices, n=n, cutoff=0.6) if suffix else []
    return tuple(f"{base}.{choice}" for choice in close or choices[:1] if choice != suffix)


def _with_suffix(base: str, suffix: str) -> str:
    choices = kind_of(base).suffixes
    if not choices:
        return base
    return f"{base}.{suffix if suffix in choices else choices[0]}"


def _trigrams(name: str) -> frozenset[str]:
    return frozenset(name[at : at + 3].lower() for at in range(len(name) - 2))


def _similarity(first: frozenset[str], second: frozenset[str]) -> float:
    return 2 * len(first & second) / (len(first) + len(second))


@lru_cache
def _index(chip: str) -> tuple[tuple[str, frozenset[str]], ...]:
    return tuple((name, _trigrams(name)) for name in sorted(base_names(chip) | launch_names()))


# --- counters by meaning ----------------------------------------------------------------------------------------------


_SASS = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"
_TENSOR = "sm__ops_path_tensor_src_{}.sum"

# Scalar single and double precision: an addition or a multiplication is one FLOP, a fused multiply-add is two.
_SCALAR = {_SASS.format(kind + op): flops for kind in "fd" for op, flops in (("add", 1), ("mul", 1), ("fma", 2))}
# Half precision (fp16, bf16) only has packed instructions (HADD2, HMUL2, HFMA2) with two lanes, so newer releases of ncu weight
# them by 2, 2 and 4 in their own roofline (2024.1 by 1, 1 and 2). A kernel that uses one lane is counted as if it used both, and
# compilers use HFMA2 to move constants. The count is therefore an upper bound and is kept apart.
_PACKED_HALF = {_SASS.format("h" + op): flops for op, flops in (("add", 2), ("mul", 2), ("fma", 4))}
# B200 has packed as well as scalar single precision.
_PACKED_SINGLE = {_SASS.format(op): flops for op, flops in (("fadd2", 2), ("fmul2", 2), ("ffma2", 4))}

# Only parents: `_op_*`, `_sparsity_*` and `_realtime` counters are subsets or copies of these and would count work twice.
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
    """The counters of one chip by meaning. Every name includes its suffix."""

    chip: str
    time_ns: str
    tensor_flops: dict[str, int]
    """Counter → FLOPs per count. No counter includes another, so they can be added. Empty if FLOPs are unavailable."""
    vector_flops: dict[str, int]
    """Counter → FLOPs per count outside the tensor cores, in single and double precision."""
    half_flops: dict[str, int]
    """Counter → the most FLOPs per count outside the tensor cores, in packed half precision."""
    dram_read_bytes: str
    dram_write_bytes: str
    l2_bytes: str
    sm_pct: str
    dram_pct: str
    occupancy_pct: str
    tensor_pct: str | None
    tensor_int_ops: dict[str, int]
    """Counter → integer operations per count on the tensor cores, which are not FLOPs."""
    note: str = ""
    """The basis of the FLOP counts of this chip, or why they are unavailable."""


def roles(chip: str) -> CounterRoles:
    """Return the counters of a chip by meaning."""
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
        return "One count of a tensor counter is one FLOP: for a 4096³ bf16 GEMM, the counter read exactly 2·4096³."
    return (
        f"One count of a tensor counter is assumed to be one FLOP, as the tool describes it. This was measured on "
        f"{_MEASURED_ON} only; a GEMM of known size must confirm it on this chip."
    )
