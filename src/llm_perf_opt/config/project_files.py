"""The user's own option files: read safely, completed with the package's defaults, and searched before the packaged options.

A file may be as short as it likes. Without a `defaults` list it is merged over the packaged option of the same name, or over the
defaults of its group. `hydra/default.yaml` may have its settings under `hydra:`, and a file of a group may also set values of
other sections (`experiment`, `hydra`, another group) at its top level.
"""

import io
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from llm_perf_opt.config.choices import CONF_MODULE, DEFAULTS, GROUPS, packaged_options
from llm_perf_opt.config.guide_keys import SECTIONS, torch_preset
from llm_perf_opt.config.runtimes import OWN_OPTION
from llm_perf_opt.core.errors import ConfigError, file_error, nearest, words_of
from llm_perf_opt.core.user_files import read_text
from llm_perf_opt.core.yaml_text import check_yaml

PRIMARY = "config"
_MOST_BYTES = 1_000_000
_MOST_NODES = 20_000
"""Values of one file, with every alias expanded."""
_SELF = "_self_"
_GLOBAL = "_global_"
_OUTSIDE = ("experiment", *GROUPS, *SECTIONS)
"""Names that are sections of the whole configuration, in whichever file they are written."""
_TORCH_PRESET = re.compile(r"/?profiling/torch(@\S*)?")
"""The group of torch.profiler presets in the guides."""
_HYDRA_ENTRY = re.compile(r"(override |optional )*/?hydra/")
_Names = list[str]


@dataclass(frozen=True)
class OwnFile:
    """A user's file that is part of the configuration."""

    path: Path
    group: str
    """`config` for config.yaml."""
    keys: tuple[str, ...]
    """What it sets, as dotted keys of the whole configuration."""
    packaged: bool
    """Whether the package has an option of this name that a user selects."""
    notes: tuple[str, ...] = ()

    def is_option(self, choices: Mapping[str, str]) -> bool:
        """Return whether it is the selected option of its group, or config.yaml, and not a file that another one includes."""
        return self.group == PRIMARY or choices.get(self.group) == self.path.stem


class OwnSource(ConfigSource):
    """A folder of option files, as a source for Hydra."""

    def __init__(self, folder: Path) -> None:
        super().__init__("user", f"{self.scheme()}://{folder}")
        self.folder = folder
        self.loaded: list[OwnFile] = []

    def __deepcopy__(self, memo: Any) -> "OwnSource":
        """Return itself: Hydra copies its sources before it loads from them, and `loaded` is read afterwards."""
        return self

    @staticmethod
    def scheme() -> str:
        """Return the scheme of such a source in Hydra's messages."""
        return "own"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's settings over the package's defaults."""
        group, _, option = config_path.removesuffix(".yaml").rpartition("/")
        path = self._place(f"{group}/{option}.yaml" if group else f"{option}.yaml")
        content, package = _read(path)
        read = _Read(path, group, option, content)
        if not group and option == PRIMARY:
            values = _primary(read)
        elif group in GROUPS and package in (None, _GLOBAL, group):
            values, package = _option(read, package)
        else:
            values = content
            read.keys = [] if group else _flat({key: value for key, value in content.items() if key != "defaults"})
        self.loaded.append(OwnFile(path, group or option, *read.facts()))
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(values), {"package": package})

    def available(self) -> bool:
        """Return whether the folder exists."""
        return self.folder.is_dir()

    def is_group(self, config_path: str) -> bool:
        """Return whether there is such a folder of options."""
        return _is_inside(config_path) and self._place(config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Return whether there is such a file, even a dangling link or a folder, which is an error when it is read."""
        return _is_inside(config_path) and os.path.lexists(self._place(f"{config_path.removesuffix('.yaml')}.yaml"))

    def list(self, config_path: str, results_filter: ObjectType | None) -> _Names:
        """Return the options and groups in a folder."""
        found: _Names = []
        for entry in sorted(self._place(config_path).iterdir()):
            name = f"{config_path}/{entry.name}".lstrip("/")
            self._list_add_result(found, name, entry.name, results_filter)
        return found

    def _place(self, config_path: str) -> Path:
        return self.folder / config_path


class PackagedSource(ConfigSource):
    """The packaged options, as a source for Hydra that reads each file once per process: a sweep composes many times."""

    _read: ClassVar[dict[str, bytes]] = {}

    def __init__(self, source: ConfigSource) -> None:
        super().__init__(source.provider, f"{source.scheme()}://{source.path}")
        self._source = source

    def __deepcopy__(self, memo: Any) -> "PackagedSource":
        """Return itself: it does not change."""
        return self

    @staticmethod
    def scheme() -> str:
        """Return the scheme of such a source in Hydra's messages."""
        return "pkg"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a copy of a file's settings; Hydra changes what it gets."""
        found = self._read.get(config_path)
        if found is None:
            found = self._read[config_path] = pickle.dumps(self._source.load_config(config_path))
        result: ConfigResult = pickle.loads(found)  # noqa: S301 - written above, and faster than copy.deepcopy
        return result

    def available(self) -> bool:
        """Return whether the package is there."""
        return self._source.available()

    def is_group(self, config_path: str) -> bool:
        """Return whether there is such a group."""
        return self._source.is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        """Return whether there is such an option."""
        return self._source.is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> _Names:
        """Return the options and groups in a group."""
        return self._source.list(config_path, results_filter)


def _is_inside(config_path: str) -> bool:
    return not config_path.startswith("/") and ".." not in Path(config_path).parts


@dataclass
class _Read:
    """A file while it is completed."""

    path: Path
    group: str
    option: str
    content: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def facts(self) -> tuple[tuple[str, ...], bool, tuple[str, ...]]:
        """Return what is recorded of the file."""
        packaged = self.group in GROUPS[1:] and self.option in packaged_options(self.group)
        return tuple(self.keys), packaged, tuple(self.notes)

    def defaults(self) -> list[Any] | None:
        """Remove and return the defaults list, without entries that have no meaning here; None if the file has none."""
        entries = self.content.pop("defaults", None)
        if entries is None:
            return None
        if not isinstance(entries, list):
            raise ConfigError(f"{self.path}: defaults is not a list.", "Write one entry per line: - model: NAME.")
        return [entry for entry in entries if not self._is_dropped(entry)]

    def _is_dropped(self, entry: Any) -> bool:
        if not isinstance(entry, Mapping) or len(entry) != 1:
            return False
        ((key, value),) = entry.items()
        if _TORCH_PRESET.fullmatch(str(key)):
            preset = torch_preset(f"{self.path}: {key}: {value}", str(value))
            torch = {"torch": {"enable": True, "preset": preset}}
            self.content.update(_merged(torch, self.content))
            self.notes.append(f"{key}: {value} ({self.path}) was translated to profiling.torch.preset={preset}.")
            return True
        if _HYDRA_ENTRY.match(str(key)):
            self.notes.append(f"{key}: {value} ({self.path}) has no effect: llm-perf uses Hydra only to compose settings.")
            return True
        return False


# --- config.yaml ------------------------------------------------------------------------------------------------------


def _primary(read: _Read) -> dict[str, Any]:
    """Return the settings of config.yaml, with a default for each group that it does not choose."""
    packaged = _packaged_yaml(f"{PRIMARY}.yaml")
    usual = [entry for entry in packaged.pop("defaults") if entry != _SELF]
    chosen = read.defaults() or []
    named = {_group_of(read.path, entry) for entry in chosen}
    defaults = [*(entry for entry in usual if next(iter(entry)) not in named), *chosen]
    if _SELF not in defaults:
        defaults.append(_SELF)
    _refuse_search_path(read.path, read.content)
    read.keys = _flat(read.content)
    included = any(isinstance(entry, str) and entry != _SELF for entry in defaults)  # such a file may set the same values
    return {"defaults": defaults, **_merged({} if included else packaged, read.content)}


def _group_of(path: Path, entry: Any) -> str:
    """Return the group that an entry of the defaults list chooses; empty for a file."""
    if not isinstance(entry, Mapping) or not entry:
        return ""
    key = str(next(iter(entry))).removeprefix("override ").removeprefix("optional ").split("@")[0].lstrip("/")
    if key.split("/")[0] not in GROUPS:
        raise ConfigError(
            f"{path}: there is no group '{key}'.{nearest(key, GROUPS)}",
            f"Groups: {', '.join(GROUPS)}. If this folder belongs to another program, start llm-perf in another folder.",
        )
    return key


def _refuse_search_path(path: Path, content: Mapping[str, Any]) -> None:
    section = content.get("hydra")
    if isinstance(section, Mapping) and "searchpath" in section:
        raise ConfigError(f"{path}: hydra.searchpath is not supported.", "Use --config-dir DIR for a folder of options.")


# --- options ----------------------------------------------------------------------------------------------------------


