"""Compose Hydra groups and overrides into a typed `RunConfig`. No other module sees a DictConfig."""

import dataclasses
import itertools
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llm_perf_opt.config.checks import check
from llm_perf_opt.config.choices import (
    CONF_MODULE,
    HARDWARE_HINT,
    HIDDEN_OPTIONS,
    HUB_NAME,
    MEANT,
    all_options,
    assignments,
    keys_like,
    model_remedy,
    packaged_options,
    searched_folders,
)
from llm_perf_opt.config.passes import check_sections
from llm_perf_opt.config.runtimes import OWN_OPTION, known_runtimes, listed
from llm_perf_opt.config.schema import PROJECT_CONF, RunConfig
from llm_perf_opt.config.values import build, current, current_key, is_added
from llm_perf_opt.core.errors import ConfigError, close_names, did_you_mean, nearest, words_of
from llm_perf_opt.core.user_files import check_folder

_LET_THROUGH = (OSError, ValueError, RecursionError, AssertionError, AttributeError, LookupError, TypeError)
"""Errors, other than its own, that Hydra raises for invalid YAML or an invalid defaults list."""
MOST_POINTS = 1000
"""Maximum number of runs in one sweep."""
_CPUS = "hardware.cpus"
_SEE_HELP = "See `llm-perf run --help` for the groups and their options."


@dataclass(frozen=True)
class Composed:
    """A resolved configuration and the run folder it requests."""

    config: RunConfig
    run_dir: Path


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> Composed:
    """Compose the packaged groups, those `config_dir` adds and those of ./conf with `overrides`; check the result."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    for folder in searched_folders(config_dir):
        check_folder(folder)
    options = all_options(config_dir)
    written = [_respelled(text) for text in _registered_runtimes(overrides, options["runtime"])]
    checked = [_checked_override(text, options) for text in written]
    if searched := searched_folders(config_dir):
        places = ",".join(_quoted(f"file://{folder.resolve()}") for folder in searched)
        checked.append(f"hydra.searchpath=[{places}]")
    _register_resolvers()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONF_MODULE, version_base="1.3"):
            composed = hydra_compose("config", overrides=checked, return_hydra_config=True)
        plain = _plain(composed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_first_sentence(error), _SEE_HELP) from error
    except _LET_THROUGH as error:
        searched_names = " and ".join(str(folder) for folder in searched)
        where = f"the files in {searched_names}" if searched else "the values given"
        raise ConfigError(f"The configuration cannot be composed: {_first_sentence(error)}", f"Look at {where}.") from error
    finally:
        GlobalHydra.instance().clear()
    own_root = any(text.lstrip("+").startswith("dataset.root=") for text in checked)
    if not own_root and isinstance(root := (plain.get("dataset") or {}).get("root"), str):
        plain["dataset"]["root"] = _root_of_option(root, str(composed.hydra.runtime.choices.dataset), searched)
    _refuse_hub_name(plain.get("model"))
    return Composed(config_from_mapping(plain), _run_dir(composed))


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return every combination of the values of `a=1,2 b=x,y` or `a=range(1,5)`; the last one varies fastest."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    choices: list[list[str]] = []
    points = 1
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
            if not override.is_sweep_override():
                choices.append([text])
                continue
            if not override.is_discrete_sweep():
                raise ConfigError(
                    f"'{text}' is an interval, not a list of values.", "List the values, or use range(first,last,step)."
                )
            key = override.get_key_element()
            values = [f"{key}={value}" for value in itertools.islice(override.sweep_string_iterator(), MOST_POINTS + 1)]
        except (HydraException, ValueError, RecursionError) as error:
            raise ConfigError(f"'{text}' is not an override: {_first_sentence(error)}", _SEE_HELP) from error
        points *= len(values)
        if points > MOST_POINTS:
            raise ConfigError(f"With '{text}' this sweep has more than {MOST_POINTS} runs.", "Sweep fewer values at a time.")
        choices.append(values)
    return [list(point) for point in itertools.product(*choices)]


def config_from_mapping(values: Mapping[str, Any]) -> RunConfig:
    """Return a checked `RunConfig` from plain nested values, as in a run's config.yaml."""
    known = current(values) if isinstance(values, Mapping) else values
    return check_sections(check(build(RunConfig, known, "")))


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Return a run's configuration with some values replaced, or raise a ConfigError if it is invalid."""
    changed = _copied(current(values))
    for text in overrides:
        key, separator, value = text.partition("=")
        *path, last = current_key(key).split(".")
        place: Any = changed
        for part in path:
            place = place.get(part) if isinstance(place, dict) else None
        if not separator or not isinstance(place, dict) or last not in place:
            raise ConfigError(
                f"'{text}' is not a setting of the run's configuration.", "The run was made by another version of llm-perf."
            )
        place[last] = yaml.safe_load(value)
    return config_from_mapping(changed)


