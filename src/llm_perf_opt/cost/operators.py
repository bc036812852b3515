"""FLOPs of each class of operator, from the shapes of its inputs; needs no torch, so that a trace with shapes is counted too.

A multiply-add counts as 2 FLOPs, and only products, convolutions and attention have any, as in PyTorch's own counter. An operator
that is not in the table has none: whoever counts names those that multiply (see `MAY_MULTIPLY`).
"""

import math
from collections.abc import Callable, Mapping, Sequence

Shape = Sequence[int]
Shapes = Sequence[Shape]
"""The shapes of an operator's tensor arguments, in order; an argument that is no tensor has an empty one."""


def _matrix(left: Shape, right: Shape) -> int:
    """Return the FLOPs of a (batched) matrix product: left is … × m × k, right is … × k × n."""
    return 2 * math.prod(left) * right[-1]


def _linear(shapes: Shapes) -> int:
    """Return the FLOPs of x · Wᵀ, with the weight as outputs × inputs."""
    return 2 * math.prod(shapes[0]) * shapes[1][0]


def _convolution(shapes: Shapes, output: Shape, transposed: bool) -> int:
    """Return the FLOPs of a convolution: each output value, or each input value of a transposed one, sums a kernel."""
    source, weight = shapes[0], shapes[1]
    return 2 * (math.prod(source) if transposed else math.prod(output)) * math.prod(weight[1:])


def attention_flops(query: Shape, key: Shape, value: Shape) -> int:
    """Return the FLOPs of scores and weighted values: query … × heads × q × d, key … × k × d, value … × k × v."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _grouped(shapes: Shapes) -> int:
    """Return the FLOPs of a product of which each row uses one matrix of a stack: rows × k, matrices × k × n."""
    left, right = shapes[0], shapes[1]
    return 2 * math.prod(left) * right[-1]


_BY_NAME: Mapping[str, Callable[[Shapes], int]] = {
    "mm": lambda shapes: _matrix(shapes[0], shapes[1]),
    "bmm": lambda shapes: _matrix(shapes[0], shapes[1]),
    "mv": lambda shapes: 2 * math.prod(shapes[0]),
    "dot": lambda shapes: 2 * math.prod(shapes[0]),
    "vdot": lambda shapes: 2 * math.prod(shapes[0]),
    "addmm": lambda shapes: _matrix(shapes[1], shapes[2]),
    "addmm_": lambda shapes: _matrix(shapes[1], shapes[2]),
    "_addmm_activation": lambda shapes: _matrix(shapes[1], shapes[2]),
    "baddbmm": lambda shapes: _matrix(shapes[1], shapes[2]),
    "baddbmm_": lambda shapes: _matrix(shapes[1], shapes[2]),
    "addbmm": lambda shapes: _matrix(shapes[1], shapes[2]),
    "addmv": lambda shapes: 2 * math.prod(shapes[1]),
    "addr": lambda shapes: 2 * shapes[1][0] * shapes[2][0],
    "linear": _linear,
    "mkldnn_linear": _linear,
    "_scaled_mm": lambda shapes: _matrix(shapes[0], shapes[1]),
    "_scaled_mm_v2": lambda shapes: _matrix(shapes[0], shapes[1]),
    "_int_mm": lambda shapes: _matrix(shapes[0], shapes[1]),
    "_weight_int8pack_mm": _linear,
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "scaled_dot_product_attention": lambda shapes: attention_flops(*shapes[:3]),
    "_scaled_dot_product_flash_attention": lambda shapes: attention_flops(*shapes[:3]),
    "_scaled_dot_product_flash_attention_for_cpu": lambda shapes: attention_flops(*shapes[:3]),
    "_scaled_dot_product_efficient_attention": lambda shapes: attention_flops(*shapes[:3]),
    "_scaled_dot_product_cudnn_attention": lambda shapes: attention_flops(*shapes[:3]),
    "_scaled_dot_product_fused_attention_overrideable": lambda shapes: attention_flops(*shapes[:3]),
    "_scaled_dot_product_attention_math": lambda shapes: attention_flops(*shapes[:3]),
}
"""Operators of the namespace aten, without their overload."""
_CONVOLUTIONS = frozenset(
    ("convolution", "_convolution", "convolution_overrideable", "conv1d", "conv2d", "conv3d", "cudnn_convolution")
)
MAY_MULTIPLY = ("mm", "matmul", "conv", "linear", "attention", "gemm", "einsum", "lstm", "gru", "rnn", "fft")
"""Parts of names of operators that would have FLOPs; one that is not in the table is named in the result."""


def flops_of(name: str, shapes: Shapes, output: Shape = (), transposed: bool = False) -> int | None:
    """Return the FLOPs of an operator of aten, named without namespace and overload; None if the table has no formula."""
    if name in _CONVOLUTIONS:
        return _convolution(shapes, output, transposed)
    formula = _BY_NAME.get(name)
    if formula is not None:
        return formula(shapes)
    return None if any(part in name for part in MAY_MULTIPLY) else 0
