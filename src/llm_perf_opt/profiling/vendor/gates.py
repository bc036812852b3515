"""What starts and stops a recording, and a check that a range filter can match.

If a range never occurs, both Nsight tools record nothing and exit with code 0. So range expressions are checked first.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.stages import DOMAIN, PARENT, STAGE_NAMES, Stage, nsys_range

Tool = Literal["nsys", "ncu"]

BOTH_SYNTAXES = (
    "nsys syntax: NAME@DOMAIN with the literal name (profile@LLM; NAME@* for any domain). "
    "ncu syntax: DOMAIN@OUTER/INNER/, the domain first, nested ranges as a path, a slash at the end for push/pop ranges "
    "(LLM@decode/decode_step/). Neither accepts a wildcard inside a name."
)


@dataclass(frozen=True)
class Gate:
    """What a tool records of a program: `on_stage`, `on_range`, CUDA_PROFILER_API or WHOLE_PROGRAM."""

    kind: Literal["nvtx", "cudaProfilerApi", "none"]
    range: str = ""
    """In nsys syntax: NAME@DOMAIN."""
    ours: bool = True
    """Whether the program marks llm-perf's stages; a user's program may use any name."""
    substage: str = ""
    """The sub-stage that the range marks, if it marks one."""


CUDA_PROFILER_API = Gate("cudaProfilerApi")
"""From the program's cudaProfilerStart to its cudaProfilerStop."""
WHOLE_PROGRAM = Gate("none")
"""From start to exit."""


def on_stage(stage: Stage = Stage.PROFILE) -> Gate:
    """Return the gate on a stage."""
    return Gate("nvtx", nsys_range(stage))


def on_substage(name: str) -> Gate:
    """Return the gate on a sub-stage of a stage."""
    return Gate("nvtx", f"{name}@{DOMAIN}", substage=name)


def on_range(expression: str) -> Gate:
    """Return the gate on an NVTX range of a user's program, in nsys syntax."""
    return Gate("nvtx", expression, ours=False)


def check_gate(tool: Tool, expression: str, *, ours: bool = True, substages: Sequence[str] = ()) -> None:
    """Raise a ConfigError for a range expression that cannot match; with `ours`, for any range that llm-perf does not push.

    `substages` are the names of `model.substages`, which lie inside prefill and inside each decode step.
    """
    problem = _nsys_problem(expression) if tool == "nsys" else _ncu_problem(expression)
    if problem:
        raise _error(tool, expression, problem)
    if not ours:
        return
    known = _nsys_spellings(substages) if tool == "nsys" else _ncu_spellings(substages)
    if expression not in known:
        closest = nearest(expression, known)
        raise _error(tool, expression, f"no such range is ever pushed.{closest} Ranges: {', '.join(known)}")


def _error(tool: Tool, expression: str, problem: str) -> ConfigError:
    option = "--nvtx-capture" if tool == "nsys" else "--nvtx-include"
    return ConfigError(
        f"{tool} {option} {expression!r} would record nothing and still exit with code 0: {problem}.", BOTH_SYNTAXES
    )


def _nsys_problem(expression: str) -> str:
    name, *domain = re.split(r"(?<!\\)@", expression)
    if not name:
        return "it names no range"
    if len(domain) > 1:
        return "it has more than one @ (escape an @ in the name as \\@)"
    if expression.endswith("/"):
        return "a slash at the end is ncu syntax"
    if "*" in name or (domain and "*" in domain[0] and domain[0] != "*"):
        return "names are literal, so an asterisk matches only itself"
    return ""


def _ncu_problem(expression: str) -> str:
    domain, _, path = expression.rpartition("@")
    steps = path.split("/")
    if not path.strip("/"):
        return "it names no range"
    if "@" in domain:
        return "it has more than one @"
    if any("*" in step and step != "*" for step in steps) or steps == ["*"]:
        return "an asterisk matches nested ranges only as a whole path element (A/*/B)"
    return ""


def _nsys_spellings(substages: Sequence[str]) -> list[str]:
    return [f"{name}@{domain}" for name in (*STAGE_NAMES, *substages) for domain in (DOMAIN, "*")]


def _ncu_spellings(substages: Sequence[str]) -> list[str]:
    """Return every stage by itself and as a path through the ranges around it."""
    paths = []
    for stage in Stage:
        path = [stage.value]
        paths.append(tuple(path))
        parent = PARENT[stage]
        while parent is not None:
            path.insert(0, parent.value)
            paths.append(tuple(path))
            parent = PARENT[parent]
    inner = [path for path in paths if path[-1] in (Stage.PREFILL, Stage.DECODE_STEP)]
    paths += [(name,) for name in substages] + [(*path, name) for name in substages for path in inner]
    return [f"{DOMAIN}@{'/'.join(path)}/" for path in paths]
