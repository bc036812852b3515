"""Measure the products of a model with its weights, at the shapes of a run, in each number format of a CPU."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.core.machine_records import LinearLayer, ModelLinears
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.runners.measure.ceiling_cpu import other_kernel, thread_counts, using_threads, with_instructions
from llm_perf_opt.runners.measure.ceiling_kernels import Arena, Room
from llm_perf_opt.runners.measure.ceiling_timing import Measured, Quantity

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llm_perf_opt.runners.quantization import Kernel

Stage = Literal["gemv", "gemm"]
"""`gemv`: a decode step. `gemm`: prefill."""
Product = Callable[["Tensor"], object]
"""Multiplies the activations with a weight matrix."""

_FORMATS = ("fp32", "bf16", "fp16", "int8")
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
_LEAST_SAMPLES, _MOST_SAMPLES = 3, 30
_SAMPLE_NS = 200_000
_PROBE_ROWS, _LEAST_OUTPUTS = 128, 64
_LEAST_WEIGHTS = 2**20
"""Weights times rows of the smallest product that stands for a larger one: libraries use one thread for products below half of
that (bf16 on aarch64, torch 2.13), which would double the time per weight."""
_CALLS = 2 + _LEAST_SAMPLES
"""The fewest calls per shape: one to warm up, one to estimate, the samples."""


@dataclass(frozen=True)
class _Shape:
    """One distinct product with its share of a stage."""

    layer: LinearLayer
    rows: int

    @property
    def weights(self) -> int:
        return self.layer.in_features * self.layer.out_features

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.weights * self.layer.count


@dataclass(frozen=True)
class _Series:
    """The time of one product in ns, per sample."""

    times: list[float]
    cut: bool
    """Whether only a part of the product was measured, and its time scaled."""


def model_quantities(model: ModelLinears, device: "torch.device", room: Room) -> tuple[Quantity, ...]:
    """Return the time of all products with weights per decode step and per prefill, in each format and number of threads."""
    bench = _Bench(model, Arena(room, device, 1))
    return tuple(_quantities(model, bench))


def _quantities(model: ModelLinears, bench: "_Bench") -> Iterator[Quantity]:
    run = model.dtype if model.dtype in _FORMATS else "fp32"

    def threaded(count: int, seconds: float) -> Maybe[Measured]:
        if other := other_kernel(run):
            return Missing(other)
        with using_threads(count):
            return bench.measure("gemv", run, seconds)

    stages: tuple[tuple[Stage, str], ...] = (("gemv", "decode step"), ("gemm", "prefill"))
    for stage, what in stages:
        if not bench.shapes(stage):
            continue
        for name in _FORMATS:
            label = f"linear layers per {what}, {name}{' weights' if name == 'int8' else ''}"
            weight = 2.0 if name == run else 1.0
            quantity = Quantity(f"model_{stage}_{name}", label, "ns", weight, partial(bench.measure, stage, name))
            # Some kernels convert int8 weights to the format of the activations: no instructions of their own apply.
            known = quantity if name == "int8" else with_instructions(quantity, name)
            yield replace(known, work=bench.work(stage, name))
    counts = thread_counts() if bench.shapes("gemv") else ()
    for count in counts:
        label = f"linear layers per decode step, {run}, {count} thread{'s' if count > 1 else ''}"
        quantity = Quantity(f"threads_{count}_model_gemv", label, "ns", 1.5 / len(counts), partial(threaded, count))
        yield replace(quantity, work=bench.work("gemv", run))


class _Bench:
    """Times the products of a model. Weights are used in turn, so that they come from where the model's weights come."""

    def __init__(self, model: ModelLinears, arena: Arena) -> None:
        self._model, self._arena = model, arena
        self._preparing_s = 0.0
        """Time spent on preparing int8 products."""
        self._turn_bytes = arena.room.bytes
        """The fewest bytes that the weights of one shape were taken from, in the last measurement."""

    def shapes(self, stage: Stage) -> list[_Shape]:
        """Return the products of a stage, those with the most work first."""
        found = [_Shape(layer, layer.decode_rows if stage == "gemv" else layer.prefill_rows) for layer in self._model.layers]
        return sorted((shape for shape in found if shape.rows), key=lambda shape: -shape.flops)

    def work(self, stage: Stage, dtype: str) -> float:
        """Return the bytes of the weights of a decode step, or the FLOPs of a prefill."""
        if stage == "gemm":
            return sum(shape.flops for shape in self.shapes(stage))
        return float(sum(shape.weights * shape.layer.count * _ITEM_BYTES[dtype] for shape in self.shapes(stage)))

    def measure(self, stage: Stage, dtype: str, seconds: float) -> Maybe[Measured]:
        """Return the time of all products of a stage; those beyond the time are estimated at the rate of the others."""
        if dtype == "int8" and isinstance(problem := self._int8_problem(), Missing):
            return problem
        begun, shapes = time.perf_counter() - self._preparing_s, self.shapes(stage)
        self._turn_bytes = self._window(dtype)
        total, done = sum(shape.flops for shape in shapes), 0.0
        series: list[list[float]] = []
        cut = False
        for shape in shapes:
            left = seconds - (time.perf_counter() - self._preparing_s - begun)
            if series and left <= 0:
                break
            slot = max(left, 0.0) * max(shape.flops / (total - done), 1 / (2 * len(shapes)))
            found = self._series(shape, dtype, slot)
            if isinstance(found, Missing):
                return found
            series.append([time_ns * shape.layer.count for time_ns in found.times])
            cut = cut or found.cut
            done += shape.flops
        share = done / total
        times = [sum(entries) / share for entries in zip(*series, strict=False)]
        how = self._how(dtype, shapes, len(series), share)
        return Measured(summarize(times), f"{how}, large ones in part" if cut else how)

    def _how(self, dtype: str, shapes: list[_Shape], measured: int, share: float) -> str:
        count = sum(shape.layer.count for shape in shapes)
        rows = shapes[0].rows
        rest = "" if measured == len(shapes) else f", the largest {measured} measured ({100 * share:.0f} % of the FLOPs)"
        kernels = f", by {self._kernel_names()}" if dtype == "int8" else ""
        window = self._turn_bytes / 2**20
        return (
            f"{count} products of {len(shapes)} shapes with {rows} row{'s' if rows > 1 else ''}{rest}{kernels}, "
            f"weights from {window:.0f} MiB in turn"
        )

    def _kernel_names(self) -> str:
        return " and ".join(dict.fromkeys(kernel.name for kernel in self._kernels.values()))

    def _window(self, dtype: str) -> int:
        """Return the bytes that the weights are taken from: those of the whole model, if there is room for them."""
        return min(self._model.parameters * _ITEM_BYTES[dtype], self._arena.room.bytes // 4096 * 4096)

    def _series(self, shape: _Shape, dtype: str, seconds: float) -> Maybe[_Series]:
        """Return the time of one product."""
        import torch

        inputs, outputs = shape.layer.in_features, shape.layer.out_features
        # A matrix beyond half of the window is cut, so that at least two are used in turn; its time grows with its size.
        most = max(1, min(outputs, self._window(dtype) // 2 // (inputs * _ITEM_BYTES[dtype])))
        activations = torch.randn(shape.rows, inputs).to(getattr(torch, _TORCH[self._activations(dtype)]))
        least = min(most, max(_LEAST_OUTPUTS, math.ceil(_LEAST_WEIGHTS / (inputs * min(shape.rows, _PROBE_ROWS)))))
        probe = self._products(shape, least, dtype, activations[:_PROBE_ROWS])
        if isinstance(probe, Missing):
            return probe
        rows, used = _fitting(probe, activations, (least, most), seconds)
        products = self._products(shape, used, dtype, activations[:rows])
        if isinstance(products, Missing):
            return products
        self._turn_bytes = min(self._turn_bytes, len(products) * inputs * used * _ITEM_BYTES[dtype])
        times = _samples(products, activations[:rows], seconds)
        scale = outputs / used * shape.rows / rows
        return _Series([time_ns * scale for time_ns in times], cut=scale > 1)

    def _activations(self, dtype: str) -> str:
        return _activations(self._model.dtype) if dtype == "int8" else dtype

    def _products(self, shape: _Shape, outputs: int, dtype: str, activations: "Tensor") -> Maybe[list[Product]]:
        """Return the products with the first outputs of several matrices of a shape."""
        import torch

        inputs = shape.layer.in_features
        values = self._arena.filled(getattr(torch, _TORCH[dtype]))
        size = inputs * outputs
        count = max(1, min(_MOST_MATRICES, self._window(dtype) // (size * _ITEM_BYTES[dtype])))
        if size > values.numel():
            return Missing("a weight matrix does not fit in the memory that can be used")
        matrices = [values[start : start + size].view(outputs, inputs) for start in range(0, count * size, size)]
        if dtype != "int8":
            return [partial(_linear, matrix) for matrix in matrices]
        begun = time.perf_counter()
        products = self._int8_products(matrices, (shape.layer.out_features, inputs), activations)
        self._preparing_s += time.perf_counter() - begun
        return products

    def _int8_problem(self) -> Missing | None:
        """Choose the int8 kernels, if that has not been done yet; return why there are none."""
        if self._model.experts:
            return Missing("the weights of experts, one tensor for all of them, are not quantized")
        try:
            self._kernels  # noqa: B018
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return Missing(f"this torch has no product with int8 weights on this CPU: {str(error).splitlines()[0][:100]}")
        return None

    def _int8_products(self, matrices: "list[Tensor]", shape: tuple[int, int], activations: "Tensor") -> list[Product]:
        """Return the products of the kernel that a run with int8 weights would use for matrices of this shape.

        Each is called once, because some kernels rearrange their weights then. That takes longer than forty products, so only as
        many matrices are used as exceed the cache, and fewer if they take too long.
        """
        import torch

        from llm_perf_opt.runners.quantization import Int8Linear

        dtype, kernel = getattr(torch, _TORCH[self._activations("int8")]), self._kernels[shape]
        begun, most = time.perf_counter(), _CACHES * self._arena.room.cache_bytes // matrices[0].numel()
        products: list[Product] = []
        for matrix in matrices[: max(_LEAST_MATRICES, most)]:
            products.append(kernel.product(Int8Linear.of(matrix, self._scales(matrix), dtype), len(activations)))
            products[-1](activations)
            if len(products) >= _LEAST_MATRICES and time.perf_counter() - begun > _PREPARE_S:
                break
        return products

    @cached_property
    def _kernels(self) -> "dict[tuple[int, int], Kernel]":
        """Outputs and inputs → the int8 kernel that a run would use."""
        import torch

        from llm_perf_opt.runners.quantization import Int8Linear, choose_kernels, tried_outputs

        values, dtype = self._arena.filled(torch.int8), getattr(torch, _TORCH[self._activations("int8")])
        samples = {}
        for layer in self._model.layers:
            shape = (layer.out_features, layer.in_features)
            outputs = min(tried_outputs(shape), values.numel() // layer.in_features)
            matrix = values[: outputs * layer.in_features].view(outputs, layer.in_features)
            samples[shape] = Int8Linear.of(matrix, self._scales(matrix), dtype)
        return choose_kernels(samples, max(layer.decode_rows for layer in self._model.layers), self._model.compiled)

    def _scales(self, matrix: "Tensor") -> "Tensor":
        """Return scales that give the weights a usual size: results must not overflow in fp16."""
        import torch

        outputs, inputs = matrix.shape
        return torch.full((outputs,), 1 / (127 * math.sqrt(inputs)))


_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
_LEAST_MATRICES, _MOST_MATRICES = 2, 4096
_CACHES = 2
"""int8 weights are taken from this many times the last-level cache, if the model has as many."""
_PREPARE_S = 0.25
"""The longest time to prepare the int8 products of one shape."""


def _activations(dtype: str) -> str:
    """Return the format of activations in a run of this dtype."""
    return dtype if dtype in ("fp32", "bf16", "fp16") else "fp32"


def _linear(weight: "Tensor", activations: "Tensor") -> object:
    import torch

    return torch.nn.functional.linear(activations, weight)


def _fitting(probe: list[Product], activations: "Tensor", outputs: tuple[int, int], seconds: float) -> tuple[int, int]:
    """Return how many rows and outputs can be measured in the time: outputs are halved until a few calls fit, then rows.

    `outputs` are the fewest, which the probe has, and the most. The time grows with both. Few rows are not cut, because
    libraries may use another kernel for them.
    """
    rows, (least, used) = len(activations), outputs
    some = min(rows, _PROBE_ROWS)
    probe[0](activations[:some])
    begun = time.perf_counter()
    probe[-1](activations[:some])
    each = (time.perf_counter() - begun) / (some * least)
    while used // 2 >= least and _CALLS * rows * used * each > seconds:
        used //= 2
    while rows // 2 >= some and _CALLS * rows * used * each > seconds:
        rows //= 2
    return rows, used


def _samples(products: list[Product], activations: "Tensor", seconds: float) -> list[float]:
    """Return the time of one call in ns, per sample; short calls are timed together."""
    number = 0

    def sample(calls: int) -> float:
        nonlocal number
        begun = time.perf_counter_ns()
        for _ in range(calls):
            products[number % len(products)](activations)
            number += 1
        return max(1.0, float(time.perf_counter_ns() - begun)) / calls

    sample(1)
    once = sample(1)
    calls = math.ceil(_SAMPLE_NS / once)
    samples = int(seconds * 1e9 / (once * calls))
    return [sample(calls) for _ in range(max(_LEAST_SAMPLES, min(_MOST_SAMPLES, samples)))]
