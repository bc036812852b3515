"""Layers in int8, fp8 and int4 multiply with their rounded weights, and every byte of them is counted."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from builders import default_config
from docs_commands import commands
from llm_perf_opt.analysis.cost_model.architecture import Architecture
from llm_perf_opt.analysis.cost_model.cost import compute_dtype, step_cost, weight_bytes
from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.limits.efficiency import formats_of
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.schema import Quantization
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners import quantized_layers
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.pytorch_runner import PyTorchRunner, open_pytorch
from llm_perf_opt.runners.quantized_layers import (
    Int4Linear,
    QuantizedLinear,
    ScaledLinear,
    check_format,
    check_product,
    fits,
    quantized_layer,
)
from llm_perf_opt.runners.quantized_model import quantize_linear_layers, quantized_bytes
from llm_perf_opt.workspace.data.prompts import synthetic_prompts

OUTPUTS, INPUTS = 48, 256
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, biases and inputs. The outputs differ in size, and one input is large."""
    torch.manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS) * torch.logspace(-2, 0, OUTPUTS)[:, None]
    inputs = torch.randn(2, 3, INPUTS)
    inputs[0, 0, 5] = 900.0  # times an unscaled weight of 448, it overflows in fp16
    return weight.to(dtype), torch.randn(OUTPUTS).to(dtype), inputs.to(dtype)


def dequantized(layer: QuantizedLinear) -> torch.Tensor:
    assert isinstance(layer, ScaledLinear | Int4Linear)
    if isinstance(layer, ScaledLinear):
        return layer.weight.float() * layer.scales[:, None]
    return layer.product(torch.eye(INPUTS, dtype=layer.scales.dtype)).float().t()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "largest"), [("int8", 0.5 / 127), ("fp8", 2**-4), ("int4", 0.5 / 15 * 2.1)])
def test_a_layer_multiplies_with_its_rounded_weights(kind: str, largest: float, dtype: torch.dtype) -> None:
    weight, bias, inputs = matrices(dtype)
    layer = quantized_layer(kind, weight, bias, compiled=False)
    with torch.inference_mode():
        rounded = dequantized(layer)
        error = (rounded - weight.float()).abs().amax(dim=1) / weight.float().abs().amax(dim=1)
        assert float(error.max()) <= largest * 1.02 + (0.005 if kind == "int4" else 0)
        expected = torch.nn.functional.linear(inputs.float(), rounded, bias.float())
        found = layer(inputs)
        assert (found.dtype, found.shape) == (dtype, (2, 3, OUTPUTS))
        assert float((found.float() - expected).norm() / expected.norm()) < 0.006


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_compiled_layer_sums_products_of_few_rows(kind: str) -> None:
    """Captured as a graph: generating kernels takes long."""
    weight, bias, inputs = matrices(torch.bfloat16)
    layer = quantized_layer(kind, weight, bias, compiled=True)
    operators: list[list[str]] = []

    def capture(graph: Any, _: Any) -> Any:
        operators.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    with torch.inference_mode():
        expected = torch.nn.functional.linear(inputs.float(), dequantized(layer), bias.float())
        torch._dynamo.reset()
        found = torch.compile(layer, backend=capture, fullgraph=True)(inputs)
        many = torch.cat([inputs.reshape(6, INPUTS)] * 2)
        torch.compile(layer, backend=capture, fullgraph=True, dynamic=False)(many)
    assert float((found.float() - expected).norm() / expected.norm()) < 0.003
    few, more = operators
    assert few.count("sum") == 6, "one sum per row"
    assert not any("linear" in name for name in few)
    assert "sum" not in more
    assert any("linear" in name for name in more), "more rows are multiplied with converted weights"


