"""What to change first: every rule over the evidence, ranked by the wall-clock time it saves in a request.

Savings of different findings overlap: the same gap may be claimed by two. They are never added up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llm_perf_opt.analysis.evidence import Evidence
from llm_perf_opt.analysis.finding import Confidence, Finding, Kind, Saving, ToTry
from llm_perf_opt.analysis.rules.device import low_occupancy, small_batch, wave_tail
from llm_perf_opt.analysis.rules.host import allocations_in_the_loop, copies_from_the_host, syncs_per_step
from llm_perf_opt.analysis.rules.kernels import (
    cache_concatenation,
    logits_for_the_whole_prompt,
    math_attention,
    products_without_tensor_cores,
    unfused_elementwise,
)
from llm_perf_opt.analysis.rules.launching import host_between_steps, launch_bound_decode, launch_bound_prefill
from llm_perf_opt.analysis.rules.trust import noisy_machine, passes_disagree, profiler_inflation, throttled
from llm_perf_opt.analysis.trace.labels import engine_dialects
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing

__all__ = ["RULES", "Finding", "Kind", "Rule", "Saving", "ToTry", "find"]

Rule = Callable[[Evidence], Finding | None]

RULES: tuple[Rule, ...] = (
    launch_bound_decode,
    launch_bound_prefill,
    host_between_steps,
    syncs_per_step,
    allocations_in_the_loop,
    copies_from_the_host,
    cache_concatenation,
    unfused_elementwise,
    products_without_tensor_cores,
    math_attention,
    logits_for_the_whole_prompt,
    low_occupancy,
    wave_tail,
    small_batch,
    throttled,
    noisy_machine,
    profiler_inflation,
    passes_disagree,
)

_OWN_RUNTIME = "pytorch"
_OF_OWN_RUNTIME = ("runtime.cache=", "runtime.compile=", "runtime.attn_implementation=")
"""Settings that only the runtime stepped by this program has."""

_ORDER = {kind: place for place, kind in enumerate(Kind)}


def find(evidence: Evidence) -> tuple[Finding, ...]:
    """What the rules find: changes for latency by their saving, then for throughput, then reasons to measure again."""
    found = [_as_sure(_fitting(finding, evidence), evidence) for rule in RULES if (finding := rule(evidence)) is not None]
    return tuple(sorted(found, key=lambda one: (_ORDER[one.kind], -one.weight_ns)))


def _fitting(finding: Finding, evidence: Evidence) -> Finding:
    """Without overrides that this program or this run does not take: then the change in words is what to try."""
    overrides, config = finding.to_try.overrides, evidence.facts.config
    if not overrides:
        return finding
    runtime = evidence.facts.setting("runtime.type")
    if runtime is None and evidence.method.split(",")[0] in engine_dialects():
        return _in_words(finding)
    if runtime not in (None, _OWN_RUNTIME) and any(override.startswith(_OF_OWN_RUNTIME) for override in overrides):
        return _in_words(finding)
    why = _refusal(config, overrides) if config else ""
    return _in_words(finding, f" This run does not take {' '.join(overrides)}: {why}") if why else finding


def _in_words(finding: Finding, why: str = "") -> Finding:
    return replace(finding, to_try=ToTry(change=finding.to_try.change + why))


def _refusal(config: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Why the run's configuration does not take them; empty where it does, or would be refused without them, too."""
    from llm_perf_opt.config.composition import with_overrides  # the trace of another program needs no configuration

    try:
        with_overrides(config, ())
    except ConfigError:
        return ""  # of another version, or a part of one: it cannot be asked
    try:
        with_overrides(config, overrides)
    except ConfigError as error:
        return error.fact
    return ""


_LOWER: dict[Confidence, Confidence] = {"high": "medium", "medium": "low", "low": "low"}


def _as_sure(finding: Finding, evidence: Evidence) -> Finding:
    """No surer than the unprofiled times that its saving is taken from: less so where their spread target was not reached."""
    timings, saving, stage = evidence.facts.timings, finding.saving, evidence.stage(finding.stage)
    promises = finding.throughput is not None or (not isinstance(saving, Missing) and bool(saving.high_ns))
    if isinstance(timings, Missing) or timings.stable or not promises:
        return finding
    if stage is None or not stage.unprofiled:
        return finding
    why = f"{finding.because}; the unprofiled repeats did not reach their spread target"
    return replace(finding, confidence=_LOWER[finding.confidence], because=why)
