"""Find a load generator on this machine, in an environment of its own."""

import os
import shutil
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from llm_perf_opt.config.runtimes import all_traits
from llm_perf_opt.config.serving import LOOPBACK, Generator
from llm_perf_opt.core.errors import ConfigError, ResourceError, nearest
from llm_perf_opt.core.processes import IMPORTING_NOTHING_HERE, ask
from llm_perf_opt.profiling.vendor.launch import program_environment
from llm_perf_opt.runners.child import PARENT_VARIABLE
from llm_perf_opt.traces.serving.json_files import most_requests

_BUILT_IN = ("llm_perf_opt.profiling.serving.aiperf:GENERATOR",)


@dataclass(frozen=True)
class LocatedGenerator:
    """A generator and how it is started on this machine."""

    generator: Generator
    launch: tuple[str, ...]
    version: str

    def most_requests(self, tokens: int) -> int:
        """Return how many requests of this many tokens can be read from the file of the generator."""
        return most_requests(tokens, self.generator.file)


def known_generators() -> dict[str, Generator]:
    """Return the generators by name: the built-in ones, then those that come with an engine."""
    found = {}
    engines = (server.generators for runtime in all_traits() if (server := runtime.server) is not None)
    for target in (*_BUILT_IN, *(name for names in engines for name in names)):
        module, _, name = target.partition(":")
        generator: Generator = getattr(import_module(module), name)
        found[generator.name] = generator
    return found


def locate_generator(name: str, python: Path | None) -> LocatedGenerator:
    """Return the generator of this name as installed here; raise an error that says how to install it."""
    known = known_generators()
    if name not in known:
        raise ConfigError(f"--generator {name} is not known.{nearest(name, known)}", f"Known: {', '.join(known)}.")
    generator = known[name]
    launch = _launch(generator, python)
    if launch is None:
        looked = f"in {python}" if python else f"on the PATH or in {' or '.join(map(str, _environments(generator)))}"
        raise ResourceError(
            f"The load generator {generator.label} is not installed: there is none {looked}.",
            f"{generator.install}; or name its interpreter with --generator-python PATH.",
        )
    return LocatedGenerator(generator, launch, _version(generator, launch[0]))


def _launch(generator: Generator, python: Path | None) -> tuple[str, ...] | None:
    if python is not None:
        found = shutil.which(python)
        return _in_environment(generator, Path(found)) if found else None
    on_path = shutil.which(generator.program) if generator.program else None
    if on_path:
        return (on_path,)
    if not generator.program and find_spec(generator.package) is not None:
        return (sys.executable, *generator.launch)
    for folder in _environments(generator):
        interpreter = folder / "bin" / "python"
        if interpreter.exists():
            return _in_environment(generator, interpreter)
    return None


def _environments(generator: Generator) -> list[Path]:
    """Return where environments of a generator are: next to that of this process. The working folder may be anybody's."""
    return [Path(sys.prefix).parent / folder for folder in generator.folders]


def _in_environment(generator: Generator, interpreter: Path) -> tuple[str, ...] | None:
    program = interpreter.parent / generator.program
    if generator.program and os.access(program, os.X_OK):
        return (str(program),)
    code = f"{IMPORTING_NOTHING_HERE}import importlib.util; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    has = ask([str(interpreter), "-c", code, generator.package], 60) is not None
    return (str(interpreter), *generator.launch) if has else None


def _version(generator: Generator, program: str) -> str:
    """Return the version in the environment of a program, or an empty string."""
    interpreter = Path(program) if Path(program).name != generator.program else Path(program).resolve().parent / "python"
    code = (
        f"{IMPORTING_NOTHING_HERE}import importlib.metadata as m; found = {{d.name: d.version for d in m.distributions()}}; "
        "print(next((found[name] for name in sys.argv[1:] if name in found), ''))"
    )
    names = generator.distributions or (generator.package,)
    return (ask([str(interpreter), "-c", code, *names], 60) if interpreter.exists() else None) or ""


def generator_environment(located: LocatedGenerator) -> dict[str, str]:
    """Return the environment of a generator: the user's, without a proxy for loopback or imports from the working folder.

    Another interpreter does not get the packages of this one.
    """
    environment = {**program_environment(), PARENT_VARIABLE: str(os.getpid()), "PYTHONSAFEPATH": "1"}
    for name in ("PYTHONPATH", "PYTHONHOME") if located.launch[0] != sys.executable else ():
        environment.pop(name, None)
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, (environment.get(name), LOOPBACK, "localhost")))
    for name, value in located.generator.variables.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment
