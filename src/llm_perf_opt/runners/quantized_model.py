"""Quantize the linear layers of a model in place, and record what that changed."""

from collections import Counter
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.weight_records import QuantizedWeights
from llm_perf_opt.runners.measure.components import OTHER, part_of
from llm_perf_opt.runners.quantization import ALL_ROWS, DYNAMIC, Int8Linear, use_fastest
from llm_perf_opt.runners.quantized_layers import GROUP, QuantizedLinear, check_product, choose_row_blocks, fits, quantized_layer


def quantize_linear_layers(
    model: nn.Module, rows: int = 1, *, compiled: bool = False, graphs: bool = False, format: str = "int8"
) -> QuantizedWeights:
    """Replace the linear layers of the model in place and return what was replaced.

    Each layer uses the kernel that is fastest for inputs of `rows` rows; `graphs`: in steps that are replayed as CUDA graphs. A
    head that shares its matrix with the embedding becomes a copy: the embedding keeps its dtype. A layer whose shape does not fit
    the format stays as it is.
    """
    paths = [path for path, _ in _linear_layers(model)]
    counted = _Counted()
    checked: set[tuple[int, int]] = set()
    with torch.no_grad():
        for path in paths:
            layer = model.get_submodule(path)
            weight, bias = _output_by_input(layer), cast("torch.Tensor | None", getattr(layer, "bias", None))
            shape, device, dtype = (weight.shape[0], weight.shape[1]), weight.device, weight.dtype
            if not fits(format, shape, device):
                counted.keep(_component(path), weight, bias)
                continue
            if format == "int8" and device.type == "cpu":
                made: QuantizedLinear = Int8Linear(weight, bias)
            else:
                made = quantized_layer(format, weight, bias, compiled=compiled, rows=rows)
                if shape not in checked:
                    check_product(made, weight)
                    checked.add(shape)
            model.set_submodule(path, made)
            counted.replace(_component(path), made)
    if not counted.layers:
        raise ConfigError(
            f"runtime.quantization={format}: {type(model).__name__} has no linear layer that can be quantized.",
            "Use runtime.quantization=none.",
        )
    on_cpu = [layer for layer in counted.layers if isinstance(layer, Int8Linear)]
    if on_cpu:
        use_fastest(on_cpu, rows, compiled)
    elif graphs and rows == 1 and format != "int4":
        choose_row_blocks(counted.layers, dtype)
    return counted.record(format)


class _Counted:
    """The layers of a model that were replaced, and those that were kept."""

    def __init__(self) -> None:
        self.layers: list[QuantizedLinear] = []
        self._kept = 0
        self._replaced: dict[str, list[QuantizedLinear]] = {}
        """By component."""
        self._plain: dict[str, list[torch.Tensor]] = {}
        """Biases, and the weights of kept layers, by component."""

    def keep(self, component: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Count a layer that stays as it is."""
        self._kept += 1
        self._plain.setdefault(component, []).extend(tensor for tensor in (weight, bias) if tensor is not None)

    def replace(self, component: str, layer: QuantizedLinear) -> None:
        """Count a layer that replaces another."""
        self.layers.append(layer)
        self._replaced.setdefault(component, []).append(layer)
        if layer.bias is not None:
            self._plain.setdefault(component, []).append(layer.bias)

    def record(self, format: str) -> QuantizedWeights:
        """Return the record of all layers, with the kernels that they use now."""
        used = Counter(layer.kernel for layer in self.layers)
        kernel_rows = min((layer.kernel_rows for layer in self.layers if isinstance(layer, Int8Linear)), default=ALL_ROWS)
        return QuantizedWeights(
            format=format,
            kernel=", ".join(f"{name} in {count} layer{'s' if count > 1 else ''}" for name, count in used.most_common()),
            layers=len(self.layers),
            weights=sum(layer.weights for layer in self.layers),
            weight_bytes=sum(layer.weight_bytes for layer in self.layers),
            scale_bytes=sum(layer.scale_bytes for layer in self.layers),
            components=tuple(self._replaced),
            kernel_rows=None if kernel_rows == ALL_ROWS else kernel_rows,
            quantized_inputs=any(name.startswith(DYNAMIC) for name in used),
            group=GROUP if format == "int4" else None,
            kept_layers=self._kept,
            component_bits={name: self._bits(name) for name in self._replaced},
        )

    def _bits(self, component: str) -> float:
        """Return the average bits of the parameters of a component's linear layers."""
        replaced, plain = self._replaced[component], self._plain.get(component, [])
        size = sum(layer.weight_bytes + layer.scale_bytes for layer in replaced)
        size += sum(tensor.numel() * tensor.element_size() for tensor in plain)
        return 8 * size / (sum(layer.weights for layer in replaced) + sum(tensor.numel() for tensor in plain))


def quantized_bytes(model: nn.Module) -> int:
    """Return the bytes of all quantized layers: weights, scales and biases."""
    tensors = [tensor for layer in model.modules() if isinstance(layer, QuantizedLinear) for tensor in layer.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers; GPT-2 calls them Conv1D and stores them transposed."""
    for path, layer in model.named_modules():
        if type(layer) is nn.Linear or type(layer).__name__ == "Conv1D":
            yield path, layer


def _component(path: str) -> str:
    """Return the component of the cost model that a layer belongs to."""
    while path:
        part = part_of(path, True)
        if part is not None:
            return part
        path = path.rpartition(".")[0]
    return OTHER


def _output_by_input(layer: nn.Module) -> torch.Tensor:
    weight = cast("torch.Tensor", layer.weight).detach()
    return weight.t() if type(layer).__name__ == "Conv1D" else weight
