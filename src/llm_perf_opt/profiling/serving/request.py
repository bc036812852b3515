"""The request of a serving run, and its checks: nothing is started yet."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_perf_opt.analysis.serving.slo import parse_slo
from llm_perf_opt.config.runtimes import Runtime, runtime_named
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.config.serving import LOOPBACK, Server
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.missing import Maybe
from llm_perf_opt.core.serving_records import LoadKind, ServerFacts
from llm_perf_opt.profiling.serving.generators import LocatedGenerator, locate_generator
from llm_perf_opt.profiling.serving.http import ServedModel, ask, check_lengths, check_url, free_port, served_model
from llm_perf_opt.profiling.serving.metrics import load_series

STEADY_LOAD_TIMES = 3.5
"""A load goes on for at least so many times the end-to-end time of a request: a little more than a steady state needs."""
LEAST_TURNS = 10
"""Requests one after the other in each place of a closed loop."""
LEAST_E2E_S = 1e-3


@dataclass(frozen=True)
class ServingRequest:
    """The loads, and what they may cost."""

    config: RunConfig
    code: tuple[str, ...] = ()
    """The settings that can run code and were typed, as KEY=VALUE."""
    url: str | None = None
    """Attach to this server instead of starting one."""
    served_model: str | None = None
    """The model of an attached server; None: the only one."""
    tokenizer: str | None = None
    """A folder with the tokenizer of an attached server's model."""
    port: int | None = None
    """None: a free one."""
    generator: str = "aiperf"
    generator_python: Path | None = None
    rates: tuple[float, ...] = ()
    concurrency: tuple[float, ...] = ()
    """Neither: rates by bisection to the knee."""
    slo: str = ""
    """Limits of a good request, as `ttft=200ms,tpot=20ms`; empty: none."""
    requests: int = 100
    least_s: float = 10.0
    """A load goes on for at least this many seconds, with more requests if needed; 0: `requests` is enough."""
    warmup: int = 5
    points: int = 8
    """The most loads of a bisection."""
    profile: float | None = None
    """The load of the profiled point; None: the knee."""
    profiled: bool = True
    profile_s: float = 5.0
    spans: bool = True
    seed: int = 0
    request_s: float = 120.0
    point_s: float = 600.0
    startup_s: float = 900.0
    timeout_s: float = 3600.0

    def requests_at(self, load: float, e2e_s: float) -> int:
        """Return how many requests a load has, so that it goes on for `least_s` and reaches a steady state.

        `e2e_s`: the time of a request at the largest smaller load, which is less than at this one. Requests at a time end at a
        rate of at most load ÷ time; each place takes several requests one after the other.
        """
        if not self.least_s:
            return self.requests
        seconds = max(self.least_s, STEADY_LOAD_TIMES * e2e_s)
        each = seconds if self.kind == "rate" else max(LEAST_TURNS, seconds / max(e2e_s, LEAST_E2E_S))
        return max(self.requests, math.ceil(min(load * each, sys.maxsize)))

    def least_requests_at(self, load: float) -> int:
        """Return the least number of requests that a load has, however quick the server is."""
        return self.requests_at(load, 0.0 if self.kind == "rate" else self.least_s / STEADY_LOAD_TIMES)

    @property
    def kind(self) -> LoadKind:
        """Whether loads are rates or numbers of requests at a time."""
        return "concurrency" if self.concurrency else "rate"

    def settings(self) -> dict[str, Any]:
        """Return what config.yaml records of it."""
        return {
            "generator": self.generator,
            "slo": self.slo,
            "requests": self.requests,
            "least_s": self.least_s,
            "warmup": self.warmup,
            "seed": self.seed,
            "request_s": self.request_s,
        }


@dataclass(frozen=True)
class Prepared:
    """A checked request: nothing has been started yet."""

    request: ServingRequest
    located: LocatedGenerator
    runtime: Runtime | None
    """None: the server runs already."""
    facts: ServerFacts
    tokenizer: str
    """Empty until the server that llm-perf starts has named it."""

    @property
    def server(self) -> Server:
        """The declared server of the runtime."""
        if self.runtime is None or self.runtime.server is None:
            raise ValueError("the server was not started by llm-perf")
        return self.runtime.server


