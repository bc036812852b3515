"""Compose Hydra groups and overrides into a typed `RunConfig`. No other module sees a DictConfig."""

import dataclasses
import itertools
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from llm_perf_opt.config.checks import check, unused_settings
from llm_perf_opt.config.choices import (
    GROUPS,
    HARDWARE_HINT,
    HIDDEN_OPTIONS,
    HUB_NAME,
    MEANT,
    METRICS,
    all_options,
    assignments,
    keys_like,
    model_remedy,
    own_sets,
    searched_folders,
    unread_files,
)
from llm_perf_opt.config.code_settings import CodeSetting, Stored, code_settings, not_typed, refuse_in_files
from llm_perf_opt.config.guide_keys import ON_THE_COMMAND_LINE, RUN_DIR, answer_keys, is_answered
from llm_perf_opt.config.hydra_composition import (
    SEE_HELP,
    HydraResult,
    UnknownOptionError,
    compose_values,
    first_sentence,
    quoted,
)
from llm_perf_opt.config.passes import check_sections
from llm_perf_opt.config.runtimes import OWN_OPTION, known_runtimes, listed
from llm_perf_opt.config.schema import ProjectConfig, RunConfig
from llm_perf_opt.config.values import build, current, current_key, is_added
from llm_perf_opt.config.weights import RANDOM_SUFFIX, choose_weights
from llm_perf_opt.core.errors import ConfigError, close_names, did_you_mean, nearest
from llm_perf_opt.core.inside import leading_out, leads_inside
from llm_perf_opt.core.user_files import FOLDER_NAME, PROJECT_CONF, PROJECT_MODELS, check_folder
from llm_perf_opt.core.yaml_text import load_yaml

if TYPE_CHECKING:
    from llm_perf_opt.config.project_files import OwnFile

MOST_POINTS = 1000
"""Maximum number of runs in one sweep."""
_CPUS = "hardware.cpus"
_MOST_NAMED = 3


@dataclass(frozen=True)
class Composed:
    """A resolved configuration and the run folder it requests."""

    config: RunConfig
    run_dir: Path
    run_dir_given: bool = False
    """Whether an override names the folder."""
    run_dir_file: str = ""
    """The user's file that has the pattern of the folder; empty if the command line or the package names it."""
    code: tuple[CodeSetting, ...] = ()
    """The settings that can run code and were typed on this command line. Any other one is refused before the run starts."""

    def checked_run_dir(self) -> Path:
        """Return the run folder to create. Raise a ConfigError if a file or a link puts it outside of the current folder."""
        if self.run_dir_file and not leads_inside(Path(), self.run_dir):
            cause = f"{link} is a link: it puts" if (link := leading_out(Path(), self.run_dir)) else f"{self.run_dir_file} sets"
            fact = f"{cause} {RUN_DIR}={self.run_dir}, outside of {Path.cwd()}: a file cannot choose that."
            raise ConfigError(fact, f"Give it on the command line: {RUN_DIR}=DIR.")
        return self.run_dir


def compose(overrides: Sequence[str], config_dir: Path | None = None, stored: Stored | None = None) -> Composed:
    """Compose the options of `config_dir`, of ./conf and of the package with `overrides`; check the result.

    `stored`: the file that the overrides were read from; None: they were typed.
    """
    searched = _checked_folders(config_dir)
    options = all_options(config_dir)
    plain_words = [without_plus(text) for text in overrides]
    known = _linked_models(_registered_runtimes(plain_words, options["runtime"]), options["model"])
    checked = [_checked_override(_respelled(text), options) for text in known]
    given = frozenset(text.lstrip("+~").partition("=")[0] for text in checked)
    found = _composed(checked, searched, options, typed=stored is None)
    plain = found.values
    if "dataset.root" not in given and isinstance(root := (plain.get("dataset") or {}).get("root"), str):
        plain["dataset"]["root"] = _root_of_option(root, found.choices.get("dataset", ""), searched)
    _check_own_keys(found.files)
    refuse_in_files(plain, found.files, checked) if stored is None else stored.allowed(not_typed(plain, ()))
    notes = [note for file in found.files for note in file.notes]
    notes += [*answer_keys(plain, found.files, given, found.run_dir), *_unread(searched, found.files)]
    notes += unused_settings(plain.get("profiling"), given)
    plain["project"] = _project(found, given, notes)
    _refuse_hub_name(plain.get("model"))
    _define_metric_sets(plain.get("profiling"), config_dir)
    config = config_from_mapping(plain)
    named = RUN_DIR in given  # a folder that the user names is used as it is
    random = RANDOM_SUFFIX if not named and config.model.source == "random" else ""
    run_dir = found.run_dir.with_name(found.run_dir.name + random)
    file = "" if named else found.file_of(RUN_DIR) or ("" if leads_inside(Path(), run_dir) else "A project file")
    return Composed(config, run_dir, named, file, code_settings(dataclasses.asdict(config)))


