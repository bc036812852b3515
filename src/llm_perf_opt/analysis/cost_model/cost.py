"""FLOPs and minimum bytes of a stage, per component.

Bytes are the minimum that must cross the memory interface: each used weight once, the cached keys and values that are
attended to, the new ones, the gathered embedding rows and the logits. Activations between components are assumed to
stay on the chip.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from llm_perf_opt.analysis.cost_model.architecture import TRANSFORMERS_MLA, Architecture, Mla, Moe
from llm_perf_opt.analysis.cost_model.counted_work import CountedArchitecture, counted_work
from llm_perf_opt.analysis.cost_model.work import (
    ComponentName,
    Step,
    Work,
    layer_work,
    model_work,
    tokens_kept,
)
from llm_perf_opt.analysis.stats import shown, whole_number
from llm_perf_opt.config.schema import canonical_dtype
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.vision_records import VisionInput

DTYPE_BITS: dict[str, int] = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
    "fp4": 4,
}
"""Bits per element. Scales and zero points of quantized formats are not counted, because bytes are a minimum."""

_COMPUTE = {"int8": "bf16", "int4": "bf16"}
"""Integer weights are storage formats (GPTQ, AWQ, bitsandbytes): they are converted to bf16 before the product."""


def dtype_named(name: object, field: str = "dtype") -> str:
    """Return the canonical name (`bf16`) of a number format in any common spelling (`torch.bfloat16`)."""
    if not isinstance(name, str):
        raise ConfigError(f"{field} must be the name of a number format, not {shown(name)}.", _known())
    word = canonical_dtype(name)
    if word not in DTYPE_BITS:
        raise ConfigError(f"{field} '{name}' is not a known number format.{nearest(word, DTYPE_BITS)}", _known())
    return word


def size_bytes(elements: float, dtype: str) -> int:
    """Return the bytes of `elements`: rounded up for an int, to the nearest for an expected value."""
    bits = DTYPE_BITS[dtype]
    if isinstance(elements, int):
        return -(-elements * bits // 8)
    return round(elements * bits / 8)


def activation_dtype(weight_dtype: str) -> str:
    """Return the format of activations and logits with such weights: the same, or bf16 below 16 bits."""
    return weight_dtype if DTYPE_BITS[weight_dtype] >= 16 else "bf16"


def compute_dtype(weight_dtype: str) -> str:
    """Return the format whose peak rate applies to a matrix product with such weights."""
    return _COMPUTE.get(weight_dtype, weight_dtype)


def _known() -> str:
    return f"Known: {', '.join(DTYPE_BITS)}."


COMPONENT_NAMES: tuple[ComponentName, ...] = get_args(ComponentName)
"""In display order."""


@dataclass(frozen=True)
class Formats:
    """Number formats of weights and KV cache, in any common spelling, and the implementation of latent attention."""

    weights: str = "bf16"
    kv: str = "bf16"
    mla: Mla = TRANSFORMERS_MLA
    quantized: tuple[str, ...] = ()
    """Components whose matrices were quantized; their weights have `quantized_bits`."""
    quantized_bits: float = 0.0
    """Average bits of a quantized weight, including scales."""
    component_bits: tuple[tuple[str, float], ...] = ()
    """Average bits of the parameters of a quantized component, where they are known: including biases and kept matrices."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", dtype_named(self.weights, "dtype"))
        object.__setattr__(self, "kv", dtype_named(self.kv, "kv_dtype"))
        try:
            object.__setattr__(self, "mla", Mla(self.mla))
        except ValueError:
            raise ConfigError(f"mla must be one of {', '.join(map(str, Mla))}, not {self.mla!r}.") from None

    def quantized_size(self, name: str, parameters: float) -> int | None:
        """Return the bytes of parameters of a component; None if it is not quantized."""
        if name not in self.quantized:
            return None
        return round(parameters * dict(self.component_bits).get(name, self.quantized_bits) / 8)


BF16 = Formats()
"""Weights and cache in bf16, latent attention as in transformers."""


@dataclass(frozen=True)
class ComponentCost:
    """What one component computes and moves in a stage, over all layers."""

    name: ComponentName
    flops: int
    """With causal attention: a token attends to earlier tokens within the window."""
    flops_full_attention: int
    """With full attention: each new token attends to every key held, as frameworks count it."""
    bytes: int
    within: ComponentName
    """The component whose kernel moves these bytes: another one for the KV cache, otherwise itself."""


