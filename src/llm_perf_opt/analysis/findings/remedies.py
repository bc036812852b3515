"""What the rules on engines share: the changes that an engine accepts, and the cost of prefill by its number of tokens.

An engine's runner records which of its arguments could be changed (`EngineRemedy`). The rules decide whether that would help.
"""

import re
from collections.abc import Sequence

from llm_perf_opt.analysis.cost_model.cost import step_cost
from llm_perf_opt.analysis.cost_model.models import architecture_that_ran
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.evidence import Evidence
from llm_perf_opt.analysis.findings.finding import Bounds, PredictedTime, Saving, ToTry
from llm_perf_opt.analysis.limits.efficiency import formats_of
from llm_perf_opt.analysis.limits.hardware import devices_of
from llm_perf_opt.analysis.limits.peaks import best_roofline_time, peaks_of
from llm_perf_opt.analysis.trace.labels import is_engines
from llm_perf_opt.analysis.trace.operator_classes import HostRow
from llm_perf_opt.analysis.trace.stage_instances import PREFILL
from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.remedy_records import EngineRemedy, Remedy

WORTHWHILE = 0.05
"""The least share of a stage that a change must save to be a finding."""
_PER_STEP = (HostRow.FRAMEWORK, HostRow.PYTHON)
"""On a CPU, what a step costs whatever it computes."""
_UNKNOWN = "the arguments of the engine are unknown"
_IN_WORDS = {
    Remedy.OVERLAP: "If the engine can, let it schedule the next step while one runs.",
    Remedy.GRAPHS: "Let the engine run decode in CUDA graphs: do not force eager mode, and capture this batch size.",
}
"""Changes for the trace of an engine without its run."""


def of_engine(evidence: Evidence) -> bool:
    """Return whether an engine ran the model, whose code its user does not change: by the run's configuration, or else by the
    labels of the trace. A runtime that llm-perf steps is none, even if it is another package's."""
    runtime = evidence.facts.setting("runtime.type")
    if runtime is None:
        return is_engines(evidence.method.split(",")[0])
    return not evidence.facts.own_runtime and traits_of(str(runtime)).steppable is not True


def remedy_of(evidence: Evidence, kind: Remedy) -> EngineRemedy | None:
    """Return how the engine of the run can be changed in this way; None if it cannot, or already does it."""
    timings = evidence.facts.timings
    if isinstance(timings, Missing):
        words = _IN_WORDS.get(kind) if of_engine(evidence) else None
        return EngineRemedy(kind.value, (), words, _UNKNOWN) if words else None
    runtime = timings.runtime
    return next((remedy for remedy in runtime.remedies if remedy.kind == kind.value), None) if runtime else None


def to_try(remedy: EngineRemedy, title: str, concerns: tuple[str, ...] = ()) -> ToTry:
    """Return what to try, with its condition and its effect on the output."""
    altered = "The output changes: a trial measures the time, not the quality of the answers." if remedy.alters_output else ""
    return ToTry(remedy.overrides, " ".join(text for text in (remedy.change, remedy.condition, altered) if text), title, concerns)


def implied_settings(evidence: Evidence, remedy: EngineRemedy) -> Maybe[tuple[str, ...]]:
    """Return what the engine changes with a change, as NAME=VALUE.

    For runs that did not record it: what the condition names, if a profiled pass changed it, too.
    """
    if remedy.implied is not None:
        return remedy.implied
    made = dict.fromkeys(setting for entry in evidence.facts.overheads if entry.changes for setting in entry.changes.settings)
    named = tuple(f"{each.name}={each.value}" for each in made if re.search(rf"\b{re.escape(each.name)}\b", remedy.condition))
    return named or Missing("the run did not record what else the engine changes with it")


def implied_step_ns(evidence: Evidence, settings: Maybe[tuple[str, ...]]) -> Maybe[float]:
    """Return what the settings that a change implies add to a decode step, by the pass that measured them; 0 if none are.

    The pass measures all of its changes together. If these make a step shorter, the change gets no credit for that.
    """
    if isinstance(settings, Missing) or not settings:
        return settings if isinstance(settings, Missing) else 0.0
    for entry in evidence.facts.overheads:
        made = {f"{setting.name}={setting.value}" for setting in entry.changes.settings} if entry.changes else set()
        if entry.changes and made.issuperset(settings) and not isinstance(entry.changes.added_step, Missing):
            added = entry.changes.added_step
            return max(added.ns, 0.0) if added.distinguishable else 0.0
    return Missing(f"what {', '.join(settings)} costs was not measured")


def products_ns(evidence: Evidence, tokens: Sequence[int]) -> float | None:
    """Return the roofline time of prefill steps of so many tokens, without attention; None if it is unknown.

    Attention does not depend on how the tokens are split.
    """
    timings, facts = evidence.facts.timings, evidence.facts
    if isinstance(timings, Missing) or (timings.runtime is not None and timings.runtime.uncosted):
        return None
    try:
        architecture = architecture_that_ran(timings.model)
    except ConfigError:
        return None
    formats = formats_of(timings.model)
    peak_sets = peaks_of(timings, devices_of(timings), formats.weights, facts.hardware, facts.ceilings)
    found = [best_roofline_time(step_cost(architecture, Step(1, count), formats), peak_sets) for count in tokens]
    times = [time[1].components for time in found if not isinstance(time, Missing)]
    if len(times) < len(found):
        return None
    return 1e9 * sum(part.seconds for parts in times for part in parts if part.name != "attention_core")


def fixed_prefill_ns(evidence: Evidence) -> float:
    """Return the part of the prefill's time that does not depend on its tokens: idle, or framework and Python on a CPU."""
    on_gpu, on_cpu = evidence.stage(PREFILL), evidence.cpu_stage(PREFILL)
    if on_gpu is not None and on_gpu.unprofiled:
        return max(on_gpu.per_unit(on_gpu.budget.idle_ns), 0.0)
    if on_cpu is not None and on_cpu.unprofiled:
        return on_cpu.per_unit(sum(on_cpu.rows.get(row, 0) for row in _PER_STEP))
    return 0.0


def saving_in(wall_ns: float, bounds: Bounds, unit: str) -> Saving:
    """Return a saving in a time of the unprofiled pass; the time after it is a share of that time."""
    low, expected, high = (round(min(max(value, 0.0), wall_ns)) for value in bounds)
    before = round(wall_ns)
    after = PredictedTime(before - expected, before - high, before - low, before, kept=1 - expected / max(before, 1))
    return Saving(expected, low, high, unit, 0, after)
