"""Find passes and runtimes: the built-in ones and those that other packages provide through entry points."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError


@dataclass(frozen=True)
class Declared:
    """A name and where it is defined; nothing has been imported yet."""

    name: str
    target: str
    """`module:attribute`."""
    provided_by: str = ""
    """The distribution that provides the entry point; empty for a built-in one."""


def declared(group: str, packaged: Mapping[str, str], kind: str) -> tuple[Declared, ...]:
    """Return the built-in entries, then those of other packages by name; raise a ConfigError if two have the same name."""
    found = {name: Declared(name, target) for name, target in packaged.items()}
    for entry in sorted(metadata.entry_points(group=group), key=lambda entry: entry.name):
        provided_by = entry.dist.name if entry.dist else "an installed package"
        known = found.get(entry.name)
        if known is not None and known.target != entry.value:
            raise ConfigError(
                f"The {kind} '{entry.name}' is provided by {provided_by} and by {known.provided_by or 'llm-perf-opt'}.",
                f"Rename one, or uninstall {provided_by}.",
            )
        found[entry.name] = Declared(entry.name, entry.value, provided_by)
    return tuple(found.values())


def load(entry: Declared, kind: str, remedy: str) -> Any:
    """Return the object that the entry names, or raise a ResourceError: another package's code may fail in any way."""
    module, _, attribute = entry.target.partition(":")
    try:
        found = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except LlmPerfError:
        raise
    except Exception as error:
        owner = f" of {entry.provided_by}" if entry.provided_by else ""
        raise ResourceError(
            f"The {kind} '{entry.name}'{owner} cannot be loaded from {entry.target}: {type(error).__name__}: {error}.", remedy
        ) from error
    return found
