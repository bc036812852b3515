"""Which arguments of vLLM are offered to findings: by the configuration that the engine resolved.

That the real EngineArgs takes them is asserted in test_vllm_engine.py.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_perf_opt.config.composition import compose, with_overrides
from llm_perf_opt.core.remedy_records import EngineRemedy
from llm_perf_opt.runners import vllm_remedies
from llm_perf_opt.runners.engines import shared_prefix_tokens
from llm_perf_opt.runners.vllm_remedies import Opened
from vllm_offers import ARGUMENTS, every_offer, h200, opened

BACKENDS = vars(vllm_remedies)["_backends"]
"""The real one, which asks vLLM."""


@pytest.fixture(autouse=True)
def _h200() -> Iterator[None]:
    with h200():
        yield


def offers(engine: Opened) -> dict[str, EngineRemedy]:
    return {remedy.kind: remedy for remedy in vllm_remedies.remedies(engine)}


def overrides(engine: Opened) -> dict[str, str]:
    """Kind → its overrides without the prefix."""
    return {kind: " ".join(remedy.overrides).replace("runtime.engine.", "") for kind, remedy in offers(engine).items()}


ALWAYS = {
    "cache_format": "kv_cache_dtype=fp8",
    "weight_format": "quantization=fp8_per_tensor",
    "attention_backend": "attention_backend=FLASHINFER",
}
"""What an engine with its own defaults could still change on a GPU with fp8."""


def test_an_engine_with_its_own_defaults() -> None:
    assert overrides(opened()) == ALWAYS
    assert overrides(opened(device="cpu")) == {}, "a CPU has no graphs and no fp8"
    assert [remedy.alters_output for remedy in offers(opened()).values()] == [True, True, False]


@pytest.mark.parametrize(
    ("arguments", "resolved", "kind", "words"),
    [
        ({"async_scheduling": False}, {"async_scheduling": False}, "overlap_scheduling", "async_scheduling=true"),
        ({"enforce_eager": True}, {"cudagraph_mode": "NONE"}, "cuda_graphs", "enforce_eager=false"),
        ({"optimization_level": 0}, {"cudagraph_mode": "NONE"}, "cuda_graphs", "optimization_level=2"),
        (
            {"compilation_config": {"cudagraph_mode": "NONE"}},
            {"cudagraph_mode": "NONE"},
            "cuda_graphs",
            "compilation_config.cudagraph_mode=FULL_AND_PIECEWISE",
        ),
        (
            {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
            {"cudagraph_mode": "PIECEWISE"},
            "full_graphs",
            "compilation_config.cudagraph_mode=FULL_AND_PIECEWISE",
        ),
        ({}, {"cudagraph_capture_sizes": [1, 4]}, "graph_sizes", "cudagraph_capture_sizes=[1,2,4]"),
        (
            {"compilation_config": {"cudagraph_capture_sizes": [1]}},
            {"cudagraph_capture_sizes": [1]},
            "graph_sizes",
            "compilation_config.cudagraph_capture_sizes=[1,2]",
        ),
        (
            {"max_cudagraph_capture_size": 1},
            {"cudagraph_capture_sizes": [1]},
            "graph_sizes",
            "cudagraph_capture_sizes=[1,2] max_cudagraph_capture_size=2",
        ),
        (
            {"compilation_config": {"max_cudagraph_capture_size": 5}},
            {"cudagraph_capture_sizes": [1, 4]},
            "graph_sizes",
            "cudagraph_capture_sizes=[1,2,4] compilation_config.max_cudagraph_capture_size=4",
        ),
        ({}, {"max_num_batched_tokens": 100}, "larger_step", "max_num_batched_tokens=128"),
        ({}, {"max_num_seqs": 1}, "more_sequences", "max_num_seqs=2"),
        ({"num_gpu_blocks_override": 6}, {"num_gpu_blocks": 6}, "more_sequences", "num_gpu_blocks_override=11"),
        ({"kv_cache_memory_bytes": 6000}, {"num_gpu_blocks": 6}, "more_sequences", "kv_cache_memory_bytes=11000"),
        ({}, {"num_gpu_blocks": 6}, "more_sequences", "gpu_memory_utilization=0.95"),
    ],
)
def test_what_was_turned_off_or_is_too_small(arguments: dict[str, Any], resolved: dict[str, Any], kind: str, words: str) -> None:
    assert overrides(opened(arguments, **resolved)) == {**ALWAYS, kind: words}


@pytest.mark.parametrize(
    ("arguments", "resolved"),
    [
        ({}, {"async_scheduling": False}),
        ({"async_scheduling": False}, {"async_scheduling": False, "pipeline_parallel_size": 2}),
        ({}, {"cudagraph_mode": "NONE"}),
        ({}, {"cudagraph_mode": "PIECEWISE"}),
        ({}, {"num_gpu_blocks": 6, "gpu_memory_utilization": 0.95}),
        ({}, {"num_gpu_blocks": None}),
    ],
    ids=["no overlap", "pipeline stages", "no graphs", "piecewise graphs", "all memory is used", "unknown cache"],
)
def test_what_the_engine_decided_itself_is_left_alone(arguments: dict[str, Any], resolved: dict[str, Any]) -> None:
    assert overrides(opened(arguments, **resolved)) == ALWAYS


def test_what_the_engine_already_does_is_not_offered() -> None:
    assert "weight_format" not in overrides(opened(quantization="fp8"))
    assert "cache_format" not in overrides(opened(cache_dtype="fp8"))
    named = opened(backend=SimpleNamespace(name="FLASHINFER"))
    assert overrides(named)["attention_backend"] == "attention_backend=FLASH_ATTN"


def test_an_argument_that_this_version_does_not_have_is_not_offered() -> None:
    few = opened({"enforce_eager": True}, known=frozenset({"enforce_eager"}), cudagraph_mode="NONE", max_num_seqs=1)
    assert overrides(few) == {"cuda_graphs": "enforce_eager=false"}


def test_figures_of_a_batch_without_its_graph() -> None:
    padded, eager = (offers(opened(cudagraph_capture_sizes=sizes))["graph_sizes"] for sizes in ([1, 4], [1]))
    assert (padded.before, padded.after, eager.before) == (4, 2, 0)


def test_a_shared_prefix_is_offered_only_while_it_is_not_cached() -> None:
    common = tuple(range(40))
    ids = ((*common, *range(100, 124)), (*common, *range(200, 224)))
    found = offers(opened(ids=ids, enable_prefix_caching=False))["prefix_cache"]
    assert (found.overrides, found.before, found.after) == (("runtime.engine.enable_prefix_caching=true",), 128, 96)
    assert "prefix_cache" not in offers(opened(ids=ids)), "it is on"
    assert "prefix_cache" not in offers(opened(enable_prefix_caching=False)), "nothing is shared"


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 4),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 2),
        ([[1, 2, 3, 4, 5], [9, 9, 3, 4, 5]], 0),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 5]], 4),
        ([[1], [1]], 0),
    ],
    ids=["two blocks", "the last token is computed", "later blocks are not a prefix", "three", "shorter than a block"],
)
def test_shared_tokens_are_those_of_whole_blocks(prompts: list[list[int]], shared: int) -> None:
    assert shared_prefix_tokens(prompts, 2) == shared


def test_speculation_needs_its_proposer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "speculation" not in overrides(opened())
    monkeypatch.setattr(vllm_remedies, "find_spec", lambda _: object())
    words = "speculative_config.method=ngram speculative_config.num_speculative_tokens=4 speculative_config.prompt_lookup_max=4"
    assert overrides(opened())["speculation"] == words
    assert overrides(opened({"async_scheduling": True}))["speculation"] == f"{words} async_scheduling=false"
    assert "speculation" not in overrides(opened(speculative_config=object()))
    assert offers(opened())["speculation"].implied == ("async_scheduling=False",)
    assert offers(opened(async_scheduling=False))["speculation"].implied == (), "nothing to lose"


def test_backends_that_cannot_be_listed_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(config: Any, cache_dtype: str) -> Iterator[str]:
        raise ImportError("cannot import name 'AttentionSelectorConfig'")

    monkeypatch.setattr(vllm_remedies, "_backends", BACKENDS)
    monkeypatch.setattr(vllm_remedies, "_valid_backends", gone)
    engine = opened()
    assert {"cache_format", "attention_backend"}.isdisjoint(offers(engine))
    assert "AttentionSelectorConfig" in engine.problems[0]


def test_a_backend_is_chosen_by_what_the_configuration_says() -> None:
    """A model with a sliding window, whose cache is transferred and has blocks that the user chose."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_head_size=lambda: 128, dtype=torch.bfloat16, use_mla=False, get_sliding_window=lambda: 4096
        ),
        cache_config=SimpleNamespace(block_size=32, user_specified_block_size=True),
        parallel_config=SimpleNamespace(decode_context_parallel_size=2),
        attention_config=SimpleNamespace(),
        kv_transfer_config=SimpleNamespace(is_kv_transfer_instance=True),
    )
    values = vllm_remedies.selector_values(config, "fp8")
    assert (values["head_size"], values["block_size"], values["kv_cache_dtype"]) == (128, 32, "fp8")
    chosen = {name for name, value in values.items() if value is True}
    assert chosen == {"has_sliding_window", "use_kv_connector", "use_dcp"}
    by_default = SimpleNamespace(**vars(config) | {"cache_config": SimpleNamespace(block_size=16), "kv_transfer_config": None})
    values = vllm_remedies.selector_values(by_default, "auto")
    assert (values["block_size"], values["use_kv_connector"]) == (None, False)


def test_every_offer_can_be_tried_on_a_run() -> None:
    """`advise --verify` adds the overrides to the run's configuration, where most of them are not set."""
    values = asdict(compose(["model=tiny", "runtime=vllm", "hardware=cpu"]).config)
    for remedy in every_offer():
        config = with_overrides(values, remedy.overrides)
        assert config.runtime.engine, remedy.kind
    nested = with_overrides(values, ["runtime.engine.speculative_config.method=ngram"]).runtime.engine
    assert nested == {"speculative_config": {"method": "ngram"}}
    assert values["runtime"]["engine"] == {}, "the run's own is left alone"


def test_vllm_0_24_has_every_argument() -> None:
    recorded = json.loads((Path(__file__).parents[1] / "fixtures" / "vllm" / "names_0.24.0.json").read_text())
    names = {word.split("=")[0].split(".")[2] for remedy in every_offer() for word in remedy.overrides}
    assert names == ARGUMENTS
    assert names <= set(recorded["engine/arg_utils.py"]["EngineArgs"])