def _check_size(request: ServingRequest, located: LocatedGenerator) -> None:
    """Raise if the file of a load would be too large to be read."""
    tokens = request.config.runtime.num_new_tokens
    most = located.most_requests(tokens)
    readable = f"the {most:,} requests of {tokens:,} tokens that llm-perf can read from the file of {located.generator.label}"
    if request.requests > most:
        remedy = "Give fewer requests, or a smaller runtime.num_new_tokens."
        raise ConfigError(f"--requests {request.requests} is more than {readable}.", remedy)
    for load in request.rates or request.concurrency or ():
        if request.least_requests_at(load) > most:
            option = f"--rates {load:g} --least-s {request.least_s:g}" if request.rates else f"--concurrency {load:g}"
            remedy = "Give smaller values, or a smaller runtime.num_new_tokens."
            raise ConfigError(f"{option} needs more than {readable}.", remedy)


def prepare(request: ServingRequest) -> Prepared:
    """Check everything that can be checked without starting a process, or raise."""
    if request.rates and request.concurrency:
        raise ConfigError("--rates and --concurrency exclude each other.", "Give one of them.")
    for name in ("least_s", "profile_s", "point_s"):
        if not math.isfinite(seconds := getattr(request, name)):
            option, default = f"--{name.replace('_', '-')}", getattr(ServingRequest, name)
            raise ConfigError(f"{option} {seconds} is not a number of seconds.", f"The default is {option} {default:g}.")
    slo_ns = parse_slo(request.slo).limits if request.slo else {}
    if request.url is not None:
        return _attached(request, slo_ns)
    located = locate_generator(request.generator, request.generator_python)
    _check_size(request, located)
    runtime = runtime_named(request.config.runtime.type)
    if runtime.server is None:
        raise ConfigError(
            f"runtime={runtime.name} has no server to start.", "Choose a runtime with one, or attach to a server with --url URL."
        )
    url = f"http://{LOOPBACK}:{free_port(request.port)}"
    return Prepared(request, located, runtime, ServerFacts(url, request.config.model.name, slo_ns=slo_ns), "")


def _attached(request: ServingRequest, slo_ns: dict[str, int]) -> Prepared:
    if request.profile is not None:
        raise ConfigError(
            "--profile needs a server that llm-perf starts: an attached one writes its trace where it runs.", "Leave it out."
        )
    url = check_url(request.url or "")
    served = served_model(url, request.served_model)
    located = locate_generator(request.generator, request.generator_python)
    _check_size(request, located)
    check_lengths(served, request.config.runtime.prompt_tokens, request.config.runtime.num_new_tokens)
    tokenizer = _tokenizer(request.tokenizer, served)
    version = ask(url + "/version").json()
    facts = ServerFacts(
        url=url,
        model=served.name,
        engine=served.owner or ServerFacts.engine,
        version=str(version["version"]) if isinstance(version, dict) and "version" in version else ServerFacts.version,
        metrics_url=metrics_url_of(url, "/metrics"),
        notes=("llm-perf did not start the server: other clients may use it, and its settings are not known.",),
        slo_ns=slo_ns,
    )
    return Prepared(request, located, None, facts, tokenizer)


def _tokenizer(given: str | None, served: ServedModel) -> str:
    """Return the folder of the tokenizer: a generator would download a name that is not a folder."""
    if given is not None:
        if not Path(given).expanduser().is_dir():
            raise ConfigError(f"--tokenizer {given} is not a folder.", "Give a local folder with the tokenizer's files.")
        return str(Path(given).expanduser().resolve())
    found = next((name for name in (served.root, served.name) if name and Path(name).is_dir()), None)
    if found is None:
        raise ConfigError(
            f"The tokenizer of '{served.name}' is not known: the server names no folder on this machine.",
            "Give a local folder with it: --tokenizer DIR.",
        )
    return str(Path(found).resolve())


def metrics_url_of(url: str, path: str) -> Maybe[str]:
    """Return the address of a server's metrics, or why it has none."""
    answer = ask(url + path)
    if answer.code == 200 and load_series(answer.body.decode(errors="replace")):
        return url + path
    return ServerFacts.metrics_url