def _copied(values: Any) -> Any:
    return {key: _copied(value) for key, value in values.items()} if isinstance(values, Mapping) else values


def config_to_yaml(config: RunConfig) -> str:
    """Return the resolved configuration as YAML that `config_from_mapping` can read."""
    values = dataclasses.asdict(config)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return yaml.safe_dump(values, sort_keys=False) if "\x85" in text else text  # unescaped, it is read back as a space


def option_root(conf: Path, root: str) -> Path:
    """Return the folder that `root` in an option file of `conf` means: relative paths start at the parent of `conf`."""
    return Path(root) if conf == PROJECT_CONF else _absolute(conf).parent / root


def root_for_option(conf: Path, folder: Path) -> str:
    """Return `folder` as an option file in `conf` names it: relative if both are in one project, so that it can be moved."""
    project, place = _absolute(conf).parent, _absolute(folder)
    return str(place.relative_to(project)) if place.is_relative_to(project) else str(place)


def _absolute(path: Path) -> Path:
    """Return the absolute path without following links."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow them


# --- overrides --------------------------------------------------------------------------------------------------------


def _root_of_option(root: str, option: str, searched: Sequence[Path]) -> str:
    for folder in searched:
        if (folder / "dataset" / f"{option}.yaml").is_file():
            return str(option_root(folder, root))
    return root


def _refuse_shadowed(group: str, option: str) -> None:
    own = PROJECT_CONF / group / f"{option}.yaml"
    if option in packaged_options(group) and own.is_file():
        raise ConfigError(
            f"{group}={option} is in {own} and in the package.", "Rename the file; the packaged option would be used instead."
        )


def _registered_runtimes(overrides: Sequence[str], options: Sequence[str]) -> list[str]:
    """Replace `runtime=NAME` of a runtime without its own YAML by the default option and its type."""
    registered = [runtime.name for runtime in known_runtimes() if runtime.name not in options]
    found: list[str] = []
    for text in overrides:
        name = text.removeprefix("runtime=")
        found += [f"runtime={OWN_OPTION}", f"runtime.type={name}"] if name != text and name in registered else [text]
    return found


def _respelled(text: str) -> str:
    """Return the override with the current name of its key, and a list of CPUs quoted: its comma does not start a sweep."""
    key, separator, value = text.partition("=")
    name = current_key(key.lstrip("+"))
    if name == _CPUS and re.fullmatch(r"[\d\s,-]+", value):
        value = _quoted(value)
    return f"{key[: len(key) - len(key.lstrip('+'))]}{name}{separator}{value}"


def _checked_override(text: str, options: Mapping[str, tuple[str, ...]]) -> str:
    """Return the override for Hydra, or raise a ConfigError with the choices and the nearest name."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:
        why = _first_sentence(error) if "=" in text else f"it has no '='.{did_you_mean(assignments(text, options))}"
        raise ConfigError(
            f"'{text}' is not an override: {why}",
            "Write KEY=VALUE, such as runtime.batch_size=4; quote a value with spaces or special characters: 'key=\"a b\"'.",
        ) from error
    key = override.key_or_group.split("@")[0]
    if override.is_sweep_override():
        raise ConfigError(
            f"'{text}' has several values, but a run takes one.",
            f"Add -m to run a sweep; write a list as {key}=[a,b], or quote a value that contains a comma.",
        )
    if key in options:
        choice = override.value()
        if choice not in options[key]:
            raise _unknown_option(key, str(choice), options[key])
        _refuse_shadowed(key, str(choice))
        return text
    if key.split(".")[0] == "hydra":
        if key != "hydra.run.dir":
            raise ConfigError(f"{key} is not supported.", "The only Hydra setting is hydra.run.dir.")
        return text
    open_mapping = _check_key(key, text.partition("=")[2]) or is_added(key)  # an option file may not have an added setting
    return f"++{text.lstrip('+')}" if open_mapping and not override.is_delete() else text


