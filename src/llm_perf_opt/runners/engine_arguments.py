"""Which arguments an engine takes, read off its source: a wrong name is refused without loading it, which takes seconds."""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import ConfigError, nearest

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
