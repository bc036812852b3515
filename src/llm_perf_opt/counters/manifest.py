"""Resolve named metric sets to the counters and options of the profilers on one chip.

Merge order: `base`, then the sets in the given order, then additions, then removals. A counter that is requested more than once
keeps its first position and lists all its sources. Every name is checked before anything is started.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from llm_perf_opt.config.choices import set_name
from llm_perf_opt.config.schema import TorchPreset
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.counters.catalog import CounterRoles, chips, has, near, problem, roles, split_name
from llm_perf_opt.counters.set_file import PRESETS, ROLE, MetricSet, known_sets

_ALIKE = 0.8
"""The least similarity of a suggested old name; one wrong letter in twelve is 0.92."""


@dataclass(frozen=True)
class Part:
    """One counter of a translation: the old value is the sum of factor × counter."""

    name: str
    factor: int = 1


@dataclass(frozen=True)
class Translation:
    """An old name, the counters that replace it on one chip, and a note for readers."""

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
    "flop_count_sp": (_sass_flops("f"), f"{_FMA_IS_TWO} The tensor cores are excluded."),
    "flop_count_dp": (_sass_flops("d"), f"{_FMA_IS_TWO} The tensor cores are excluded."),
    "flop_count_hp": (
        _half_flops,
        "Half-precision instructions are packed, two lanes each. The fp16 and bf16 work of the tensor cores is included.",
    ),
    "shared_load_sectors": (_one(_SHARED.format("ld")), _WAVEFRONTS),
    "shared_store_sectors": (_one(_SHARED.format("st")), _WAVEFRONTS),
    "shared_load_transactions": (_one(_SHARED.format("ld")), _WAVEFRONTS),
    "shared_store_transactions": (_one(_SHARED.format("st")), _WAVEFRONTS),
    "smsp__sass_average_branch_divergence.pct": (_one(_DIVERGENCE), "The value is inverted: 100 % means no divergence."),
    "branch_efficiency": (_one(_DIVERGENCE), "The value is not inverted: 100 % means no divergence."),
    "gpu__time_elapsed.avg": (
        lambda chip: {chip.time_ns: 1},
        "No such counter exists; ncu reported n/a for it without an error.",
    ),
    "achieved_occupancy": (lambda chip: {chip.occupancy_pct: 1}, "The value is now a percentage; it was a fraction of 1."),
    "dram_read_bytes": (lambda chip: {chip.dram_read_bytes: 1}, ""),
    "dram_write_bytes": (lambda chip: {chip.dram_write_bytes: 1}, ""),
    "dram_read_throughput": (lambda chip: {f"{chip.dram_read_bytes}.per_second": 1}, ""),
    "dram_write_throughput": (lambda chip: {f"{chip.dram_write_bytes}.per_second": 1}, ""),
    "dram_utilization": (lambda chip: {chip.dram_pct: 1}, "The value is now a percentage; it was a level from 0 to 10."),
    "tensor_precision_fu_utilization": (
        lambda chip: {chip.tensor_pct: 1} if chip.tensor_pct else {},
        "The value is now a percentage; it was a level from 0 to 10.",
    ),
    "sm_efficiency": (_one("smsp__cycles_active.avg.pct_of_peak_sustained_elapsed"), ""),
    "ipc": (_one("sm__inst_executed.avg.per_cycle_active"), ""),
    "inst_executed": (_one("smsp__inst_executed.sum"), ""),
    "gld_transactions": (_one("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"), "The value is counted in sectors of 32 bytes."),
    "gst_transactions": (_one("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"), "The value is counted in sectors of 32 bytes."),
    "nvlink_total_data_received": (_one("nvlrx__bytes.sum"), ""),
    "nvlink_total_data_transmitted": (_one("nvltx__bytes.sum"), ""),
}


def old_names() -> tuple[str, ...]:
    """Return every name that has a translation on some chip."""
    return tuple(_OLD)


def close_names(chip: str, name: str, *, n: int = 3) -> tuple[str, ...]:
    """Return the most similar names that can be requested on this chip, best first: old names with a translation, and its own."""
    old = difflib.get_close_matches(
        name, [known for known in _OLD if known != name and translate(chip, known)], n=n, cutoff=_ALIKE
    )
    return tuple(dict.fromkeys((*old, *near(chip, name, n=n))))[:n]


def translate(chip: str, name: str) -> Translation | None:
    """Return the counters that replace an old or foreign name on this chip, or None if none is known to mean the same."""
    if name in _OLD:
        counters, note = _OLD[name]
        parts = counters(roles(chip))
        if not parts or not all(has(chip, part) for part in parts):
            return None
        return Translation(name, tuple(Part(part, factor) for part, factor in parts.items()), note)
    return None if has(chip, name) else _renamed(chip, name)


def _renamed(chip: str, name: str) -> Translation | None:
    """Translate `_read` and `_op_read`: RTX 50 uses the second, other chips the first."""
    base, suffix = split_name(chip, name)
    if not base.startswith("dram__"):
        return None
    for way in ("read", "write"):
        other = base.replace(f"_op_{way}", f"_{way}") if f"_op_{way}" in base else base.replace(f"_{way}", f"_op_{way}")
        full = f"{other}.{suffix}"
        if other != base and has(chip, full):
            return Translation(name, (Part(full),), f"The same counter under its name on {chip}.")
    return None


_SECTION = re.compile(r"\w+")
ADDED = "added"
"""The source of a counter that was requested by name."""


@dataclass(frozen=True)
class ResolvedMetric:
    """A counter to collect."""

    name: str
    sources: tuple[str, ...]
    """The sets that contain it, in merge order; `added` if it was requested by name."""
    note: str = ""


@dataclass(frozen=True)
class DroppedMetric:
    """An entry of a set that this chip or the installed ncu does not have."""

    name: str
    sources: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class ResolvedMetrics:
    """The counters and options for the profilers."""

    chip: str
    sets: tuple[str, ...]
    metrics: tuple[ResolvedMetric, ...]
    sections: tuple[str, ...]
    trace_modules: tuple[str, ...]
    gpu_metrics: bool
    torch_preset: TorchPreset
    dropped: tuple[DroppedMetric, ...]
    notes: tuple[str, ...]
    origins: tuple[str, ...] = ()
    """Where the user's own sets are defined, as sentences."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the counters, in order."""
        return tuple(metric.name for metric in self.metrics)


