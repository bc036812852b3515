"""Linear layers with quantized weights that torch.compile turns into kernels which read the small weights only.

Inputs, products and sums keep the dtype of the model or more: only the weights are quantized.

- int8, fp8: a byte per weight and a scale per output channel. With one row, as in a decode step of one sequence, a layer that is
  replayed in a CUDA graph uses our own kernel (`row_kernel`). With few rows, a compiled layer is a sum of products, which
  Inductor fuses with the conversion of the weights into one kernel. With more rows, and without torch.compile, the weights are
  first converted to the dtype of the inputs, which moves more bytes than without quantization.
- int4: a scale and a zero point for every 128 inputs of an output channel, and torch's own kernels, compiled or not.
"""

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from llm_perf_opt.core.errors import ConfigError

if TYPE_CHECKING:
    from llm_perf_opt.runners.row_kernel import Blocks

ONE_ROW = "llm-perf's kernel for one row"
FUSED = "sum of products fused by Inductor"
CONVERTED = "product with converted weights"
GROUP = 128
"""Inputs that share a scale in int4."""
_INNER_TILES = 8
"""Tiles along the inputs that one thread of the GPU kernel reads at once, each of 16 inputs."""
_OUTPUTS = {"cuda": 8, "cpu": 16}
"""int4: the number of outputs must be a multiple of this."""
_FEW_ROWS = 8
"""Up to this many rows, a compiled layer is a sum of products."""
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_BYTES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FP8_CAPABILITY = (8, 9)
"""The first compute capability on which Triton converts float8_e4m3fn."""
_INT4_CAPABILITY = (8, 0)
_MOST_AT_ONCE = 2**25
"""Weights that are quantized at once, in fp32."""
_TINY = torch.finfo(torch.float32).tiny
_MOST_ERROR = 0.02
"""Relative error above which a product is wrong; rounding the result costs less than 0.005."""


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights."""

    out_features: int
    in_features: int
    bias: torch.Tensor | None
    weights: int
    """Number of weights."""
    weight_bytes: int
    scale_bytes: int
    """What a product reads in addition to the weights."""
    kernel: str
    """How a decode step multiplies, as it is recorded."""


class ScaledLinear(QuantizedLinear):
    """A linear layer with a byte per weight and a scale per output channel."""

    weight: torch.Tensor
    scales: torch.Tensor
    """In fp32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: torch.dtype, *, compiled: bool) -> None:
        """Quantize `weight`, [output, input], to `kind`: the largest weight of each row becomes the largest number.

        `compiled`: the layer may be part of a compiled step.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        stored = torch.empty(weight.shape, dtype=kind, device=weight.device)
        scales = torch.empty(self.out_features, dtype=torch.float32, device=weight.device)
        for rows, part in _blocks(weight):
            scales[rows] = (part.abs().amax(dim=1) / _LARGEST[kind]).clamp(min=_TINY)
            scaled = (part / scales[rows, None]).clamp_(-_LARGEST[kind], _LARGEST[kind])
            stored[rows] = (scaled if kind.is_floating_point else scaled.round_()).to(kind)
        self.register_buffer("weight", stored, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)
        self.weights = self.weight_bytes = stored.numel()
        self.scale_bytes = scales.numel() * scales.element_size()
        self.kernel = CONVERTED
        self.blocks: Blocks | None = None
        """How the kernel for one row divides the matrix; None: it is not used."""
        if compiled:
            importlib.import_module("torch._inductor.inductor_prims")  # defines an operator of `row_sums`; takes a second

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return inputs · weightᵀ + bias."""
        rows = inputs.reshape(-1, self.in_features)
        few = torch.compiler.is_compiling() and rows.shape[0] <= _FEW_ROWS
        if few and rows.shape[0] == 1 and self.blocks is not None:
            product: torch.Tensor = torch.ops.llm_perf_opt.row_product(rows, self.weight, self.scales, *self.blocks)
        else:
            product = self.summed(rows) if few else self.converted(rows)
        if self.bias is not None:
            product = product + self.bias
        return product.to(inputs.dtype).reshape(*inputs.shape[:-1], self.out_features)

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product as one sum per row, in fp32, without the bias. Inductor reads the weights once for all sums."""
        return row_sums(self.weight, rows) * self.scales

    def converted(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product with the weights in the dtype of the inputs, without the bias."""
        if rows.dtype is torch.float16:  # unscaled, a sum would overflow
            return functional.linear(rows, (self.weight.to(torch.float32) * self.scales[:, None]).to(rows.dtype))
        return functional.linear(rows, self.weight.to(rows.dtype)) * self.scales