@dataclass(frozen=True)
class StageCost:
    """The cost of one or more steps, per component."""

    components: tuple[ComponentCost, ...]

    @property
    def flops(self) -> int:
        """FLOPs with causal attention."""
        return sum(component.flops for component in self.components)

    @property
    def flops_full_attention(self) -> int:
        """FLOPs with full attention."""
        return sum(component.flops_full_attention for component in self.components)

    @property
    def bytes(self) -> int:
        """Minimum bytes."""
        return sum(component.bytes for component in self.components)

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity, with causal attention."""
        return self.flops / self.bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "flops": self.flops,
            "flops_full_attention": self.flops_full_attention,
            "bytes": self.bytes,
            "parts": [{"name": part.name, "flops": part.flops, "bytes": part.bytes} for part in self.components],
        }


@dataclass(frozen=True)
class ModelCost:
    """The cost of a prefill and one decode step, with their assumptions."""

    architecture: Architecture
    formats: Formats
    batch: int
    prompt: int
    context: int
    prefill: StageCost
    decode: StageCost
    images: VisionInput | None = None
    """Images in the prompts; `prompt` and `prefill` include them."""
    modules: tuple[tuple[str, StageCost], ...] = ()
    """The modules of the image encoders and the projector: path and cost, which is part of `prefill`."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one more token of a sequence adds to the cache."""
        return kv_bytes_per_token(self.architecture, self.formats)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; `decode` is one step of the batch."""
        found: dict[str, Any] = {
            "params": self.architecture.params,
            "active_params": self.architecture.active_params,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "prefill": self.prefill.to_json(),
            "decode": self.decode.to_json(),
            "assumptions": {
                "model_type": self.architecture.model_type,
                "part_of": self.architecture.part_of,
                "batch": self.batch,
                "prompt": self.prompt,
                "context": self.context,
                "dtype": self.formats.weights,
                "kv_dtype": self.formats.kv,
                "mla": str(self.formats.mla) if self.architecture.has_latent_attention else None,
                "logits": "last",
                "caveats": list(self.architecture.caveats),
            },
        }
        if self.images is not None:
            found["images"] = {
                "images": self.images.images,
                "image_tokens": sum(self.images.image_tokens),
                "pixel_shapes": self.images.pixel_shapes,
                "modules": [{"module": path, **cost.to_json()} for path, cost in self.modules],
            }
        return found


def model_cost(architecture: Architecture, *, batch: int, prompt: int, context: int, formats: Formats = BF16) -> ModelCost:
    """Return the cost of a prefill of `prompt` tokens and a decode step on `context` cached ones; logits for the last token."""
    whole_number("prompt", prompt, at_least=1)
    whole_number("context", context, at_least=0)
    prefill = step_cost(architecture, Step(batch, prompt), formats)
    decode = step_cost(architecture, Step(batch, 1, context), formats)
    return ModelCost(architecture, formats, batch, prompt, context, prefill, decode)


def step_cost(architecture: Architecture, step: Step, formats: Formats = BF16) -> StageCost:
    """Return the cost of one forward step."""
    totals: dict[ComponentName, Work] = {}
    if isinstance(architecture, CountedArchitecture):
        for name, work in counted_work(architecture.model, step, formats.mla):
            totals[name] = totals.get(name, Work()) + work
        return stage_of(totals, formats, carriers_of(architecture, formats))
    for layer, count in architecture.layer_counts.items():
        for name, work in layer_work(layer, step, formats.mla):
            totals[name] = totals.get(name, Work()) + work.times(count)
    for name, work in model_work(architecture, step):
        totals[name] = totals.get(name, Work()) + work
    return stage_of(totals, formats, carriers_of(architecture, formats))


def carriers_of(architecture: Architecture, formats: Formats) -> Mapping[ComponentName, ComponentName]:
    """Return the components whose kernels move the bytes of the cache."""
    reexpands = architecture.has_latent_attention and formats.mla is Mla.REEXPAND
    return {
        # The projection that expands the latent also reads it; otherwise attention reads the cache.
        "kv_read": "attention_projections" if reexpands else "attention_core",
        "kv_write": "attention_projections",
        "state": "recurrent",
    }


def stage_of(
    totals: Mapping[ComponentName, Work], formats: Formats, carriers: Mapping[ComponentName, ComponentName] = MappingProxyType({})
) -> StageCost:
    """Return the cost of this work; `carriers` name the components whose kernels move the bytes of others."""
    return StageCost(
        tuple(_component(name, totals[name], formats, carriers.get(name, name)) for name in COMPONENT_NAMES if name in totals)
    )


def combined(stages: Iterable[StageCost]) -> StageCost:
    """Return the sum of several steps, such as the chunks of a prefill or the steps of a decode."""
    totals: dict[ComponentName, ComponentCost] = {}
    for stage in stages:
        for component in stage.components:
            so_far = totals.get(component.name, ComponentCost(component.name, 0, 0, 0, component.within))
            totals[component.name] = ComponentCost(
                component.name,
                so_far.flops + component.flops,
                so_far.flops_full_attention + component.flops_full_attention,
                so_far.bytes + component.bytes,
                component.within,
            )
    return StageCost(tuple(totals[name] for name in COMPONENT_NAMES if name in totals))


def weight_bytes(architecture: Architecture, formats: Formats = BF16) -> int:
    """Return the bytes of all weights, including every expert."""
    whole = size_bytes(architecture.params, formats.weights)
    if not formats.quantized:
        return whole
    inside = {name: count for name, count in _linear_params(architecture).items() if name in formats.quantized}
    tied = architecture.head_matrix_params if architecture.tied_embeddings and "lm_head" in formats.quantized else 0
    kept = architecture.params + tied - sum(inside.values())  # a quantized head does not share its matrix with the embedding
    return size_bytes(kept, formats.weights) + sum(formats.quantized_size(name, count) or 0 for name, count in inside.items())


def _linear_params(architecture: Architecture) -> dict[str, int]:
    """Return the parameters of the linear layers of each component, including every expert."""
    if isinstance(architecture, CountedArchitecture):
        inside: Counter[str] = Counter()
        for operator, times in architecture.model.operators():
            if operator.kind in ("product", "experts"):
                inside[operator.component] += times * operator.params * max(1, operator.experts)
        return inside
    found = Counter({"lm_head": architecture.head_matrix_params + architecture.head_bias_params})
    for layer, count in architecture.layer_counts.items():
        attention, feed_forward = layer.attention, layer.feed_forward
        found["attention_projections"] += count * (attention.matrix_params + attention.bias_params)
        if not isinstance(feed_forward, Moe):
            found["mlp"] += count * feed_forward.params
            continue
        found["router"] += count * feed_forward.router_params
        found["experts"] += count * feed_forward.experts * feed_forward.expert.params
        found["shared_experts"] += count * feed_forward.shared_params
    return found


def kv_bytes_per_token(architecture: Architecture, formats: Formats = BF16) -> int:
    """Return the bytes that one more token of a sequence adds to the cache while no layer's window is full."""
    if isinstance(architecture, CountedArchitecture):
        one, none = (architecture.cached_elements(tokens, formats.mla) for tokens in (1, 0))
        return size_bytes(one - none, formats.kv)
    elements = sum(count * layer.attention.kv_elements(formats.mla) for layer, count in architecture.layer_counts.items())
    return size_bytes(elements, formats.kv)


