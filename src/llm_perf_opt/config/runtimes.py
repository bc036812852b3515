"""The runtimes there are: the package's own, and those other packages bring by an entry point. None of them is imported."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec

from llm_perf_opt.core.errors import ConfigError, ResourceError, nearest

GROUP = "llm_perf_opt.runners"
"""Entry points of this group name a function that opens a runner."""
OWN_OPTION = "engine"
"""The option of the group `runtime` that a runtime of another package starts from."""


@dataclass(frozen=True)
class Runtime:
    """One runtime."""

    name: str
    target: str
    """`module:function` that opens it."""
    needs: str = ""
    """The package it cannot run without, as it is imported."""
    install: str = ""
    """How to get that."""
    brought_by: str = ""
    """The distribution whose entry point it is; empty for those of this package."""

    @property
    def installed(self) -> bool:
        """Whether what it needs is here."""
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
    """The package's own first, then those of other packages by name; a name that is taken cannot be taken again."""
    found = {runtime.name: runtime for runtime in _PACKAGED}
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        brought_by = entry.dist.name if entry.dist else "an installed package"
        known = found.get(entry.name)
        if known is not None and known.target != entry.value:
            taken = known.brought_by or "llm-perf-opt itself"
            raise ConfigError(
                f"The runtime '{entry.name}' is brought by {brought_by} and by {taken}.",
                f"Rename one, or uninstall {brought_by}.",
            )
        found[entry.name] = Runtime(entry.name, entry.value, brought_by=brought_by)
    return tuple(found.values())


def runtime_named(name: str) -> Runtime:
    """The runtime of this name, installed; else an error that lists what is there and what to install."""
    known = known_runtimes()
    found = next((runtime for runtime in known if runtime.name == name), None)
    if found is None:
        raise ConfigError(
            f"runtime.type={name} is not known.{nearest(name, [runtime.name for runtime in known])}",
            f"Known: {listed(known)}. One of your own is brought by an entry point of the group {GROUP}; see docs/runtimes.md.",
        )
    if not found.installed:
        raise ResourceError(
            f"runtime={name} needs the package {found.needs}, which is not installed beside this program.",
            f"{found.install}, best in an environment of its own; then run llm-perf from there. Here: {listed(known)}.",
        )
    return found


def listed(known: Iterable[Runtime]) -> str:
    """Names in a line; with those that are not installed, how to get them."""
    return ", ".join(
        runtime.name if runtime.installed else f"{runtime.name} (not installed: {runtime.install})" for runtime in known
    )