def _option(read: _Read, package: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the settings of an option over its base, and the package that they belong in."""
    defaults = read.defaults()
    own, outside = _split(read, everything_outside=package == _GLOBAL)
    _refuse_search_path(read.path, outside if read.group != "hydra" else {"hydra": own})
    read.keys = [*(f"{read.group}.{key}" for key in _flat(own)), *_flat(outside)]
    included = [entry for entry in defaults or [] if entry not in (_SELF, read.option)]
    if not included or read.option in (defaults or []):
        own = _over_base(read, own)
    if not outside:
        return ({"defaults": _ordered(included, defaults)} if included else {}) | own, None
    entries = [f"/{read.group}/{entry}@{read.group}" if isinstance(entry, str) else entry for entry in included]
    return ({"defaults": _ordered(entries, defaults)} if entries else {}) | outside | {read.group: own}, _GLOBAL


def _ordered(included: list[Any], defaults: list[Any] | None) -> list[Any]:
    """Return the entries with `_self_` where the file has it, last by default."""
    first = bool(defaults) and defaults is not None and defaults[0] == _SELF
    return [_SELF, *included] if first else [*included, _SELF]


def _split(read: _Read, *, everything_outside: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the group, and those of the rest of the configuration."""
    content, group = dict(read.content), read.group
    wrapped = content.pop(group, None)
    if group == "hydra":
        outside = content if wrapped is not None or everything_outside else {}
        own = {} if outside is content else content
    else:
        outside = content if everything_outside else {key: content[key] for key in _OUTSIDE if key in content}
        own = {} if everything_outside else {key: value for key, value in content.items() if key not in outside}
    if wrapped is None:
        return own, dict(outside)
    if not isinstance(wrapped, dict):
        raise ConfigError(f"{read.path}: {group}={wrapped!r} is not a mapping of settings.", f"Write the settings of {group}.")
    return _merged(own, wrapped), dict(outside)


def _over_base(read: _Read, own: dict[str, Any]) -> dict[str, Any]:
    same = read.option in packaged_options(read.group)
    base = packaged_option(read.group, read.option if same else _base_of(read.group, own))
    if not same and read.group in ("model", "dataset"):
        base["name"] = read.option
    shape = own.get("architecture")
    if isinstance(shape, Mapping) and shape.get("model_type", "") not in ("", (base.get("architecture") or {}).get("model_type")):
        base["architecture"] = {}  # another family: its fields are not those of the base
    return _merged(base, own)


def _base_of(group: str, own: Mapping[str, Any]) -> str:
    """Return the packaged option that has the defaults of an option with another name."""
    if group == "model":
        return "hf" if own.get("path") or own.get("source") == "pretrained" else "random"
    if group == "dataset":
        if own.get("kind") in packaged_options(group):
            return str(own["kind"])
        return "sample_prompts" if own.get("root") or own.get("path") else "synthetic"
    if group == "launcher" and own.get("type") in packaged_options(group):
        return str(own["type"])
    if group == "runtime" and own.get("type") is not None:
        return str(own["type"]) if own["type"] in packaged_options(group) else OWN_OPTION
    return "default" if group == "hydra" else DEFAULTS[group]


def packaged_option(group: str, option: str) -> dict[str, Any]:
    """Return a packaged option with the ones that it starts from."""
    values = _packaged_yaml(f"{group}/{option}.yaml")
    found: dict[str, Any] = {}
    for entry in values.pop("defaults", []):
        if entry != _SELF:
            found = _merged(found, packaged_option(group, entry))
    return _merged(found, values)


def _packaged_yaml(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(files(CONF_MODULE).joinpath(name).read_text("utf-8"))
    return found


# --- YAML -------------------------------------------------------------------------------------------------------------


class _NamedText(io.StringIO):
    """A text with the name of its file, which YAML's errors quote."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the values of a file, not resolved, and the package in its header. Raise if it is not a mapping in YAML."""
    text = _text(path)
    try:
        check_yaml(_NamedText(text, str(path)), _MOST_NODES)
        found = OmegaConf.to_container(OmegaConf.load(_NamedText(text, str(path))), resolve=False)
        package = ConfigSource._get_header_dict(text[:512])["package"]
    except ValueError as error:
        raise ConfigError(f"{path}: {words_of(error)}.", "Correct the file.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a mapping of settings.", "Write KEY: VALUE, one per line.")
    return {str(key): value for key, value in found.items()}, package


def _text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ConfigError(f"{path} is too large for a settings file: {size:,} bytes.", f"The limit is {_MOST_BYTES:,} bytes.")
        return read_text(path)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text.", "Write the settings as YAML.") from None
    except OSError as error:
        if path.is_symlink():
            words = f"{path} is a link to {path.readlink()}, which cannot be read: {words_of(error)}."
            raise ConfigError(words, "Restore the target, or remove the link.") from error
        raise file_error(error) from error


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in over.items():
        below = found.get(key)
        found[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return found


def _flat(values: Mapping[str, Any], above: str = "") -> list[str]:
    """Return the dotted keys of all values; an empty mapping sets nothing."""
    found: list[str] = []
    for name, value in values.items():
        key = f"{above}{name}"
        found += _flat(value, f"{key}.") if isinstance(value, Mapping) else [key]
    return found
