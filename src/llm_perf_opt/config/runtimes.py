"""The registry of runtimes: built-in ones and entry points of other packages. Imports none of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec

from llm_perf_opt.core.errors import ConfigError, ResourceError, nearest

GROUP = "llm_perf_opt.runners"
"""Entry points in this group name a function that opens a runner."""
OWN_OPTION = "engine"
"""The option of the group `runtime` that runtimes of other packages are based on."""


@dataclass(frozen=True)
class Runtime:
    """A runtime."""

    name: str
    target: str
    """`module:function` that opens it."""
    needs: str = ""
    """The package it requires, by import name."""
    install: str = ""
    """The command that installs it."""
    brought_by: str = ""
    """The distribution that provides the entry point; empty for built-in runtimes."""

    @property
    def installed(self) -> bool:
        """Whether the package it requires is installed."""
        return not self.needs or find_spec(self.needs) is not None


_PACKAGED = (
    Runtime("pytorch", "llm_perf_opt.runners.pytorch_runner:open_pytorch"),
    Runtime("vllm", "llm_perf_opt.runners.vllm_runner:open_vllm", "vllm", "pip install 'llm-perf-opt[vllm]'"),
    Runtime(
        "tensorrtllm",
        "llm_perf_opt.runners.tensorrtllm_runner:open_tensorrtllm",
        "tensorrt_llm",
        "pip install 'llm-perf-opt[tensorrtllm]'",
    ),
)


@cache
def known_runtimes() -> tuple[Runtime, ...]:
    """Return the built-in runtimes, then those of other packages by name. A name may be used only once."""
    found = {runtime.name: runtime for runtime in _PACKAGED}
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        brought_by = entry.dist.name if entry.dist else "an installed package"
        known = found.get(entry.name)
        if known is not None and known.target != entry.value:
            taken = known.brought_by or "llm-perf-opt itself"
            raise ConfigError(
                f"The runtime '{entry.name}' is provided by both {brought_by} and {taken}.",
                f"Rename one, or uninstall {brought_by}.",
            )
        found[entry.name] = Runtime(entry.name, entry.value, brought_by=brought_by)
    return tuple(found.values())


def runtime_named(name: str) -> Runtime:
    """Return the installed runtime of this name, or raise with the known ones and what to install."""
    known = known_runtimes()
    found = next((runtime for runtime in known if runtime.name == name), None)
    if found is None:
        raise ConfigError(
            f"runtime.type={name} is not known.{nearest(name, [runtime.name for runtime in known])}",
            f"Known: {listed(known)}. To add your own, use an entry point in the group {GROUP}; see docs/runtimes.md.",
        )
    if not found.installed:
        raise ResourceError(
            f"runtime={name} needs the package {found.needs}, which is not installed in this environment.",
            f"Run {found.install}, preferably in its own environment, and run llm-perf from there. Available: {listed(known)}.",
        )
    return found


def listed(known: Iterable[Runtime]) -> str:
    """Return the names as one line, with install commands for missing ones."""
    return ", ".join(
        runtime.name if runtime.installed else f"{runtime.name} (not installed: {runtime.install})" for runtime in known
    )
