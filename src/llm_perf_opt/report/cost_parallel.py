"""The part of `llm-perf cost` about several devices: memory, times, communication and pipeline stages."""

from collections.abc import Sequence

from llm_perf_opt.analysis.cost_model.sharding import Plan
from llm_perf_opt.analysis.limits.parallel import ParallelRow, ParallelStep
from llm_perf_opt.core.records import Maybe
from llm_perf_opt.report.document import Column, Document, Paragraph, Section, Table, cell, count_cell, numbers
from llm_perf_opt.report.text import (
    bytes_per_s,
    duration,
    flops,
    grouped,
    memory_size,
    moved_bytes,
    percent,
    significant,
    then,
)

_ABOUT_TIME = (
    "FLOPs/GPU and bytes/GPU are those of the most loaded GPU, sent/GPU is the most that any GPU sends. No GPU is faster than "
    "its roofline time. Communication is added to it: nothing overlaps. MFU compares the model's FLOPs with the peaks of all "
    "GPUs in that time. A run that overlaps communication with computation can be faster than the sum."
)
_ABOUT_STAGES = (
    "With pipeline stages, FLOPs and bytes are those of the slowest stage. The times of all stages are added: one batch is in "
    "the pipeline. Interval: how often a step ends if every stage always has a batch."
)
_ABOUT_COMMUNICATION = (
    "Rings: a device sends 2(N-1)/N of a tensor in an all-reduce and (N-1)/N in an all-gather or reduce-scatter."
)


def parallel_document(rows: Sequence[ParallelRow], model: str) -> Document:
    """Return the plan and its rows for a model of this name; for a single row, also communication and pipeline stages."""
    sections = [Section("parallel-memory", "", [_memory(rows)])]
    plan = rows[0].deployment.plan
    if plan.devices > 1:
        about = [_ABOUT_TIME, *([_ABOUT_STAGES] if plan.pp > 1 else []), *_narrow_links(rows)]
        sections.append(Section("parallel-times", "", [_times(rows), *(Paragraph(text) for text in about)]))
        sections += _details(rows[0]) if len(rows) == 1 else []
    return Document(_title(rows[0], model), "", "", sections)


def _narrow_links(rows: Sequence[ParallelRow]) -> list[str]:
    """Return that the fastest link connects too few GPUs of a node, if a slower one is used for this reason."""
    fastest, *others = rows[0].deployment.fabric.links
    stages = (stage for row in rows for step in (row.prefill, row.decode) for stage in step.stages)
    used = {one.link for stage in stages for one in stage.communication}
    return [
        f"{fastest.name} connects {fastest.gpus} GPUs: others in a node communicate over {link.name}."
        for link in others
        if link in used
    ]


def _title(row: ParallelRow, model: str) -> str:
    deployment = row.deployment
    plan, hardware = deployment.plan, deployment.hardware
    if plan.devices == 1:
        return f"memory of one {hardware.name}"
    parts = [f"tensor parallel {plan.tp}"] if plan.tp > 1 else []
    parts += [f"pipeline parallel {plan.pp}"] if plan.pp > 1 else []
    parts += [f"expert parallel {plan.ep}"] if plan.ep > 1 else []
    parts += [f"{plan.replicas} replicas of the attention"] if plan.replicas > 1 else []
    parts += [f"latent attention {deployment.formats.mla}"] if deployment.architecture.has_latent_attention else []
    return f"{model} on {plan.devices} × {hardware.name}: {', '.join(parts)}"


def _memory(rows: Sequence[ParallelRow]) -> Table:
    columns = [
        *(Column("dtype"), Column("cache"), *numbers("batch", "tokens", "weights", "KV cache", "together", "usable")),
        *(Column("fits"), *numbers("largest batch", "most tokens"), Column("fewest GPUs")),
    ]
    several = rows[0].deployment.plan.devices > 1
    table = Table("parallel-memory", "memory of the fullest device" if several else "", columns)
    for row in rows:
        memory, formats = row.memory, row.deployment.formats
        table.add(
            *(formats.weights, formats.kv, count_cell(row.batch), count_cell(row.tokens)),
            *(cell(size, memory_size) for size in (memory.weight_bytes, memory.kv_cache_bytes)),
            cell(memory.weight_bytes + memory.kv_cache_bytes, memory_size),
            cell(memory.usable_bytes, memory_size),
            cell(memory.fits, lambda fitting: "yes" if fitting else "no"),
            *(cell(found, grouped) for found in (row.largest_batch, row.largest_context)),
            cell(row.smallest, _devices),
        )
    share = f"{rows[0].deployment.memory_share * 100:g} %"
    table.foot = (
        f"usable: {share} of the nominal memory; the rest is for activations and the CUDA context. Largest batch: with this many "
        "tokens per sequence. Most tokens: per sequence, with this batch."
    )
    return table


