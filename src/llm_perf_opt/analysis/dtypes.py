"""Number formats: how many bits an element takes, and which format the arithmetic on it runs in."""

from llm_perf_opt.analysis.stats import shown
from llm_perf_opt.config.schema import canonical_dtype
from llm_perf_opt.core.errors import ConfigError, nearest

DTYPE_BITS: dict[str, int] = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
    "fp4": 4,
}
"""Bits of one element. Scales and zero points of quantized formats are not counted: bytes are the least possible."""

_COMPUTE = {"int8": "bf16", "int4": "bf16"}
"""Integer weights are taken as storage only (GPTQ, AWQ, bitsandbytes): multiplied after conversion to bf16."""


def dtype_named(name: object, field: str = "dtype") -> str:
    """The canonical name (`bf16`) of a format in any usual spelling (`torch.bfloat16`), or a ConfigError."""
    if not isinstance(name, str):
        raise ConfigError(f"{field} must be the name of a number format, not {shown(name)}.", _known())
    word = canonical_dtype(name)
    if word not in DTYPE_BITS:
        raise ConfigError(f"{field} '{name}' is not a known number format.{nearest(word, DTYPE_BITS)}", _known())
    return word


def size_bytes(elements: float, dtype: str) -> int:
    """Whole bytes of that many elements: exact and rounded up for an int, to the nearest for an expected value."""
    bits = DTYPE_BITS[dtype]
    if isinstance(elements, int):
        return -(-elements * bits // 8)
    return round(elements * bits / 8)


def activation_dtype(weight_dtype: str) -> str:
    """What activations and logits are kept in beside such weights: the same format, or bf16 below 16 bits."""
    return weight_dtype if DTYPE_BITS[weight_dtype] >= 16 else "bf16"


def compute_dtype(weight_dtype: str) -> str:
    """The format whose peak rate limits a matrix product with such weights."""
    return _COMPUTE.get(weight_dtype, weight_dtype)


def _known() -> str:
    return f"Known: {', '.join(DTYPE_BITS)}."
