"""The call of Hydra: compose options and overrides to plain values. Its errors become ConfigErrors that name the files."""

import functools
import pickle
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llm_perf_opt.config.choices import CONF_MODULE, GROUPS
from llm_perf_opt.config.resolvers import Environment, resolvers
from llm_perf_opt.core.errors import ConfigError, words_of

if TYPE_CHECKING:
    from llm_perf_opt.config.project_files import OwnFile, OwnSource

SEE_HELP = "See `llm-perf run --help` for the groups and their options."
_LET_THROUGH = (OSError, ValueError, AssertionError, AttributeError, LookupError, TypeError)
"""Errors, other than its own, that Hydra raises for invalid YAML or an invalid defaults list."""


class UnknownOptionError(ConfigError):
    """A defaults list names an option that does not exist."""

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"There is no option '{name}'.", remedy)
        self.group, _, self.option = name.rpartition("/")


@dataclass(frozen=True)
class HydraResult:
    """What Hydra composed."""

    values: dict[str, Any]
    """Everything except Hydra's own settings, resolved."""
    run_dir: Path
    choices: dict[str, str]
    """The selected option of each group."""
    files: "tuple[OwnFile, ...]"
    """The user's files that are part of it."""

    def file_of(self, key: str) -> str:
        """Return the last of the user's files that sets a key; empty if none is known to."""
        return next((str(file.path) for file in reversed(self.files) if key in file.keys), "")


def compose_values(overrides: Sequence[str], searched: Sequence[Path], typed: Sequence[str]) -> HydraResult:
    """Compose the options of the folders `searched`, in this order, and of the package with the overrides.

    `typed` are those of them that were typed: they may read any variable of the environment.
    """
    from hydra.errors import HydraException, MissingConfigException

    from llm_perf_opt.config.project_files import OwnSource

    sources, environment = [OwnSource(folder) for folder in searched], Environment(typed)
    try:
        with resolvers(environment):
            composed, choices = _composed(overrides, sources)
            result = HydraResult(_plain(composed), _run_dir(composed), choices, _files(sources))
        environment.check(result.files)
        return result
    except ConfigError:
        environment.check(_files(sources))
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        environment.check(_files(sources))
        if isinstance(error, MissingConfigException) and error.missing_cfg_file:
            raise UnknownOptionError(error.missing_cfg_file, _look_at(sources)) from error
        raise ConfigError(first_sentence(error), _look_at(sources) or SEE_HELP) from error
    except RecursionError as error:
        raise ConfigError("Option files include each other, or a value refers to itself.", _look_at(sources)) from error
    except _LET_THROUGH as error:
        fact = f"The configuration cannot be composed: {first_sentence(error)}"
        raise ConfigError(fact, _look_at(sources) or "Check the values on the command line.") from error


def _files(sources: "Sequence[OwnSource]") -> "tuple[OwnFile, ...]":
    loaded = [file for source in sources for file in source.loaded]
    return tuple(sorted(loaded, key=lambda file: GROUPS.index(file.group) if file.group in GROUPS else -1))