@dataclass
class _Request:
    """One counter while sets are merged."""

    sources: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Merge:
    """Counters in the order of their first request, with sources and notes."""

    def __init__(self, chip: str, known: Collection[str] | None) -> None:
        self.chip = chip
        self.known = None if known is None else frozenset(known)
        self.wanted: dict[str, _Request] = {}
        self.dropped: dict[str, tuple[list[str], str]] = {}

    def want(self, name: str, source: str, note: str = "") -> None:
        request = self.wanted.setdefault(name, _Request())
        _append_new(request.sources, source)
        if note:
            _append_new(request.notes, note)

    def drop(self, name: str, source: str, why: str) -> None:
        _append_new(self.dropped.setdefault(name, ([], why))[0], source)

    def take(self, requested: str, source: str) -> str:
        """Add an entry of a set or an addition. Return why it is unavailable, or an empty string."""
        translation = translate(self.chip, requested)
        parts = {part.name: part.factor for part in translation.parts} if translation else {requested: 1}
        faults = {name: why for name in parts if (why := problem(self.chip, name, self.known))}
        if faults:
            return "; ".join(why if name == requested else f"{name}: {why}" for name, why in faults.items())
        for name, factor in parts.items():
            self.want(name, source, _note(requested, factor, translation.note) if translation else "")
        return ""


def resolve(
    sets: Sequence[str],
    *,
    add: Sequence[str] = (),
    remove: Sequence[str] = (),
    sections: Sequence[str] = (),
    chip: str,
    known: Collection[str] | None = None,
    known_sections: Collection[str] | None = None,
    defined: Mapping[str, Any] | None = None,
) -> ResolvedMetrics:
    """Merge `base`, `sets`, `add` and `remove`, in that order, for one chip; `sections` follow those of the sets.

    `defined` contains the user's own sets as written. An entry of theirs that no known chip has raises a ConfigError.

    `known` contains the base names that the installed ncu lists for the chip (`catalog.names_listed`). Names that are not in it
    are dropped from sets; as additions they are an error. `known_sections` does the same for sections. Unknown sets, additions,
    removals and sections raise a ConfigError.
    """
    chosen = chosen_sets(sets, defined)
    merge = _Merge(chip, known)
    set_sections = _merge_sets(merge, chosen, known_sections)
    _check_sections(sections, known_sections)
    _add(merge, add)
    _remove(merge, remove)
    presets = [metric_set.torch for metric_set in chosen if metric_set.torch is not None]
    return ResolvedMetrics(
        chip=chip,
        sets=tuple(metric_set.name for metric_set in chosen),
        metrics=tuple(
            ResolvedMetric(name, tuple(request.sources), " ".join(request.notes)) for name, request in merge.wanted.items()
        ),
        sections=_unique([*set_sections, *sections]),
        trace_modules=_unique(module for metric_set in chosen for module in metric_set.trace),
        gpu_metrics=any(metric_set.gpu_metrics for metric_set in chosen),
        torch_preset=max(presets, key=PRESETS.index, default=PRESETS[0]),
        dropped=tuple(DroppedMetric(name, tuple(sources), why) for name, (sources, why) in merge.dropped.items()),
        notes=_unique(note for metric_set in chosen for note in metric_set.notes),
        origins=tuple(metric_set.origin for metric_set in chosen if metric_set.origin),
    )


