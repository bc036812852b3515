"""Which arguments an engine takes, read off its source: a wrong name is refused without loading it, which takes seconds."""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from llm_perf_opt.config.schema import RuntimeConfig
from llm_perf_opt.core.errors import ConfigError, nearest

_ALWAYS = ("model", "dtype")
"""Every engine has these: a source in which they are not found has another shape than the one known here."""
_CACHE = "kv_cache_config"


@dataclass(frozen=True)
class _Engine:
    """What is known of an engine's arguments before it is loaded."""

    label: str
    package: str
    documented: str
    own: Mapping[str, str]
    """Arguments that keys of this program's own configuration decide."""
    sources: tuple[str, ...]
    """Files of the package that tell the names …"""
    names: Callable[[ast.Module], Iterator[str]]
    """… and how they are found in one."""


def _vllm_names(tree: ast.Module) -> Iterator[str]:
    """Fields of the dataclass EngineArgs."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            yield from _fields(node)


def _tensorrtllm_names(tree: ast.Module) -> Iterator[str]:
    """Fields of every class …LlmArgs, their aliases, and what LLM takes out of its keywords before they become one.

    Which of the classes is used depends on the backend: a name that any of them has is let through, and the engine judges.
    """
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("LlmArgs"):
            yield from _fields(node)
    for called in ast.walk(tree):
        if not isinstance(called, ast.Call):
            continue
        takes = isinstance(called.func, ast.Attribute) and called.func.attr in ("pop", "get")
        if takes and called.args and _is_text(called.args[0]):
            yield ast.literal_eval(called.args[0])
        for keyword in called.keywords:
            if keyword.arg in ("alias", "validation_alias"):
                yield from (ast.literal_eval(part) for part in ast.walk(keyword.value) if _is_text(part))


_ENGINES = {
    "vllm": _Engine(
        "vLLM",
        "vllm",
        "They are the fields of vllm.EngineArgs.",
        {
            "model": "model.path",
            "tokenizer": "model.path",
            "dtype": "model.dtype",
            "trust_remote_code": "model.trust_remote_code",
            "seed": "model.seed",
            "profiler_config": "profiling.torch.preset",
            "skip_tokenizer_init": "dataset",
        },
        ("engine/arg_utils.py",),
        _vllm_names,
    ),
    "tensorrtllm": _Engine(
        "TensorRT-LLM",
        "tensorrt_llm",
        "They are the arguments of tensorrt_llm.LLM.",
        {
            "model": "model.path",
            "tokenizer": "model.path",
            "dtype": "model.dtype",
            "trust_remote_code": "model.trust_remote_code",
            "skip_tokenizer_init": "dataset",
        },
        ("llmapi/llm_args.py", "llmapi/llm.py"),
        _tensorrtllm_names,
    ),
}


def known_arguments(runtime: str) -> frozenset[str] | None:
    """The names an installed engine's source tells; None where it is not installed or its source has another shape."""
    engine = _ENGINES.get(runtime)
    spec = find_spec(engine.package) if engine else None
    if engine is None or spec is None:
        return None
    found: set[str] = set()
    for folder in spec.submodule_search_locations or ():
        for name in engine.sources:
            try:
                found.update(engine.names(ast.parse((Path(folder) / name).read_bytes())))
            except (OSError, SyntaxError, ValueError, RecursionError):  # another layout: the engine judges by itself
                continue
    return frozenset(found) if found.issuperset(_ALWAYS) else None


def refuse_arguments(runtime: RuntimeConfig, known: Collection[str] | None) -> None:
    """Refuse what this program decides, what cannot be meant, and, where `known` says so, what the engine does not have."""
    engine = _ENGINES.get(runtime.type)
    if engine is None:
        return
    for name in runtime.engine:
        if name in engine.own:
            key = engine.own[name]
            raise ConfigError(f"runtime.engine.{name} is decided by {key}.", f"Set {key} in its place.")
        if known is not None and name not in known:
            raise ConfigError(
                f"runtime.engine.{name}: the installed {engine.label} has no such engine argument.{nearest(name, known)}",
                engine.documented,
            )
    cache = runtime.engine.get(_CACHE, {})
    if runtime.type == "tensorrtllm" and not isinstance(cache, dict):
        raise ConfigError(f"runtime.engine.{_CACHE}={cache!r}: expected a mapping.", f"Write runtime.engine.{_CACHE}.NAME=VALUE.")


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
