"""What to change first: every rule over the evidence, ranked by the wall-clock time it saves in a request.

Savings of different findings overlap: the same gap may be claimed by two. They are never added up.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from llm_perf_opt.analysis.evidence import Evidence
from llm_perf_opt.analysis.findings.device import low_occupancy, small_batch, wave_tail
from llm_perf_opt.analysis.findings.finding import Kind, without_overrides
from llm_perf_opt.analysis.findings.kernels import (
    cache_concatenation,
    logits_for_the_whole_prompt,
    math_attention,
    products_without_tensor_cores,
    unfused_elementwise,
)
from llm_perf_opt.analysis.findings.launching import (
    allocations_in_the_loop,
    copies_from_the_host,
    host_between_steps,
    launch_bound_decode,
    launch_bound_prefill,
    syncs_per_step,
)
from llm_perf_opt.analysis.findings.trust import noisy_machine, passes_disagree, profiler_inflation, throttled
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.labels import engine_dialects
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing

Rule = Callable[[Evidence], Finding | None]

RULES: list[Rule] = [
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
]
"""Every rule. To add a finding, write its function in this folder and name it here."""

_OWN_RUNTIME = "pytorch"
_OF_OWN_RUNTIME = ("runtime.cache=", "runtime.compile=", "runtime.attn_implementation=")
"""Settings that only the runtime stepped by this program has."""

_ORDER = {kind.value: place for place, kind in enumerate(Kind)}


def find(evidence: Evidence) -> tuple[Finding, ...]:
    """What the rules find: changes for latency by their saving, then for throughput, then reasons to measure again."""
    found = [_as_sure(_fitting(one, evidence), evidence) for rule in RULES if (one := rule(evidence)) is not None]
    return tuple(sorted(found, key=lambda one: (_ORDER[one.kind], -one.weight_ns)))


def _fitting(finding: Finding, evidence: Evidence) -> Finding:
    """Without overrides that this program or this run does not take: then the change in words is what to try."""
    overrides, config = finding.overrides, evidence.facts.config
    if not overrides:
        return finding
    runtime = evidence.facts.setting("runtime.type")
    if runtime is None and evidence.method.split(",")[0] in engine_dialects():
        return without_overrides(finding)
    if runtime not in (None, _OWN_RUNTIME) and any(override.startswith(_OF_OWN_RUNTIME) for override in overrides):
        return without_overrides(finding)
    refused = _refusal(config, overrides) if config else None
    if refused is None:
        return finding
    return without_overrides(finding, f" This run does not take {' '.join(overrides)}: {refused.fact}")


def _refusal(config: Mapping[str, Any], overrides: Sequence[str]) -> ConfigError | None:
    """Why the run's configuration does not take them; None where it does, or would be refused without them, too."""
    from llm_perf_opt.config.composition import with_overrides  # the trace of another program needs no configuration

    try:
        with_overrides(config, ())
    except ConfigError:
        return None  # of another version, or a part of one: it cannot be asked
    try:
        with_overrides(config, overrides)
    except ConfigError as error:
        return error
    return None


_LOWER = {"high": "medium", "medium": "low", "low": "low"}


def _as_sure(finding: Finding, evidence: Evidence) -> Finding:
    """No surer than the unprofiled times that its saving is taken from: less so where their spread target was not reached."""
    timings, stage = evidence.facts.timings, evidence.stage(finding.stage)
    promises = finding.throughput is not None or bool(finding.saving_high_ns)
    if isinstance(timings, Missing) or timings.stable or not promises:
        return finding
    if stage is None or not stage.unprofiled:
        return finding
    why = f"{finding.because}; the unprofiled repeats did not reach their spread target"
    return msgspec.structs.replace(finding, confidence=_LOWER[finding.confidence], because=why)
