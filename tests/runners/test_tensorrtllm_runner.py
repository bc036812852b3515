"""The TensorRT-LLM runner against a stand-in with only the documented calls. The real engine has not been run."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.runners import tensorrtllm_runner
from llm_perf_opt.runners.engines import PREFIX_CACHE_NOTE
from llm_perf_opt.runners.llm_profile_runner import run_pass
from llm_perf_opt.runners.session import open_session

STAND_INS = Path(__file__).parents[1] / "stand_ins"
WORDS = [
    "hardware=cpu", "model.dtype=fp32", "runtime.batch_size=2", "runtime.prompt_tokens=10", "runtime.num_new_tokens=4",
    "runtime.max_warmup=1", "runtime.min_repeats=2", "runtime.max_repeats=2", "model.architecture.num_hidden_layers=1",
]  # fmt: skip


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, on a machine that it would not run on; what it opened is in `LLM.opened`."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setattr(tensorrtllm_runner, "_check_device", lambda _: None)
    import tensorrt_llm

    tensorrt_llm.LLM.opened.clear()
    yield tensorrt_llm.LLM
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from llm_perf_opt.runners import models

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "small"
    config = compose(WORDS).config
    made = models.build_model(models.load_config(config.model), config.model, config.runtime, torch.device("cpu"), torch.float32)
    for tensor in made.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    made.save_pretrained(folder)
    return folder


def measured(out: Path, *words: str) -> dict[str, Any]:
    assert run_pass(compose([*WORDS, *words]).config, "clean", out)
    found: dict[str, Any] = json.loads((out / "timings.json").read_text())
    return found


def test_the_tokens_are_those_of_pytorch(engine: Any, saved_model: Path, tmp_path: Path) -> None:
    words = [word for word in WORDS if "architecture" not in word] + ["model=hf", f"model.path={saved_model}"]
    found = {}
    for runtime in ("tensorrtllm", "pytorch"):
        out = tmp_path / runtime
        assert run_pass(compose([*words, f"runtime={runtime}"]).config, "clean", out)
        found[runtime] = json.loads((out / "timings.json").read_text())
    assert found["tensorrtllm"]["tokens_sha256"] == found["pytorch"]["tokens_sha256"]
    assert found["tensorrtllm"]["model"]["parameters"] == found["pytorch"]["model"]["parameters"]
    assert len(found["tensorrtllm"]["iterations"][0]["steps_ns"]) == 3


def test_random_weights_and_what_the_engine_is_given(engine: Any, tmp_path: Path) -> None:
    found = measured(tmp_path, "runtime=tensorrtllm", "runtime.engine.kv_cache_config.free_gpu_memory_fraction=0.5")
    given = found["runtime"]["engine"]
    assert (given["load_format"], given["max_batch_size"], given["max_seq_len"], given["max_num_tokens"]) == ("dummy", 2, 14, 20)
    assert given["kv_cache_config"] == {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.5}
    settings = {setting["name"]: setting["value"] for setting in found["runtime"]["settings"]}
    assert (settings["max_batch_size"], settings["kv_cache_config.enable_block_reuse"], settings["top_k"]) == ("2", "False", "1")
    (opened,) = engine.opened
    assert opened.kv_cache_config.enable_block_reuse is False
    assert opened.most_running == 2, "all sequences of the batch at once"
    assert "has not been run on the real engine" in " ".join(found["runtime"]["notes"])


def test_the_torch_pass_says_why_it_cannot_be(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ResourceError, match=r"torch\.profiler cannot see tensorrtllm: TensorRT-LLM runs the model in its own processes"
    ):
        run_pass(compose([*WORDS, "runtime=tensorrtllm"]).config, "torch", tmp_path)


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["runtime.engine.model=x"], ConfigError, "runtime.engine.model is set by model.path"),
        (["runtime.engine.kv_cache_config=3"], ConfigError, "expected a mapping"),
        (["runtime.engine.no_such_argument=3"], ResourceError, "cannot open this model: .*no_such_argument"),
    ],
)
def test_what_the_engine_does_not_take_is_refused(engine: Any, words: list[str], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        open_session(compose([*WORDS, "runtime=tensorrtllm", *words]).config)


def test_it_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STAND_INS))
    with pytest.raises(ResourceError, match="needs an NVIDIA GPU, but the run requests cpu"):
        open_session(compose([*WORDS, "runtime=tensorrtllm"]).config)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["runtime.engine.tensor_parallel_size=auto"], "tensor_parallel_size=auto does not give the number of devices"),
        (["runtime.engine.tensor_parallel_size=[1,2]"], "does not give the number of devices"),
        (["runtime.engine.tensor_parallel_size=null"], "does not give the number of devices"),
        (["runtime.engine.tensor_parallel_size=0.5"], "does not give the number of devices"),
        (["runtime.engine.tensor_parallel_size=-1"], "does not give the number of devices"),
        (["runtime.engine.pipeline_parallel_size=2"], "runs on 2 workers that do not all share"),
        (["dataset=sample_prompts", "runtime.prompt_tokens=128"], "without padding"),
        (["runtime.engine.model_kwargs.num_hidden_layers=2"], "changes the model's configuration"),
        (["runtime.engine.sparse_attention_config.algorithm=rocket"], "skips work of attention"),
        (["runtime.engine.enable_attention_dp=true"], "enable_attention_dp=True runs all of attention on every device"),
        (
            ["runtime.engine.kv_cache_config.dtype=fp8"],
            "stores its cache in fp8, but the cost model counts it in the model's fp32",
        ),
        (["runtime.engine.kv_cache_config.max_attention_window=[8]"], "max_attention_window=[8] limits the attention window"),
        (["runtime.engine.kv_cache_config.host_cache_size=4096"], "kv_cache_config.host_cache_size=4096 keeps some"),
        (["runtime.engine.kv_cache_config.use_uvm=true"], "outside the device's memory"),
        (["runtime.engine.kv_cache_config.enable_block_reuse=true"], "their prefill is not computed"),
    ],
)
def test_what_cannot_be_costed_says_why(engine: Any, words: list[str], why: str) -> None:
    session = open_session(compose([*WORDS, "runtime=tensorrtllm", *words]).config)
    assert why in session.runner.runtime.uncosted


def test_tensor_parallel_workers_share_the_work_of_a_step(engine: Any) -> None:
    session = open_session(compose([*WORDS, "runtime=tensorrtllm", "runtime.engine.tensor_parallel_size=2"]).config)
    assert (session.runner.runtime.uncosted, session.runner.runtime.devices) == ("", 2)


@pytest.mark.parametrize(
    "words",
    [
        ["runtime.engine.kv_cache_config.dtype=auto"],
        ["runtime.engine.kv_cache_config.dtype=float32"],
        ["runtime.engine.kv_cache_config.enable_block_reuse=false"],
        ["runtime.engine.kv_cache_config.host_cache_size=0", "runtime.engine.model_kwargs=null"],
    ],
)
def test_what_changes_nothing_is_costed(engine: Any, words: list[str]) -> None:
    session = open_session(compose([*WORDS, "runtime=tensorrtllm", *words]).config)
    assert session.runner.runtime.uncosted == ""


@pytest.mark.parametrize("reuse", [True, False])
def test_prefill_of_cached_prompts_is_told(engine: Any, reuse: bool) -> None:
    words = f"runtime.engine.kv_cache_config.enable_block_reuse={str(reuse).lower()}"
    session = open_session(compose([*WORDS, "runtime=tensorrtllm", words]).config)
    assert (PREFIX_CACHE_NOTE in session.runner.runtime.notes) == reuse
    assert "kv_cache_config.enable_block_reuse" not in {setting.name for setting in session.runner.runtime.settings}
