"""What the vLLM runner reports about an engine's configuration, without the engine. See test_vllm_engine.py for the real one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_perf_opt.config.composition import compose
from llm_perf_opt.runners import models, vllm_runner
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.workspace.data.prompts import synthetic_prompts


def uncosted(*words: str, cache_dtype: str = "auto", prefix_caching: bool = False) -> str:
    """Of an engine with one worker that heeds what it is given."""
    config = compose(["hardware=cpu", "model.dtype=bf16", "runtime=vllm", *words]).config
    architecture, prompts = models.load_config(config.model), synthetic_prompts(2, 8, 100, 0)
    request = RunnerRequest(config, architecture, prompts, torch.device("cpu"), torch.bfloat16, None)
    opened: Any = SimpleNamespace(
        model_config=SimpleNamespace(quantization=None, dtype=torch.bfloat16),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, enable_prefix_caching=prefix_caching),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
    )
    return vllm_runner._uncosted(request, opened, 1)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("hf_overrides.num_hidden_layers=1", "runtime.engine.hf_overrides={'num_hidden_layers': 1} changes the model's conf"),
        ("hf_config_path=other", "runtime.engine.hf_config_path=other changes the model's configuration"),
        ("cpu_offload_gb=1.5", "runtime.engine.cpu_offload_gb=1.5 keeps some of the model or its cache outside"),
        ("offload_group_size=8", "outside the device's memory"),
        ("kv_offloading_size=2", "outside the device's memory"),
        ("kv_transfer_config.kv_connector=OffloadingConnector", "outside the device's memory"),
        ("kv_sharing_fast_prefill=true", "skips work of prefill"),
    ],
)
def test_an_argument_that_changes_the_work_is_not_costed(word: str, why: str) -> None:
    assert why in uncosted(f"runtime.engine.{word}")


@pytest.mark.parametrize("words", [[], ["runtime.engine.cpu_offload_gb=0"], ["runtime.engine.hf_overrides={}"]])
def test_one_that_is_set_to_nothing_is_costed(words: list[str]) -> None:
    assert uncosted(*words) == ""


@pytest.mark.parametrize(("stored", "named"), [("fp8", "fp8"), ("float16", "float16"), ("auto", ""), ("bfloat16", "")])
def test_a_cache_in_another_format_than_the_models_is_not_costed(stored: str, named: str) -> None:
    expected = f"the engine stores its cache in {named}, but the cost model counts it in the model's bf16" if named else ""
    assert uncosted(cache_dtype=stored) == expected


def test_cached_prompts_are_not_costed() -> None:
    assert "their prefill is not computed" in uncosted(prefix_caching=True)


def step(**tokens: int) -> list[Any]:
    """What a step gives: so many tokens to each sequence named."""
    return [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7] * count)]) for name, count in tokens.items()]


@pytest.mark.parametrize(
    ("steps", "held_back"),
    [
        ([step(a=1, b=1), step(a=1, b=1), step(a=1, b=1)], False),
        ([step(a=1, b=1), step(a=1, b=1), step(a=1), step(b=1)], True),
        ([step(a=1, b=1), step(a=1, b=1), step(a=1, b=0), step(b=1)], True),
        ([step(a=1, b=1), step(a=1), step(a=1), step(b=1), step(b=1)], True),
        ([step(a=1, b=1), step(a=2, b=1), step(b=1)], False),
        ([step(a=1), step(a=1, b=1), step(a=1, b=1), step(b=1)], False),
        ([step(a=1, b=1), step(), step(a=1, b=1), step(a=1, b=1)], False),
    ],
    ids=["in step", "at the last", "none at the last", "amid", "several at once", "chunked prefill", "a step for nobody"],
)
def test_a_step_that_passes_over_a_sequence_is_known(steps: list[list[Any]], held_back: bool) -> None:
    for in_turns in (False, True):
        received = vllm_runner._Received(["a", "b"], 3, in_turns=in_turns)
        for outputs in steps:
            received.take(outputs)
        generated = received.generated(0)
        assert [len(row) for row in generated.tokens] == [3, 3]
        assert generated.held_back == (held_back and not in_turns)
