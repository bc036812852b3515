"""Groups, options and keys, and suggestions for wrong words. Loads nothing heavy."""

import dataclasses
import os
import re
import typing
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from llm_perf_opt.config.runtimes import OWN_OPTION, known_runtimes
from llm_perf_opt.config.schema import ProjectConfig, RunConfig
from llm_perf_opt.core.errors import ConfigError, close_names, words_of
from llm_perf_opt.core.user_files import FOLDER_NAME, PROJECT_CONF, PROJECT_MODELS, read_text
from llm_perf_opt.core.yaml_text import invalid_yaml, load_yaml

CONF_MODULE = "llm_perf_opt.config.conf"
GROUPS = ("hydra", "model", "dataset", "runtime", "hardware", "profiling", "launcher")
METRICS = "metrics"
"""The folder of the user's metric sets, next to the groups."""
HIDDEN_OPTIONS = {("model", "random"), ("profiling", "base"), ("runtime", OWN_OPTION)}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""OWNER/NAME, as on the Hugging Face Hub."""
DEFAULTS = {
    "model": "random",
    "dataset": "synthetic",
    "runtime": "pytorch",
    "hardware": "auto",
    "profiling": "base",
    "launcher": "local",
}
"""The files with the default values of each group."""
MEANT = {("hardware", "cuda"): "single_gpu", ("hardware", "gpu"): "single_gpu"}
"""Other names of options."""
_KEYS_MEANT = {"gpu": "hardware.device_index"}
"""Other names of keys."""
HARDWARE_HINT = (
    "hardware selects where to run: auto, cpu or single_gpu, with hardware.device_index=N for another GPU. "
    "Product names such as h100_sxm are for `llm-perf cost --hardware`."
)


def group_options(config_dir: Path | None = None) -> dict[str, tuple[str, ...]]:
    """Return every group with the options that a user can select."""
    options = all_options(config_dir)
    options["runtime"] += tuple(runtime.name for runtime in known_runtimes() if runtime.name not in options["runtime"])
    options["model"] += tuple(name for name in _linked_models() if name not in options["model"])
    return {
        group: tuple(name for name in names if (group, name) not in HIDDEN_OPTIONS)
        for group, names in options.items()
        if group != "hydra"
    }


def _linked_models() -> list[str]:
    """Return the names in models/ that can be selected."""
    try:
        return sorted(entry.name for entry in PROJECT_MODELS.iterdir() if FOLDER_NAME.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []


def packaged_options(group: str) -> frozenset[str]:
    """Return the packaged options of a group."""
    from importlib.resources import files

    return frozenset(item.name[:-5] for item in files(CONF_MODULE).joinpath(group).iterdir() if item.name.endswith(".yaml"))


def searched_folders(config_dir: Path | None) -> list[Path]:
    """Return the folders with user options: the given one, then the project's."""
    found = [config_dir] if config_dir is not None else []
    if PROJECT_CONF.is_dir() and not (config_dir is not None and config_dir.resolve() == PROJECT_CONF.resolve()):
        found.append(PROJECT_CONF)
    return found


def all_options(config_dir: Path | None) -> dict[str, tuple[str, ...]]:
    """Return every group with all of its options, including hidden base options."""
    if config_dir is not None and not os.path.isdir(config_dir):  # noqa: PTH112 - False where the name is too long, too
        raise ConfigError(
            f"--config-dir {config_dir}: no such folder.",
            "It should contain a folder per group: model/, runtime/ …",
        )
    found: dict[str, tuple[str, ...]] = {}
    for group in GROUPS:
        names = packaged_options(group)
        for folder in searched_folders(config_dir):
            names |= frozenset(path.stem for path in (folder / group).glob("*.yaml"))
        found[group] = tuple(sorted(names))
    return found


def unread_files(folder: Path) -> list[Path]:
    """Return the YAML files in a folder of options that are neither options nor metric sets, two levels deep."""
    read = [folder / name for name in (*GROUPS, METRICS)]
    return sorted(path for pattern in ("*/*.yaml", "*/*/*.yaml") for path in folder.glob(pattern) if path.parent not in read)


# --- the user's metric sets ---------------------------------------------------------------------------------------------

_MOST_ENTRIES = 1000
"""Maximum number of entries of a list in a metric set; no chip has more counters that fit into a report."""


