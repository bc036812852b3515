"""The report of `llm-perf cost`: FLOPs and bytes of each component, and roofline times on given hardware."""

from collections.abc import Sequence

from llm_perf_opt.analysis.cost_model.architecture import Architecture
from llm_perf_opt.analysis.cost_model.cost import ModelCost, StageCost
from llm_perf_opt.analysis.limits.hardware import Hardware
from llm_perf_opt.analysis.limits.roofline import RooflineTime, TurningPoint, WhatIf
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.vision_records import VisionInput
from llm_perf_opt.report.document import Block, Cell, Column, Document, Paragraph, Section, Table, cell, count_cell, numbers
from llm_perf_opt.report.text import bytes_per_s, count, duration, flops, flops_per_s, moved_bytes, percent, significant, then

_ABOUT_COST = (
    "FLOPs are those of matrix products with causal attention; a multiply-add counts as 2. Bytes are the minimum that must be "
    "moved."
)
_ABOUT_TIME = (
    "The roofline time is the sum over components of the larger of FLOPs / peak and bytes / bandwidth. No real run is faster."
)


def cost_document(cost: ModelCost) -> Document:
    """Return the parameters, the cache, and both stages by component."""
    architecture = cost.architecture
    latent = f", latent attention {cost.formats.mla}" if architecture.has_latent_attention else ""
    title = (
        f"{_name(architecture)}: {count(architecture.params)} parameters "
        f"({count(architecture.active_params)} active per token), weights {cost.formats.weights}, cache {cost.formats.kv}{latent}"
    )
    blocks: list[Block] = [
        *([_modules(cost, cost.images)] if cost.images else []),
        _stage("prefill", f"prefill: batch {cost.batch} × {cost.prompt} tokens, logits for the last", cost.prefill),
        _stage("decode", f"decode: one step, batch {cost.batch} on {cost.context} cached tokens", cost.decode),
        Paragraph(_ABOUT_COST),
        *(Paragraph(caveat) for caveat in architecture.caveats),
    ]
    rows = architecture.position_rows
    if rows and max(cost.prompt, cost.context + 1) > rows:
        blocks.append(Paragraph(f"The model has {rows:,} learned positions: it cannot run sequences this long."))
    return Document(title, f"cache: {cost.kv_bytes_per_token:,} bytes per token and sequence", "", _apart(blocks))


def what_if_document(
    rows: Sequence[WhatIf], turning: Sequence[TurningPoint], hardware: Hardware, part_of: str | None = None
) -> Document:
    """Return the roofline time of every combination, and where decode becomes compute-bound."""
    peaks = ", ".join(f"{dtype} {flops_per_s(peak.flops_per_s)}" for dtype, peak in hardware.peaks.items())
    title = f"{hardware.name}: {bytes_per_s(hardware.bandwidth_bytes_per_s)}, dense {peaks} ({hardware.source})"
    subtitle = f"Roofline times of {_decoder_of(part_of)}." if part_of else ""
    blocks: list[Block] = [_what_if(rows), *[Paragraph(_turning(point)) for point in turning], Paragraph(_ABOUT_TIME)]
    return Document(title, subtitle, "", [Section("what-if", "", blocks)])


def _apart(blocks: Sequence[Block]) -> list[Section]:
    """Return a section for each block: the terminal separates sections by an empty line."""
    return [Section(f"block-{number}", "", [block]) for number, block in enumerate(blocks)]


def _name(architecture: Architecture) -> str:
    if architecture.vision_params:
        return f"{architecture.part_of} (text decoder {architecture.model_type})"
    part_of = architecture.part_of
    return f"{architecture.model_type} ({_decoder_of(part_of)})" if part_of else architecture.model_type


def _modules(cost: ModelCost, images: VisionInput) -> Table:
    """Return the modules of the image encoders and the projector, as shares of prefill."""
    columns = [Column("module"), *numbers("FLOPs", "share of prefill", "bytes", "share of prefill")]
    one = "1 image" if images.images == 1 else f"{images.images:,} images"
    title = f"images, part of prefill: {one}, {sum(images.image_tokens):,} tokens"
    table = Table("cost-images", title, columns)
    for path, part in cost.modules:
        shares = (cell(part.flops / cost.prefill.flops, percent), cell(part.bytes / cost.prefill.bytes, percent))
        table.add(path, cell(part.flops, flops), shares[0], cell(part.bytes, moved_bytes), shares[1])
    shapes = (f"{name} {' × '.join(map(str, shape))}" for name, shape in images.pixel_shapes.items())
    table.foot = f"pixels: {', '.join(shapes)}"
    return table


def _decoder_of(model_type: str) -> str:
    return f"the text decoder of {model_type}; the rest is not counted"


def _what_if(rows: Sequence[WhatIf]) -> Table:
    columns = [
        *(Column("dtype"), Column("cache"), *numbers("batch", "prompt", "context", "memory"), Column("fits")),
        *(*numbers("prefill ≥"), Column("bound by"), *numbers("step ≥"), Column("bound by"), *numbers("tokens/s ≤")),
    ]
    table = Table("what-if-table", "", columns)
    for row in rows:
        sizes = [count_cell(number) for number in (row.batch, row.prompt, row.context)]
        table.add(
            row.formats.weights,
            row.formats.kv,
            *sizes,
            cell(row.weight_bytes + row.kv_cache_bytes, moved_bytes),
            cell(row.fits, lambda fitting: "yes" if fitting else "no"),
            *_least(row.prefill),
            *_least(row.decode),
            cell(row.decode_tokens_per_s, significant),
        )
    table.foot = f"fits: weights and KV cache in {rows[0].memory_share * 100:g} % of the nominal memory (--memory-share)"
    return table


def _least(value: Maybe[RooflineTime]) -> list[Cell | Missing]:
    return [cell(then(value, lambda least: least.seconds * 1e9), duration), cell(then(value, lambda least: least.bound))]


def _stage(name: str, title: str, stage: StageCost) -> Table:
    columns = [Column("component"), *numbers("FLOPs", "share", "bytes", "share")]
    table = Table(f"cost-{name}", title, columns)
    for part in stage.components:
        shares = (cell(part.flops / stage.flops, percent), cell(part.bytes / stage.bytes, percent))
        table.add(part.name, cell(part.flops, flops), shares[0], cell(part.bytes, moved_bytes), shares[1])
    table.add("total", cell(stage.flops, flops), "", cell(stage.bytes, moved_bytes), "")
    whole, intensity = flops(stage.flops_full_attention), significant(stage.flops_per_byte)
    table.foot = f"full attention: {whole} · arithmetic intensity {intensity} FLOP/byte"
    return table


def _turning(point: TurningPoint) -> str:
    def batch(value: Maybe[int]) -> str:
        return f"n/a, {value.why}" if isinstance(value, Missing) else f"{value:,}"

    return (
        f"decode at context {point.context:,}, {point.formats.weights}: batch at which the step becomes compute-bound: "
        f"{batch(point.step)}; batch at which its weight matrices alone do: {batch(point.weights)}"
    )
