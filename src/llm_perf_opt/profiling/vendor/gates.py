"""Where a tool begins and ends to record, and whether its range filter can match anything at all.

Both Nsight tools take a range that never comes for an answer: they record nothing and end with exit code 0. So an expression is
checked before a process is started.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.stages import DOMAIN, PARENT, STAGE_NAMES, Stage, nsys_range

Tool = Literal["nsys", "ncu"]

BOTH_SYNTAXES = (
    "nsys takes the literal name first: NAME@DOMAIN (profile@LLM; NAME@* for any domain). "
    "ncu takes the domain first, nested ranges as a path, a slash at the end for push/pop ranges: "
    "DOMAIN@OUTER/INNER/ (LLM@decode/decode_step/). Neither takes a wildcard inside a name."
)


@dataclass(frozen=True)
class Gate:
    """What a tool records of a program. Make one with `on_stage`, `on_range`, or take one of the two constants below."""

    kind: Literal["nvtx", "cudaProfilerApi", "none"]
    range: str = ""
    """As nsys spells it: NAME@DOMAIN."""
    ours: bool = True
    """Whether the program marks our stages; in a user's own program any name may come."""


CUDA_PROFILER_API = Gate("cudaProfilerApi")
"""From the program's cudaProfilerStart to its cudaProfilerStop."""
WHOLE_PROGRAM = Gate("none")
"""From the first instruction to the last."""


def on_stage(stage: Stage = Stage.PROFILE) -> Gate:
    """The gate on one of our stages."""
    return Gate("nvtx", nsys_range(stage))


def on_range(expression: str) -> Gate:
    """The gate on an NVTX range of a user's own program, as nsys spells it."""
    return Gate("nvtx", expression, ours=False)


def check_gate(tool: Tool, expression: str, *, ours: bool = True, substages: Sequence[str] = ()) -> None:
    """Refuse a range expression that would match nothing; with `ours`, every expression that is no range of ours.

    `substages` are the names of `model.substages`, which lie inside prefill and inside each decode step.
    """
    flaw = _nsys_flaw(expression) if tool == "nsys" else _ncu_flaw(expression)
    if flaw:
        raise _refusal(tool, expression, flaw)
    if not ours:
        return
    known = _nsys_spellings(substages) if tool == "nsys" else _ncu_spellings(substages)
    if expression not in known:
        closest = nearest(expression, known)
        raise _refusal(tool, expression, f"no such range is ever pushed.{closest} Ranges: {', '.join(known)}")


def _refusal(tool: Tool, expression: str, flaw: str) -> ConfigError:
    option = "--nvtx-capture" if tool == "nsys" else "--nvtx-include"
    return ConfigError(
        f"{tool} {option} {expression!r} would record nothing and still end with exit code 0: {flaw}.", BOTH_SYNTAXES
    )


def _nsys_flaw(expression: str) -> str:
    name, *domain = re.split(r"(?<!\\)@", expression)
    if not name:
        return "it names no range"
    if len(domain) > 1:
        return "it has more than one @ (write \\@ for one that belongs to the name)"
    if expression.endswith("/"):
        return "a slash at the end is the syntax of ncu"
    if "*" in name or (domain and "*" in domain[0] and domain[0] != "*"):
        return "a name is taken literally, the asterisk with it"
    return ""


def _ncu_flaw(expression: str) -> str:
    domain, _, path = expression.rpartition("@")
    steps = path.split("/")
    if not path.strip("/"):
        return "it names no range"
    if "@" in domain:
        return "it has more than one @"
    if any("*" in step and step != "*" for step in steps) or steps == ["*"]:
        return "an asterisk stands for nested ranges only as a step of its own (A/*/B)"
    return ""


def _nsys_spellings(substages: Sequence[str]) -> list[str]:
    return [f"{name}@{domain}" for name in (*STAGE_NAMES, *substages) for domain in (DOMAIN, "*")]


def _ncu_spellings(substages: Sequence[str]) -> list[str]:
    """Every stage by itself, and below each of the ranges around it."""
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
