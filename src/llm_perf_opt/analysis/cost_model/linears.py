"""The weight matrices of a model and the number of rows that each multiplies in a workload."""

from collections import Counter
from collections.abc import Iterable, Iterator

from llm_perf_opt.analysis.cost_model.architecture import Architecture, GroupedAttention, LatentAttention, Mla, Mlp, Moe
from llm_perf_opt.analysis.cost_model.counted_work import CountedArchitecture, latent
from llm_perf_opt.analysis.cost_model.vision import ModuleWork
from llm_perf_opt.analysis.cost_model.work import Step, expected_experts
from llm_perf_opt.core.machine_records import LinearLayer
from llm_perf_opt.cost.counted import CountedModel

_Matrix = tuple[int, int]
"""Inputs and outputs of a weight matrix."""
_Use = tuple[_Matrix, int, int]
"""A matrix, how many of it one step uses, and the rows that each multiplies."""


def linear_layers(
    architecture: Architecture, prefill: Step, decode: Step, modules: Iterable[ModuleWork] = ()
) -> tuple[LinearLayer, ...]:
    """Return the distinct products with weights, those with the most weights first.

    Matrices count as transformers runs them: query, key, value, gate and up projections are separate. `modules` are those of the
    image encoders, which run in prefill only.
    """
    rows: Counter[tuple[int, int, int, int]] = Counter()
    for product in (product for module in modules for product in module.products if product.rows):
        rows[product.inputs, product.outputs, product.rows, 0] += product.count
    for (matrix, count, at_prefill), (_, used, at_decode) in zip(
        _uses(architecture, prefill), _uses(architecture, decode), strict=True
    ):
        inputs, outputs = matrix
        if count == used:
            rows[inputs, outputs, at_prefill, at_decode] += count
        else:  # a mixture of experts, which uses more experts in prefill
            rows[inputs, outputs, at_prefill, 0] += count
            rows[inputs, outputs, 0, at_decode] += used
    found = [LinearLayer(shape[0], shape[1], count, shape[2], shape[3]) for shape, count in rows.items()]
    return tuple(sorted(found, key=lambda layer: -layer.in_features * layer.out_features * layer.count))


def _uses(architecture: Architecture, step: Step) -> Iterator[_Use]:
    if isinstance(architecture, CountedArchitecture):
        yield from _counted(architecture.model, step)
        return
    for layer, count in architecture.layer_counts.items():
        for matrix in _attention(layer.attention):
            yield matrix, count, step.tokens
        if isinstance(layer.feed_forward, Mlp):
            for matrix in _mlp(layer.feed_forward):
                yield matrix, count, step.tokens
        else:
            for matrix, used, rows in _moe(layer.feed_forward, step.tokens):
                yield matrix, count * used, rows
    if architecture.projected_embedding:
        yield (architecture.embedding_dim, architecture.hidden), 1, step.tokens
        yield (architecture.hidden, architecture.embedding_dim), 1, step.logit_positions
    yield (architecture.embedding_dim, architecture.vocabulary), 1, step.logit_positions


def _counted(model: CountedModel, step: Step) -> Iterator[_Use]:
    sequences = ((step.new_tokens, step.cached_tokens),)
    operators = [
        (operator, times * operator.count) for part, times in model.parts() for operator in latent(part, Mla.EXPAND_ONCE)
    ]
    for operator, times in operators:
        matrix = operator.inputs, operator.outputs
        if operator.kind == "experts":
            used = round(expected_experts(operator.experts, operator.active, step.tokens))
            yield matrix, times * used, max(1, round(step.tokens * operator.active / used))
        elif operator.kind == "product":
            head = operator.component == "lm_head"
            yield matrix, times, step.logit_positions if head else operator.rows(sequences, step.batch)


def _attention(attention: GroupedAttention | LatentAttention) -> list[_Matrix]:
    hidden = attention.hidden
    if isinstance(attention, GroupedAttention):
        query, key = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        return [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    queries = attention.heads * (attention.nope_dim + attention.rope_dim)
    rank = attention.query_rank
    return [
        *([(hidden, queries)] if rank is None else [(hidden, rank), (rank, queries)]),
        (hidden, attention.kv_rank + attention.rope_dim),
        (attention.kv_rank, attention.heads * (attention.nope_dim + attention.value_dim)),
        (attention.heads * attention.value_dim, hidden),
    ]


def _mlp(mlp: Mlp) -> list[_Matrix]:
    up = (mlp.hidden, mlp.intermediate)
    return [*([up] if mlp.gated else []), up, (mlp.intermediate, mlp.hidden)]


def _moe(moe: Moe, tokens: int) -> Iterator[_Use]:
    used = round(expected_experts(moe.experts, moe.active, tokens))
    yield (moe.expert.hidden, moe.experts), 1, tokens
    for matrix in _mlp(moe.expert):
        yield matrix, used, max(1, round(tokens * moe.active / used))
    if moe.shared:
        for matrix in _mlp(moe.shared):
            yield matrix, 1, tokens
    if moe.shared_gate:
        yield (moe.expert.hidden, 1), 1, tokens
