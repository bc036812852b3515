"""The registry of runtimes: their arguments, the labels of their stages, the packages to record.

A runtime is an entry point of the group `llm_perf_opt.runners`. It names a `Runtime` in capitals (`my_runner:RUNTIME`), in a
module that imports its engine only when it is opened; or just the function that opens a runner.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from llm_perf_opt.config.registry import Declared, declared, load
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ResourceError, nearest
from llm_perf_opt.core.stages import MIXED_STEP, STEP, Stage

if TYPE_CHECKING:
    from llm_perf_opt.config.serving import Server

GROUP = "llm_perf_opt.runners"
OWN_OPTION = "engine"
"""The option of the group `runtime` that a runtime without its own YAML uses."""


class EngineArguments(Protocol):
    """The arguments of an engine, `runtime.engine.NAME=VALUE`, as far as they are known without loading it."""

    def known(self) -> frozenset[str] | None:
        """Return the names that the installed engine accepts; None if unknown."""

    def refuse(self, given: Mapping[str, Any], known: Collection[str] | None) -> None:
        """Raise a ConfigError for an argument that llm-perf sets itself, or that is not `known`."""


@dataclass(frozen=True)
class StageLabels:
    """How an engine labels its stages in a trace."""

    name: str
    """The name of the method in reports."""
    stage_of: Callable[[str], str | None]
    """Label → stage; None for a label that marks no stage."""


@dataclass(frozen=True)
class Machine:
    """What the choices of a lever may depend on."""

    device: str
    """cpu or cuda."""
    processors: int
    """CPUs that the measured process may use."""
    compiler: bool = True
    """Whether there is a C++ compiler, which torch.compile needs on a CPU."""


@dataclass(frozen=True)
class Lever:
    """Settings with a finite list of choices, which `llm-perf tune` tries."""

    name: str
    choices: tuple[tuple[str, ...], ...]
    """Each choice is a group of overrides that are set together."""
    lossy: bool = False
    """Whether the model computes with another precision, so that tokens may change. Only tried if the user allows it."""
    stage: str = ""
    """The only stage that it changes, prefill or decode; empty: any."""
    throughput: bool = False
    """Whether it only changes how much is computed at once, so that a single request is no faster."""


@dataclass(frozen=True)
class Runtime:
    """A runtime."""

    name: str
    target: str
    """The `module:function` that opens a runner."""
    engine: bool = True
    """Whether it takes `runtime.engine.*`; otherwise `runtime.cache`, `attn_implementation` and `compile` apply."""
    steppable: bool | None = None
    """Whether llm-perf calls its steps and sees its modules; None: unknown until it is opened."""
    images: bool = False
    """Whether its runner takes the images of prompts (`Prompts.images`); otherwise runs with images are rejected."""
    needs: str = ""
    """The import name of the package that it requires."""
    install: str = ""
    """The command that installs it."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions are recorded in env.json."""
    variables: tuple[str, ...] = ()
    """Prefixes of environment variables that are recorded in env.json."""
    arguments: EngineArguments | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    """Engine argument → pattern of the texts that a file may set it to, because they name neither code nor a file. Any other
    text must be typed on the command line."""
    labels: tuple[StageLabels, ...] = ()
    """The most specific first; the next are used if a trace has none of the previous ones."""
    marks_stages: Callable[[Mapping[str, Any]], bool] = lambda _: False
    """Given `runtime.engine`: whether the thread that launches the work marks prefill and decode steps."""
    separate: str = ""
    """How to separate prefill and decode if the engine ran them together; shown to the user."""
    ranks: bool = False
    """Whether llm-perf starts one process for each rank of `runtime.tensor_parallel`; the runner then splits its model."""
    tensor_parallel: str = ""
    """The engine argument that takes `runtime.tensor_parallel`; the engine then starts its own workers."""
    server: "Server | None" = None
    """Its OpenAI-compatible server, for `llm-perf serve`; None: it has none."""
    levers: Callable[[Machine], tuple[Lever, ...]] = lambda _: ()
    """What `llm-perf tune` may change without a prediction, in the order in which it is tried."""
    provided_by: str = field(default="", kw_only=True)
    """The distribution that provides the entry point; empty for a built-in runtime."""

    @property
    def installed(self) -> bool:
        """Whether the required package is installed."""
        return not self.needs or find_spec(self.needs) is not None


@cache
def known_runtimes() -> tuple[Declared, ...]:
    """Return the built-in runtimes, then those of other packages by name."""
    return declared(GROUP, import_module(GROUP).ENTRY_POINTS, "runtime")


def _record(entry: Declared) -> Runtime:
    if not entry.target.rpartition(":")[2].isupper():
        return Runtime(entry.name, entry.target, provided_by=entry.provided_by)
    remedy = f"The entry point of the group {GROUP} must name a Runtime in capitals, or a function."
    found = load(entry, "runtime", remedy)
    if not isinstance(found, Runtime):
        raise ResourceError(
            f"The runtime '{entry.name}' of {entry.provided_by} cannot be used: {entry.target} is not a Runtime.", remedy
        )
    return replace(found, name=entry.name, provided_by=entry.provided_by)


def traits_of(name: str) -> Runtime:
    """Return the runtime of this name, or default traits if it is unknown or cannot be loaded: its runs can still be read."""
    found = next((entry for entry in known_runtimes() if entry.name == name), None)
    if found is None:
        return Runtime(name, "")
    try:
        return _record(found)
    except LlmPerfError:  # `runtime_named` raises it
        return Runtime(name, found.target, provided_by=found.provided_by)


def all_traits() -> list[Runtime]:
    """Return every runtime that can be loaded; errors of the others are reported when they are selected."""
    found = []
    for entry in known_runtimes():
        try:
            found.append(_record(entry))
        except LlmPerfError:
            continue
    return found


def runtime_named(name: str) -> Runtime:
    """Return the runtime of this name; raise an error with the known ones if it is unknown or not installed."""
    known = known_runtimes()
    entry = next((entry for entry in known if entry.name == name), None)
    if entry is None:
        raise ConfigError(
            f"runtime.type={name} is not known.{nearest(name, [entry.name for entry in known])}",
            f"Known: {listed(known)}. Register your own as an entry point of the group {GROUP}; see docs/runtimes.md.",
        )
    found = _record(entry)
    if not found.installed:
        raise ResourceError(
            f"runtime={name} needs the package {found.needs}, which is not installed in this environment.",
            f"{found.install}, preferably in a separate environment, and run llm-perf from there. Known: {listed(known)}.",
        )
    return found


def listed(known: Iterable[Declared]) -> str:
    """Return the names in one line, with the install command of those that are not installed."""
    found = {entry.name: traits_of(entry.name) for entry in known}
    return ", ".join(
        name if runtime.installed else f"{name} (not installed: {runtime.install})" for name, runtime in found.items()
    )


def by_requests(pattern: str) -> Callable[[str], str | None]:
    """Return a function that reads labels whose two groups count the requests in prefill and in decode."""
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
    """Return a function that reads labels of steps with unknown content."""
    return lambda label: STEP if re.fullmatch(pattern, label) else None
