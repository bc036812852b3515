"""Linear layers with int8 weights give nearly the same results, for every architecture, with and without many rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from builders import default_config
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.instruction_sets import instruction_set
from llm_perf_opt.runners import quantization
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.pytorch_runner import open_pytorch
from llm_perf_opt.runners.quantization import Int8Linear
from llm_perf_opt.runners.quantized_model import quantize_linear_layers, quantized_bytes
from llm_perf_opt.workspace.data.prompts import synthetic_prompts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 8), (33, 64), (64, 48)])
def test_a_layer_multiplies_with_its_rounded_weights(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    exact = torch.nn.Linear(shape[1], shape[0], dtype=dtype)
    layer = Int8Linear(exact.weight.detach(), exact.bias.detach())
    rounded = layer.weight.float() * layer.scales.float()[:, None]
    error = (rounded - exact.weight.float()).abs().amax(dim=1)
    assert bool((error <= 0.51 * layer.scales.float() + 0.01 * exact.weight.float().abs().amax(dim=1)).all())
    inputs = torch.randn(2, 3, shape[1], dtype=dtype)
    with torch.inference_mode():
        expected = torch.nn.functional.linear(inputs.float(), rounded, exact.bias.float())
        for rows in (layer.kernel_rows, 0):
            layer.kernel_rows = rows
            found = layer(inputs)
            assert (found.shape, found.dtype) == ((2, 3, shape[0]), dtype)
            torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("columns", [5, 33])
def test_a_kernel_that_is_wrong_for_a_shape_is_not_used(columns: int) -> None:
    """On aarch64 the kernel ignores some of the inputs if their number is no multiple of eight."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(columns, 32), torch.nn.Linear(32, 16))
    inputs = torch.randn(3, columns)
    with torch.inference_mode():
        expected = model(inputs)
        found = quantize_linear_layers(model, compiled=True)
        assert float((model(inputs) - expected).norm() / expected.norm()) < 0.05
    assert found.layers == 2


