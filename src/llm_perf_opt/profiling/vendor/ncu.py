"""Nsight Compute: the command that reads hardware counters of kernels."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llm_perf_opt.config.schema import CacheControl, ClockControl
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.profiling.vendor.gates import WHOLE_PROGRAM, Gate, check_gate
from llm_perf_opt.profiling.vendor.guide_calls import DEFAULT_METRICS, ncu_options, takes_guide_calls

__all__ = ["DEFAULT_METRICS", "REPORT_ENDING", "AskedCounters", "NcuRequest", "asked_counters", "build_ncu_cmd", "kernel_filter"]

REPORT_ENDING = ".ncu-rep"

_LAST_OPTION = ("--export", "-o")
"""Its value and the program follow."""

Replay = Literal["kernel", "application", "range", "app-range"]

_SPECIAL = re.compile(r"([.^$*+?()\[\]{}|\\])")


@dataclass(frozen=True)
class NcuRequest:
    """What ncu collects, and of which launches. Without metrics, sections and set it collects its default set."""

    ranges: Sequence[str] = ()
    """NVTX ranges in ncu syntax: only launches inside them are counted."""
    metrics: Sequence[str] = ()
    """Names of counters; `counters/` checks them per chip."""
    sections: Sequence[str] = ()
    section_set: str | None = None
    kernels: Sequence[str] = ()
    """Function names without namespace and template arguments, as `--kernel-name-base function` shows them."""
    launch_skip: int = 0
    """How many launches to skip of those that pass the filters."""
    launch_count: int | None = None
    replay: Replay = "kernel"
    gate: Gate = WHOLE_PROGRAM
    ours: bool = True
    """False: the ranges belong to a user's program."""
    substages: Sequence[str] = ()
    clock_control: ClockControl = "none"
    cache_control: CacheControl = "none"
    args: Sequence[str] = ()
    """More options, as `own_options` returns them."""


@takes_guide_calls("ncu", ncu_options)
def build_ncu_cmd(
    ncu: Path, out_base: Path, work_argv: Sequence[str], request: NcuRequest | None = None, **options: Any
) -> list[str]:
    """Return an `ncu` command around `work_argv`. It writes `out_base` + REPORT_ENDING.

    Clocks and caches stay as they are unless the request says otherwise. `options` are fields of the request. Calls in the form
    of the profiling guides are accepted too: see `guide_calls`.
    """
    request = replace(request or NcuRequest(), **options)
    gate, ranges = request.gate, request.ranges
    if gate.kind == "nvtx":
        raise ConfigError("ncu cannot start its capture at an NVTX range.", "Put the range into `ranges`, in ncu syntax.")
    for expression in ranges:
        check_gate("ncu", expression, ours=request.ours, substages=request.substages)
    argv = [str(ncu), "--target-processes", "all", "--config-file", "off", "--replay-mode", request.replay]
    argv += ["--clock-control", request.clock_control, "--cache-control", request.cache_control]
    argv += ["--profile-from-start", "off"] if gate.kind == "cudaProfilerApi" else []
    argv += ["--nvtx"] if ranges else []
    for expression in ranges:
        argv += ["--nvtx-include", expression]
    argv += ["--metrics", ",".join(_separate(request.metrics))] if request.metrics else []
    argv += ["--set", request.section_set] if request.section_set else []
    for section in request.sections:
        argv += ["--section", section]
    argv += ["--kernel-name-base", "function", "--kernel-name", kernel_filter(request.kernels)] if request.kernels else []
    argv += _launches(request.launch_skip, request.launch_count)
    return [*argv, *request.args, "--force-overwrite", "--export", _literal(out_base), *work_argv]


@dataclass(frozen=True)
class AskedCounters:
    """The counters that a command requests."""

    metrics: tuple[str, ...]
    whole_groups: bool
    """Whether it requests sections, a set, a breakdown or the default, whose counters only the tool knows."""


def asked_counters(argv: Sequence[str]) -> AskedCounters:
    """Return the counters that a command of `build_ncu_cmd` requests; the program's own arguments are ignored."""
    end = next((place for place, word in enumerate(argv) if word in _LAST_OPTION), len(argv))
    own = list(itertools.pairwise(argv[:end]))
    metrics = tuple(dict.fromkeys(name for option, names in own if option == "--metrics" for name in names.split(",")))
    groups = any(option in ("--section", "--set") for option, _ in own) or any(":" in name for name in metrics)
    return AskedCounters(tuple(name for name in metrics if ":" not in name), groups or not metrics)


def kernel_filter(kernels: Sequence[str]) -> str:
    """Return the argument of `--kernel-name` that matches exactly these names.

    Escapes only regular-expression syntax: `re.escape` also escapes characters that ncu's dialect may reject.
    """
    names = "|".join(_SPECIAL.sub(r"\\\1", name) for name in dict.fromkeys(kernels))
    return f"regex:^({names})$"


def _separate(metrics: Sequence[str]) -> list[str]:
    for name in metrics:
        if not name or "," in name or any(character.isspace() for character in name):
            raise ConfigError(f"{name!r} is not a metric name.", "Give each name separately, without commas and spaces.")
    return list(dict.fromkeys(metrics))


def _launches(skip: int, count: int | None) -> list[str]:
    if skip < 0 or (count is not None and count < 1):
        raise ConfigError(
            f"ncu cannot skip {skip} launches and count {count}.", "Skip zero or more launches, and count at least one."
        )
    argv = ["--launch-skip", str(skip)] if skip else []
    return argv + (["--launch-count", str(count)] if count is not None else [])


def _literal(path: Path) -> str:
    """Escape the path: ncu replaces %h, %i, %p and %q{…} in an output name."""
    return str(path).replace("%", "%%")
