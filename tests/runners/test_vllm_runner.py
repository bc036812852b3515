"""What the vLLM runner chooses and reports, without the engine. See test_vllm_engine.py for the real one."""

import functools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.engine_records import EngineMemory
from llm_perf_opt.core.records import Missing
from llm_perf_opt.runners import models, vllm_runner, vllm_settings
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.workspace.data.prompts import synthetic_prompts


def request_of(*words: str, batch: int = 2, vocabulary: int = 100, device: str = "cpu", profiled: bool = False) -> RunnerRequest:
    config = compose(["hardware=cpu", "model.dtype=bf16", "runtime=vllm", *words]).config
    architecture, prompts = models.load_config(config.model), synthetic_prompts(batch, 8, vocabulary, 0)
    return RunnerRequest(config, architecture, prompts, torch.device(device), torch.bfloat16, None, profiled=profiled)


def uncosted(*words: str, cache_dtype: str = "auto", prefix_caching: bool = False, block: int = 4) -> str:
    """Of an engine with one worker that heeds what it is given."""
    opened: Any = SimpleNamespace(
        model_config=SimpleNamespace(quantization=None, dtype=torch.bfloat16),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, enable_prefix_caching=prefix_caching, block_size=block),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
    )
    return vllm_runner._uncosted(request_of(*words, vocabulary=2 if prefix_caching else 100), opened, 1)


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
    """Prompts of two different ids, of which both begin with the same one."""
    assert "their prefill is not computed" in uncosted(prefix_caching=True, block=1)
    assert uncosted(prefix_caching=True, block=8) == "", "nothing is shared"


EVERY = {
    "model", "dtype", "seed", "trust_remote_code", "load_format", "disable_log_stats", "skip_tokenizer_init", "max_model_len",
    "enable_prefix_caching", "kv_cache_memory_bytes", "async_scheduling", "max_num_seqs", "max_num_batched_tokens",
}  # fmt: skip


def scheduler(**decided: Any) -> Any:
    """What the engine decided by itself."""
    own = {"async_scheduling": True}
    return SimpleNamespace(scheduler_config=SimpleNamespace(**own | decided))


def test_an_engine_on_a_gpu_keeps_its_own_scheduling_limits_prefix_cache_and_memory() -> None:
    arguments, stated = vllm_settings._arguments(request_of(device="cuda"), EVERY)
    assert {each.name: each.value for each in stated} == {
        "load_format": "dummy",
        "skip_tokenizer_init": "True",
        "max_model_len": "-1",
    }
    assert not arguments.keys() & {"async_scheduling", "enable_prefix_caching", "kv_cache_memory_bytes"}
    assert vllm_settings._changed(request_of(device="cuda"), scheduler()) == {}


def test_what_the_user_sets_is_neither_changed_nor_stated() -> None:
    given = ("runtime.engine.max_model_len=64", "runtime.engine.async_scheduling=true", "runtime.engine.max_num_seqs=1")
    request = request_of(*given, profiled=True)
    arguments, stated = vllm_settings._arguments(request, EVERY)
    assert (arguments["max_model_len"], arguments["async_scheduling"]) == (64, True)
    assert {each.name for each in stated} == {"load_format", "skip_tokenizer_init", "kv_cache_memory_bytes"}
    assert vllm_settings._changed(request, scheduler()) == {}


def test_a_batch_beyond_the_engines_limits_waits_or_is_split_as_for_any_user() -> None:
    arguments, _ = vllm_settings._arguments(request_of(batch=3000), EVERY)
    assert not arguments.keys() & {"max_num_seqs", "max_num_batched_tokens"}
    assert vllm_settings._changed(request_of(batch=3000), scheduler()) == {}


def test_only_a_profiled_pass_turns_off_async_scheduling_and_only_if_it_is_on() -> None:
    changed = vllm_settings._changed(request_of(profiled=True), scheduler())
    assert changed["async_scheduling"][0] is False
    assert vllm_settings._changed(request_of(profiled=True), scheduler(async_scheduling=False)) == {}


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    chosen = vllm_settings._set(vllm_settings._ALWAYS)
    assert [each.name for each in chosen] == ["VLLM_WORKER_MULTIPROC_METHOD"]
    assert (os.environ["VLLM_NO_USAGE_STATS"], os.environ["VLLM_WORKER_MULTIPROC_METHOD"]) == ("0", "spawn")