@pytest.mark.parametrize("columns", [5, 8, 24, 40])
def test_a_kernel_that_reads_beyond_the_weights_is_never_called(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor with AVX-512 the kernel ends the process if the number of inputs is no multiple of 16."""
    monkeypatch.setattr(Int8Linear, "packed", lambda layer, rows: pytest.fail(f"called for {layer.in_features} inputs"))
    for compiled in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(columns, 8), torch.nn.Linear(8, columns)).to(torch.bfloat16)
        with torch.inference_mode():
            quantize_linear_layers(model, compiled=compiled)
            assert bool(model(torch.ones(2, columns, dtype=torch.bfloat16)).isfinite().all())


def test_the_largest_weight_of_each_row_is_exact_and_zero_stays_zero() -> None:
    layer = Int8Linear(torch.tensor([[0.0, 0.0], [-2.0, 1.0], [127e-30, 1e-30]]), None)
    layer.kernel_rows = 0
    assert layer.weight.tolist() == [[0, 0], [-127, 64], [127, 1]]
    torch.testing.assert_close(layer(torch.ones(1, 2)), torch.tensor([[0.0, -63 / 127 * 2, 128e-30]]))


SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.5, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.5}


def small_model(model_type: str) -> Any:
    torch.manual_seed(1)
    fields = GPT2 if model_type == "gpt2" else SMALL
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.float32).eval()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("model_type", ["qwen2", "llama", "gpt2"])
def test_an_architecture_is_quantized_with_nearly_the_same_logits(model_type: str, compiled: bool) -> None:
    model, ids = small_model(model_type), torch.arange(1, 9)[None]
    layers = [m for m in model.modules() if type(m) is torch.nn.Linear or type(m).__name__ == "Conv1D"]
    with torch.inference_mode():
        before = model(ids).logits
        found = quantize_linear_layers(model, compiled=compiled)
        after = model(ids).logits
    assert found.layers == len(layers)
    assert not (compiled and found.quantized_inputs), "torch.compile cannot see through that kernel"
    assert found.weight_bytes == found.weights == sum(m.weight.numel() for m in layers)
    assert 8 < found.bits_per_weight <= 16
    assert "attention_projections" in found.components
    assert "lm_head" in found.components
    assert float((after - before).norm() / before.norm()) < 0.1


def request(model_type: str = "qwen2", *, tied: bool = True, compare: bool = True, device: str = "cpu") -> RunnerRequest:
    fields: dict[str, Any] = {
        **SMALL,
        "model_type": model_type,
        "tie_word_embeddings": tied,
    }
    config: RunConfig = default_config()
    config = replace(
        config,
        model=replace(config.model, architecture=fields),
        runtime=replace(config.runtime, quantization="int8", num_new_tokens=6),
    )
    made = AutoConfig.for_model(**fields)
    prompts = synthetic_prompts(2, 5, 97, 0)
    return RunnerRequest(config, made, prompts, torch.device(device), torch.float32, None, compare)


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_runner_records_what_it_is(tied: bool) -> None:
    asked = request(tied=tied)
    plain = AutoModelForCausalLM.from_config(asked.architecture)
    runner = open_pytorch(asked)
    facts = runner.facts
    assert facts.parameters == sum(tensor.numel() for tensor in plain.parameters()), "tied or not, as before"
    assert facts.weights is not None
    quantized = facts.weights.quantized
    assert quantized is not None
    kept = sum(tensor.numel() * tensor.element_size() for tensor in runner.model.parameters())
    assert facts.weight_bytes == kept + quantized_bytes(runner.model)
    assert runner.model.get_input_embeddings().weight.dtype == torch.float32, "the embedding is not quantized"
    assert isinstance(runner.model.get_output_embeddings(), Int8Linear), "the head is, as a copy if they are tied"
    assert set(quantized.components) == {"attention_projections", "mlp", "lm_head"}


def test_the_tokens_before_are_kept_to_compare() -> None:
    asked = request()
    runner = open_pytorch(asked)
    assert runner.reference_tokens is not None
    assert [len(row) for row in runner.reference_tokens] == [6, 6]
    plain = replace(asked, config=replace(asked.config, runtime=replace(asked.config.runtime, quantization="none")))
    unquantized = open_pytorch(plain)
    unquantized.begin()
    first = unquantized.prefill(unquantized.place(asked.prompts))
    assert [row[0] for row in runner.reference_tokens] == [int(token) for token in first.flatten()]
    assert open_pytorch(request(compare=False)).reference_tokens is None


def test_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="CPU or an NVIDIA GPU"):
        open_pytorch(request(device="meta"))


def layer_of(rows: int = 24, columns: int = 48) -> Int8Linear:
    torch.manual_seed(0)
    return Int8Linear(torch.randn(rows, columns), None)


@pytest.mark.parametrize("engine", [name for name in quantization._ENGINES if name in torch.backends.quantized.supported_engines])
def test_the_integer_product_is_correct_where_it_exists(engine: str) -> None:
    layer = layer_of()
    try:
        product = layer.dynamic(engine)
        product(torch.ones(1, 48))
    except RuntimeError:
        pytest.skip(f"{engine} does not run on this processor")
    assert quantization._is_correct(layer, product)
    assert not quantization._is_correct(layer, lambda rows: product(rows) * 1.1)
    layer.use_dynamic(engine)
    assert (layer.weight.device.type, layer.weight.shape) == ("meta", (24, 48))
    expected = layer_of().dequantized(torch.eye(48))
    torch.testing.assert_close(layer(torch.eye(48)), expected, rtol=0.05, atol=0.05)


def test_tiny_weights_do_not_make_a_product_wrong() -> None:
    """In fp16, the scales of such rows are less exact than others."""
    torch.manual_seed(0)
    weights = torch.randn(64, 512)
    weights[-4:] *= torch.tensor([1e-6, 3e-6, 1e-5, 3e-5])[:, None]
    layer = Int8Linear(weights.half(), None)
    assert quantization._packed_is_correct(layer)
    assert quantization._is_correct(layer, lambda rows: saturating(layer, rows, largest=127))


@pytest.mark.parametrize(
    ("engine", "flags", "narrow"),
    [
        ("onednn", {"avx2", "fma", "avx512f"}, True),
        ("onednn", {"avx2", "fma", "avx512f", "avx512_vnni"}, False),
        ("onednn", {"avx2", "fma", "avx_vnni"}, False),
        ("onednn", {"asimd", "asimddp"}, False),
        ("onednn", set(), True),
        ("x86", {"avx512f", "avx512_vnni"}, True),
    ],
)
def test_inputs_have_seven_bits_where_sums_could_overflow(
    engine: str, flags: set[str], narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def multiply(rows: torch.Tensor, packed: Any, seven_bits: bool) -> torch.Tensor:
        asked.append(seven_bits)
        return torch.zeros(len(rows), 24)

    monkeypatch.setattr(torch.backends, "quantized", type("Engines", (), {"engine": ""}))
    monkeypatch.setattr(torch.ops.quantized, "linear_prepack", lambda weights, bias: None)
    monkeypatch.setattr(torch.ops.quantized, "linear_dynamic", multiply)
    monkeypatch.setattr(quantization, "instruction_set", lambda dtype: instruction_set(dtype, flags))
    layer_of().dynamic(engine)(torch.ones(1, 48))
    assert asked == [narrow]


def saturating(layer: Int8Linear, rows: torch.Tensor, largest: int = 255) -> torch.Tensor:
    """The product of processors without VNNI: the sum of two products of 8 bits is cut to 16 bits."""
    inputs = rows.float()
    least = inputs.amin(1, keepdim=True).clamp(max=0)
    scale = (inputs.amax(1, keepdim=True).clamp(min=0) - least) / largest
    zero = (-least / scale).round()
    products = ((inputs / scale).round() + zero)[:, None] * layer.weight.float()
    padded = torch.nn.functional.pad(products, (0, layer.in_features % 2))
    sums = padded.reshape(len(rows), layer.out_features, -1, 2).sum(3).clamp(-(2**15), 2**15 - 1).sum(2)
    return ((sums - zero * layer.weight.float().sum(1)) * scale * layer.scales).to(rows.dtype)


@pytest.mark.parametrize("size", [1e-5, 3e-5, 1e-3])
def test_overflowing_sums_of_tiny_weights_are_noticed(size: float) -> None:
    torch.manual_seed(0)
    layer = Int8Linear((torch.randn(64, 1024) * size).half(), None)
    assert quantization._is_correct(layer, lambda rows: saturating(layer, rows, largest=127))
    assert not quantization._is_correct(layer, lambda rows: saturating(layer, rows))


@pytest.mark.parametrize("outlier", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 1024), (64, 513), (127, 512)])
def test_a_product_whose_sums_overflow_is_not_correct(outputs: int, inputs: int, outlier: bool) -> None:
    """Random inputs seldom show an overflow."""
    torch.manual_seed(0)
    weights = torch.randn(outputs, inputs)
    if outlier:
        weights[:, 5] = 12.0
    layer = Int8Linear(weights, None)
    assert quantization._is_correct(layer, lambda rows: saturating(layer, rows, largest=127))
    assert not quantization._is_correct(layer, lambda rows: saturating(layer, rows))


def test_the_faster_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(product: Any, inputs: torch.Tensor) -> float:
        return {"packed": 1.0, "dequantized": 0.5}.get(product.__name__, 2.0 if inputs.shape[0] == 1 else 0.7)

    monkeypatch.setattr(quantization, "_seconds", seconds)
    monkeypatch.setattr(quantization, "_ENGINES", ("one",))
    monkeypatch.setattr(Int8Linear, "dynamic", lambda self, engine: lambda rows: self.dequantized(rows))
    monkeypatch.setattr(torch.backends, "quantized", type("Engines", (), {"supported_engines": ["one"]}))
    layer = layer_of()
    assert quantization.fastest_engine(layer, 1) is None
    assert quantization.fastest_engine(layer, 2) == "one"
    monkeypatch.setattr(Int8Linear, "dynamic", lambda self, engine: lambda rows: self.dequantized(rows) * 2)
    assert quantization.fastest_engine(layer, 2) is None, "a wrong result is not used, however fast"


def test_each_shape_has_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {32: None, 16: "onednn"}
    used: list[tuple[int, int]] = []

    def use_dynamic(self: Int8Linear, engine: str) -> None:
        used.append((self.out_features, self.in_features))

    monkeypatch.setattr(quantization, "fastest_engine", lambda layer, rows: chosen[layer.in_features])
    monkeypatch.setattr(quantization, "_fastest_rows", lambda layer: 8)
    monkeypatch.setattr(Int8Linear, "use_dynamic", use_dynamic)
    shapes = [(32, 16), (16, 48), (16, 4800)]
    model = torch.nn.Sequential(*[torch.nn.Linear(*shape) for shape in shapes])
    found = quantize_linear_layers(model)
    assert used == [(48, 16), (4800, 16)]
    assert found.kernel == "quantized::linear_dynamic (onednn) in 2 layers, aten::_weight_int8pack_mm in 1 layer"
    assert (found.kernel_rows, found.quantized_inputs) == (8, True)


@pytest.mark.parametrize("outputs", [1, 64, 300, 4096, 4097, 151_936])
def test_a_large_matrix_is_tried_in_part(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "_MOST_TRIED_WEIGHTS", 2**16)
    tried = quantization.tried_outputs((outputs, 64))
    assert tried == outputs if outputs <= 1024 else 900 < tried <= 1024
    assert tried % 64 == outputs % 64, "kernels treat the last outputs of a block apart"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_large_activation_does_not_overflow(dtype: torch.dtype) -> None:
    """900 times an unscaled weight of 127 is more than fp16 can hold."""
    torch.manual_seed(0)
    layer = Int8Linear(torch.randn(24, 48).to(dtype), None)
    inputs = torch.randn(3, 48)
    inputs[:, 7] = 900.0
    expected = inputs @ (layer.weight.float() * layer.scales[:, None]).t()
    products: list[quantization.Product] = [layer.packed, layer.dequantized]
    for engine in quantization._ENGINES:
        try:
            product = layer.dynamic(engine)
            product(inputs.to(dtype))
        except RuntimeError:  # not on this processor
            continue
        products.append(product)
    for product in products:
        found = product(inputs.to(dtype))
        assert found.dtype == dtype
        assert float((found.float() - expected).norm() / expected.norm()) < 0.02


def test_a_product_that_overflows_is_not_correct() -> None:
    torch.manual_seed(0)
    layer = Int8Linear(torch.randn(24, 40).half(), None)

    def unscaled(rows: torch.Tensor) -> torch.Tensor:
        return torch.mm(rows, layer.weight.half().t()) * layer.scales.half()

    assert quantization._is_correct(layer, layer.dequantized)
    assert not quantization._is_correct(layer, unscaled)


def test_many_rows_are_multiplied_with_dequantized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(product: Any, inputs: torch.Tensor) -> float:
        return inputs.shape[0] if product.__name__ == "packed" else 20.0

    monkeypatch.setattr(quantization, "_seconds", seconds)
    assert quantization._fastest_rows(layer_of()) == 16
    monkeypatch.setattr(quantization, "_seconds", lambda product, inputs: 1.0)
    assert quantization._fastest_rows(layer_of()) == quantization.ALL_ROWS
