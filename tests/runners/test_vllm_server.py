"""The command line of vLLM's server and of its load generator, without vLLM."""

from pathlib import Path

import pytest

from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.config.serving import Generator, LoadRequest
from llm_perf_opt.profiling.serving import aiperf
from llm_perf_opt.profiling.serving.generators import known_generators
from llm_perf_opt.runners import vllm_bench
from llm_perf_opt.runners.vllm_server import command_line


def test_engine_arguments_are_options() -> None:
    given = {
        "max_model_len": 512,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "profiler_config": {"profiler": "torch", "torch_profiler_with_stack": False},
        "cudagraph_capture_sizes": [1, 2],
        "quantization": None,
    }
    assert command_line(given) == [
        *("--max-model-len", "512"),
        "--enforce-eager",
        "--no-enable-prefix-caching",
        *("--profiler-config", '{"profiler": "torch", "torch_profiler_with_stack": false}'),
        *("--cudagraph-capture-sizes", "1", "2"),
    ]


def test_the_runtime_declares_its_server() -> None:
    server = traits_of("vllm").server
    assert server is not None
    assert (server.start_profile, server.stop_profile, server.health) == ("/start_profile", "/stop_profile", "/health")
    assert traits_of("pytorch").server is None
    assert list(known_generators()) == ["aiperf", "vllm-bench"]


def load(kind: str, asked: float) -> LoadRequest:
    return LoadRequest(
        url="http://127.0.0.1:1",
        model="m",
        tokenizer="t",
        kind="rate" if kind == "rate" else "concurrency",
        asked=asked,
        requests=7,
        warmup=2,
        prompt_tokens=64,
        new_tokens=16,
        seed=3,
        request_s=30.0,
        folder=Path("out"),
    )


@pytest.mark.parametrize("generator", [aiperf.GENERATOR, vllm_bench.GENERATOR])
def test_a_load_is_a_command(generator: Generator) -> None:
    rate, closed = (generator.arguments(load(kind, asked)) for kind, asked in (("rate", 2.5), ("concurrency", 4.0)))
    assert rate[rate.index("--request-rate") + 1] == "2.5"
    assert "--request-rate" not in closed
    assert {"7", "2", "64", "16", "3", "out"} <= set(rate)
    assert "4" in closed
