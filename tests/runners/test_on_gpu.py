"""What only a GPU can show. Run with: python -m pytest -m gpu"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from builders import default_config
from llm_perf_opt.config.schema import CacheKind, CompileMode, Quantization
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.compilation import Compilation
from llm_perf_opt.runners.logits import _Forced
from llm_perf_opt.runners.measure.clock import CudaEventClock
from llm_perf_opt.runners.measure.meter import Meter
from llm_perf_opt.runners.pytorch_runner import Batch, PyTorchRunner, open_pytorch
from llm_perf_opt.runners.quantized_layers import ONE_ROW, QuantizedLinear
from llm_perf_opt.workspace.data.prompts import synthetic_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

NEW_TOKENS = 12


def runner(cache: CacheKind, compile: CompileMode) -> PyTorchRunner:
    config = AutoConfig.for_model(
        "qwen2", vocab_size=997, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.5, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return PyTorchRunner(model, "small", NEW_TOKENS, cache, Compilation(compile))


def tokens_of(cache: CacheKind, compile: CompileMode) -> list[list[int]]:
    """Tokens of the fourth request: by then a graph has been recorded and is replayed."""
    stepper = runner(cache, compile)
    return generated(stepper, stepper.place(synthetic_prompts(2, 32, 997, seed=3)))


def generated(stepper: PyTorchRunner, batch: Batch) -> list[list[int]]:
    for _ in range(4):
        stepper.begin()
        tokens = [stepper.prefill(batch)]
        for _ in range(NEW_TOKENS - 1):
            tokens.append(stepper.decode_step(tokens[-1]))
    return stepper.to_lists(tokens)


def test_replayed_graphs_give_the_eager_tokens() -> None:
    expected = tokens_of("dynamic", "none")
    assert len({token for row in expected for token in row}) > 4
    assert tokens_of("static", "none") == expected
    assert tokens_of("static", "reduce-overhead") == expected


def request(
    kind: Quantization,
    compile: CompileMode,
    *,
    tuned: bool = False,
    batch: int = 1,
    row_kernel: bool = False,
    fused: bool = False,
) -> RunnerRequest:
    config = default_config()
    fields: dict[str, Any] = {
        "model_type": "qwen2", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    runtime = replace(
        config.runtime, quantization=kind, compile=compile, cache="static", num_new_tokens=NEW_TOKENS,
        coordinate_descent_tuning=tuned, batch_size=batch, row_kernel=row_kernel, fuse_projections=fused,
    )  # fmt: skip
    config = replace(config, model=replace(config.model, architecture=fields), runtime=runtime)
    prompts = synthetic_prompts(batch, 32, 1000, seed=3)
    return RunnerRequest(config, AutoConfig.for_model(**fields), prompts, torch.device("cuda"), torch.bfloat16, None)


def layers_of(asked: RunnerRequest) -> tuple[PyTorchRunner, list[QuantizedLinear]]:
    opened = open_pytorch(asked)
    return opened, [layer for layer in opened.model.modules() if isinstance(layer, QuantizedLinear)]


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_each_format_multiplies_with_its_rounded_weights(kind: Quantization) -> None:
    """Eager and compiled, for one row, a few and many; int4 against the weights before, which it rounds most."""
    exact, _ = layers_of(request("none", "none"))
    opened, layers = layers_of(request(kind, "reduce-overhead"))
    assert opened.facts.weights is not None
    assert opened.facts.weights.quantized is not None
    assert opened.facts.weights.quantized.kept_layers == 0
    assert len(layers) == 15
    path = "model.layers.0.mlp.gate_proj"
    before, layer = exact.model.get_submodule(path), opened.model.get_submodule(path)
    most = {"int8": 0.02, "fp8": 0.05, "int4": 0.15}[kind]
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(layer, dynamic=False)
    with torch.inference_mode():
        for rows in (1, 3, 64):
            inputs = torch.randn((rows, 256), dtype=torch.bfloat16, device="cuda")
            expected = before(inputs).float()
            for found in (layer(inputs), compiled(inputs)):
                assert float((found.float() - expected).norm() / expected.norm()) < most


def test_the_row_kernel_gives_the_products_of_the_library() -> None:
    from llm_perf_opt.runners.row_kernel import Layer, RowLinear, fastest_blocks

    opened, _ = layers_of(request("none", "reduce-overhead", row_kernel=True))
    assert any("runtime.row_kernel" in note for note in opened.runtime.notes)
    for outputs, inputs in ((48, 256), (1000, 896), (7, 2100)):
        layer = torch.nn.Linear(inputs, outputs, dtype=torch.bfloat16, device="cuda")
        row = torch.randn((1, 1, inputs), dtype=torch.bfloat16, device="cuda")
        with torch.inference_mode():
            expected = layer(row).float()
            layer.__class__ = RowLinear
            layer.blocks = fastest_blocks([Layer(layer.weight)], torch.bfloat16)[0]  # type: ignore[assignment]
            found = torch.compile(layer, fullgraph=True)(row).float()
        assert float((found - expected).norm() / expected.norm()) < 0.01
    several, _ = layers_of(request("none", "reduce-overhead", row_kernel=True, batch=4))
    assert any("4 rows" in note for note in several.runtime.notes)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_one_row_of_a_graph_has_a_kernel_of_its_own(kind: Quantization) -> None:
    for compile, batch, own in (("reduce-overhead", 1, True), ("reduce-overhead", 4, False), ("default", 1, False)):
        opened, layers = layers_of(request(kind, compile, batch=batch))  # type: ignore[arg-type]
        assert {layer.kernel == ONE_ROW for layer in layers} == {own}
        assert opened.facts.weights is not None


@pytest.mark.parametrize("kind", ["none", "int8", "fp8", "int4"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_quantized_model_is_compiled_with_graphs_and_tuned(kind: Quantization, batch: int) -> None:
    opened, _ = layers_of(request(kind, "reduce-overhead", tuned=True, batch=batch, row_kernel=True, fused=True))
    assert opened.facts.compile == "reduce-overhead, coordinate descent tuning"
    placed = opened.place(synthetic_prompts(batch, 32, 1000, seed=3))
    rows = []
    for _ in range(4):
        opened.begin()
        tokens = [opened.prefill(placed)]
        for _ in range(NEW_TOKENS - 1):
            tokens.append(opened.decode_step(tokens[-1]))
        rows.append(opened.to_lists(tokens))
    assert rows[1:] == rows[:-1], "graphs are recorded in the first requests and replayed later"


def test_logits_of_replayed_graphs_are_those_of_the_model() -> None:
    """The same tokens are fed to both; nothing is compiled again to record them."""
    eager, graphs = runner("dynamic", "none"), runner("static", "reduce-overhead")
    graphs.return_logits()
    batch = eager.place(synthetic_prompts(2, 32, 997, seed=3))
    with torch.inference_mode():
        tokens = generated(eager, batch)
        assert generated(graphs, batch) == tokens
        with torch.compiler.set_stance("fail_on_recompile"):
            replayed = _Forced(graphs, batch, tokens, None)
        expected = _Forced(eager, batch, tokens, None)
    assert replayed.chosen.tolist() == expected.chosen.tolist() == tokens
    assert expected.values.shape == (2, NEW_TOKENS, 997)
    assert abs(replayed.values - expected.values).max() < 1e-3 * expected.values.std()


def test_events_cover_the_host_time_of_a_request() -> None:
    stepper = runner("dynamic", "none")
    meter = Meter(stepper, stepper.place(synthetic_prompts(1, 32, 997, seed=3)), NEW_TOKENS, CudaEventClock(torch.device("cuda")))
    for _ in range(5):
        iteration = meter.iterate()
    assert len(iteration.steps_ns) == NEW_TOKENS - 1
    assert min(iteration.steps_ns) > 0
    assert iteration.total_ns <= iteration.wall_ns * 1.01
    assert iteration.total_ns > iteration.wall_ns * 0.8