@pytest.mark.parametrize(
    ("kind", "weights", "scales"),
    [
        ("int8", OUTPUTS * INPUTS, 4 * OUTPUTS),
        ("fp8", OUTPUTS * INPUTS, 4 * OUTPUTS),
        ("int4", OUTPUTS * INPUTS // 2, 8 * OUTPUTS),
    ],
)
def test_bytes_are_those_of_the_tensors(kind: str, weights: int, scales: int) -> None:
    """int4: two groups of 128 inputs, each with a scale and a zero point in bf16."""
    weight, bias, _ = matrices(torch.bfloat16)
    layer = quantized_layer(kind, weight, bias, compiled=False)
    assert (layer.weights, layer.weight_bytes, layer.scale_bytes) == (OUTPUTS * INPUTS, weights, scales)
    assert quantized_bytes(layer) == weights + scales + 2 * OUTPUTS
    assert getattr(layer, "weight").dim() == 2, "components are found by it"  # noqa: B009


def test_the_kernel_of_a_decode_step_is_recorded() -> None:
    weight, bias, _ = matrices(torch.bfloat16)
    kernels = [
        quantized_layer("fp8", weight, bias, compiled=compiled, rows=rows).kernel
        for compiled, rows in ((True, 8), (True, 9), (False, 1))
    ]
    assert kernels == [quantized_layers.FUSED, quantized_layers.CONVERTED, quantized_layers.CONVERTED]
    assert quantized_layer("int4", weight, bias, compiled=False).kernel == "aten::_weight_int4pack_mm_for_cpu"


def test_a_large_matrix_is_quantized_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _, _ = matrices(torch.float32)
    whole = [quantized_layer(kind, weight, None, compiled=False) for kind in ("int8", "fp8", "int4")]
    monkeypatch.setattr(quantized_layers, "_MOST_AT_ONCE", 16 * INPUTS)
    for one, kind in zip(whole, ("int8", "fp8", "int4"), strict=True):
        other = quantized_layer(kind, weight, None, compiled=False)
        assert all(
            bool((a.view(torch.uint8) == b.view(torch.uint8)).all()) for a, b in zip(one.buffers(), other.buffers(), strict=True)
        )


def test_a_constant_and_an_empty_row_stay_finite() -> None:
    weight = torch.zeros(16, 128)
    weight[1] = 3.0
    for kind in ("int8", "fp8", "int4"):
        layer = quantized_layer(kind, weight, None, compiled=False)
        found = layer(torch.ones(1, 128))[0]
        assert float(found[0]) == 0
        assert float(found[1]) == pytest.approx(384, rel=1e-3)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, _ = matrices(torch.bfloat16)
    layer = quantized_layer("int4", weight, 100 * bias, compiled=False)
    check_product(layer, weight)
    right = torch._weight_int4pack_mm_for_cpu
    monkeypatch.setattr(torch, "_weight_int4pack_mm_for_cpu", lambda *given: right(*given).roll(1, -1))
    with pytest.raises(ConfigError, match="wrong products"):
        check_product(layer, weight)


# --- what runs where ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "capability", "problem"),
    [
        ("int8", torch.float16, (7, 0), None),
        ("fp8", torch.bfloat16, (8, 9), None),
        ("fp8", torch.bfloat16, (8, 0), "compute capability 8.9; cuda has 8.0"),
        ("int4", torch.bfloat16, (9, 0), None),
        ("int4", torch.bfloat16, (7, 5), "compute capability 8.0"),
        ("int4", torch.float16, (9, 0), "model.dtype=bf16"),
    ],
)
def test_a_gpu_without_the_format_is_refused(
    kind: str, dtype: torch.dtype, capability: tuple[int, int], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if problem is None:
        check_format(kind, torch.device("cuda"), dtype)
        return
    with pytest.raises(ConfigError, match=problem):
        check_format(kind, torch.device("cuda"), dtype)


def test_a_gpu_of_another_vendor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(ConfigError, match="NVIDIA"):
        check_format("int8", torch.device("cuda"), torch.bfloat16)


def test_only_matrices_that_fit_become_int4() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert fits("int4", (24, 256), gpu)
    assert not fits("int4", (24, 256), cpu), "the kernel of a CPU takes multiples of 16 outputs"
    assert not fits("int4", (24, 192), gpu)
    assert fits("fp8", (7, 5), cpu)
    with pytest.raises(ConfigError, match="no linear layer"):
        quantize_linear_layers(torch.nn.Sequential(torch.nn.Linear(8, 8)), format="int4")


# --- a model ----------------------------------------------------------------------------------------------------------------

FIELDS: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 97, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def opened(kind: Quantization, dtype: torch.dtype = torch.bfloat16) -> PyTorchRunner:
    config = default_config()
    config = replace(
        config,
        model=replace(config.model, architecture=FIELDS),
        runtime=replace(config.runtime, quantization=kind, num_new_tokens=3),
    )
    prompts = synthetic_prompts(1, 5, 97, 0)
    return open_pytorch(
        RunnerRequest(config, AutoConfig.for_model(**FIELDS), prompts, torch.device("cpu"), dtype, None, compare_tokens=True)
    )


def of(runner: PyTorchRunner) -> Architecture:
    return architecture_of(runner.facts.architecture)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_the_cost_model_counts_the_bytes_of_the_model(kind: Quantization) -> None:
    """With biases, a tied head and, in int4, layers that stay: the head (97 outputs) and the last of the MLP (192 inputs)."""
    runner = opened(kind)
    facts = runner.facts
    assert facts.weights is not None
    quantized = facts.weights.quantized
    assert quantized is not None
    formats = formats_of(facts)
    assert weight_bytes(of(runner), formats) == facts.weight_bytes
    assert compute_dtype(formats.weights) == "bf16", "the peak of the products"
    cost = {part.name: part.bytes for part in step_cost(of(runner), Step(1, 1, 4), formats).components}
    hidden, middle, keys = 128, 192, 64
    attention = 2 * (2 * hidden * hidden + 2 * hidden * keys)
    biases, outputs = 2 * (hidden + 2 * keys), 2 * (2 * hidden + 2 * keys)
    if kind == "fp8":
        assert quantized.kept_layers == 0
        assert cost["attention_projections"] == attention + 2 * biases + 4 * outputs
        assert cost["mlp"] == 2 * (3 * hidden * middle + 4 * (2 * middle + hidden))
        assert cost["lm_head"] == 97 * hidden + 4 * 97 + 2 * 97, "weights, scales and logits"
        return
    assert (quantized.kept_layers, quantized.layers, quantized.group) == (3, 12, 128)
    assert set(quantized.components) == {"attention_projections", "mlp"}
    assert cost["attention_projections"] == attention // 2 + 2 * biases + 4 * outputs
    assert cost["mlp"] == 2 * (2 * hidden * middle // 2 + 4 * 2 * middle + 2 * hidden * middle)
    assert cost["lm_head"] == 2 * 97 * hidden + 2 * 97


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_quantized_model_runs_and_compares_its_tokens(kind: Quantization) -> None:
    runner = opened(kind, torch.float32)
    runner.begin()
    token = runner.prefill(runner.place(synthetic_prompts(1, 5, 97, 0)))
    assert runner.decode_step(token).shape == (1, 1)
    assert runner.reference_tokens is not None
    assert len(runner.reference_tokens[0]) == 3


def test_the_commands_of_the_page_are_valid() -> None:
    found = commands("quantization.md")
    assert len(found) == 1
    for verb, *words in found:
        assert verb == "run"
        assert compose(words).config.runtime.quantization == "int8"
