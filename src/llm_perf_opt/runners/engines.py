"""What is said of a model that an engine runs: counted on the architecture, since an engine packs, pads and shards weights."""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.schema import ModelConfig, canonical_dtype
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError, nearest
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


# --- engine arguments -------------------------------------------------------------------------------------------------


_ALWAYS = ("model", "dtype")
"""Every engine has these: a source in which they are not found has another shape than the one known here."""
DECIDED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "skip_tokenizer_init": "dataset",
}
"""Arguments of most engines that keys of this program's own configuration decide."""


@dataclass(frozen=True)
class SourceArguments:
    """The arguments of an engine as its source tells them; see `EngineArguments`."""

    label: str
    """The engine's name in a message."""
    package: str
    documented: str
    """Where they are documented, in a sentence."""
    sources: tuple[str, ...]
    """Files of the package that tell the names …"""
    names: Callable[[ast.Module], Iterator[str]]
    """… and how they are found in one."""
    decided: Mapping[str, str]
    """Argument → the key of this program's own configuration that decides it."""
    mappings: tuple[str, ...] = ()
    """Arguments that are mappings."""

    def known(self) -> frozenset[str] | None:
        """Return the names; None where the engine is not installed or its source has another shape."""
        spec = find_spec(self.package)
        found: set[str] = set()
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for name in self.sources:
                try:
                    found.update(self.names(ast.parse((Path(folder) / name).read_bytes())))
                except (OSError, SyntaxError, ValueError, RecursionError):  # another layout: the engine judges by itself
                    continue
        return frozenset(found) if found.issuperset(_ALWAYS) else None

    def refuse(self, given: Mapping[str, Any], known: Collection[str] | None) -> None:
        """Refuse what this program decides, what cannot be meant, and, where `known` says so, what the engine does not have."""
        for name in given:
            if name in self.decided:
                key = self.decided[name]
                raise ConfigError(f"runtime.engine.{name} is decided by {key}.", f"Set {key} in its place.")
            if known is not None and name not in known:
                raise ConfigError(
                    f"runtime.engine.{name}: the installed {self.label} has no such engine argument.{nearest(name, known)}",
                    self.documented,
                )
        for name in self.mappings:
            if not isinstance(given.get(name, {}), dict):
                raise ConfigError(
                    f"runtime.engine.{name}={given[name]!r}: expected a mapping.", f"Write runtime.engine.{name}.NAME=VALUE."
                )


def fields_of(tree: ast.Module, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the annotated fields of the classes whose names are wanted."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and is_wanted(node.name):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id
