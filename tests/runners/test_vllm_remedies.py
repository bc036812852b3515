"""Which arguments of vLLM are offered to findings: by the configuration that the engine resolved, and by the real EngineArgs."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_perf_opt.config.composition import compose, with_overrides
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.remedy_records import EngineRemedy
from llm_perf_opt.runners import models, vllm_remedies
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.engines import shared_prefix_tokens
from llm_perf_opt.runners.vllm_remedies import Opened
from llm_perf_opt.workspace.data.prompts import Prompts

ARGUMENTS = frozenset(
    {
        "async_scheduling", "attention_backend", "compilation_config", "cudagraph_capture_sizes", "enable_prefix_caching",
        "enforce_eager", "gpu_memory_utilization", "kv_cache_dtype", "kv_cache_memory_bytes", "max_cudagraph_capture_size",
        "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override", "optimization_level", "quantization",
        "speculative_config",
    }
)  # fmt: skip
"""Those that are offered; the real ones are compared below."""


def opened(
    arguments: Mapping[str, Any] | None = None,
    *,
    device: str = "cuda",
    ids: tuple[tuple[int, ...], ...] = ((1,) * 64, (2,) * 64),
    known: frozenset[str] = ARGUMENTS,
    **resolved: Any,
) -> Opened:
    """An engine that runs two prompts of 64 tokens, in bf16, with its own defaults and a cache of 100 blocks of 16 tokens."""
    values: dict[str, Any] = {
        "async_scheduling": True, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8],
        "max_num_batched_tokens": 8192, "max_num_seqs": 256, "num_gpu_blocks": 100, "block_size": 16,
        "gpu_memory_utilization": 0.9, "cache_dtype": "auto", "enable_prefix_caching": True, "quantization": None,
        "speculative_config": None, "pipeline_parallel_size": 1, "backend": None, **resolved,
    }  # fmt: skip
    sections = {
        "scheduler_config": ("async_scheduling", "max_num_batched_tokens", "max_num_seqs"),
        "compilation_config": ("cudagraph_mode", "cudagraph_capture_sizes"),
        "cache_config": ("num_gpu_blocks", "block_size", "gpu_memory_utilization", "cache_dtype", "enable_prefix_caching"),
        "model_config": ("quantization",),
        "parallel_config": ("pipeline_parallel_size",),
        "attention_config": ("backend",),
    }
    config = SimpleNamespace(
        speculative_config=values["speculative_config"],
        **{section: SimpleNamespace(**{name: values[name] for name in names}) for section, names in sections.items()},
    )
    settings, architecture = tiny()
    request = RunnerRequest(settings, architecture, Prompts(ids, "by hand"), torch.device(device), torch.bfloat16, None)
    return Opened(config, arguments or {}, known, request)


@cache
def tiny() -> tuple[RunConfig, Any]:
    settings = compose(["hardware=cpu", "model=tiny", "runtime=vllm", "runtime.num_new_tokens=16"]).config
    return settings, models.load_config(settings.model)


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with fp8 and two attention backends, without vLLM and numba."""
    monkeypatch.setattr(vllm_remedies, "_has_fp8", lambda opened: opened.on_gpu)
    usable = ["FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION"]
    monkeypatch.setattr(vllm_remedies, "_backends", lambda opened, _: usable if opened.on_gpu else [])
    monkeypatch.setattr(vllm_remedies, "_quantization_methods", lambda: ("awq", "fp8", "fp8_per_tensor"))
    monkeypatch.setattr(vllm_remedies, "find_spec", lambda _: None)


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

    monkeypatch.undo()
    monkeypatch.setattr(vllm_remedies, "_has_fp8", lambda opened: True)
    monkeypatch.setattr(vllm_remedies, "_quantization_methods", lambda: ("fp8",))
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


def every_offer(monkeypatch: pytest.MonkeyPatch) -> list[EngineRemedy]:
    """Each kind in each of its spellings."""
    monkeypatch.setattr(vllm_remedies, "find_spec", lambda _: object())
    shared = ((1,) * 64, (1,) * 64)
    engines = [
        opened(ids=shared, enable_prefix_caching=False),
        opened({"async_scheduling": False, "enforce_eager": True}, cudagraph_mode="NONE"),
        opened({"optimization_level": 0}, cudagraph_mode="NONE"),
        opened({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, cudagraph_mode="PIECEWISE"),
        opened(cudagraph_capture_sizes=[1, 4], max_num_batched_tokens=100, max_num_seqs=1),
        opened({"compilation_config": {"cudagraph_capture_sizes": [1]}}, cudagraph_capture_sizes=[1]),
        opened({"max_cudagraph_capture_size": 1}, cudagraph_capture_sizes=[1]),
        opened({"num_gpu_blocks_override": 6}, num_gpu_blocks=6),
        opened({"kv_cache_memory_bytes": 2**26}, num_gpu_blocks=6),
        opened(num_gpu_blocks=6),
    ]
    return [remedy for engine in engines for remedy in vllm_remedies.remedies(engine)]


def test_every_offer_can_be_tried_on_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`advise --verify` adds the overrides to the run's configuration, where most of them are not set."""
    values = asdict(compose(["model=tiny", "runtime=vllm", "hardware=cpu"]).config)
    for remedy in every_offer(monkeypatch):
        config = with_overrides(values, remedy.overrides)
        assert config.runtime.engine, remedy.kind
    nested = with_overrides(values, ["runtime.engine.speculative_config.method=ngram"]).runtime.engine
    assert nested == {"speculative_config": {"method": "ngram"}}
    assert values["runtime"]["engine"] == {}, "the run's own is left alone"


def test_vllm_0_24_has_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = json.loads((Path(__file__).parents[1] / "fixtures" / "vllm" / "names_0.24.0.json").read_text())
    names = {word.split("=")[0].split(".")[2] for remedy in every_offer(monkeypatch) for word in remedy.overrides}
    assert names == ARGUMENTS
    assert names <= set(recorded["engine/arg_utils.py"]["EngineArgs"])


CHECK = """
import json, sys
from dataclasses import fields
from vllm import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

offers, folder = json.loads(sys.argv[1]), sys.argv[2]
base = {"model": folder, "dtype": "bfloat16", "skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 256}
for given in offers:
    assert set(given) <= {field.name for field in fields(EngineArgs)}, given
    EngineArgs(**base, **given).create_engine_config()
print(len(offers), AttentionBackendEnum["FLASHINFER"].name)
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_the_real_engine_refuses_none_of_them(vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    AutoConfig.for_model("qwen2", **sizes, num_key_value_heads=2, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    values = asdict(compose(["model=tiny", "runtime=vllm", "hardware=cpu"]).config)
    given = [with_overrides(values, remedy.overrides).runtime.engine for remedy in every_offer(monkeypatch)]
    distinct = [json.loads(text) for text in sorted({json.dumps(each) for each in given})]
    argv = [str(vllm_python), "-c", CHECK, json.dumps(distinct), str(tmp_path)]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-2:] == [str(len(distinct)), "FLASHINFER"]
    assert len(distinct) >= len(ARGUMENTS) - 1
