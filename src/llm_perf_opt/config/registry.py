"""How passes and runtimes are found: those of this package, and those that other packages bring by an entry point."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError


@dataclass(frozen=True)
class Declared:
    """A name and where it is defined; nothing is imported yet."""

    name: str
    target: str
    """`module:attribute`."""
    brought_by: str = ""
    """The distribution whose entry point it is; empty for those of this package."""


def declared(group: str, packaged: Mapping[str, str], kind: str) -> tuple[Declared, ...]:
    """Return the package's own entries, then those of other packages by name. A name can be taken once."""
    found = {name: Declared(name, target) for name, target in packaged.items()}
    for entry in sorted(metadata.entry_points(group=group), key=lambda entry: entry.name):
        brought_by = entry.dist.name if entry.dist else "an installed package"
        known = found.get(entry.name)
        if known is not None and known.target != entry.value:
            raise ConfigError(
                f"The {kind} '{entry.name}' is brought by {brought_by} and by {known.brought_by or 'llm-perf-opt itself'}.",
                f"Rename one, or uninstall {brought_by}.",
            )
        found[entry.name] = Declared(entry.name, entry.value, brought_by)
    return tuple(found.values())


def load(entry: Declared, kind: str, remedy: str) -> Any:
    """Return what the entry names, or raise a ResourceError: another package's code may fail to load in any way."""
    module, _, attribute = entry.target.partition(":")
    try:
        found = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except LlmPerfError:
        raise
    except Exception as error:
        whose = f" of {entry.brought_by}" if entry.brought_by else ""
        raise ResourceError(
            f"The {kind} '{entry.name}'{whose} cannot be loaded from {entry.target}: {type(error).__name__}: {error}.", remedy
        ) from error
    return found
