"""int8 weights on a CPU: linear layers with one signed byte per weight and one scale per output channel.

torch has two products for them on a CPU. Which one is faster depends on the processor and the shape, so both are measured for
each shape when the model is loaded:

- `aten::_weight_int8pack_mm` converts the weights to the dtype of the inputs on the fly. It multiplies row by row; for many
  rows, as in prefill, a matrix product with dequantized weights is faster. On aarch64 it is wrong for inputs whose length is
  no multiple of eight (torch 2.13).
- `quantized::linear_dynamic` also rounds the inputs to int8 and multiplies integers. It is used with one scale for the whole
  matrix, and the scales of the channels are applied to its result: with scales per channel it is slow and wrong on aarch64
  (torch 2.13). torch.compile cannot see through it.

Each is compared with the dequantized product first, and not used where it is wrong. Products of unscaled weights are sums of
values up to 127 times an input, which overflow in fp16: they are scaled in fp32.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llm_perf_opt.core.instruction_sets import instruction_set
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.runners.quantized_layers import QuantizedLinear

PACKED = "aten::_weight_int8pack_mm"
DYNAMIC = "quantized::linear_dynamic"
_ENGINES = ("onednn", "x86", "fbgemm")
"""Implementations of DYNAMIC to try. qnnpack is six times slower than the fp32 product on a Neoverse N1."""
_NARROW = ("x86", "fbgemm")
"""Engines that may overflow unless the inputs have 7 bits. Without instructions for int8, such as VNNI, all of them may."""
_MOST_ERROR = 0.05
"""Relative error above which a product is wrong; rounding inputs and weights costs about 0.015."""
_LARGEST = 127
_TRIED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHECKED_ROWS = (1, 4, 32)
_BLOCK = 64
_OUTLIER = 900.0
"""A large activation, as trained models have: with an unscaled weight of 127, the product overflows in fp16."""
_MOST_TRIED_WEIGHTS = 2**22
"""Larger matrices are timed in part."""
_LEAST_TRIES, _MOST_TRIES = 3, 15
_TRY_S = 0.03
"""After the fewest tries, a product is not tried again if it took this long."""
ALL_ROWS = 1 << 62
_LANES = 16
"""PACKED reads this many inputs at a time. With another number of inputs it reads beyond the end, and torch 2.13 crashes with
bf16 on a processor with AVX-512."""

Product = Callable[[torch.Tensor], torch.Tensor]
Shape = tuple[int, int]
"""Outputs and inputs."""


class Int8Linear(QuantizedLinear):
    """A linear layer with int8 weights."""

    weight: torch.Tensor
    scales: torch.Tensor
    """In fp32."""
    packed_scales: torch.Tensor
    """In the dtype of the inputs, which PACKED needs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Quantize `weight`, [output, input]: each row is scaled so that its largest weight is ±127."""
        super().__init__()
        scales = (weight.float().abs().amax(dim=1) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        rounded = (weight.float() / scales[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
        self.register_buffer("weight", rounded.to(torch.int8).contiguous(), persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("packed_scales", scales.to(weight.dtype), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)
        self.out_features, self.in_features = weight.shape
        self.kernel = PACKED
        self.kernel_rows = ALL_ROWS if self.packs else 0
        """Inputs with more rows are multiplied with dequantized weights; 0 if PACKED is wrong for this shape."""
        self._dynamic: Product | None = None

    @property
    def weights(self) -> int:  # type: ignore[override]
        """Number of weights."""
        return self.weight.numel()

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        """One per weight."""
        return self.weight.numel()

    @property
    def scale_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the scales that a product reads."""
        return self.packed_scales.numel() * self.packed_scales.element_size()

    @property
    def packs(self) -> bool:
        """Whether PACKED can read weights of this shape."""
        return self.in_features % _LANES == 0

    @classmethod
    def of(cls, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> "Int8Linear":
        """Return a layer for inputs of this dtype, with weights that are already int8 and scales in fp32."""
        made = cls(torch.zeros((1, 1), dtype=dtype), None)
        made.weight, made.scales, made.packed_scales = weight.contiguous(), scales, scales.to(dtype)
        made.out_features, made.in_features = weight.shape
        made.kernel_rows = ALL_ROWS if made.packs else 0
        return made

    def last(self, outputs: int) -> "Int8Linear":
        """Return a layer with the last outputs only."""
        return Int8Linear.of(self.weight[-outputs:], self.scales[-outputs:], self.packed_scales.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return inputs · weightᵀ + bias."""
        rows = inputs.reshape(-1, self.in_features)
        if self._dynamic is not None:
            product = self._dynamic(rows)
        else:
            product = self.packed(rows) if rows.shape[0] <= self.kernel_rows else self.dequantized(rows)
        if self.bias is not None:
            product = product + self.bias
        return product.reshape(*inputs.shape[:-1], self.out_features)

    def packed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product by PACKED, without the bias."""
        return torch._weight_int8pack_mm(rows.contiguous(), self.weight, self.packed_scales)

    def dequantized(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product with the weights in the dtype of the inputs, for fp16 in fp32, without the bias."""
        dtype = torch.float32 if rows.dtype is torch.float16 else rows.dtype
        return (torch.mm(rows.to(dtype), self.weight.to(dtype).t()) * self.scales).to(rows.dtype)

    def dynamic(self, engine: str) -> Product:
        """Return the product by DYNAMIC, without the bias; raise a RuntimeError if this torch does not have it."""
        torch.backends.quantized.engine = engine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantized tensors are deprecated, but the operator takes nothing else
            whole = torch._make_per_tensor_quantized_tensor(self.weight, 1.0, 0)
            kept: Any = torch.ops.quantized.linear_prepack(whole, None)
        multiply, scales = torch.ops.quantized.linear_dynamic, self.scales
        instructions = instruction_set("int8")
        narrow = engine in _NARROW or isinstance(instructions, Missing) or not instructions.native

        def product(rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = multiply(rows.float(), kept, narrow)
            return found.mul_(scales).to(rows.dtype)

        return product

    def use_dynamic(self, engine: str) -> None:
        """Multiply with DYNAMIC from now on, which keeps its own copy of the weights."""
        self._dynamic = self.dynamic(engine)
        self.weight = torch.empty_like(self.weight, device="meta")  # only its size is still needed
        self.packed_scales = self.scales


@dataclass(frozen=True)
class Kernel:
    """How the layers of one shape multiply."""

    engine: str | None
    """The implementation of DYNAMIC; None: PACKED."""
    packed_rows: int = ALL_ROWS
    """With PACKED, inputs with more rows are multiplied with dequantized weights."""

    @property
    def name(self) -> str:
        """The operator, as it is recorded."""
        return PACKED if self.engine is None else f"{DYNAMIC} ({self.engine})"

    def product(self, layer: Int8Linear, rows: int) -> Product:
        """Return the product of a layer for inputs of `rows` rows, without the bias."""
        if self.engine is not None:
            return layer.dynamic(self.engine)
        return layer.packed if rows <= self.packed_rows else layer.dequantized

    def use_in(self, layer: Int8Linear) -> None:
        """Let a layer multiply in this way from now on."""
        layer.kernel = self.name
        if self.engine is not None:
            layer.use_dynamic(self.engine)
        else:
            layer.kernel_rows = self.packed_rows


# --- the fastest kernel -----------------------------------------------------------------------------------------------


def use_fastest(layers: list[Int8Linear], rows: int, compiled: bool) -> None:
    """Set up the fastest kernel of each shape for inputs of `rows` rows."""
    first: dict[Shape, Int8Linear] = {}
    for layer in layers:
        first.setdefault((layer.out_features, layer.in_features), layer)
    kernels = choose_kernels({shape: layer.last(tried_outputs(shape)) for shape, layer in first.items()}, rows, compiled)
    for layer in layers:
        kernels[layer.out_features, layer.in_features].use_in(layer)


def tried_outputs(shape: Shape) -> int:
    """Return how many outputs of a matrix are tried: all, or so many that the last block is as long as that of the matrix."""
    outputs, inputs = shape
    most = max(2 * _BLOCK, _MOST_TRIED_WEIGHTS // inputs)
    return outputs if outputs <= most else most // _BLOCK * _BLOCK - _BLOCK + outputs % _BLOCK


def choose_kernels(samples: Mapping[Shape, Int8Linear], rows: int, compiled: bool) -> dict[Shape, Kernel]:
    """Return the fastest kernel of each shape for inputs of `rows` rows; `samples` have `tried_outputs` of each."""
    with torch.inference_mode():
        engines = {shape: None if compiled else fastest_engine(layer, rows) for shape, layer in samples.items()}
        packed = {shape: layer for shape, layer in samples.items() if engines[shape] is None}
        packs = [layer for layer in packed.values() if layer.packs]
        most = _fastest_rows(max(packs, key=lambda layer: layer.weight.numel())) if packs else ALL_ROWS
        return {
            shape: Kernel(engine, most if shape not in packed or _packed_is_correct(layer) else 0)
            for (shape, layer), engine in zip(samples.items(), engines.values(), strict=True)
        }


def fastest_engine(layer: Int8Linear, rows: int) -> str | None:
    """Return the engine of DYNAMIC that is correct and faster than the other products for inputs of `rows` rows, or None."""
    inputs, part = _inputs(layer, rows), _part(layer)
    other = layer.packed if _packed_is_correct(layer) else layer.dequantized
    fastest, best = None, _seconds(other, inputs)
    for engine in [name for name in _ENGINES if name in torch.backends.quantized.supported_engines]:
        try:
            if not _is_correct(part, part.dynamic(engine)):
                continue
            seconds = _seconds(layer.dynamic(engine), inputs)
        except (RuntimeError, AttributeError, NotImplementedError):  # not on this processor, or not in this torch
            continue
        if seconds < best:
            fastest, best = engine, seconds
    return fastest


def _part(layer: Int8Linear) -> Int8Linear:
    """Return a layer with a few of the outputs, which is quick to check; kernels treat the last outputs of a block apart."""
    count = min(layer.out_features, _BLOCK + layer.out_features % _BLOCK)
    return layer.last(count)


def _packed_is_correct(layer: Int8Linear) -> bool:
    part = _part(layer)
    return part.packs and _is_correct(part, part.packed)


def _is_correct(layer: Int8Linear, product: Product) -> bool:
    """Return whether a product agrees with the dequantized one, also for a large activation and for two large products."""
    for rows in _CHECKED_ROWS:
        for inputs in (_inputs(layer, rows), _outlier(layer, rows)):
            expected = layer.dequantized(inputs).float()
            if not float((product(inputs).float() - expected).norm()) <= _MOST_ERROR * float(expected.norm()):
                return False
    inputs = _largest_pairs(layer)
    expected = layer.dequantized(inputs).float().diagonal()
    limits = torch.finfo(layer.packed_scales.dtype)
    # Scales below `tiny` are rounded to multiples of tiny · eps. Twice the error that this adds to the largest sum is accepted.
    rounded = 2 * _LARGEST * limits.tiny * limits.eps
    most = _MOST_ERROR * expected.abs() + rounded
    return bool(((product(inputs).float().diagonal() - expected).abs() <= most).all())


def _fastest_rows(layer: Int8Linear) -> int:
    """Return up to how many rows PACKED is faster than a product with dequantized weights."""
    fastest = 0
    for rows in _TRIED_ROWS:
        inputs = _inputs(layer, rows)
        if _seconds(layer.packed, inputs) > _seconds(layer.dequantized, inputs):
            return fastest
        fastest = rows
    return ALL_ROWS


def _inputs(layer: Int8Linear, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((rows, layer.in_features), generator=generator).to(layer.packed_scales.dtype)


def _outlier(layer: Int8Linear, rows: int) -> torch.Tensor:
    """Return inputs with one large activation per row and no others, which rounding to int8 keeps."""
    inputs = torch.zeros((rows, layer.in_features), dtype=layer.packed_scales.dtype)
    inputs[torch.arange(rows), torch.arange(rows) % layer.in_features] = _OUTLIER
    return inputs


def _largest_pairs(layer: Int8Linear) -> torch.Tensor:
    """Return a row per output that selects its two adjacent weights of largest sum: some kernels add two products in 16 bits."""
    weights = torch.nn.functional.pad(layer.weight.float(), (0, layer.in_features % 2))
    pairs = weights.reshape(layer.out_features, -1, 2).sum(2)
    chosen = torch.nn.functional.one_hot(pairs.argmax(1), pairs.shape[1]).repeat_interleave(2, dim=1)
    return chosen[:, : layer.in_features].to(layer.packed_scales.dtype)


def _seconds(product: Product, inputs: torch.Tensor) -> float:
    """Return the shortest of several calls, after one to warm up."""
    product(inputs)
    found: list[float] = []
    while len(found) < _LEAST_TRIES or (len(found) < _MOST_TRIES and sum(found) < _TRY_S):
        begun = time.perf_counter()
        product(inputs)
        found.append(time.perf_counter() - begun)
    return min(found)
