"""Nsight Compute: the command that reads hardware counters of single kernels."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.profiling.vendor.gates import WHOLE_PROGRAM, Gate, check_gate

REPORT_ENDING = ".ncu-rep"

_LAST_OPTION = ("--export", "-o")
"""Followed by its value and then by the program."""

Replay = Literal["kernel", "application", "range", "app-range"]

_SPECIAL = re.compile(r"([.^$*+?()\[\]{}|\\])")


@dataclass(frozen=True)
class NcuRequest:
    """What ncu collects, and of which launches. Without metrics, sections and set it collects its own default set."""

    ranges: Sequence[str] = ()
    """NVTX ranges, as ncu spells them: only launches inside them are counted."""
    metrics: Sequence[str] = ()
    """Names of counters; `counters/` checks them per chip."""
    sections: Sequence[str] = ()
    section_set: str | None = None
    kernels: Sequence[str] = ()
    """Function names without namespace and template arguments, as `--kernel-name-base function` has them."""
    launch_skip: int = 0
    """Of the launches that pass the filters above."""
    launch_count: int | None = None
    replay: Replay = "kernel"
    gate: Gate = WHOLE_PROGRAM
    ours: bool = True
    """False: the ranges are those of a user's program."""
    substages: Sequence[str] = ()


def build_ncu_cmd(ncu: Path, out_base: Path, work_argv: Sequence[str], request: NcuRequest | None = None) -> list[str]:
    """Return the command of `ncu` around `work_argv`. It writes `out_base` + REPORT_ENDING and leaves clocks and caches alone."""
    request = request or NcuRequest()
    gate, ranges = request.gate, request.ranges
    if gate.kind == "nvtx":
        raise ConfigError("ncu has no NVTX gate as nsys has.", "Give the range, as ncu spells it, in `ranges`.")
    for expression in ranges:
        check_gate("ncu", expression, ours=request.ours, substages=request.substages)
    argv = [str(ncu), "--target-processes", "all", "--replay-mode", request.replay]
    argv += ["--clock-control", "none", "--cache-control", "none"]
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
    return [*argv, "--force-overwrite", "--export", _literal(out_base), *work_argv]


@dataclass(frozen=True)
class AskedCounters:
    """What a command told the tool to collect."""

    metrics: tuple[str, ...]
    whole_groups: bool
    """Whether it named sections, a set or a breakdown, or nothing at all: only the tool knows which counters those hold."""


def asked_counters(argv: Sequence[str]) -> AskedCounters:
    """Read from a command that `build_ncu_cmd` made. What follows its last option is the program's, whatever it looks like."""
    end = next((place for place, word in enumerate(argv) if word in _LAST_OPTION), len(argv))
    own = list(itertools.pairwise(argv[:end]))
    metrics = tuple(dict.fromkeys(name for option, names in own if option == "--metrics" for name in names.split(",")))
    groups = any(option in ("--section", "--set") for option, _ in own) or any(":" in name for name in metrics)
    return AskedCounters(tuple(name for name in metrics if ":" not in name), groups or not metrics)


def kernel_filter(kernels: Sequence[str]) -> str:
    """The argument of `--kernel-name` that matches exactly these names.

    Only what a regular expression gives a meaning is escaped: `re.escape` also escapes characters that other dialects do not
    allow to be.
    """
    names = "|".join(_SPECIAL.sub(r"\\\1", name) for name in dict.fromkeys(kernels))
    return f"regex:^({names})$"


def _separate(metrics: Sequence[str]) -> list[str]:
    for name in metrics:
        if not name or "," in name or any(character.isspace() for character in name):
            raise ConfigError(f"{name!r} is no name of a metric.", "Give each name by itself, without commas and blanks.")
    return list(dict.fromkeys(metrics))


def _launches(skip: int, count: int | None) -> list[str]:
    if skip < 0 or (count is not None and count < 1):
        raise ConfigError(
            f"ncu cannot skip {skip} launches and count {count}.", "Skip none or more launches, and count at least one."
        )
    argv = ["--launch-skip", str(skip)] if skip else []
    return argv + (["--launch-count", str(count)] if count is not None else [])


def _literal(path: Path) -> str:
    """ncu replaces %h, %i, %p and %q{…} in an output name; a folder may be called so."""
    return str(path).replace("%", "%%")