def test_threads_are_bound_only_if_they_are_set() -> None:
    assert vllm_settings._bound_threads(request_of()) == []
    (bound,) = vllm_settings._bound_threads(request_of("hardware.threads=1"))
    assert bound.value.isdecimal()
    assert vllm_settings._bound_threads(request_of("hardware.threads=1", device="cuda")) == []
    assert vllm_settings._bound_threads(request_of("hardware.threads=1", "runtime.engine.tensor_parallel_size=2")) == []


def cache(quantization: str | None = None, **known: Any) -> Any:
    own = {
        "cache_dtype": "auto", "gpu_memory_utilization": 0.92, "kv_cache_memory_bytes": None, "num_gpu_blocks": 100,
        "block_size": 16, "kv_cache_size_tokens": None,
    }  # fmt: skip
    model = SimpleNamespace(quantization=quantization)
    return SimpleNamespace(cache_config=SimpleNamespace(**own | known), model_config=model)


@functools.cache
def three_sequences() -> RunnerRequest:
    return request_of("runtime.num_new_tokens=4", batch=3)


def reserved(quantization: str | None = None, **known: Any) -> EngineMemory:
    return vllm_settings.reserved_memory(three_sequences(), cache(quantization, **known), 5000)


def test_reserved_memory_is_told_apart_from_what_the_request_needs() -> None:
    found = reserved()
    assert found.needed_tokens == 3 * (8 + 4)
    assert not isinstance(found.needed_bytes, Missing)
    per_token = found.needed_bytes // found.needed_tokens
    assert (found.share, found.cache_tokens, found.cache_bytes) == (0.92, 1600, 1600 * per_token)
    assert found.weights_bytes == 5000
    assert reserved(kv_cache_size_tokens=1500).cache_tokens == 1500
    fixed = reserved(kv_cache_memory_bytes=2**20)
    assert (isinstance(fixed.share, Missing), fixed.cache_bytes) == (True, 2**20)
    unknown = reserved(num_gpu_blocks=None)
    assert isinstance(unknown.cache_tokens, Missing)
    assert isinstance(unknown.cache_bytes, Missing)


def test_needed_memory_is_that_of_the_stored_formats() -> None:
    """The model computes in bf16: its cache has two bytes per value."""
    own, narrow, other = reserved(), reserved(cache_dtype="fp8"), reserved(cache_dtype="nvfp4")
    assert not isinstance(own.needed_bytes, Missing)
    assert not isinstance(own.cache_bytes, Missing)
    assert (narrow.needed_bytes, narrow.cache_bytes) == (own.needed_bytes // 2, own.cache_bytes // 2)
    assert reserved(cache_dtype="float16").needed_bytes == own.needed_bytes
    assert isinstance(other.needed_bytes, Missing)
    assert isinstance(other.cache_bytes, Missing)
    assert isinstance(reserved("fp8").weights_bytes, Missing)


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


def notes(*words: str, in_process: bool = False, profiled: bool = False, workers: int = 1) -> str:
    """The notes of an engine that schedules asynchronously."""
    runner: Any = SimpleNamespace(_in_process=in_process, _pauses=False)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=False), scheduler_config=SimpleNamespace(async_scheduling=True)
    )
    return " ".join(vllm_runner.VllmRunner._notes(runner, config, workers, request_of(*words, profiled=profiled)))


def test_notes_are_about_what_profiled_passes_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_settings.IN_PROCESS, raising=False)
    elsewhere, ranges = "not llm-perf's ranges", "encloses launches of the next"
    assert elsewhere not in notes(), "profiled passes run the engine in their process"
    assert ranges not in notes(), "profiled passes schedule synchronously"
    assert elsewhere in notes(workers=2, in_process=True)
    assert ranges in notes("runtime.engine.async_scheduling=true")
    monkeypatch.setenv(vllm_settings.IN_PROCESS, "1")
    assert elsewhere in notes()