def kv_cache_bytes(architecture: Architecture, batch: int, tokens: int, formats: Formats = BF16) -> int:
    """Return the bytes of the cache after `tokens` tokens per sequence; a layer with a window keeps only its window."""
    whole_number("batch", batch, at_least=1)
    whole_number("tokens", tokens, at_least=0)
    if isinstance(architecture, CountedArchitecture):
        return size_bytes(batch * architecture.cached_elements(tokens, formats.mla), formats.kv)
    elements = sum(
        count * layer.attention.kv_elements(formats.mla) * tokens_kept(tokens, layer.window)
        for layer, count in architecture.layer_counts.items()
    )
    return size_bytes(batch * elements, formats.kv)


def _component(name: ComponentName, work: Work, formats: Formats, within: ComponentName) -> ComponentCost:
    moved = (
        _weight_size(name, work.weights, formats)
        + size_bytes(work.kv, formats.kv)
        + size_bytes(work.activations, activation_dtype(formats.weights))
    )
    return ComponentCost(name, work.flops, work.flops + work.full_attention_extra_flops, moved, within)


def _weight_size(name: ComponentName, weights: float, formats: Formats) -> int:
    quantized = formats.quantized_size(name, weights)
    return size_bytes(weights, formats.weights) if quantized is None else quantized
