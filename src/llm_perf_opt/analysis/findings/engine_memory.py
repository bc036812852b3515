"""Rules on the bytes and kernels of an engine: formats of cache and weights, attention, shared prompts, speculation."""

from dataclasses import replace

from llm_perf_opt.analysis.cost_model.cost import Formats
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence, repeats_of, unit_roofline
from llm_perf_opt.analysis.findings.decode_cost import Decode, decode_of, rooflines
from llm_perf_opt.analysis.findings.finding import (
    ATTENTION,
    Claim,
    Grounds,
    finding,
    largest_saving,
    place_of,
    saving_of,
    unit_time,
    wall_clock_saving,
)
from llm_perf_opt.analysis.findings.remedies import (
    WORTHWHILE,
    fixed_prefill_ns,
    implied_settings,
    implied_step_ns,
    products_ns,
    remedy_of,
    saving_in,
    to_try,
)
from llm_perf_opt.analysis.kernels.classes import KernelClass
from llm_perf_opt.analysis.separable import stages_unavailable
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import PREFILL
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.remedy_records import EngineRemedy, Remedy
from llm_perf_opt.core.units import duration, percentage

QUANTIZED = ("attention_projections", "mlp", "experts", "shared_experts")
"""Components that engines quantize while they load; the LM head, the router and the embedding stay."""
FAR = 2.0
"""From this many times its roofline time on, attention is far from it."""
ACCEPTED = 0.25
"""Share of proposed tokens that is assumed to be accepted. Nothing in a run shows it: it is low, so that surer changes rank
first, and the bounds range from none to all."""
HARDLY_LONGER = 0.25
"""A step that verifies proposals may be this much longer; beyond it, decode is not memory-bound enough to speculate."""
_PRODUCTS = (KernelClass.GEMM, KernelClass.GEMV)


def wide_cache(evidence: Evidence) -> Finding | None:
    """Decode attention reads a KV cache in a wide format; a narrower one is fewer bytes."""
    remedy, found = remedy_of(evidence, Remedy.CACHE_FORMAT), decode_of(evidence)
    if remedy is None or found is None:
        return None
    return _format_finding(
        found,
        "wide_cache",
        remedy,
        replace(found.formats, kv=_NARROW.get(round(remedy.after), found.formats.kv)),
        (KernelClass.ATTENTION,),
        ("cached keys and values", f"Store the KV cache in {remedy.after:.0f} bits"),
    )


def wide_weights(evidence: Evidence) -> Finding | None:
    """Decode reads its weights in a wide format; quantized ones are fewer bytes."""
    remedy, found = remedy_of(evidence, Remedy.WEIGHT_FORMAT), decode_of(evidence)
    if remedy is None or found is None:
        return None
    return _format_finding(
        found,
        "wide_weights",
        remedy,
        replace(found.formats, quantized=QUANTIZED, quantized_bits=remedy.after),
        _PRODUCTS,
        ("weights", f"Quantize the weights to {remedy.after:.0f} bits"),
    )


def slow_attention(evidence: Evidence) -> Finding | None:
    """Attention kernels are far from their roofline time, and the engine has other kernels."""
    remedy = remedy_of(evidence, Remedy.ATTENTION)
    if remedy is None:
        return None
    found = (_attention_above_roofline(evidence, stage, remedy) for stage in evidence.stages)
    return largest_saving([each for each in found if each is not None])


def _attention_above_roofline(evidence: Evidence, stage: StageEvidence, remedy: EngineRemedy) -> Finding | None:
    least = unit_roofline(stage.name, stage.unit, stage.units, evidence.facts)
    if isinstance(least, Missing):
        return None
    spent = sum(row.total_ns for row in stage.kernels if row.kind is KernelClass.ATTENTION) * stage.overlap
    core = sum(part.seconds for part in least[1].components if part.name == "attention_core")
    roofline = core * 1e9 * repeats_of(stage.name, stage.units)
    above = spent - roofline
    if not roofline or spent < FAR * roofline or above / 2 < WORTHWHILE * stage.budget.wall_ns:
        return None
    on_wall = wall_clock_saving(stage, (0, above / 2, above))
    because = "how fast the other kernels are is unknown; the expected saving is half of the time above roofline"
    claim: Claim = (
        f"Attention of {stage.name} takes {unit_time(stage, spent)} per {stage.unit}, {spent / roofline:.1f} × roofline "
        f"({unit_time(stage, roofline)}).",
        on_wall.claim,
    )
    rows = (remedy.now, f"{percentage(spent / stage.budget.wall_ns)} of {stage.name}")
    grounds = Grounds(rows, "low", f"{because}; {on_wall.because}" if on_wall.because else because)
    saving = saving_of(stage, *on_wall.bounds)
    return finding(
        "slow_attention",
        place_of(evidence, stage),
        claim,
        grounds,
        saving,
        to_try(remedy, "Try another attention backend", ATTENTION),
    )


