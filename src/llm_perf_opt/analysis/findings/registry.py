"""Every rule, and the findings ranked by the wall-clock time they save in a request.

Savings overlap, because two findings may claim the same gap. They are never added.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from llm_perf_opt.analysis.evidence import Evidence
from llm_perf_opt.analysis.findings import compiled, cpu, device, engine, engine_memory, host, kernels, trust
from llm_perf_opt.analysis.findings.finding import Kind, without_overrides
from llm_perf_opt.analysis.findings.remedies import of_engine
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing

Rule = Callable[[Evidence], Finding | None]

RULES: list[Rule] = [
    host.launch_bound_decode,
    host.launch_bound_prefill,
    host.host_between_steps,
    host.syncs_per_step,
    host.allocations_in_the_loop,
    host.copies_from_the_host,
    kernels.cache_concatenation,
    kernels.unfused_elementwise,
    kernels.products_without_tensor_cores,
    kernels.math_attention,
    kernels.logits_for_the_whole_prompt,
    device.low_occupancy,
    device.wave_tail,
    device.small_batch,
    compiled.slow_products,
    compiled.separate_projections,
    compiled.slow_decode_attention,
    compiled.many_small_kernels,
    compiled.eight_bit_weights,
    compiled.four_bit_weights,
    cpu.framework_bound_decode,
    cpu.slow_dtype,
    cpu.int8_weights,
    cpu.thread_count,
    cpu.growing_cache,
    cpu.unfused_attention,
    cpu.small_batch_on_cpu,
    engine.unoverlapped_scheduling,
    engine.eager_engine,
    engine.piecewise_graphs,
    engine.uncaptured_batch,
    engine.split_prefill,
    engine.held_back_sequences,
    engine_memory.wide_cache,
    engine_memory.wide_weights,
    engine_memory.slow_attention,
    engine_memory.unshared_prefix,
    engine_memory.one_token_per_step,
    trust.throttled,
    trust.noisy_machine,
    trust.profiler_inflation,
    trust.passes_disagree,
]
"""Every rule. To add a finding, write its function in this folder and list it here."""

_OWN_SETTINGS = tuple(
    f"runtime.{name}="
    for name in (
        "cache",
        "compile",
        "attn_implementation",
        "quantization",
        "attention_backend",
        "compile_prefill",
        "coordinate_descent_tuning",
        "fuse_projections",
        "row_kernel",
    )
)
"""Settings that only this runtime has."""
_EVERYWHERE = (kernels.products_without_tensor_cores, device.small_batch, cpu.small_batch_on_cpu)
_ABOUT_PYTORCH = {module.__name__ for module in (compiled, cpu, device, host, kernels)}
_FOR_PYTORCH = frozenset(rule for rule in RULES if rule.__module__ in _ABOUT_PYTORCH and rule not in _EVERYWHERE)
"""Rules whose advice is about PyTorch code and settings, which the user of an engine cannot change."""

_OF_ONE_RANK = frozenset(rule for rule in RULES if rule.__module__ in (cpu.__name__, host.__name__) and rule not in _EVERYWHERE)
"""Rules that predict host time. A rank also waits for the others, which they would take for time that can be saved."""

_ORDER = {kind.value: place for place, kind in enumerate(Kind)}


def find(evidence: Evidence) -> tuple[Finding, ...]:
    """Return all findings: latency changes by their saving, then throughput changes, then reasons to measure again."""
    several = (evidence.facts.setting("runtime.tensor_parallel") or 1) > 1
    skipped = _FOR_PYTORCH if of_engine(evidence) else _OF_ONE_RANK if several else frozenset()
    results = [rule(evidence) for rule in RULES if rule not in skipped]
    found = [_with_confidence(_applicable(result, evidence), evidence) for result in results if result is not None]
    return tuple(sorted(found, key=lambda finding: (_ORDER[finding.kind], -finding.weight_ns)))


def _is_program(config: Mapping[str, Any] | None) -> bool:
    """Return whether the settings are those of a user's program, which has no runtime."""
    return bool(config) and "runtime" not in (config or {})


def _applicable(finding: Finding, evidence: Evidence) -> Finding:
    """Return the finding without overrides that this program or run does not accept; the change in words remains."""
    overrides, config = finding.overrides, evidence.facts.config
    if not overrides:
        return finding
    if evidence.facts.setting("runtime.type") is None and (_is_program(config) or of_engine(evidence)):
        return without_overrides(finding)  # a program or an engine that was started otherwise has no settings of llm-perf
    if not evidence.facts.own_runtime and any(override.startswith(_OWN_SETTINGS) for override in overrides):
        return without_overrides(finding)
    error = _rejection(config, overrides) if config else None
    if error is None:
        return finding
    return without_overrides(finding, f" This run does not accept {' '.join(overrides)}: {error.fact}")


def _rejection(config: Mapping[str, Any], overrides: Sequence[str]) -> ConfigError | None:
    """Return why the run's configuration rejects the overrides; None if it accepts them or is invalid without them."""
    from llm_perf_opt.config.composition import with_overrides  # a trace without a run needs no configuration

    try:
        with_overrides(config, ())
    except ConfigError:
        return None  # from another version, or incomplete: it cannot be checked
    try:
        with_overrides(config, overrides)
    except ConfigError as error:
        return error
    return None


_LOWER = {"high": "medium", "medium": "low", "low": "low"}


def _with_confidence(finding: Finding, evidence: Evidence) -> Finding:
    """Lower the confidence if the unprofiled times behind the saving did not reach their spread target."""
    timings, stage = evidence.facts.timings, evidence.figures(finding.stage)
    has_effect = finding.throughput is not None or bool(finding.saving_high_ns)
    if isinstance(timings, Missing) or timings.stable or not has_effect:
        return finding
    if stage is None or not stage.unprofiled:
        return finding
    why = f"{finding.because}; the unprofiled repeats did not reach their spread target"
    return msgspec.structs.replace(finding, confidence=_LOWER[finding.confidence], because=why)
