"""What serving needs from a runtime and from a load generator: the server of an engine, and the programs that drive it.

An engine's server is declared in its runtime (`Runtime.server`); generators are modules that hold a `Generator`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.serving_records import Arrival, LoadKind

LOOPBACK = "127.0.0.1"
"""Servers that llm-perf starts listen here only."""
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"


@dataclass(frozen=True)
class Server:
    """The OpenAI-compatible server of an engine."""

    target: str
    """The `module:function` that takes a `runners.base.ServerRequest` and returns a `ServerCommand`; called in its process."""
    health: str = "/health"
    """Answers 200 once the model is loaded."""
    metrics: str = "/metrics"
    start_profile: str = ""
    """Takes a POST and starts the server's torch.profiler; empty: it has none."""
    stop_profile: str = ""
    """Takes a POST and answers when the trace is written."""
    traces: str = "*.trace.json*"
    """Traces in the folder that the profiler writes to."""
    generators: tuple[str, ...] = ()
    """Load generators that come with the engine, as `module:NAME` of a `Generator`."""


@dataclass(frozen=True)
class ServerCommand:
    """How a server is run in the current process."""

    module: str
    """Run as `python -m`."""
    arguments: tuple[str, ...]
    model: str
    """The name that requests use."""
    tokenizer: str
    """A folder with the tokenizer that the server uses."""
    version: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set unless the user sets them."""
    notes: tuple[str, ...] = ()
    random_ids: bool = False
    """Whether prompts are random token ids: the tokenizer was made for a model without one."""


@dataclass(frozen=True)
class LoadRequest:
    """One load to put on a server."""

    url: str
    model: str
    tokenizer: str
    kind: LoadKind
    asked: float
    requests: int
    warmup: int
    prompt_tokens: int
    new_tokens: int
    seed: int
    request_s: float
    """A request that takes longer is given up."""
    folder: Path
    """Where the generator writes its files."""
    random_ids: bool = False
    """Whether prompts are random token ids instead of text, where the generator can choose."""

    @property
    def arrival(self) -> Arrival:
        """When requests are sent."""
        return "poisson" if self.kind == "rate" else "closed"


@dataclass(frozen=True)
class Generator:
    """A load generator, run in an environment of its own."""

    name: str
    label: str
    program: str
    """Its command on the PATH; empty: it has none and runs in the interpreter."""
    launch: tuple[str, ...]
    """How an interpreter runs it: `-m`, module."""
    package: str
    """Its import name."""
    folders: tuple[str, ...]
    """Environments in the current folder to look in."""
    install: str
    arguments: Callable[[LoadRequest], list[str]]
    file: str
    """The file with a record per request, in the folder of the load, in a format of `traces.serving.load_file`."""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables of its process; None removes one."""
    prepare: Callable[[LoadRequest, Path], Mapping[str, str]] = lambda _load, _folder: {}
    """Prepares a load in a temporary folder, and returns further environment variables."""
    distributions: tuple[str, ...] = ()
    """Distributions that may provide the package, for its version; default: of the same name."""


def parse_loads(text: str, option: str) -> tuple[float, ...]:
    """Return the loads of `1,2,4` in ascending order, or raise a ConfigError."""
    found = set()
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{option} {word}: expected a number above 0.", f"Write {option} 1,2,4.")
        if option == "--concurrency" and value != int(value):
            raise ConfigError(f"--concurrency {word}: expected a whole number.", "Write --concurrency 1,2,4.")
        found.add(value)
    if not found:
        raise ConfigError(f"{option} names no load.", f"Write {option} 1,2,4.")
    return tuple(sorted(found))