def own_set_files(config_dir: Path | None = None) -> dict[str, Path]:
    """Return the files metrics/NAME.yaml of the folders with user options by name; the first folder wins."""
    found: dict[str, Path] = {}
    for folder in searched_folders(config_dir):
        for path in sorted((folder / METRICS).glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def own_sets(names: Iterable[str] | None = None, config_dir: Path | None = None) -> dict[str, Any]:
    """Return the content of the user's metric sets with these names; None: of all. `counters/` checks the content."""
    files = own_set_files(config_dir)
    wanted = files if names is None else [name for name in (set_name(name, files) for name in names) if name in files]
    return {name: _own_set(files[name]) for name in wanted}


def set_name(name: str, known: Container[str]) -> str:
    """Return the name of a set as it is defined: `ch9` means ch09."""
    chapter = re.fullmatch(r"ch(\d)", name)
    return f"ch0{chapter[1]}" if chapter and name not in known else name


def _own_set(path: Path) -> dict[str, Any]:
    try:
        content = load_yaml(read_text(path))
    except invalid_yaml() as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(words_of(error).split())}.", "Fix the file.") from error
    if not isinstance(content, dict) or not all(map(_is_flat, content.values())):
        raise ConfigError(
            f"{path} is not a metric set.", "Each key takes one value or a list of values, such as ncu: [lts__t_bytes.sum]."
        )
    return {**content, "file": str(path)}


def _is_flat(value: Any) -> bool:
    if not isinstance(value, list):
        return not isinstance(value, dict)
    entries = [list(entry.values()) if isinstance(entry, dict) else [entry] for entry in value]
    return len(value) <= _MOST_ENTRIES and not any(isinstance(word, (list, dict)) for words in entries for word in words)


# --- suggestions --------------------------------------------------------------------------------------------------------


def assignments(word: str, options: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return what a word without `=` may mean: an option with its group, or a key that needs a value."""
    if "=" in word:
        return []
    if word in options:
        return [f"{word}=NAME"]
    if word.startswith((".", "/")):
        return [f"model=hf model.path={word}"]
    shown = [(group, name) for group, names in options.items() for name in names if (group, name) not in HIDDEN_OPTIONS]
    other_names = [f"{group}={name}" for (group, called), name in MEANT.items() if called == word.casefold()]
    if other_names:
        return other_names
    wanted = close_names(word.rpartition("/")[2], [name for group, name in shown if group != "hydra"])
    return [f"{group}={name}" for group, name in shown if name in wanted] or [f"{key}=VALUE" for key in keys_like(word)]


def model_remedy(name: str) -> str:
    """Return what to type for a Hub name, since nothing is downloaded, or for a folder."""
    if not HUB_NAME.fullmatch(name) or Path(name).is_dir():
        return f"For a model in a folder, use model=hf model.path={name}."
    architectures = sorted(packaged_options("model") - {"hf", *(option for _, option in HIDDEN_OPTIONS)})
    close = close_names(name.rpartition("/")[2], architectures)
    shape = f"model={close[0]}" if close else f"model=NAME, one of {', '.join(architectures)}"
    return (
        f"Nothing is downloaded automatically: run `hf download {name} --local-dir DIR` and pass model=hf model.path=DIR, "
        f"or use random weights: {shape}."
    )


def keys_like(key: str, *, exactly: bool = False) -> list[str]:
    """Return the keys whose last part equals that of `key` except for spelling, or, unless `exactly`, resembles it."""
    if key in _KEYS_MEANT:
        return [_KEYS_MEANT[key]]
    last = key.rpartition(".")[2]
    names = {known: known.rpartition(".")[2] for known in all_keys()}
    wanted = close_names(last, names.values())
    if exactly:
        wanted = [name for name in wanted if name.replace("_", "") == last.replace("_", "").casefold()]
    return [known for known, name in names.items() if name in wanted]


def all_keys(kind: Any = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Return every key that takes a value, with its type; a free mapping counts as one key."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if hint is ProjectConfig:
            continue  # recorded, not set
        found |= all_keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else {f"{prefix}{name}": hint}
    return found


def default_of(key: str) -> str | None:
    """Return the default of a key as typed; None if it depends on other settings."""
    from importlib.resources import files

    import yaml

    group, _, rest = key.partition(".")
    if group not in DEFAULTS:
        return None
    value: Any = yaml.safe_load(files(CONF_MODULE).joinpath(group).joinpath(f"{DEFAULTS[group]}.yaml").read_text("utf-8"))
    for part in rest.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return None if text.startswith("${") or isinstance(value, (dict, list)) else text
