"""The labels by which serving engines and profilers mark their steps, one dialect each: the rules are data.

A dialect turns a label's name into the stage it marks, or None. Spellings were read from the engines' sources:

| dialect | label | meaning |
|---|---|---|
| labels | `profile`, `prefill`, `decode`, `decode_step` in the domain `LLM` or none | this tool's own |
| vllm | `execute_context_2(512)_generation_6(6)`, `execute_7_context_2(sq512sk…)_generation_…` | requests in prefill, in decode |
| vllm | `execute_new_1_cached_4` (2025) | requests seen first, and before |
| vllm | `gpu_model_runner: forward` | a step, content not told; used where the above is missing |
| sglang | `step[EXTEND bs=1 toks=512]`, `step[DECODE bs=8]`, `step[MIXED bs=4 …]`, lower case too | the batch's forward mode |
| tensorrt_llm | `[Executor] _forward_step 7: 1 ctx reqs, 3 gen reqs` | requests in prefill and in decode |
| atom | `prefill[bs=2 tok=16384]`, `decode[bs=16 …]` | |
| profiler_step | `ProfilerStep#3` | one `profiler.step()` of torch.profiler |
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.trace.stage_instances import DECODE_STEP, MIXED_STEP, PREFILL, STEP
from llm_perf_opt.stages import STAGE_NAMES


@dataclass(frozen=True)
class Dialect:
    """How one maker of traces labels its stages."""

    name: str
    stage_of: Callable[[str], str | None]
    """Label → stage, or None for a label that marks none."""
    our_domain_only: bool = False
    """Whether labels of another NVTX domain than ours are somebody else's; names as plain as `decode` need it."""


_VLLM_STEP = re.compile(r"execute_(?:\d+_)?context_(\d+)\(.*?\)_generation_(\d+)\(.*?\)")
_VLLM_NEW = re.compile(r"execute_new_(\d+)_cached_(\d+)")
_VLLM_FORWARD = re.compile(r"(?:v2_)?gpu_model_runner: forward")
_SGLANG_STEP = re.compile(r"step\[(\w+)(?: .*)?\]")
_TENSORRT_STEP = re.compile(r"\[Executor\] _forward_step(?: \d+)?: (\d+) ctx reqs,.*?(\d+) gen reqs")
_ATOM_STEP = re.compile(r"(prefill|decode)\[.*\]")
_PROFILER_STEP = re.compile(r"ProfilerStep\s*#\d+")

_SGLANG_MODES = {
    "EXTEND": PREFILL,
    "PREFILL": PREFILL,
    "SPLIT_PREFILL": PREFILL,
    "DLLM_EXTEND": PREFILL,
    "DECODE": DECODE_STEP,
    "TARGET_VERIFY": DECODE_STEP,
    "MIXED": MIXED_STEP,
}
"""Other modes (a draft model's steps, idle ones) are steps of which nothing more is said."""


def _by_requests(prefilling: str, decoding: str) -> str:
    if int(prefilling) and int(decoding):
        return MIXED_STEP
    if int(prefilling):
        return PREFILL
    return DECODE_STEP if int(decoding) else STEP


def _own(label: str) -> str | None:
    return label if label in STAGE_NAMES else None


def _vllm(label: str) -> str | None:
    found = _VLLM_STEP.fullmatch(label) or _VLLM_NEW.fullmatch(label)
    return _by_requests(*found.groups()) if found else None


def _vllm_forward(label: str) -> str | None:
    return STEP if _VLLM_FORWARD.fullmatch(label) else None


def _sglang(label: str) -> str | None:
    found = _SGLANG_STEP.fullmatch(label)
    return _SGLANG_MODES.get(found[1].upper(), STEP) if found else None


def _tensorrt(label: str) -> str | None:
    found = _TENSORRT_STEP.fullmatch(label)
    return _by_requests(*found.groups()) if found else None


def _atom(label: str) -> str | None:
    found = _ATOM_STEP.fullmatch(label)
    return {"prefill": PREFILL, "decode": DECODE_STEP}[found[1]] if found else None


def _profiler_step(label: str) -> str | None:
    return STEP if _PROFILER_STEP.fullmatch(label) else None


DIALECTS: Sequence[Dialect] = (
    Dialect("labels", _own, our_domain_only=True),
    Dialect("vllm", _vllm),
    Dialect("sglang", _sglang),
    Dialect("tensorrt_llm", _tensorrt),
    Dialect("atom", _atom),
    Dialect("vllm", _vllm_forward),
    Dialect("profiler_step", _profiler_step),
)
"""In the order they are tried: the one that says most first."""

ENGINES = frozenset(dialect.name for dialect in DIALECTS) - {"labels", "profiler_step"}
"""Dialects of programs that serve: their settings are their own, none of this tool's."""