def _checked_folders(config_dir: Path | None) -> list[Path]:
    """Return the folders with user options, after a check that nothing in them blocks."""
    if PROJECT_CONF.is_symlink() and not os.path.exists(PROJECT_CONF):  # noqa: PTH110 - False for a circular link, too
        words = f"./{PROJECT_CONF} is a link to {PROJECT_CONF.readlink()}, which does not exist."
        raise ConfigError(words, "Restore its target, or remove the link.")
    searched = searched_folders(config_dir)
    for folder in searched:
        check_folder(folder)
    return searched


def _composed(
    overrides: Sequence[str], searched: Sequence[Path], options: Mapping[str, tuple[str, ...]], *, typed: bool
) -> HydraResult:
    """Compose with Hydra; for an option in a defaults list that does not exist, the error lists the existing ones."""
    try:
        return compose_values(overrides, searched, overrides if typed else ())
    except UnknownOptionError as error:
        if error.group not in options or error.option in options[error.group]:
            raise
        unknown = _unknown_option(error.group, error.option, options[error.group])
        raise ConfigError(unknown.fact, f"{unknown.remedy} {error.remedy}".strip()) from error


def _check_own_keys(own: "Sequence[OwnFile]") -> None:
    """Raise a ConfigError for a key of a user's file that is neither known nor translated."""
    for file in own:
        for key in file.keys:
            try:
                if not is_answered(key):
                    _check_key(current_key(key), "")
            except ConfigError as error:
                raise ConfigError(f"{file.path}: {error.fact}", ON_THE_COMMAND_LINE.get(key, error.remedy)) from None


def _unread(searched: Sequence[Path], own: "Sequence[OwnFile]") -> list[str]:
    """Return a note on the files in folders that are not groups, if no other file includes them."""
    read = {file.path for file in own}
    found = [path for folder in searched for path in unread_files(folder) if path not in read]
    if not found:
        return []
    names = ", ".join(map(str, found[:_MOST_NAMED])) + (f" and {len(found) - _MOST_NAMED} more" * (len(found) > _MOST_NAMED))
    places = ", ".join(f"{group}/" for group in (*GROUPS, METRICS))
    return [f"Not read: {names}. Options are files in {places}; move settings of a runner or of torch.profiler to profiling/."]


def _project(found: HydraResult, given: frozenset[str], notes: Sequence[str]) -> dict[str, Any]:
    """Decide where the weights come from; return what is recorded of the project."""
    values, option, own = found.values, found.choices.get("model", ""), found.files
    over = [f"{file.group}={file.path.stem}" for file in own if file.packaged]
    notes = [f"Project files override the packaged options {', '.join(over)}.", *notes] if over else notes
    used = {file.group if file.is_option(found.choices) else f"{file.group}/{file.path.stem}": str(file.path) for file in own}
    if not isinstance(values.get("model"), dict):
        return {"files": used, "notes": notes}
    named = "model" in given or any(file.group in ("model", "config") for file in own)
    keys = frozenset(key for file in own for key in file.keys)
    chosen = choose_weights(values["model"], option, given, keys, named=named)
    values["model"] = chosen.model
    return {"files": used, "notes": [*notes, *chosen.notes], "contradictions": [*chosen.contradictions]}


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
            raise ConfigError(f"'{text}' is not an override: {first_sentence(error)}", SEE_HELP) from error
        points *= len(values)
        if points > MOST_POINTS:
            raise ConfigError(f"With '{text}' this sweep has more than {MOST_POINTS} runs.", "Sweep fewer values at a time.")
        choices.append(values)
    return [list(point) for point in itertools.product(*choices)]


