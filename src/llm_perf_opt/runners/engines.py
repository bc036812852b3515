"""What the engine runners share: model facts, why a run has no cost, engine arguments read from the engine's source.

Parameters are counted on the architecture, because an engine packs, pads and shards the weights.
"""

import ast
import atexit
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.schema import ModelConfig, canonical_dtype
from llm_perf_opt.core.engine_records import EngineSetting
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError, nearest
from llm_perf_opt.core.host import last_level_cache_bytes
from llm_perf_opt.core.records import Maybe, ModelFacts
from llm_perf_opt.runners import models

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from llm_perf_opt.runners.base import RunnerRequest


Chosen = dict[str, tuple[Any, str]]
"""Name of a setting → its value and why llm-perf chose it."""
GREEDY = "decoding is greedy"
EXACTLY = "every sequence gets exactly runtime.num_new_tokens tokens"
RUN_THREADS = "the threads of the run (hardware.threads)"
"""Why engines get settings that all of them have."""


def stated(chosen: Chosen, given: Collection[str] = ()) -> list[EngineSetting]:
    """Return the settings that llm-perf chose, without those that the user set."""
    return [EngineSetting(name, str(value), why) for name, (value, why) in chosen.items() if name not in given]


def last_level_cache_of(device: "torch.device") -> Maybe[int]:
    """Return the bytes of the device's last-level cache."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return last_level_cache_bytes()


def short_dtype(dtype: "torch.dtype") -> str:
    """Return bf16, fp16, fp32, or torch's name of another dtype."""
    return canonical_dtype(str(dtype))


def plain_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration that JSON can hold, also inside inner configurations."""

    def keep(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(keep(item) for item in value)
        if isinstance(value, dict):
            return not value or any(isinstance(key, str) for key in value)
        return value is None or isinstance(value, (bool, int, float, str))

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return plain_config(value) if isinstance(value, dict) else value

    return {key: plain(value) for key, value in values.items() if isinstance(key, str) and keep(value)}


PARAMETERS_NOTE = (
    "Parameters and weight bytes are counted on the architecture as transformers builds it; "
    "what the engine packs, pads or adds is not included."
)
PREFIX_CACHE_NOTE = (
    "The engine caches prompts (prefix caching), and every request has the same prompts: except for the first request, "
    "prefill and TTFT are those of cached prompts."
)
PREFIX_CACHED = "the engine reuses cached prompts (prefix caching), so their prefill is not computed"
OVERRIDDEN = "changes the model's configuration, but parameters and costs are counted without the change"
OFFLOADED = "keeps some of the model or its cache outside the device's memory; the cost model does not count that traffic"
QUANTIZED = "the engine runs quantized weights, which the cost model does not count"
SPECULATIVE = "the engine decodes speculatively, so a step produces several tokens"
UNPADDED = "the engine runs sequences of different length without padding, which the cost model does not count"


def changed_work(given: Mapping[str, Any], changing: Mapping[str, str], prefix: str = "runtime.engine.") -> str:
    """Return why an argument set by the user makes the cost unknown, or an empty string."""
    for name, why in changing.items():
        if given.get(name):
            return f"{prefix}{name}={given[name]} {why}"
    return ""


def shared_prefix_tokens(prompts: Sequence[Sequence[int]], block: int) -> int:
    """Return how many prompt tokens a prefix cache of such blocks saves, because an earlier prompt begins alike.

    Only whole blocks are shared, and the last token of a prompt is always computed.
    """
    seen: set[int] = set()
    shared = 0
    for ids in prompts:
        chain, known = 0, True
        for start in range(0, len(ids) - block + 1, block):
            chain = hash((chain, tuple(ids[start : start + block])))
            known = known and chain in seen and start + block < len(ids)
            shared += block if known else 0
            seen.add(chain)
    return shared


def other_cache_dtype(stored: str, dtype: "torch.dtype") -> str:
    """Return why the cost of a cache in another dtype than the model's is unknown, or an empty string."""
    if stored in ("auto", str(dtype).removeprefix("torch.")):
        return ""
    return f"the engine stores its cache in {stored}, but the cost model counts it in the model's {short_dtype(dtype)}"


def not_tensor_parallel(workers: int) -> str:
    """Return why the cost of a model on several workers is unknown unless all of them share each step."""
    return (
        f"the model runs on {workers} workers that do not all share each step (tensor_parallel_size alone "
        "would), so neither the peaks of one device nor those of all apply"
    )


