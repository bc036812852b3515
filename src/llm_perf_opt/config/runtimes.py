"""The registry of runtimes: what each is, which arguments it takes, how its stages are labeled, what to record of it.

A runtime is an entry point of the group `llm_perf_opt.runners`. It names a `Runtime` in capitals (`my_runner:RUNTIME`), in a
module that loads its engine only when it is opened; or, where there is nothing to declare, the function that opens a runner.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from llm_perf_opt.config.registry import Declared, declared, load
from llm_perf_opt.core.errors import ConfigError, ResourceError, nearest
from llm_perf_opt.core.stages import MIXED_STEP, STEP, Stage

GROUP = "llm_perf_opt.runners"
OWN_OPTION = "engine"
"""The option of the group `runtime` that a runtime of another package starts from."""


class EngineArguments(Protocol):
    """The arguments of an engine, `runtime.engine.NAME=VALUE`, as far as they are known before it is loaded."""

    def known(self) -> frozenset[str] | None:
        """Return the names that the installed engine takes; None where they are not known."""

    def refuse(self, given: Mapping[str, Any], known: Collection[str] | None) -> None:
        """Raise a ConfigError for an argument that this program decides itself, or that is not `known`."""


@dataclass(frozen=True)
class StageLabels:
    """How an engine labels its stages in a trace."""

    name: str
    """The method that an analysis names."""
    stage_of: Callable[[str], str | None]
    """Label → stage, or None for a label that marks none."""


@dataclass(frozen=True)
class Runtime:
    """One runtime."""

    name: str
    target: str
    """`module:function` that opens a runner."""
    engine: bool = True
    """Whether it runs the model by itself and takes `runtime.engine.*`; otherwise cache, attention and compile are set here."""
    steppable: bool | None = None
    """Whether this program calls its steps and reaches its modules; None: known once it is opened."""
    needs: str = ""
    """The package it cannot run without, as it is imported."""
    install: str = ""
    """How to install that."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions are recorded with a run."""
    variables: tuple[str, ...] = ()
    """Prefixes of environment variables that are recorded with a run."""
    arguments: EngineArguments | None = None
    labels: tuple[StageLabels, ...] = ()
    """The most telling first; the next are tried where a trace has none of those before."""
    marks_stages: Callable[[Mapping[str, Any]], bool] = lambda _: False
    """Given `runtime.engine`: whether the thread that launches the work marks prefill and decode steps."""
    separate: str = ""
    """What keeps prefill and decode apart, where the engine may run them together."""
    brought_by: str = field(default="", kw_only=True)
    """The distribution whose entry point it is; empty for those of this package."""

    @property
    def installed(self) -> bool:
        """Whether what it needs is here."""
        return not self.needs or find_spec(self.needs) is not None


@cache
def known_runtimes() -> tuple[Declared, ...]:
    """Return the package's own runtimes first, then those of other packages by name."""
    return declared(GROUP, import_module(GROUP).ENTRY_POINTS, "runtime")


def _record(entry: Declared) -> Runtime:
    if not entry.target.rpartition(":")[2].isupper():
        return Runtime(entry.name, entry.target, brought_by=entry.brought_by)
    remedy = f"The entry point of the group {GROUP} must name a Runtime in capitals, or a function."
    found = load(entry, "runtime", remedy)
    if not isinstance(found, Runtime):
        raise ResourceError(
            f"The runtime '{entry.name}' of {entry.brought_by} cannot be used: {entry.target} is not one.", remedy
        )
    return replace(found, name=entry.name, brought_by=entry.brought_by)


def traits_of(name: str) -> Runtime:
    """Return the runtime of this name; one that is not installed here, or never was, has no traits of its own."""
    found = next((entry for entry in known_runtimes() if entry.name == name), None)
    return Runtime(name, "") if found is None else _record(found)


def all_traits() -> list[Runtime]:
    """Return every runtime that can be loaded; what is wrong with another is reported when it is chosen."""
    found = []
    for entry in known_runtimes():
        try:
            found.append(_record(entry))
        except ResourceError:
            continue
    return found


def runtime_named(name: str) -> Runtime:
    """Return the runtime of this name, installed; else raise an error that lists what is there and what to install."""
    known = known_runtimes()
    if name not in [entry.name for entry in known]:
        raise ConfigError(
            f"runtime.type={name} is not known.{nearest(name, [entry.name for entry in known])}",
            f"Known: {listed(known)}. One of your own is brought by an entry point of the group {GROUP}; see docs/runtimes.md.",
        )
    found = traits_of(name)
    if not found.installed:
        raise ResourceError(
            f"runtime={name} needs the package {found.needs}, which is not installed in this environment.",
            f"{found.install}, best in an environment of its own; then run llm-perf from there. Here: {listed(known)}.",
        )
    return found


def listed(known: Iterable[Declared]) -> str:
    """Return the names in a line; with those that are not installed, how to get them."""
    found = {entry.name: traits_of(entry.name) for entry in known}
    return ", ".join(
        name if runtime.installed else f"{name} (not installed: {runtime.install})" for name, runtime in found.items()
    )


def by_requests(pattern: str) -> Callable[[str], str | None]:
    """Return a reader of labels in which two groups count the requests in prefill and those in decode."""
    compiled = re.compile(pattern)

    def stage_of(label: str) -> str | None:
        found = compiled.fullmatch(label)
        if found is None:
            return None
        prefilling, decoding = (int(count) for count in found.groups() if count is not None)
        if prefilling and decoding:
            return MIXED_STEP
        return Stage.PREFILL.value if prefilling else Stage.DECODE_STEP.value if decoding else STEP

    return stage_of


def by_step(pattern: str) -> Callable[[str], str | None]:
    """Return a reader of labels that mark a step and do not tell what is in it."""
    return lambda label: STEP if re.fullmatch(pattern, label) else None