def _composed(overrides: Sequence[str], sources: "Sequence[OwnSource]") -> tuple[DictConfig, dict[str, str]]:
    """Return the composed options and the selected option of each group. The section `hydra` has what a file may refer to."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.types import RunMode

    parsed = OverridesParser.create().parse_overrides([*overrides])
    ConfigLoaderImpl.validate_sweep_overrides_legal(parsed, run_mode=RunMode.RUN, from_shell=False)
    texts = tuple(text for text, override in zip(overrides, parsed, strict=True) if not _is_value(override))
    selected = _selected(texts, sources) if sources else _packaged(texts)
    composed: DictConfig = pickle.loads(selected.options)  # noqa: S301 - written below, by this process
    facts = {"runtime": {"cwd": str(Path.cwd()), "choices": selected.choices}, "job": {"name": "llm-perf"}}
    OmegaConf.update(composed, "hydra", OmegaConf.merge(facts, composed.get("hydra") or {}), force_add=True)
    OmegaConf.set_struct(composed, True)
    changes = [override for override in parsed if _is_value(override) or override.input_line in selected.changes]
    ConfigLoaderImpl._apply_overrides_to_config(changes, composed)
    OmegaConf.register_new_resolver("hydra", lambda key: _setting_of_hydra(composed, key), replace=True)  # ${hydra:runtime.cwd}
    return composed, dict(selected.choices)


def _is_value(override: Any) -> bool:
    """Return whether the override sets a value inside a group. No group has a dot in its name."""
    return "." in override.key_or_group


@dataclass(frozen=True)
class _Selected:
    """The options that some overrides select, before any value is changed."""

    options: bytes
    """The composed options, pickled. Loading them takes a sixth of the time of `copy.deepcopy`."""
    choices: dict[str, str]
    changes: frozenset[str | None]
    """The overrides without a dot that set a value instead of selecting an option, such as `experiment=NAME`."""


@functools.lru_cache(maxsize=256)
def _packaged(overrides: tuple[str, ...]) -> _Selected:
    """Return `_selected` of the packaged options alone. They do not change, and sweeps compose the same ones many times."""
    return _selected(overrides, ())


def _selected(overrides: tuple[str, ...], sources: "Sequence[OwnSource]") -> _Selected:
    """Return the options that the overrides select.

    These are the steps of Hydra's `compose` without its settings for logging and launchers. Those take longer to compose than the
    options themselves.
    """
    from hydra import initialize_config_module
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()  # a program that calls this one may use Hydra, too
    with initialize_config_module(CONF_MODULE, version_base="1.3"):
        loader: Any = GlobalHydra.instance().config_loader()
        _add_sources(loader, sources)
        parsed, repository = loader._parse_overrides_and_create_caching_repo("config", [*overrides])
        found = create_defaults_list(repository, "config", parsed, prepend_hydra=False, skip_missing=False)
        composed = loader._compose_config_from_defaults_list(found.defaults, repository)
    choices = {str(group): str(option) for group, option in found.overrides.known_choices.items()}
    return _Selected(pickle.dumps(composed), choices, frozenset(change.input_line for change in found.config_overrides))


def _setting_of_hydra(composed: DictConfig, key: str) -> Any:
    found = OmegaConf.select(composed.hydra, key)
    if found is None:
        raise ValueError(f"'{key}' is not available; available are runtime.cwd, runtime.choices.GROUP and job.name")
    return found


def quoted(text: str) -> str:
    """Quote for Hydra's grammar: a backslash is literal, except before a quotation mark."""
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text) + '"'


def first_sentence(error: BaseException) -> str:
    """Return the first line of an error of Hydra, OmegaConf or YAML, with the file or the cause if it has one."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}."
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}."
    lines = [line.strip() for line in words_of(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    if first.endswith(":") and len(lines) > 1:
        first = f"{first} {lines[1]}"
    return f"{first}: {first_sentence(error.__cause__)}" if isinstance(error.__cause__, OmegaConfBaseException) else first


def _add_sources(loader: Any, sources: "Sequence[OwnSource]") -> None:
    """Make Hydra search the user's folders before the package."""
    from llm_perf_opt.config.project_files import PackagedSource

    known = loader.repository.sources
    known[:] = [PackagedSource(source) if source.path == CONF_MODULE else source for source in known]
    known[1:1] = sources  # after Hydra's own options


def _look_at(sources: "Sequence[OwnSource]") -> str:
    names = [str(file.path) for source in sources for file in source.loaded] or [str(source.folder) for source in sources]
    return f"Check {', '.join(names)}." if names else ""


def _run_dir(composed: DictConfig) -> Path:
    from hydra.conf import HydraConf

    for name in composed.hydra:
        if name not in HydraConf.__dataclass_fields__:
            raise ConfigError(f"Hydra has no setting '{name}'.", "The only one that is used is hydra.run.dir.")
    try:
        text = "" if OmegaConf.is_config(composed.hydra.run.dir) else str(composed.hydra.run.dir)
    except OmegaConfBaseException as error:
        raise ConfigError(f"hydra.run.dir: {first_sentence(error)}", "Give a folder that does not exist yet.") from error
    path = Path(text)
    if path.name in ("", "..") or "\0" in text:
        raise ConfigError(f"hydra.run.dir={text!r} cannot be used as a run folder.", "Give a folder that does not exist yet.")
    return path


def _plain(composed: DictConfig) -> dict[str, Any]:
    """Return everything except Hydra's own node, with interpolations resolved."""
    values: dict[str, Any] = {}
    for key in typing.cast("list[str]", [key for key in composed if key != "hydra"]):
        if OmegaConf.is_dict(composed[key]):
            raw = typing.cast("dict[str, Any]", OmegaConf.to_container(composed[key], resolve=False))
            for name in (name for name, value in raw.items() if value == "???"):
                raise ConfigError(f"{key}.{name} has no value.", f"Pass {key}.{name}=…")
            values[key] = OmegaConf.to_container(composed[key], resolve=True)
        elif OmegaConf.is_list(composed[key]):
            values[key] = OmegaConf.to_container(composed[key], resolve=True)
        else:
            values[key] = composed[key]
    return values
