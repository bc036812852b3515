"""What is said of a model that an engine runs: counted on the architecture, since an engine packs, pads and shards weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.schema import ModelConfig, canonical_dtype
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError
from llm_perf_opt.core.host import last_level_cache_bytes
from llm_perf_opt.core.records import Maybe, ModelFacts
from llm_perf_opt.runners import models

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


def last_level_cache_of(device: "torch.device") -> Maybe[int]:
    """Bytes of the device's last-level cache."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return last_level_cache_bytes()


def short_dtype(dtype: "torch.dtype") -> str:
    """bf16, fp16, fp32; another as torch calls it."""
    return canonical_dtype(str(dtype))


def plain_config(values: dict[str, Any]) -> dict[str, Any]:
    """Only what JSON can hold; the rest of a configuration is no fact about the architecture."""

    def keep(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(keep(item) for item in value)
        if isinstance(value, dict):
            return all(isinstance(key, str) and keep(item) for key, item in value.items())
        return value is None or isinstance(value, (bool, int, float, str))

    return {str(key): value for key, value in values.items() if keep(value)}


COUNTED = (
    "Parameters and the bytes of the weights are counted on the architecture, as transformers builds it; "
    "what the engine packs, pads or adds is not in them."
)

REUSED = (
    "The engine keeps prompts in its cache (prefix caching), and every request has the same ones: but for the first request, "
    "prefill and TTFT are those of cached prompts."
)
REUSES = "the engine takes prompts it has seen from its cache (prefix caching): their prefill is not computed"
OVERRIDDEN = "changes the model's configuration, and parameters and costs are counted on the one without it"
OFFLOADED = "keeps a part of the model or of its cache outside the device's memory, whose traffic the cost model does not count"


def changed_work(given: Mapping[str, Any], changing: Mapping[str, str], prefix: str = "runtime.engine.") -> str:
    """Why a run is not costed whose user set an argument that changes the work; empty where none is set to anything."""
    for name, why in changing.items():
        if given.get(name):
            return f"{prefix}{name}={given[name]} {why}"
    return ""


def other_cache(stored: str, dtype: "torch.dtype") -> str:
    """Why a cache kept in another format than the model's is not costed; empty where it is the same."""
    if stored in ("auto", str(dtype).removeprefix("torch.")):
        return ""
    return f"the engine keeps its cache in {stored}, and the cost model counts it in the model's {short_dtype(dtype)}"


def not_shared(workers: int) -> str:
    """Why a model spread over workers is not costed, where not all of them share the work of each step."""
    return (
        f"the model is spread over {workers} workers that do not all share the work of a step (tensor_parallel_size alone "
        "would), so its limits are neither those of one device nor of all"
    )


@dataclass(frozen=True)
class EngineWords:
    """How the engine runs the model, in the words of a report."""

    attention: str
    cache: str
    compile: str
    logits: str


def engine_model_facts(
    model: ModelConfig, architecture: "PretrainedConfig", device: "torch.device", dtype: "torch.dtype", words: EngineWords
) -> ModelFacts:
    """The model's facts with the engine's own words where it differs from plain PyTorch."""
    need = models.memory_need(architecture, model, dtype, 1, 1)
    classes = getattr(architecture, "architectures", None) or [f"{architecture.model_type} (no class named)"]
    return ModelFacts(
        name=model.name,
        model_class=str(classes[0]),
        model_type=str(architecture.model_type),
        parameters=need.parameters,
        weight_bytes=need.parameters * dtype.itemsize,
        dtype=short_dtype(dtype),
        device=str(device),
        device_name=models.device_name(device),
        attention=words.attention,
        cache=words.cache,
        compile=words.compile,
        logits=words.logits,
        architecture=plain_config(architecture.to_dict()),
        last_level_cache_bytes=last_level_cache_of(device),
    )


def write_model_folder(architecture: "PretrainedConfig", folder: Path) -> Path:
    """A Hugging Face folder without weights, for an engine that makes random ones itself."""
    if not getattr(architecture, "architectures", None):
        architecture.architectures = [models.class_name(architecture)]
    try:
        architecture.save_pretrained(folder)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"The configuration of {architecture.model_type} cannot be written: {error}.") from error
    return folder


@contextmanager
def refused_in_its_own_words(engine: str) -> Iterator[None]:
    """An engine's error while it opens a model, as one of ours. Running out of memory is told as everywhere else."""
    try:
        yield
    except LlmPerfError:
        raise
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError, RuntimeError, AssertionError) as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        words = " ".join(str(error).split())[:500] or type(error).__name__
        raise ResourceError(
            f"{engine} cannot open this model: {words}",
            "Engine arguments are runtime.engine.NAME=VALUE; the whole error is in the pass's log.txt.",
        ) from error
