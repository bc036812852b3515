"""What only a GPU can show. Run with: python -m pytest -m gpu"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llm_perf_opt.config.schema import CacheKind, CompileMode
from llm_perf_opt.runners.logits import _Forced
from llm_perf_opt.runners.measure.clock import CudaEventClock
from llm_perf_opt.runners.measure.meter import Meter
from llm_perf_opt.runners.pytorch_runner import Batch, PyTorchRunner
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
    return PyTorchRunner(model, "small", NEW_TOKENS, cache, compile)


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