def row_sums(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows · weightᵀ in fp32 as one sum of products per row; Inductor reads the weights once for all of them.

    The rows become a tensor in memory. Otherwise Inductor computes what they come from, such as an activation function, again for
    every output.
    """
    stored = torch.ops.prims.inductor_force_stride_order(rows, rows.stride())
    return torch.stack([(weight.to(torch.float32) * row.to(torch.float32)).sum(dim=-1) for row in stored.unbind(0)])


class Int4Linear(QuantizedLinear):
    """A linear layer with half a byte per weight, and a scale and a zero point for every `GROUP` inputs."""

    packed: torch.Tensor
    """In the layout of the kernel."""
    scales: torch.Tensor
    """[group, output, 2]: scales and zero points."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Quantize `weight`, [output, input]: a weight is (number - 8) · scale + zero."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        numbers, scales = _grouped(weight)
        self.register_buffer("packed", _packed(numbers), persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)
        self.weights = weight.numel()
        self.weight_bytes = self.packed.numel() * self.packed.element_size()
        self.scale_bytes = scales.numel() * scales.element_size()
        self.kernel = "aten::_weight_int4pack_mm" + ("_for_cpu" if weight.device.type == "cpu" else "")

    @property
    def weight(self) -> torch.Tensor:
        """The packed weights as a matrix, one row per output."""
        return self.packed.view(self.out_features, -1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return inputs · weightᵀ + bias."""
        product = self.product(inputs.reshape(-1, self.in_features))
        if self.bias is not None:
            product = product + self.bias
        return product.reshape(*inputs.shape[:-1], self.out_features)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product without the bias."""
        multiply = torch._weight_int4pack_mm_for_cpu if rows.device.type == "cpu" else torch._weight_int4pack_mm
        return multiply(rows.contiguous(), self.packed, GROUP, self.scales)


def check_format(format: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise a ConfigError if weights of this format do not run on the device with inputs of this dtype."""
    problem = _problem(format, device, dtype)
    if problem:
        raise ConfigError(f"runtime.quantization={format} {problem}.", "Use another format, or runtime.quantization=none.")


def fits(format: str, shape: tuple[int, int], device: torch.device) -> bool:
    """Return whether a matrix of this shape, [output, input], can be stored in the format."""
    return format != "int4" or (shape[0] % _OUTPUTS[device.type] == 0 and shape[1] % GROUP == 0)


def quantized_layer(
    format: str, weight: torch.Tensor, bias: torch.Tensor | None, *, compiled: bool, rows: int = 1
) -> QuantizedLinear:
    """Return a layer with the weights, [output, input], in the format; `rows`: those of a decode step."""
    if format == "int4":
        return Int4Linear(weight, bias)
    made = ScaledLinear(weight, bias, _BYTES[format], compiled=compiled)
    made.kernel = FUSED if compiled and rows <= _FEW_ROWS else CONVERTED
    return made


def choose_row_blocks(layers: Sequence[QuantizedLinear], dtype: torch.dtype) -> None:
    """Let layers with a byte per weight on a GPU multiply one row with `row_kernel`, divided as is fastest for their shape."""
    from llm_perf_opt.runners.row_kernel import Layer, fastest_blocks

    shapes: dict[torch.Size, list[ScaledLinear]] = {}
    for layer in layers:
        if isinstance(layer, ScaledLinear):
            shapes.setdefault(layer.weight.shape, []).append(layer)
    for alike in shapes.values():
        blocks, _ = fastest_blocks([Layer(layer.weight, layer.scales) for layer in alike], dtype)
        for layer in alike:
            layer.blocks, layer.kernel = blocks, ONE_ROW


def check_product(layer: QuantizedLinear, exact: torch.Tensor) -> None:
    """Raise a ConfigError if a layer's product is not that of its weights: kernels for packed weights differ by device."""
    if not isinstance(layer, Int4Linear):
        return
    columns = torch.cat((torch.arange(GROUP), torch.arange(layer.in_features - GROUP, layer.in_features))).to(exact.device)
    expected = _ungrouped(*_grouped(exact[:, columns]))  # of the first and the last group
    inputs = torch.zeros((len(columns), layer.in_features), dtype=exact.dtype, device=exact.device)
    inputs[torch.arange(len(columns)), columns] = 1
    if not float((layer.product(inputs).float().t() - expected).norm()) <= _MOST_ERROR * float(expected.norm()):
        raise ConfigError(
            f"runtime.quantization=int4: {layer.kernel} of torch {torch.__version__} gives wrong products on {exact.device}.",
            "Use runtime.quantization=int8 or none.",
        )


def _problem(format: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return why the format does not run, as the rest of a sentence; empty if it does."""
    if device.type not in _OUTPUTS:
        return f"runs on a CPU or an NVIDIA GPU, not on {device}"
    if device.type == "cpu":
        return ""
    if torch.version.hip:
        return "runs on NVIDIA GPUs; this torch is built for AMD"
    needed = {"fp8": _FP8_CAPABILITY, "int4": _INT4_CAPABILITY}.get(format, (0, 0))
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        return f"needs a GPU of compute capability {needed[0]}.{needed[1]}; {device} has {found[0]}.{found[1]}"
    if format == "int4" and dtype is not torch.bfloat16:
        return "needs model.dtype=bf16 on a GPU"
    return ""


def _blocks(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the rows of a matrix in fp32, some at a time."""
    step = max(16, _MOST_AT_ONCE // weight.shape[1] // 16 * 16)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, min(start + step, weight.shape[0]))
        yield rows, weight[rows].float()


def _grouped(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers from 0 to 15 in the shape of the matrix, and scales and zero points, [group, output, 2]."""
    outputs, inputs = weight.shape
    numbers = torch.empty((outputs, inputs), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((inputs // GROUP, outputs, 2), dtype=weight.dtype, device=weight.device)
    for rows, part in _blocks(weight):
        groups = part.view(len(part), -1, GROUP)
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)
        scale = ((high - low) / 15).clamp(min=1e-6).to(weight.dtype)
        zero = (low + 8 * scale.float()).to(weight.dtype)
        rounded = ((groups - zero.float()[..., None]) / scale.float()[..., None] + 8).round_().clamp_(0, 15)
        numbers[rows] = rounded.view(part.shape).to(torch.uint8)
        scales[:, rows] = torch.stack((scale.t(), zero.t()), dim=-1)
    return numbers, scales


def _ungrouped(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weights that the numbers stand for, in fp32."""
    groups = numbers.view(len(numbers), -1, GROUP).float() - 8
    scale, zero = (scales[..., place].t().float()[..., None] for place in (0, 1))
    return (groups * scale + zero).view(numbers.shape)


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers in the layout of the device's kernel."""
    if numbers.device.type == "cpu":
        return torch._convert_weight_to_int4pack_for_cpu(numbers.to(torch.int32), 1)
    pairs = numbers[:, ::2] << 4 | numbers[:, 1::2]
    return torch._convert_weight_to_int4pack(pairs.contiguous(), _INNER_TILES)
