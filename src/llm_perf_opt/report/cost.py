"""The cost of a model as text: what each part computes and moves, and the least time it takes on given hardware."""

from collections.abc import Sequence

from llm_perf_opt.analysis.cost_model.cost import ModelCost, StageCost
from llm_perf_opt.analysis.limits.floor import Floor, TurningPoint, WhatIf
from llm_perf_opt.analysis.limits.hardware import Hardware
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.text import columns, count, milliseconds, percent, significant


def cost_page(cost: ModelCost) -> str:
    """Parameters, cache, and both stages part by part."""
    architecture = cost.architecture
    latent = f", latent attention {cost.formats.mla}" if architecture.has_latent_attention else ""
    decoder = f" ({_decoder_of(architecture.part_of)})" if architecture.part_of else ""
    lines = [
        f"{architecture.model_type}{decoder}: {count(architecture.params)} parameters "
        f"({count(architecture.active_params)} active per token), "
        f"weights {cost.formats.weights}, cache {cost.formats.kv}{latent}",
        f"cache: {cost.kv_bytes_per_token:,} bytes per token and sequence",
        "",
        _stage(f"prefill: batch {cost.batch} × {cost.prompt} tokens, logits for the last", cost.prefill),
        _stage(f"decode: one step, batch {cost.batch} on {cost.context} cached tokens", cost.decode),
        "FLOPs: matrix products, a multiply-add counts 2, attention causal. Bytes: the least that must be moved.",
    ]
    rows = architecture.position_rows
    if rows and max(cost.prompt, cost.context + 1) > rows:
        lines.append(
            f"The model has {rows:,} learned positions: it cannot run sequences this long, the figures are arithmetic alone."
        )
    return "\n".join(lines)


def _decoder_of(model_type: str) -> str:
    return f"the text decoder of {model_type}; the rest is not counted"


def what_if_page(rows: Sequence[WhatIf], turning: Sequence[TurningPoint], hardware: Hardware, part_of: str | None = None) -> str:
    """The floor for every combination asked for, and where decode turns."""
    body = [
        [
            row.formats.weights,
            row.formats.kv,
            f"{row.batch:,}",
            f"{row.prompt:,}",
            f"{row.context:,}",
            f"{(row.weight_bytes + row.kv_cache_bytes) / 1e9:.1f} GB",
            {True: "yes", False: "no"}.get(row.fits, "?") if isinstance(row.fits, bool) else "?",
            _floor(row.prefill),
            _bound(row.prefill),
            _floor(row.decode),
            _bound(row.decode),
            _rate(row.decode_tokens_per_s),
        ]
        for row in rows
    ]
    header = [
        "dtype",
        "cache",
        "batch",
        "prompt",
        "context",
        "memory",
        "fits",
        "prefill ≥",
        "bound by",
        "step ≥",
        "bound by",
        "tokens/s ≤",
    ]
    lines = [
        f"{hardware.name}: {hardware.bandwidth_bytes_per_s / 1e12:.3g} TB/s, "
        + ", ".join(f"{dtype} {peak.flops_per_s / 1e12:,.4g}" for dtype, peak in hardware.peaks.items())
        + f" TFLOP/s dense ({hardware.source})",
        *([f"Floors of {_decoder_of(part_of)}."] if part_of else []),
        "",
        columns(header, body, "llrrrrlrlrlr"),
        *[_turning(point) for point in turning],
        "Floor: sum over parts of the longer of FLOPs / peak and bytes / bandwidth. Nothing real is faster.",
    ]
    missing = next((row.decode for row in rows if isinstance(row.decode, Missing)), None)
    return "\n".join([*lines, *([str(missing)] if missing else [])])


def _stage(title: str, stage: StageCost) -> str:
    body = [
        [
            part.name,
            significant(part.flops / 1e9),
            percent(part.flops / stage.flops),
            significant(part.bytes / 1e6),
            percent(part.bytes / stage.bytes),
        ]
        for part in stage.parts
    ]
    body.append(["total", significant(stage.flops / 1e9), "", significant(stage.bytes / 1e6), ""])
    whole = significant(stage.flops_full_attention / 1e9)
    lines = [
        title,
        columns(["part", "GFLOP", "share", "MB", "share"], body, "lrrrr"),
        f"whole attention: {whole} GFLOP · arithmetic intensity {significant(stage.flops_per_byte)} FLOP/byte",
        "",
    ]
    return "\n".join(lines)


def _floor(value: Maybe[Floor]) -> str:
    return "n/a" if isinstance(value, Missing) else milliseconds(value.seconds * 1e9)


def _bound(value: Maybe[Floor]) -> str:
    return "n/a" if isinstance(value, Missing) else value.bound


def _rate(value: Maybe[float]) -> str:
    return "n/a" if isinstance(value, Missing) else significant(value)


def _turning(point: TurningPoint) -> str:
    def said(value: Maybe[int]) -> str:
        return value.why if isinstance(value, Missing) else f"batch {value:,}"

    return (
        f"decode at context {point.context:,}, {point.formats.weights}: "
        f"the whole step turns compute-bound at: {said(point.step)}; "
        f"its weight matrices alone at: {said(point.weights)}"
    )
