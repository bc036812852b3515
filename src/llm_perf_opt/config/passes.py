"""The registry of passes: name, order, how a pass is launched, what it leaves in `raw/`, which stages it sees.

A pass is declared in the tuple `PASSES` of a module `profiling/*_pass.py`, or by an entry point of the group
`llm_perf_opt.passes` in another package. Every command that reads a run imports these modules, so `Pass.launch` can name a
function that is imported when the pass starts. The settings `profiling.passes.NAME.KEY=VALUE` are the
fields of its settings dataclass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from typing import TYPE_CHECKING, Any

import msgspec

from llm_perf_opt.config.registry import Declared, declared, load
from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError, nearest
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.core.user_files import present

if TYPE_CHECKING:
    from llm_perf_opt.config.schema import RunConfig

GROUP = "llm_perf_opt.passes"
_ROOM = "llm_perf_opt.profiling"
_MODULE_ENDING = "_pass"
EVERY_STAGE = (Stage.PREFILL, Stage.DECODE, Stage.DECODE_STEP)


@dataclass(frozen=True)
class PassSettings:
    """The settings of a pass that can only be enabled."""

    enable: bool = False


@dataclass(frozen=True)
class Pass:
    """A profiling pass."""

    name: str
    """Its name in `raw/`, run.json, settings and reports."""
    label: str
    """Its name in progress output and messages."""
    order: int
    """Passes run in this order: the unprofiled pass is 20, timelines are 30 to 49, counters are 60."""
    launch: Callable[[Any], None] | str | None = None
    """Runs the pass in a `profiling.passes.Capture`: a function, or `module:function`, which is imported when the pass starts. An
    error before its command starts marks it skipped, a later one failed. None: the launch of another pass runs it.
    """
    wanted: "Callable[[RunConfig], bool] | None" = None
    """Whether a configuration requests it; None: `profiling.passes.NAME.enable` decides."""
    settings: type[Any] = PassSettings
    """A dataclass with a field `enable` and a default for every field."""
    leaves: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)
    """File in `raw/NAME` → the function that reads it; a ParseError fails the pass."""
    measured: Callable[[Any], bool] = lambda _: True
    """Whether the content of one of these files is a measurement; a pass that measured nothing has failed."""
    trace: str = ""
    """The file in `raw/NAME` that is a timeline, in a format of `traces`."""
    checked: bool = False
    """Whether its launch checks the timeline; then only the timeline of a successful pass is used."""
    tool: str = ""
    """The tool that recorded the timeline, as shown in reports."""
    stages: tuple[Stage, ...] = ()
    """The stages that it sees; empty for a pass that does not run the model."""
    essential: bool = False
    """Whether it runs without a profiler; if it fails, the others would fail too and are not started."""
    programs: bool = False
    """Whether it can run a user's program (`llm-perf exec`)."""

    def start(self, capture: Any) -> None:
        """Run the pass."""
        launch = resolve_name(self.launch) if isinstance(self.launch, str) else self.launch
        if launch is None:
            raise ValueError(f"{self.name} is run by another pass")
        launch(capture)

    def trace_file(self, folder: RunFolder) -> Path:
        """Return the path of its timeline, which may not exist."""
        return present(folder.raw(self.name) / self.trace)

    def is_wanted(self, config: "RunConfig") -> bool:
        """Return whether this configuration requests the pass."""
        return self.wanted(config) if self.wanted else bool(self.settings_in(config).enable)

    def settings_in(self, config: "RunConfig") -> Any:
        """Return the pass's section of `profiling.passes`, or raise a ConfigError that names the key."""
        given, known = config.profiling.passes.get(self.name, {}), [item.name for item in fields(self.settings)]
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
    """Return every pass in the order in which they run. Errors of one that cannot be loaded are reported when it is requested."""
    found: list[Pass] = [item for module in _packaged_modules() for item in import_module(module).PASSES]
    builtin = {item.name for item in found}
    for entry in _plugins():
        if entry.name in builtin:
            raise ConfigError(
                f"The pass '{entry.name}' is provided by {entry.provided_by} and by llm-perf-opt.",
                f"Uninstall {entry.provided_by}.",
            )
        try:
            found.append(_loaded(entry))
        except ResourceError:
            continue
    return tuple(sorted(found, key=lambda item: item.order))


def pass_named(name: str) -> Pass | None:
    """Return the pass of this name, or None."""
    return next((item for item in known_passes() if item.name == name), None)


def label_of(name: str) -> str:
    """Return the label of a pass; an unknown one is its own label."""
    found = pass_named(name)
    return found.label if found else name


def sees_stages(name: str) -> bool:
    """Return whether a pass runs the model under a profiler, so that its stages can be compared with the unprofiled pass."""
    found = pass_named(name)
    return found is None or bool(found.stages and not found.essential)


def planned_passes(config: "RunConfig") -> tuple[str, ...]:
    """Return the passes that a run requests, in order."""
    return tuple(item.name for item in known_passes() if item.is_wanted(config))


def trace_files(folder: RunFolder) -> dict[str, Path]:
    """Return the path of each pass's trace of the whole iteration, the preferred one first; it may not exist."""
    whole = [item for item in known_passes() if item.trace and Stage.PREFILL in item.stages]
    return {item.name: item.trace_file(folder) for item in whole}


def check_sections(config: "RunConfig") -> "RunConfig":
    """Raise a ConfigError for a section of `profiling.passes` without a pass, and for fields that its pass does not have."""
    for name in config.profiling.passes:
        found = pass_named(name)
        if found is None:
            for entry in _plugins():
                if entry.name == name:
                    _loaded(entry)  # raises why it cannot be loaded
            known = [item.name for item in known_passes() if item.wanted is None]
            raise ConfigError(
                f"profiling.passes.{name}: there is no such pass.{nearest(name, known)}",
                f"Known: {', '.join(known) or 'none'}. Register your own as an entry point of the group {GROUP}.",
            )
        if found.wanted is not None:
            section = next((key for key in (name, name.partition("_")[0]) if hasattr(config.profiling, key)), "")
            remedy = f"Its settings are profiling.{section}." if section else "It is a pass of `llm-perf exec`."
            raise ConfigError(f"profiling.passes.{name} has no effect.", remedy)
        found.settings_in(config)
    return config


def is_there(path: Path) -> None:
    """Raise a ParseError if the file is missing or empty."""
    if not path.is_file() or not path.stat().st_size:
        raise ParseError(f"{path} is missing.", "See the pass's log.txt.")


def _packaged_modules() -> list[str]:
    room = import_module(_ROOM)
    return [f"{_ROOM}.{item.name}" for item in iter_modules(room.__path__) if item.name.endswith(_MODULE_ENDING)]


def _plugins() -> tuple[Declared, ...]:
    return declared(GROUP, {}, "pass")


def _loaded(entry: Declared) -> Pass:
    found = load(entry, "pass", f"The entry point of the group {GROUP} must name a Pass.")
    if not isinstance(found, Pass) or found.name != entry.name:
        raise ResourceError(
            f"The pass '{entry.name}' of {entry.provided_by} cannot be used: {entry.target} is not a Pass of this name.",
            "See `Pass` in llm_perf_opt.config.passes.",
        )
    return found