def unshared_prefix(evidence: Evidence) -> Finding | None:
    """Prompts of the batch begin alike, and the engine computes the common tokens for each."""
    timings, remedy = evidence.facts.timings, remedy_of(evidence, Remedy.PREFIX_CACHE)
    if isinstance(timings, Missing) or remedy is None or not timings.iterations or stages_unavailable(timings):
        return None
    total, left = round(remedy.before), round(remedy.after)
    wall = percentile([iteration.prefill_ns for iteration in timings.iterations], 0.5)
    growing = max(wall - fixed_prefill_ns(evidence), 0.0)
    then, now = (products_ns(evidence, [tokens]) for tokens in (left, total))
    gone = 1 - then / now if then and now else 1 - left / total
    saved = growing * gone
    if saved < WORTHWHILE * wall:
        return None
    return finding(
        "unshared_prefix",
        (PREFILL, 1),
        (
            f"{total - left:,} of {total:,} prompt tokens repeat the beginning of another prompt, and all are computed.",
            "A prefix cache computes them once.",
        ),
        Grounds(
            (
                remedy.now,
                f"prefill: {duration(wall, 3)}, of which {duration(growing, 3)} depends on the number of tokens",
                f"without the repeated tokens, that part takes {percentage(1 - gone)} at the peaks of the device"
                if then and now
                else f"{percentage(left / total)} of the tokens are left",
            ),
            "medium" if then and now else "low",
            "only prompts of this batch are counted; prompts of other requests may share more",
        ),
        saving_in(wall, (saved / 2, saved, max(wall * (1 - left / total), saved)), PREFILL),
        to_try(remedy, "Cache shared prompts"),
    )


def one_token_per_step(evidence: Evidence) -> Finding | None:
    """Decode reads the weights for one token per sequence; speculation verifies several in almost the same time."""
    remedy, found = remedy_of(evidence, Remedy.SPECULATION), decode_of(evidence)
    if remedy is None or found is None:
        return None
    stage, work, most = found.stage, found.work, round(remedy.after)
    now, then = (
        found.roofline([Step(work.batch_size, tokens, work.padded_tokens, "all")], found.formats) for tokens in (1, most)
    )
    if now is None or then is None or now.bound != "memory" or then.seconds > (1 + HARDLY_LONGER) * now.seconds:
        return None
    longer = then.seconds / now.seconds
    accepted = sum(ACCEPTED**number for number in range(most))
    settings = implied_settings(evidence, remedy)
    implied = implied_step_ns(evidence, settings)
    added = 0.0 if isinstance(implied, Missing) else implied
    wall = stage.budget.wall_ns
    verifying = wall * longer + added * stage.units
    if wall - verifying / accepted < WORTHWHILE * wall:
        return None
    bounds = (0, wall - verifying / accepted, wall - verifying / most)
    saving = saving_of(stage, *bounds, kept=longer / accepted)
    rows = [
        remedy.now,
        f"roofline time of a step with 1 and {most} tokens per sequence: {duration(now.seconds * 1e9, 3)} and "
        f"{duration(then.seconds * 1e9, 3)}",
    ]
    if added and not isinstance(settings, Missing):
        rows.append(f"{', '.join(settings)}, measured with the other changes of a profiled pass: {duration(added, 3)} per token")
    return finding(
        "one_token_per_step",
        place_of(evidence, stage),
        (
            f"A decode step takes {duration(stage.wall_ns, 3)} for one token of each sequence; for {most} tokens, its roofline "
            f"time, which is memory traffic, is {longer:.2f} × as long.",
            f"If {percentage(ACCEPTED)} of the proposed tokens are accepted, a token takes about "
            f"{unit_time(stage, verifying / accepted)}. If none are, it takes {unit_time(stage, verifying)} or more.",
        ),
        Grounds(tuple(rows), "low", _about_speculation(evidence, implied)),
        replace(saving, counted=0),  # with several tokens at once, only decode as a whole is timed
        to_try(remedy, "Decode speculatively"),
    )


def _about_speculation(evidence: Evidence, implied: Maybe[float]) -> str:
    """Return why a prediction of speculation is uncertain."""
    reasons = ["the share of accepted tokens depends on the text and is not known; proposing them takes time, too"]
    if isinstance(implied, Missing):
        reasons.append(implied.why)
    if evidence.facts.setting("model.source") == "random":
        reasons.append("the model has random weights, whose answers say nothing about real ones")
    return "; ".join(reasons)


# --- decode by the cost model -----------------------------------------------------------------------------------------


_NARROW = {8: "fp8", 4: "fp4"}
"""Bits → the format that the cost model counts."""


def _format_finding(
    decode: Decode, id: str, remedy: EngineRemedy, formats: Formats, kinds: tuple[KernelClass, ...], words: tuple[str, str]
) -> Finding | None:
    """Return the finding that fewer bytes take less time: by the cost model at the peaks, and at most by the kernels' time."""
    stage = decode.stage
    now, then = (decode.roofline(decode.steps, each) for each in (decode.formats, formats))
    if now is None or then is None:
        return None
    saved = (now.seconds - then.seconds) * 1e9
    kernels = sum(row.total_ns for row in stage.kernels if row.kind in kinds)
    on_wall = wall_clock_saving(stage, (0, saved, max(kernels * (1 - remedy.after / remedy.before), saved)))
    if on_wall.bounds[1] < WORTHWHILE * stage.budget.wall_ns:
        return None
    moved, title = words
    claim: Claim = (
        f"A decode step reads its {moved} in {remedy.before:.0f} bits; in {remedy.after:.0f} bits, its roofline time is "
        f"{percentage(1 - then.seconds / now.seconds)} shorter.",
        on_wall.claim,
    )
    because = (
        "the saving is the time that the saved bytes take at the device's bandwidth; conversions take time, and other kernels "
        "run, which may be no faster"
    )
    rows = (remedy.now, rooflines(stage, now, then, f"{remedy.before:.0f} and {remedy.after:.0f} bits"))
    grounds = Grounds(rows, "medium", f"{because}; {on_wall.because}" if on_wall.because else because)
    place, saving = place_of(decode.evidence, stage), saving_of(stage, *on_wall.bounds)
    return finding(id, place, claim, grounds, saving, to_try(remedy, title))
