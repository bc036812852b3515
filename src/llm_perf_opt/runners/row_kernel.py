"""A Triton kernel that multiplies one row with a matrix, for decode steps of one sequence on a GPU.

Such a product takes the time of reading the matrix. Each program multiplies some rows of the matrix and converts the inputs once
for all of them. Products and sums are in fp32. How many rows and inputs a program takes at a time is measured for every shape, on
the layers of the model: what is fastest depends on the device and on whether the matrix fits into its cache.

It is for steps that are replayed as CUDA graphs: launched one by one, it takes longer to launch than to run.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional


class Blocks(NamedTuple):
    """How a matrix is divided."""

    outputs: int
    """Rows of a program, a power of 2."""
    inputs: int
    """Inputs that a program multiplies at a time, a power of 2."""
    warps: int


class Layer(NamedTuple):
    """A matrix, [output, input], and a scale per output in fp32, if it has scales."""

    weight: torch.Tensor
    scales: torch.Tensor | None = None


CHOICES = (Blocks(1, 512, 1), Blocks(2, 512, 1), Blocks(2, 1024, 2), Blocks(1, 2048, 4), Blocks(2, 2048, 4))
_MOST_STEPS = 32
"""The kernel has no loop: with more steps over the inputs than this, compiling it takes long."""
_REPLAYS = 5
_CLEARLY = 0.97
"""A choice replaces the one before it if it takes at most this share of the time, so that every process chooses the same."""
_LEAST_BYTES = 2**27
"""Layers of this many bytes are timed together, more than a GPU's cache holds."""


@triton.jit  # type: ignore[untyped-decorator]
def row_product_kernel(  # type: ignore[no-untyped-def]  # noqa: D103
    row, weight, scales, product, outputs, inputs: tl.constexpr, block_outputs: tl.constexpr, block_inputs: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    read = tl.minimum(at, outputs - 1).to(tl.int64)  # the last program may have fewer rows
    sums = tl.zeros([block_outputs, block_inputs], tl.float32)
    for first in tl.static_range(0, inputs, block_inputs):
        column = first + tl.arange(0, block_inputs)
        place = read[:, None] * inputs + column[None, :]
        if first + block_inputs <= inputs:
            part = tl.load(weight + place)
            factor = tl.load(row + column)
        else:
            part = tl.load(weight + place, mask=(column < inputs)[None, :], other=0.0)
            factor = tl.load(row + column, mask=column < inputs, other=0.0)
        if part.dtype == tl.int8:  # the bits of the float 2 ** 23 + 128 + weight: converting integers is slower
            numbers = ((part.to(tl.int32) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
        else:
            numbers = part.to(tl.float32)
        sums += numbers * factor.to(tl.float32)[None, :]
    total = tl.sum(sums, axis=1)
    if scales is not None:
        total *= tl.load(scales + read)
    tl.store(product + at, total.to(product.dtype.element_ty), mask=at < outputs)


@torch.library.custom_op("llm_perf_opt::row_product", mutates_args=())
def row_product(
    row: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, block_outputs: int, block_inputs: int, warps: int
) -> torch.Tensor:
    """Return row · weightᵀ · scales, [1, output], in the dtype of the row, [1, input]."""
    outputs, inputs = weight.shape
    product = row.new_empty((1, outputs))
    launch = row_product_kernel[(triton.cdiv(outputs, block_outputs),)]
    with torch.cuda.device(row.device) if row.is_cuda else nullcontext():
        launch(row.contiguous(), weight, scales, product, outputs, inputs, block_outputs, block_inputs, num_warps=warps)
    return product


@row_product.register_fake
def _(row: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return row.new_empty((1, weight.shape[0]))


class RowLinear(nn.Linear):
    """A linear layer whose compiled product of one row is that kernel."""

    blocks: Blocks

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input · weightᵀ + bias."""
        if not torch.compiler.is_compiling() or input.shape[:-1].numel() != 1:
            return super().forward(input)
        product: torch.Tensor = torch.ops.llm_perf_opt.row_product(input.reshape(1, -1), self.weight, None, *self.blocks)
        product = product if self.bias is None else product + self.bias
        return product.reshape(*input.shape[:-1], self.out_features)


def use_row_kernel(model: nn.Module) -> str:
    """Let the linear layers of a model use the kernel where it is faster than the library, and return what changed."""
    shapes: dict[tuple[torch.Size, torch.dtype], list[nn.Linear]] = {}
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.is_contiguous():
            shapes.setdefault((layer.weight.shape, layer.weight.dtype), []).append(layer)
    used = 0
    with torch.inference_mode():
        for (_, dtype), alike in shapes.items():
            layers = [Layer(layer.weight) for layer in alike]
            blocks, seconds = fastest_blocks(layers, dtype)
            if seconds < _CLEARLY * _seconds(layers, dtype, lambda row, layer: functional.linear(row, layer.weight)):
                for layer in alike:
                    layer.__class__ = RowLinear
                    layer.blocks = blocks  # type: ignore[assignment]
                used += len(alike)
    count = sum(map(len, shapes.values()))
    if not count:
        return "runtime.row_kernel has no effect: there are no linear layers that are not quantized."
    return f"Compiled products of one row use llm-perf's kernel in {used} of {count} linear layers (runtime.row_kernel)."


def fastest_blocks(layers: Sequence[Layer], dtype: torch.dtype) -> tuple[Blocks, float]:
    """Return the fastest choice for layers of one shape and rows of a dtype, and how long it takes."""
    inputs = layers[0].weight.shape[1]
    choices = [blocks for blocks in CHOICES if inputs <= _MOST_STEPS * blocks.inputs] or CHOICES[-1:]
    fastest, best = choices[0], float("inf")
    for blocks in choices:
        seconds = _seconds(layers, dtype, partial(_product, blocks))
        if seconds < _CLEARLY * best:
            fastest, best = blocks, seconds
    return fastest, best


def _product(blocks: Blocks, row: torch.Tensor, layer: Layer) -> torch.Tensor:
    product: torch.Tensor = row_product(row, *layer, *blocks)
    return product


def _seconds(layers: Sequence[Layer], dtype: torch.dtype, product: Callable[[torch.Tensor, Layer], torch.Tensor]) -> float:
    """Return how long the products of the layers take as a CUDA graph: launching them one by one takes longer than they do."""
    weight = layers[0].weight
    some = layers[: -(-_LEAST_BYTES // (weight.numel() * weight.element_size()))]
    row = torch.ones((1, weight.shape[1]), dtype=dtype, device=weight.device)
    with torch.cuda.device(weight.device):
        product(row, some[0])  # compiles it
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            for layer in some:
                product(row, layer)
        graph.replay()
        times = [_replayed(graph) for _ in range(_REPLAYS)]
    return min(times) / len(some)


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3
