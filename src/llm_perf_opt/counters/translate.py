"""Names of yesterday's tools, and names of another chip: what to ask for instead, and what changed in the meaning."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from llm_perf_opt.counters.catalog import has, near, split_name
from llm_perf_opt.counters.roles import CounterRoles, roles

_ALIKE = 0.8
"""How like an old name a word must be to be taken for it; one letter of twelve is 0.92."""


@dataclass(frozen=True)
class Part:
    """One counter of a translation: the old figure is the sum of factor × counter."""

    name: str
    factor: int = 1


@dataclass(frozen=True)
class Translation:
    """An old name, the counters that replace it on one chip, and what a reader must know about them."""

    old: str
    parts: tuple[Part, ...]
    note: str


def _sass_flops(letter: str) -> Callable[[CounterRoles], dict[str, int]]:
    return lambda chip: {name: flops for name, flops in chip.vector_flops.items() if f"_op_{letter}" in name}


def _half_flops(chip: CounterRoles) -> dict[str, int]:
    tensor = {name: flops for name, flops in chip.tensor_flops.items() if "_src_bf16" in name or "_src_fp16" in name}
    return {**chip.half_flops, **tensor}


def _one(name: str) -> Callable[[CounterRoles], dict[str, int]]:
    return lambda chip: {name: 1}


_DIVERGENCE = "smsp__sass_average_branch_targets_threads_uniform.pct"
_SHARED = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
_WAVEFRONTS = "Shared memory is counted in wavefronts (passes through the banks), not in sectors or transactions."
_FMA_IS_TWO = "A fused multiply-add counts as two."

_OLD: dict[str, tuple[Callable[[CounterRoles], dict[str, int]], str]] = {
    "flop_count_sp": (_sass_flops("f"), f"{_FMA_IS_TWO} Work of the tensor cores is not in it."),
    "flop_count_dp": (_sass_flops("d"), f"{_FMA_IS_TWO} Work of the tensor cores is not in it."),
    "flop_count_hp": (
        _half_flops,
        "Half-precision instructions are packed, two lanes each; fp16 and bf16 work of the tensor cores is added.",
    ),
    "shared_load_sectors": (_one(_SHARED.format("ld")), _WAVEFRONTS),
    "shared_store_sectors": (_one(_SHARED.format("st")), _WAVEFRONTS),
    "shared_load_transactions": (_one(_SHARED.format("ld")), _WAVEFRONTS),
    "shared_store_transactions": (_one(_SHARED.format("st")), _WAVEFRONTS),
    "smsp__sass_average_branch_divergence.pct": (_one(_DIVERGENCE), "Inverse sense: 100 % means no divergence."),
    "branch_efficiency": (_one(_DIVERGENCE), "The same sense: 100 % means no divergence."),
    "gpu__time_elapsed.avg": (lambda chip: {chip.time_ns: 1}, "There is no such counter: it read n/a without an error."),
    "achieved_occupancy": (lambda chip: {chip.occupancy_pct: 1}, "A percentage now; it was a fraction of 1."),
    "dram_read_bytes": (lambda chip: {chip.dram_read_bytes: 1}, ""),
    "dram_write_bytes": (lambda chip: {chip.dram_write_bytes: 1}, ""),
    "dram_read_throughput": (lambda chip: {f"{chip.dram_read_bytes}.per_second": 1}, ""),
    "dram_write_throughput": (lambda chip: {f"{chip.dram_write_bytes}.per_second": 1}, ""),
    "dram_utilization": (lambda chip: {chip.dram_pct: 1}, "A percentage now; it was a level from 0 to 10."),
    "tensor_precision_fu_utilization": (
        lambda chip: {chip.tensor_pct: 1} if chip.tensor_pct else {},
        "A percentage now; it was a level from 0 to 10.",
    ),
    "sm_efficiency": (_one("smsp__cycles_active.avg.pct_of_peak_sustained_elapsed"), ""),
    "ipc": (_one("sm__inst_executed.avg.per_cycle_active"), ""),
    "inst_executed": (_one("smsp__inst_executed.sum"), ""),
    "gld_transactions": (_one("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"), "Counted in sectors of 32 bytes."),
    "gst_transactions": (_one("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"), "Counted in sectors of 32 bytes."),
    "nvlink_total_data_received": (_one("nvlrx__bytes.sum"), ""),
    "nvlink_total_data_transmitted": (_one("nvltx__bytes.sum"), ""),
}


def old_names() -> tuple[str, ...]:
    """Every name that has a translation on some chip."""
    return tuple(_OLD)


def close_names(chip: str, name: str, *, n: int = 3) -> tuple[str, ...]:
    """The closest names that can be asked for on this chip, best first: old ones that have a translation, and its own."""
    old = difflib.get_close_matches(name, [one for one in _OLD if one != name and translate(chip, one)], n=n, cutoff=_ALIKE)
    return tuple(dict.fromkeys((*old, *near(chip, name, n=n))))[:n]


def translate(chip: str, name: str) -> Translation | None:
    """What this chip has in place of a name it lacks, or None where nothing is known to mean the same."""
    if name in _OLD:
        counters, note = _OLD[name]
        parts = counters(roles(chip))
        if not parts or not all(has(chip, part) for part in parts):
            return None
        return Translation(name, tuple(Part(part, factor) for part, factor in parts.items()), note)
    return None if has(chip, name) else _renamed(chip, name)


def _renamed(chip: str, name: str) -> Translation | None:
    """RTX 50 says `_op_read` where the others say `_read`, and the other way round."""
    base, suffix = split_name(chip, name)
    if not base.startswith("dram__"):
        return None
    for way in ("read", "write"):
        other = base.replace(f"_op_{way}", f"_{way}") if f"_op_{way}" in base else base.replace(f"_{way}", f"_op_{way}")
        full = f"{other}.{suffix}"
        if other != base and has(chip, full):
            return Translation(name, (Part(full),), f"The same counter under the name it has on {chip}.")
    return None
