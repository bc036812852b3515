"""Names of engine arguments, read from an engine's source without loading it. Those of the real vLLM: test_vllm_engine.py."""

import sys
from pathlib import Path

import pytest

from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.runtimes import EngineArguments, traits_of
from llm_perf_opt.config.schema import RuntimeConfig
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.engines import plain_config

# The layout of TensorRT-LLM's llmapi as its public source has it: pydantic classes, of which the backend chooses one, and
# keywords that LLM takes out before.
LLM_ARGS = """
from pydantic import BaseModel, Field
raise SystemExit("this must never run")
class StrictBaseModel(BaseModel): ...
class KvCacheConfig(StrictBaseModel):
    enable_block_reuse: bool = True
class BaseLlmArgs(StrictBaseModel):
    model: str = Field(description="the model")
    dtype: str = "auto"
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    parallel: int = Field(default=1, validation_alias=AliasChoices("tensor_parallel_size", "tp_size"))
class TorchLlmArgs(BaseLlmArgs):
    cuda_graph_config: object = None
class TrtLlmArgs(BaseLlmArgs):
    build_config: object = None
"""
LLM = """
class LLM:
    def __init__(self, model, **kwargs):
        self._executor_cls = kwargs.pop("executor_cls", None)
"""


def arguments_of(name: str) -> EngineArguments:
    found = traits_of(name).arguments
    assert found is not None
    return found


def runtime(*words: str) -> RuntimeConfig:
    return compose(list(words)).config.runtime


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of TensorRT-LLM's layout, which may be read and not imported."""
    folder = tmp_path / "tensorrt_llm" / "llmapi"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise SystemExit('this must never run')")
    (folder / "llm_args.py").write_text(LLM_ARGS)
    (folder / "llm.py").write_text(LLM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


@pytest.mark.parametrize(
    "name", ["cuda_graph_config", "build_config", "kv_cache_config.enable_block_reuse", "tp_size", "executor_cls"]
)
def test_what_any_backend_may_take_is_let_through(installed: Path, name: str) -> None:
    arguments = arguments_of("tensorrtllm")
    arguments.refuse(runtime("runtime=tensorrtllm", f"runtime.engine.{name}=1").engine, arguments.known())
    assert "tensorrt_llm" not in sys.modules


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("runtime.engine.cuda_graf_config=1", "TensorRT-LLM has no such engine argument. Did you mean 'cuda_graph_config'?"),
        ("runtime.engine.enable_block_reuse=1", "has no such engine argument"),
        ("runtime.engine.dtype=x", "is set by model.dtype"),
        ("runtime.engine.kv_cache_config=3", "expected a mapping"),
        ("runtime.engine.kv_cache_config=null", "expected a mapping"),
    ],
)
def test_what_none_takes_is_refused(installed: Path, words: str, said: str) -> None:
    arguments = arguments_of("tensorrtllm")
    with pytest.raises(ConfigError) as caught:
        arguments.refuse(runtime("runtime=tensorrtllm", words).engine, arguments.known())
    assert said in caught.value.fact
    assert caught.value.remedy


@pytest.mark.parametrize("damage", ["", "class BaseLlmArgs:\n    model: str\n", "class (", "x = '\0'", "(" * 10_000])
def test_a_source_of_another_shape_leaves_the_judging_to_the_engine(installed: Path, damage: str) -> None:
    (installed / "llm_args.py").write_text(damage)
    assert arguments_of("tensorrtllm").known() is None
    (installed / "llm_args.py").unlink()
    assert arguments_of("tensorrtllm").known() is None
    arguments_of("tensorrtllm").refuse(runtime("runtime=tensorrtllm", "runtime.engine.anything=1").engine, None)


def test_runtimes_without_known_arguments_are_not_judged() -> None:
    assert traits_of("pytorch").arguments is None
    assert traits_of("echo").arguments is None


def test_an_inner_configuration_keeps_what_json_can_hold() -> None:
    inner = {"hidden_size": 8, "id2label": {0: "a"}, "layers": (1, 2), "dtype": object(), "rope": {"theta": 1.0}}
    found = plain_config({"model_type": "llava", "text_config": inner, "id2label": {0: "a"}, "empty": {}})
    plain = {"hidden_size": 8, "layers": [1, 2], "rope": {"theta": 1.0}}
    assert found == {"model_type": "llava", "text_config": plain, "empty": {}}