def chosen_sets(names: Sequence[str], defined: Mapping[str, Any] | None = None) -> list[MetricSet]:
    """Return `base` and these sets, or raise a ConfigError for a name that neither the package nor the user defines."""
    known = known_sets(defined)
    names = [set_name(name, known) for name in names]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"No metric set is called {name!r}.{nearest(name, known)}",
                f"Known sets: {', '.join(known)}. Your own are files conf/metrics/NAME.yaml.",
            )
    return [known[name] for name in _unique(["base", *names])]


def _merge_sets(merge: _Merge, chosen: list[MetricSet], known_sections: Collection[str] | None) -> tuple[str, ...]:
    sections: list[str] = []
    for metric_set in chosen:
        source = metric_set.name
        for entry in metric_set.ncu:
            for name in _by_role(merge, entry, source):
                if why := merge.take(name, source):
                    _check_own_entry(metric_set, name, merge.chip, why)
                    merge.drop(name, source, why)
        for section in metric_set.sections:
            if section.needs and (why := problem(merge.chip, section.needs, merge.known)):
                merge.drop(f"section {section.name}", source, f"it needs {section.needs}: {why}")
            elif known_sections is not None and section.name not in known_sections:
                merge.drop(f"section {section.name}", source, "the installed Nsight Compute has no section of that name")
            else:
                _append_new(sections, section.name)
    return tuple(sections)


def _check_own_entry(metric_set: MetricSet, name: str, chip: str, why: str) -> None:
    """Raise a ConfigError for a counter of a user's set that no known chip has: it is a mistake, not a missing unit."""
    if metric_set.file and not any(translate(other, name) or has(other, name) for other in chips()):
        raise ConfigError(
            f"{metric_set.file}: {name!r} cannot be collected on any known chip; on {chip}: {why}.",
            _near_hint(close_names(chip, name)) or f"`llm-perf metrics check NAME --chip {chip}` checks a name.",
        )


def _check_sections(names: Sequence[str], known: Collection[str] | None) -> None:
    for name in names:
        if not _SECTION.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not the name of a section.", "`ncu --list-sections` lists them, such as SpeedOfLight."
            )
        if known is not None and name not in known:
            raise ConfigError(
                f"The installed Nsight Compute has no section {name!r}.{nearest(name, known)}", f"Known: {', '.join(known)}."
            )


def _by_role(merge: _Merge, entry: str, source: str) -> tuple[str, ...]:
    """Return the counters of an entry `role:NAME`, or the entry itself."""
    if not entry.startswith(ROLE):
        return (entry,)
    chip_roles = roles(merge.chip)
    found = getattr(chip_roles, entry.removeprefix(ROLE))
    if not found:
        merge.drop(entry, source, chip_roles.note or f"{merge.chip} has no counter for it")
        return ()
    return (found,) if isinstance(found, str) else tuple(found)


def _add(merge: _Merge, names: Sequence[str]) -> None:
    faults = {name: why for name in names if (why := merge.take(name, ADDED))}
    if faults:
        raise ConfigError(
            " ".join(f"{name!r} cannot be collected on {merge.chip}: {why}." for name, why in faults.items()),
            _near_hint(close for name in faults for close in close_names(merge.chip, name))
            or f"`llm-perf metrics check NAME --chip {merge.chip}` checks a name.",
        )


def _remove(merge: _Merge, names: Sequence[str]) -> None:
    for name in _unique(names):
        translation = translate(merge.chip, name)
        removed = [name] if name in merge.wanted else [part.name for part in translation.parts] if translation else []
        if not removed or not all(counter in merge.wanted for counter in removed):
            raise ConfigError(
                f"{name!r} cannot be removed: it is not among the requested counters.",
                _near_hint(get_close_matches(name, merge.wanted, n=3, cutoff=0.5))
                or f"Requested: {', '.join(merge.wanted) or 'none'}.",
            )
        for counter in removed:
            del merge.wanted[counter]


def _note(requested: str, factor: int, note: str) -> str:
    times = f" (× {factor})" if factor != 1 else ""
    return f"For {requested}{times}: {note}" if note else f"For {requested}{times}."


def _near_hint(names: Iterable[str]) -> str:
    found = _unique(names)
    return f"Did you mean {', '.join(found)}?" if found else ""


def _append_new(items: list[str], item: str) -> None:
    if item not in items:
        items.append(item)


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
