"""The registry of passes: what each is called, when it runs, how it is launched, what it leaves in `raw/`, what it can see.

A pass is a module `profiling/NAME_pass.py` with a tuple `PASSES`, or an entry point of the group `llm_perf_opt.passes` in another
package. Its settings are `profiling.passes.NAME.KEY=VALUE`, the fields of a dataclass that it brings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import msgspec

from llm_perf_opt.config.registry import Declared, declared, load
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError, nearest
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.stages import Stage

GROUP = "llm_perf_opt.passes"
_ROOM = "llm_perf_opt.profiling"
_MODULE_ENDING = "_pass"
EVERY_STAGE = (Stage.PREFILL, Stage.DECODE, Stage.DECODE_STEP)


@dataclass(frozen=True)
class PassSettings:
    """The section of a pass that has nothing else to set."""

    enable: bool = False


@dataclass(frozen=True)
class Pass:
    """One pass."""

    name: str
    """In `raw/`, run.json, settings and reports."""
    label: str
    """In progress and messages."""
    order: int
    """Passes run by this number: the unprofiled one has 20, those that record a timeline 30 to 49, counters 60."""
    launch: Callable[[Any], None] | None = None
    """Runs it within a `profiling.passes.Capture`; raises what went wrong, before it begins (it is then skipped) or after.

    None: the launch of another pass runs it.
    """
    wanted: Callable[[RunConfig], bool] | None = None
    """Whether a run asks for it; without one, `profiling.passes.NAME.enable` says so."""
    settings: type[Any] = PassSettings
    """A dataclass with `enable` and a default for every field."""
    leaves: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)
    """File in `raw/NAME` → how it is read back; a ParseError then means that the pass has failed."""
    trace: str = ""
    """Which file in `raw/NAME` is a timeline, in a format that `traces` reads."""
    checked: bool = False
    """Whether its launch examines the timeline, so that only that of a pass that ended well is used."""
    tool: str = ""
    """Who recorded the timeline, in reports."""
    stages: tuple[Stage, ...] = ()
    """Which stages of the model it sees; none for a pass that does not run the model under a profiler."""
    essential: bool = False
    """It runs without a profiler: where it fails, the others would fail as well, and are not begun."""
    programs: bool = False
    """Whether it can run a program of the user's (`llm-perf exec`)."""

    def trace_file(self, folder: RunFolder) -> Path:
        """Return where it leaves its timeline; the file may not be there."""
        return folder.raw(self.name) / self.trace

    def is_wanted(self, config: RunConfig) -> bool:
        """Return whether this configuration asks for the pass."""
        return self.wanted(config) if self.wanted else bool(self.settings_in(config).enable)

    def settings_in(self, config: RunConfig) -> Any:
        """Return the pass's section of `profiling.passes`, or raise a ConfigError that names the key."""
        given, known = config.profiling.passes.get(self.name, {}), [one.name for one in fields(self.settings)]
        where = f"profiling.passes.{self.name}"
        if not isinstance(given, dict):
            raise ConfigError(f"{where}={given!r}: expected the fields {', '.join(known)}.")
        for key in given:
            if key not in known:
                raise ConfigError(f"'{key}' is not known in {where}.{nearest(key, known)}", f"Known: {', '.join(known)}.")
        try:
            return msgspec.convert(given, self.settings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}.", f"It has the fields {', '.join(known)}.") from error


@cache
def known_passes() -> tuple[Pass, ...]:
    """Return every pass in the order they run. What is wrong with one that cannot be loaded is reported when it is asked for."""
    found = [one for module in _packaged_modules() for one in import_module(module).PASSES]
    for entry in _brought():
        try:
            found.append(_loaded(entry))
        except ResourceError:
            continue
    return tuple(sorted(found, key=lambda one: one.order))


def pass_named(name: str) -> Pass | None:
    """Return the pass of this name, if it is known here."""
    return next((one for one in known_passes() if one.name == name), None)


def label_of(name: str) -> str:
    """Return what a pass is called in messages; one that is not known here goes by its name."""
    found = pass_named(name)
    return found.label if found else name


def sees_stages(name: str) -> bool:
    """Return whether a pass runs the model under a profiler, so that its stages can be compared with the unprofiled ones."""
    found = pass_named(name)
    return found is None or bool(found.stages and not found.essential)


def planned_passes(config: RunConfig) -> tuple[str, ...]:
    """Return the passes that a run asks for, in their order."""
    return tuple(one.name for one in known_passes() if one.is_wanted(config))


def trace_files(folder: RunFolder) -> dict[str, Path]:
    """Return the trace that each pass leaves of the whole iteration, the one to prefer first; it may not be there."""
    whole = [one for one in known_passes() if one.trace and Stage.PREFILL in one.stages]
    return {one.name: one.trace_file(folder) for one in whole}


def check_sections(config: RunConfig) -> RunConfig:
    """Refuse a section of `profiling.passes` that no pass reads, and fields that its pass does not have."""
    for name in config.profiling.passes:
        found = pass_named(name)
        if found is None:
            for entry in _brought():
                if entry.name == name:
                    _loaded(entry)  # says why it cannot be
            known = [one.name for one in known_passes() if one.wanted is None]
            raise ConfigError(
                f"profiling.passes.{name}: there is no such pass.{nearest(name, known)}",
                f"Known: {', '.join(known) or 'none'}. A pass of your own is brought by an entry point of the group {GROUP}.",
            )
        if found.wanted is not None:
            raise ConfigError(f"profiling.passes.{name} has no effect.", f"Its settings are profiling.{name}.")
        found.settings_in(config)
    return config


def is_there(path: Path) -> None:
    """Raise a ParseError where a pass left no such file, or an empty one: the least way to read something back."""
    if not path.is_file() or not path.stat().st_size:
        raise ParseError(f"{path} is missing.", "See the pass's log.txt.")


def _packaged_modules() -> list[str]:
    room = import_module(_ROOM)
    return [f"{_ROOM}.{one.name}" for one in iter_modules(room.__path__) if one.name.endswith(_MODULE_ENDING)]


def _brought() -> tuple[Declared, ...]:
    return declared(GROUP, {}, "pass")


def _loaded(entry: Declared) -> Pass:
    found = load(entry, "pass", f"The entry point of the group {GROUP} must name a Pass.")
    if not isinstance(found, Pass) or found.name != entry.name:
        raise ResourceError(
            f"The pass '{entry.name}' of {entry.brought_by} cannot be used: {entry.target} is not a Pass of this name.",
            "See llm_perf_opt.config.passes for what a pass is.",
        )
    return found