def _devices(plan: Plan) -> str:
    return f"{plan.devices:,} ({plan.words()})" if plan.devices > 1 else "1"


def _times(rows: Sequence[ParallelRow]) -> Table:
    staged = rows[0].deployment.plan.pp > 1
    roofline = "roofline, all stages ≥" if staged else "roofline ≥"
    columns = [
        *(
            Column("dtype"),
            *numbers("batch", "context"),
            Column("step"),
            *numbers("FLOPs/GPU", "bytes/GPU", "sent/GPU", roofline),
        ),
        *(*numbers("communication", "time", *(["interval"] if staged else [])), Column("bound by"), *numbers("MFU", "tokens/s")),
    ]
    table = Table("parallel-times", "one step", columns)
    for row in rows:
        for name, step in (("prefill", row.prefill), ("decode", row.decode)):
            most = step.most_loaded
            rate: Maybe[float] | str = row.decode_tokens_per_s if name == "decode" else ""
            table.add(
                *(row.deployment.formats.weights, count_cell(row.batch), count_cell(row.context), name),
                *(cell(most.cost.flops, flops), cell(most.cost.bytes, moved_bytes)),
                *(cell(step.sent_bytes, moved_bytes), cell(_ns(step.roofline_s), duration)),
                *(cell(step.communication_s * 1e9, duration), cell(_ns(step.seconds), duration)),
                *([cell(_ns(step.interval_s), duration)] if staged else []),
                *(cell(step.bound), cell(step.mfu(step.seconds), percent)),
                rate if isinstance(rate, str) else cell(rate, significant),
            )
    return table


def _details(row: ParallelRow) -> list[Section]:
    tables = [_stages(row)] if row.deployment.plan.pp > 1 else []
    tables += [_communication(name, step) for name, step in (("prefill", row.prefill), ("decode", row.decode))]
    links = {one.link.name: one.link for step in (row.prefill, row.decode) for one in step.by_collective()}
    notes = [f"{name}: {bytes_per_s(link.bytes_per_s)} per GPU and direction ({link.source})" for name, link in links.items()]
    latency = row.deployment.fabric.latency_s
    counted = f"Each call takes {duration(latency * 1e9)} in addition." if latency else "Latency is not counted."
    about = [Paragraph(text) for text in (*notes, f"{_ABOUT_COMMUNICATION} {counted}")]
    return [*(Section(f"parallel-{table.id}", "", [table]) for table in tables), Section("parallel-about", "", about)]


def _communication(name: str, step: ParallelStep) -> Table:
    stages = ", all stages" if len(step.stages) > 1 else ""
    columns = [
        *(Column("collective"), Column("of"), Column("group"), Column("link"), *numbers("count", "size", f"sent{stages}")),
        *numbers("time"),
    ]
    table = Table(f"parallel-communication-{name}", f"communication of {name}{stages}", columns)
    for one in step.by_collective():
        call = one.collective
        nodes = f" on {one.nodes} nodes" if one.nodes > 1 else ""
        table.add(
            *(call.kind.replace("_", "-"), call.purpose, f"{call.group} {call.ranks}{nodes}", one.link.name),
            *(count_cell(call.count), cell(call.bytes, moved_bytes), cell(call.sent_bytes, moved_bytes)),
            cell(one.seconds * 1e9, duration),
        )
    return table


def _stages(row: ParallelRow) -> Table:
    columns = [Column("stage"), *numbers("layers", "weights", "KV cache", "prefill", "decode")]
    table = Table("parallel-stages", "pipeline stages", columns)
    formats = row.deployment.formats
    for index, stage in enumerate(row.deployment.stages):
        table.add(
            *(str(index), count_cell(len(stage.layers)), cell(stage.weight_bytes(formats), memory_size)),
            cell(stage.kv_cache_bytes(row.batch, row.tokens, formats), memory_size),
            cell(_ns(row.prefill.stages[index].seconds), duration),
            cell(_ns(row.decode.stages[index].seconds), duration),
        )
    return table


def _ns(value: Maybe[float]) -> Maybe[float]:
    return then(value, lambda seconds: seconds * 1e9)