def config_from_mapping(values: Mapping[str, Any]) -> RunConfig:
    """Return a checked `RunConfig` from plain nested values, as in a run's config.yaml."""
    known = current(values) if isinstance(values, Mapping) else values
    return check_sections(check(build(RunConfig, known, "")))


def check_setting(text: str) -> None:
    """Raise a ConfigError with the nearest name if the key of `KEY=VALUE` is not a setting."""
    key, _, value = text.partition("=")
    _check_key(current_key(key), value)


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Return a run's configuration with some values replaced, or raise a ConfigError if it is invalid."""
    changed = _copied(current(values))
    for text in overrides:
        key, separator, value = text.partition("=")
        *path, last = current_key(key).split(".")
        of_engine = path[:2] == ["runtime", "engine"]  # its arguments have any name, and may be mappings
        place: Any = changed
        for part in path:
            place = (place.setdefault(part, {}) if of_engine else place.get(part)) if isinstance(place, dict) else None
        if not separator or not isinstance(place, dict) or not (of_engine or last in place):
            fact = f"'{text}' is not a setting of the run's configuration."
            raise ConfigError(fact, "The run was made by another version of llm-perf.")
        place[last] = load_yaml(value)
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


def _registered_runtimes(overrides: Sequence[str], options: Sequence[str]) -> list[str]:
    """Replace `runtime=NAME` of a runtime without its own YAML by the default option and its type."""
    registered = [runtime.name for runtime in known_runtimes() if runtime.name not in options]
    found: list[str] = []
    for text in overrides:
        name = text.removeprefix("runtime=")
        found += [f"runtime={OWN_OPTION}", f"runtime.type={name}"] if name != text and name in registered else [text]
    return found


def _linked_models(overrides: Sequence[str], options: Sequence[str]) -> list[str]:
    """Replace `model=NAME` by its folder if models/NAME exists and there is no such option."""
    found: list[str] = []
    for text in overrides:
        name = text.removeprefix("model=")
        linked = name not in (text, *options) and FOLDER_NAME.fullmatch(name) and os.path.lexists(PROJECT_MODELS / name)
        found += ["model=hf", f"model.path={PROJECT_MODELS / name}", f"model.name={name}"] if linked else [text]
    return found


def without_plus(text: str) -> str:
    """Return the override without `+` or `++` before its key: a known key needs none, a new one gets it when it is checked."""
    return text.lstrip("+")


def _respelled(text: str) -> str:
    """Return the override with the current name of its key, and a list of CPUs quoted: its comma does not start a sweep."""
    key, separator, value = text.partition("=")
    name = current_key(key)
    if name == _CPUS and re.fullmatch(r"[\d\s,-]+", value):
        value = quoted(value)
    return f"{name}{separator}{value}"


def _checked_override(text: str, options: Mapping[str, tuple[str, ...]]) -> str:
    """Return the override for Hydra, or raise a ConfigError with the choices and the nearest name."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:
        why = first_sentence(error) if "=" in text else f"it has no '='.{did_you_mean(assignments(text, options))}"
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
        return text
    if key.split(".")[0] == "hydra":
        if key != RUN_DIR:
            raise ConfigError(f"{key} is not supported.", "The only Hydra setting is hydra.run.dir.")
        return text
    open_mapping = _check_key(key, text.partition("=")[2]) or is_added(key)  # an option file may not have an added setting
    return f"++{text.lstrip('+')}" if open_mapping and not override.is_delete() else text


def _define_metric_sets(profiling: Any, config_dir: Path | None) -> None:
    """Put the user's own metric sets that the run requests into its configuration, so that config.yaml has them too."""
    metrics = profiling.get("metrics") if isinstance(profiling, dict) else None
    if isinstance(metrics, dict) and isinstance(sets := metrics.get("sets"), list):
        names = [name for name in sets if isinstance(name, str)]
        defined = metrics.get("defined") or {}
        if isinstance(defined, dict):  # anything else is an error when the configuration is built
            metrics["defined"] = {**own_sets(names, config_dir), **defined}


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
    other = PROJECT_CONF / group / f"{choice}.yml"
    if os.path.isfile(other):  # noqa: PTH113 - False if the name is too long, too
        return ConfigError(f"{group}={choice} is not known: {other} is not read.", "Rename it: option files end in .yaml.")
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
        hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if hint is not ProjectConfig}
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
