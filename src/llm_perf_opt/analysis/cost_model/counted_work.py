"""A counted model in the cost model: the work of a step in its components, the cache, and the products with weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from llm_perf_opt.analysis.cost_model.architecture import Architecture, Mla
from llm_perf_opt.analysis.cost_model.work import (
    ComponentName,
    Step,
    Work,
    causal_pairs,
    expected_experts,
    full_pairs,
    tokens_kept,
)
from llm_perf_opt.cost.counted import CountedModel, Operator
from llm_perf_opt.cost.forms import PER_CONTEXT, PER_SEQUENCE, PER_TOKEN, Sequences


@dataclass(frozen=True)
class CountedArchitecture(Architecture):
    """An architecture whose operators were counted."""

    model: CountedModel = field(default_factory=lambda: CountedModel("", (), (), (), 0))
    """The counted operators."""

    @staticmethod
    def of(counted: CountedModel) -> "CountedArchitecture":
        """Return a counted model as an architecture."""
        return CountedArchitecture(
            model_type=counted.model_type, hidden=0, vocabulary=0, layers=(), final_norm_params=0, tied_embeddings=False,
            embedding_dim=0, model=counted,
        )  # fmt: skip

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the figures leave out or assume beyond what all of them do, one sentence each."""
        return tuple(self.model.caveats())

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.model.layers)

    @property
    def has_latent_attention(self) -> bool:
        """Whether a layer expands cached latents in every step, so that the choice of `Mla` matters."""
        return any(operator.rows == PER_CONTEXT and operator.kind == "product" for operator, _ in self.model.operators())

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(operator.kind == "experts" for operator, _ in self.model.operators())

    @property
    def params(self) -> int:
        """All parameters; a tied embedding counts once."""
        return self.model.params

    @property
    def active_params(self) -> int:
        """All parameters except those of experts that a token does not use."""
        return self.model.active_params

    def cached_elements(self, tokens: int, mla: Mla) -> int:
        """Return the elements of the caches and states of a sequence of so many tokens."""
        found = 0
        for part, times in self.model.parts():
            for operator in latent(part, mla):
                kept = tokens_kept(tokens, operator.window) if operator.kind == "cache" else operator.kind == "state"
                found += times * operator.count * operator.elements * kept
        return found


def counted_work(model: CountedModel, step: Step, mla: Mla) -> Iterator[tuple[ComponentName, Work]]:
    """Yield what every operator of a step computes and moves."""
    sequences: Sequences = ((step.new_tokens, step.cached_tokens),)
    for kind, times in model.parts():
        for operator in latent(kind, mla):
            for name, work in _work(operator, step, sequences):
                yield name, work.times(times * operator.count)


def _work(operator: Operator, step: Step, sequences: Sequences) -> Iterator[tuple[ComponentName, Work]]:
    name: ComponentName = operator.component  # type: ignore[assignment]
    kind = operator.kind
    if kind == "product":
        yield name, _product(operator, step, sequences)
    elif kind == "experts":
        used = expected_experts(operator.experts, operator.active, step.tokens)
        flops = 2 * operator.rows(sequences, step.batch) * operator.inputs * operator.outputs
        yield name, Work(flops, weights=used * operator.params)
    elif kind == "attention":
        per_pair = 2 * operator.heads * (operator.key_dim + operator.value_dim)
        full = step.batch * full_pairs(step.new_tokens, step.cached_tokens, operator.window)
        needed = step.batch * causal_pairs(step.new_tokens, step.cached_tokens, operator.window) if operator.causal else full
        needed += step.block_pairs if operator.causal else 0
        yield name, Work(per_pair * needed, per_pair * (full - needed))
    elif kind == "rows":
        rows = operator.rows(sequences, step.batch) - (step.image_tokens if operator.rows == PER_TOKEN else 0)
        yield name, Work(weights=min(max(rows, 0), operator.inputs) * operator.outputs)
    elif kind == "read":
        yield name, Work(weights=operator.params if name != "lm_head" or step.logit_positions else 0)
    elif kind == "cache":
        cached = operator.elements * step.batch
        yield "kv_read", Work(kv=cached * tokens_kept(step.cached_tokens, operator.window))
        # If the prompt is longer than the window, only the window's tokens reach the cache.
        yield "kv_write", Work(kv=cached * min(step.new_tokens, operator.window or step.new_tokens))
    elif kind == "state":
        reads = 1 if step.cached_tokens else 0
        yield "state", Work(kv=(1 + reads) * step.batch * operator.elements)
    else:
        yield name, Work(operator.flops(sequences, step.batch))


def _product(operator: Operator, step: Step, sequences: Sequences) -> Work:
    matrix = operator.inputs * operator.outputs
    if operator.component != "lm_head":
        return Work(2 * operator.rows(sequences, step.batch) * matrix, weights=operator.params)
    logits = step.logit_positions if operator.rows in (PER_SEQUENCE, PER_TOKEN) else operator.rows(sequences, step.batch)
    written = logits * operator.outputs if operator.rows == PER_SEQUENCE else 0
    return Work(2 * logits * matrix, weights=operator.params if logits else 0, activations=written)


def latent(operators: tuple[Operator, ...], mla: Mla) -> tuple[Operator, ...]:
    """Return the operators with another implementation of latent attention; the same if they have none or `mla` is as counted."""
    expands = [operator for operator in operators if operator.rows == PER_CONTEXT and operator.kind == "product"]
    core = next((operator for operator in operators if operator.kind == "attention"), None)
    if not expands or core is None or mla is Mla.REEXPAND:
        return operators
    rank, rope = expands[0].inputs, core.key_dim + core.value_dim - expands[0].outputs // core.heads
    changed = []
    caches = 0
    for operator in operators:
        if operator in expands:
            operator = replace(operator, rows=PER_TOKEN)
        elif operator is core and mla is Mla.ABSORB:
            operator = replace(operator, key_dim=rank + rope, value_dim=rank)
        elif operator.kind == "cache" and mla is Mla.EXPAND_ONCE:
            caches += 1
            operator = replace(operator, elements=core.heads * (core.key_dim if caches == 1 else core.value_dim))
        changed.append(operator)
    return tuple(changed)