@dataclass(frozen=True)
class EngineWords:
    """How the engine runs the model, as shown in reports."""

    attention: str
    cache: str
    compile: str
    logits: str


def engine_model_facts(
    model: ModelConfig, architecture: "PretrainedConfig", device: "torch.device", dtype: "torch.dtype", words: EngineWords
) -> ModelFacts:
    """Return the facts of a model that an engine runs."""
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
    """Write a Hugging Face folder without weights, for an engine that creates random ones, and return it."""
    if not getattr(architecture, "architectures", None):
        architecture.architectures = [models.class_name(architecture)]
    try:
        architecture.save_pretrained(folder)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"The configuration of {architecture.model_type} cannot be written: {error}.") from error
    return folder


def temporary_model_folder(architecture: "PretrainedConfig") -> str:
    """Write the model folder to a temporary folder that is removed at exit, and return its path."""
    folder = tempfile.TemporaryDirectory(prefix="llm-perf-model-")
    atexit.register(folder.cleanup)
    return str(write_model_folder(architecture, Path(folder.name)))


def cpu_engine_dtype(request: "RunnerRequest", engine: str, supported: "Sequence[torch.dtype]") -> "torch.dtype":
    """Return the dtype that the engine runs the model in, on a CPU; `auto` is the first supported one."""
    if request.device.type != "cpu":
        raise ConfigError(f"{engine} runs on the CPU here, but the device is {request.device}.", "Add hardware=cpu.")
    if request.config.model.dtype == "auto":
        return supported[0]
    if request.dtype not in supported:
        known = " or ".join(short_dtype(dtype) for dtype in supported)
        raise ConfigError(f"{engine} does not run model.dtype={short_dtype(request.dtype)}.", f"Use model.dtype={known}.")
    return request.dtype


@contextmanager
def opening(engine: str) -> Iterator[None]:
    """Raise an engine's error while it opens a model as a ResourceError; out-of-memory errors pass unchanged."""
    try:
        yield
    except LlmPerfError:
        raise
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError, RuntimeError, AssertionError) as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        text = " ".join(str(error).split())[:500] or type(error).__name__
        raise ResourceError(
            f"{engine} cannot open this model: {text}",
            "Engine arguments are runtime.engine.NAME=VALUE; the full error is in the pass's log.txt.",
        ) from error


# --- engine arguments -------------------------------------------------------------------------------------------------


_ALWAYS = ("model", "dtype")
"""Arguments of every engine: if they are not found, the source has an unknown layout."""
RESERVED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "skip_tokenizer_init": "dataset",
}
"""Engine argument → the key of llm-perf's own configuration that sets it."""


@dataclass(frozen=True)
class SourceArguments:
    """The arguments of an engine, read from its source; see `EngineArguments`."""

    label: str
    """The engine's name in messages."""
    package: str
    documented: str
    """A sentence that says where the arguments are documented."""
    sources: tuple[str, ...]
    """Files of the package that define the names."""
    names: Callable[[ast.Module], Iterator[str]]
    """Yields the names in one file."""
    reserved: Mapping[str, str]
    """Argument → the key of llm-perf's own configuration that sets it."""
    mappings: tuple[str, ...] = ()
    """Arguments that are mappings."""

    def known(self) -> frozenset[str] | None:
        """Return the names; None if the engine is not installed or its source has an unknown layout."""
        spec = find_spec(self.package)
        found: set[str] = set()
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for name in self.sources:
                try:
                    found.update(self.names(ast.parse((Path(folder) / name).read_bytes())))
                except (OSError, SyntaxError, ValueError, RecursionError):  # unknown layout: the engine checks its arguments
                    continue
        return frozenset(found) if found.issuperset(_ALWAYS) else None

    def refuse(self, given: Mapping[str, Any], known: Collection[str] | None) -> None:
        """Raise a ConfigError for a reserved argument, one that is not `known`, or a mapping given as a value."""
        for name in given:
            if name in self.reserved:
                key = self.reserved[name]
                raise ConfigError(f"runtime.engine.{name} is set by {key}.", f"Set {key} instead.")
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
    """Yield the annotated fields of the classes whose names match."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and is_wanted(node.name):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id
