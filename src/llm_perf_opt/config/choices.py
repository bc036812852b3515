"""What can be chosen: groups, their options, keys; and what a wrong word was meant to be. Loads nothing heavy."""

import dataclasses
import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_perf_opt.config.runtimes import OWN_OPTION, known_runtimes
from llm_perf_opt.config.schema import PROJECT_CONF, RunConfig
from llm_perf_opt.core.errors import ConfigError, close_names

CONF_MODULE = "llm_perf_opt.config.conf"
GROUPS = ("hydra", "model", "dataset", "runtime", "hardware", "profiling")
HIDDEN_OPTIONS = {("model", "random"), ("profiling", "base"), ("runtime", OWN_OPTION)}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""OWNER/NAME, as the Hugging Face Hub calls models."""
_DEFAULTS = {"model": "random", "dataset": "synthetic", "runtime": "pytorch", "hardware": "auto", "profiling": "base"}
"""The files that say what a group's keys are where nothing is chosen."""
MEANT = {("hardware", "cuda"): "single_gpu", ("hardware", "gpu"): "single_gpu"}
"""What an option is called elsewhere."""
_KEYS_MEANT = {"gpu": "hardware.device_index"}
"""What a key is called elsewhere."""
HARDWARE_HINT = (
    "hardware says where to run: auto, cpu or single_gpu, with hardware.device_index=N for another GPU. "
    "Products such as h100_sxm belong to `llm-perf cost --hardware`."
)


def group_options(config_dir: Path | None = None) -> dict[str, tuple[str, ...]]:
    """Every group with the options a user may choose."""
    brought = tuple(runtime.name for runtime in known_runtimes() if runtime.brought_by)
    return {
        group: tuple(option for option in options if (group, option) not in HIDDEN_OPTIONS)
        + (brought if group == "runtime" else ())
        for group, options in all_options(config_dir).items()
        if group != "hydra"
    }


def packaged_options(group: str) -> frozenset[str]:
    """The options of a group that come with the package."""
    from importlib.resources import files

    return frozenset(item.name[:-5] for item in files(CONF_MODULE).joinpath(group).iterdir() if item.name.endswith(".yaml"))


def searched_folders(config_dir: Path | None) -> list[Path]:
    """Where options of one's own may lie: the folder given, then the project's own."""
    found = [config_dir] if config_dir is not None else []
    if PROJECT_CONF.is_dir() and not (config_dir is not None and config_dir.resolve() == PROJECT_CONF.resolve()):
        found.append(PROJECT_CONF)
    return found


def all_options(config_dir: Path | None) -> dict[str, tuple[str, ...]]:
    """Every group with its options, those that only others start from among them."""
    if config_dir is not None and not os.path.isdir(config_dir):  # noqa: PTH112 - False where the name is too long, too
        raise ConfigError(
            f"--config-dir {config_dir}: no such folder.",
            "It should hold folders named like the groups: model/, runtime/ …",
        )
    found: dict[str, tuple[str, ...]] = {}
    for group in GROUPS:
        packaged = names = packaged_options(group)
        for folder in searched_folders(config_dir):
            own = frozenset(path.stem for path in (folder / group).glob("*.yaml"))
            # ./conf may belong to another program: its options of our names are ours. A folder given by name is meant for us.
            for name in sorted(own & packaged) if folder is config_dir else ():
                raise ConfigError(
                    f"{folder / group / name}.yaml has the name of an option of the package.",
                    "Rename it; the packaged one would be taken in its place.",
                )
            names |= own
        found[group] = tuple(sorted(names))
    return found


# --- what a wrong word was meant to be ---------------------------------------------------------------------------------


def assignments(word: str, options: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What a word without `=` may stand for: an option with its group, or a key that wants a value."""
    if "=" in word:
        return []
    shown = [(group, name) for group, names in options.items() for name in names if (group, name) not in HIDDEN_OPTIONS]
    meant = [f"{group}={name}" for (group, called), name in MEANT.items() if called == word.casefold()]
    if meant:
        return meant
    wanted = close_names(word.rpartition("/")[2], [name for group, name in shown if group != "hydra"])
    return [f"{group}={name}" for group, name in shown if name in wanted] or [f"{key}=VALUE" for key in keys_like(word)]


def model_remedy(name: str) -> str:
    """What to type for a name on the Hugging Face Hub, from which nothing is downloaded, or for a folder."""
    if not HUB_NAME.fullmatch(name) or Path(name).is_dir():
        return f"A model in a folder is model=hf model.path={name}."
    architectures = sorted(packaged_options("model") - {"hf", *(option for _, option in HIDDEN_OPTIONS)})
    close = close_names(name.rpartition("/")[2], architectures)
    shape = f"model={close[0]}" if close else f"model=NAME, one of {', '.join(architectures)}"
    return (
        f"Nothing is downloaded: fetch it (hf download {name} --local-dir DIR) and pass model=hf model.path=DIR; "
        f"or measure an architecture with random weights: {shape}."
    )


def keys_like(key: str, *, exactly: bool = False) -> list[str]:
    """Keys whose last part is the last part of `key`, but for how it is written; or, not `exactly`, like it."""
    if key in _KEYS_MEANT:
        return [_KEYS_MEANT[key]]
    last = key.rpartition(".")[2]
    names = {known: known.rpartition(".")[2] for known in all_keys()}
    wanted = close_names(last, names.values())
    if exactly:
        wanted = [name for name in wanted if name.replace("_", "") == last.replace("_", "").casefold()]
    return [known for known, name in names.items() if name in wanted]


def all_keys(kind: Any = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every key that takes a value, with its type; a free mapping is one."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        found |= all_keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else {f"{prefix}{name}": hint}
    return found


def default_of(key: str) -> str | None:
    """What a key is where nothing is chosen, as it is typed; None where that follows from other settings."""
    from importlib.resources import files

    import yaml

    group, _, rest = key.partition(".")
    if group not in _DEFAULTS:
        return None
    value: Any = yaml.safe_load(files(CONF_MODULE).joinpath(group).joinpath(f"{_DEFAULTS[group]}.yaml").read_text("utf-8"))
    for part in rest.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return None if text.startswith("${") or isinstance(value, (dict, list)) else text
