"""Fused projections: the matrices that multiply the same input are stored as one and multiplied once.

Attention multiplies its input by three matrices (query, key, value), a gated MLP by two. At batch 1 each product is short, and
launching it and filling the device take much of its time. One product of all of them reads the same bytes in one kernel. Its
result is the same up to rounding.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from llm_perf_opt.core.errors import ConfigError

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that multiply the same input, as transformers' families call them."""


class _Shared:
    """The product that the parts of one group share. torch.compile traces through it: one product remains."""

    def __init__(self) -> None:
        self._inputs: torch.Tensor | None = None
        self._product: torch.Tensor | None = None

    def product(self, whole: nn.Module, inputs: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Return the product with these inputs, computed once for all parts; the last part releases it."""
        found = self._product
        if found is None or self._inputs is not inputs:
            found = _multiply(whole, inputs)
            self._inputs, self._product = inputs, found
        if last:
            self._inputs = self._product = None
        return found


def _multiply(whole: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the product; a compiled one of one row adds its bias separately.

    The compiler generates a product of one row and fuses the sum into it, but leaves a product with a bias to the library.
    """
    one_row = inputs.shape[:-1].numel() == 1
    if one_row and torch.compiler.is_compiling() and type(whole) is nn.Linear and whole.bias is not None:
        return nn.functional.linear(inputs, whole.weight) + whole.bias
    return cast("torch.Tensor", whole(inputs))


class Part(nn.Module):
    """The outputs of one projection, taken from the product of its group."""

    whole: nn.Module

    def __init__(self, whole: nn.Module, shared: _Shared, outputs: tuple[int, int], *, last: bool) -> None:
        super().__init__()
        self.whole = whole
        self._shared, self._outputs, self._last = shared, outputs, last

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return inputs · weightᵀ + bias of this projection."""
        first, end = self._outputs
        return self._shared.product(self.whole, inputs, last=self._last)[..., first:end]


def fuse_projections(model: nn.Module) -> str:
    """Fuse the projections of the model in place and return what was fused, as a sentence."""
    counts: dict[str, int] = {}
    with torch.no_grad():
        for owner, names in list(_groups(model)):
            _fuse(owner, names)
            words = ", ".join(names[:-1]) + f" and {names[-1]}"
            counts[words] = counts.get(words, 0) + 1
    if not counts:
        raise ConfigError(
            f"runtime.fuse_projections=true: {type(model).__name__} has no projections that can be fused: "
            "linear layers called q_proj, k_proj, v_proj or gate_proj, up_proj that multiply the same input.",
            "Use runtime.fuse_projections=false.",
        )
    fused = "; ".join(f"{words} in {count} layer{'s' if count > 1 else ''}" for words, count in counts.items())
    return f"These projections are one product (runtime.fuse_projections): {fused}."


def share_fused(model: nn.Module) -> None:
    """Let all parts of a group use the matrix of its first part again, after that was replaced, as quantization does."""
    for owner in model.modules():
        for names in GROUPS:
            parts = [part for part in (getattr(owner, name, None) for name in names) if isinstance(part, Part)]
            for part in parts[1:]:
                part.whole = parts[0].whole


def _groups(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Yield each module with projections that can be fused, and their names."""
    for owner in model.modules():
        for names in GROUPS:
            layers = [getattr(owner, name, None) for name in names]
            if all(type(layer) is nn.Linear for layer in layers):
                linear = cast("list[nn.Linear]", layers)
                alike = {(one.in_features, one.bias is None, one.weight.dtype, one.weight.device) for one in linear}
                if len(alike) == 1:
                    yield owner, names


def _fuse(owner: nn.Module, names: tuple[str, ...]) -> None:
    layers = [cast("nn.Linear", getattr(owner, name)) for name in names]
    whole = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers), bias=False, device="meta")
    whole.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if layers[0].bias is not None:
        whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    shared, first = _Shared(), 0
    for name, layer in zip(names, layers, strict=True):
        end = first + layer.out_features
        setattr(owner, name, Part(whole, shared, (first, end), last=name == names[-1]))
        first = end