def _refuse_hub_name(model: Any) -> None:
    """Reject a Hub name as the path of a model with random weights: the user expects a download."""
    if not isinstance(model, Mapping) or model.get("source") != "random":
        return
    path = str(model.get("path"))
    if HUB_NAME.fullmatch(path) and not Path(path).is_dir():
        raise ConfigError(f"model.path={model['path']} looks like a Hub name, not a folder.", model_remedy(model["path"]))


def _unknown_option(group: str, choice: str, options: Sequence[str]) -> ConfigError:
    shown = [name for name in options if (group, name) not in HIDDEN_OPTIONS]
    known = ", ".join(shown)
    if group == "runtime":
        runtimes = known_runtimes()
        names = [runtime.name for runtime in runtimes]
        known = ", ".join([listed(runtimes), *(name for name in shown if name not in names)])
        shown += [name for name in names if name not in shown]
    if group == "model" and "/" in choice:
        return ConfigError(f"model={choice} is not known: select a model by the name of an option.", model_remedy(choice))
    return ConfigError(
        f"{group}={choice} is not known.{nearest(MEANT.get((group, choice), choice), shown)}",
        f"Known: {known}. Looked in the package's own conf/{group}, in --config-dir and in ./{PROJECT_CONF}."
        + (f" {HARDWARE_HINT}" if group == "hardware" else ""),
    )


def _check_key(key: str, value: str) -> bool:
    """Walk `key` through the dataclasses; return True if it is inside a free mapping such as model.substages."""
    kind: Any = RunConfig
    seen = ""
    for part in key.split("."):
        hints = typing.get_type_hints(kind)
        if part not in hints:
            where = f"in {seen}" if seen else "at the top level"
            known = list(hints)
            elsewhere = keys_like(key, exactly=bool(close_names(part, known)))
            here = any(found.rpartition(".")[0] == seen for found in elsewhere)
            meant = [] if here else [f"{found}={value}" if value else found for found in elsewhere]
            raise ConfigError(
                f"There is no key '{key}': '{part}' is not known {where}.{did_you_mean(meant) or nearest(part, known)}",
                f"Known {where}: {', '.join(known)}.",
            )
        seen = f"{seen}.{part}" if seen else part
        kind = hints[part]
        if typing.get_origin(kind) is dict:
            return True
        if not dataclasses.is_dataclass(kind):
            if seen != key:
                raise ConfigError(f"There is no key '{key}': {seen} is a single value.", f"Write {seen}=VALUE.")
            return False
    raise ConfigError(
        f"'{key}' is a group of settings, not a single value.",
        f"Set one of: {', '.join(f'{key}.{name}' for name in typing.get_type_hints(kind))}.",
    )


def _quoted(text: str) -> str:
    """Quote for Hydra's grammar: a backslash is literal, except before a quotation mark."""
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text) + '"'


def _run_dir(composed: DictConfig) -> Path:
    try:
        text = str(composed.hydra.run.dir)
    except OmegaConfBaseException as error:
        raise ConfigError(f"hydra.run.dir: {_first_sentence(error)}", "Give a folder that does not exist yet.") from error
    path = Path(text)
    if path.name in ("", "..") or "\0" in text:
        raise ConfigError(f"hydra.run.dir={text!r} cannot be used as a run folder.", "Give a folder that does not exist yet.")
    return path


def _first_sentence(error: BaseException) -> str:
    """Return the first line of an error of Hydra, OmegaConf or YAML, with the file or the cause if it has one."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}."
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}."
    lines = [line.strip() for line in words_of(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return f"{first}: {_first_sentence(error.__cause__)}" if isinstance(error.__cause__, OmegaConfBaseException) else first


def _register_resolvers() -> None:
    if not OmegaConf.has_resolver("folder_name"):
        OmegaConf.register_new_resolver("folder_name", lambda path: Path(str(path)).name or "model")
        OmegaConf.register_new_resolver("at_most", _at_most)
    if not OmegaConf.has_resolver("now"):
        from hydra.core.utils import setup_globals

        setup_globals()


def _at_most(usual: int, limit: Any) -> int:
    """Return the smaller of a default and another setting, which is checked elsewhere."""
    return min(usual, limit) if isinstance(limit, int) else usual


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
