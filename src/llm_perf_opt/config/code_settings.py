"""Settings that can run code. A file cannot set them: they are honoured only if they were typed on this command line.

A file is anything that was not typed: a project's options, the config.yaml of a run, the plan of a sweep, the options of a
search, a change that a run proposes. `schema.py` marks these settings, with what a file may set them to all the same.
"""

import dataclasses
import re
import shlex
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llm_perf_opt.config.hydra_composition import SEE_HELP, first_sentence, quoted
from llm_perf_opt.config.launchers import LAUNCHER, SCHEDULER_WORDS
from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.config.schema import FROM_FILES, FromFiles, LauncherConfig, RunConfig
from llm_perf_opt.core.errors import ConfigError

_SWITCHES_ON = re.compile(r"trust|auto_map|name_or_path|(remote|custom)_code|unsafe|insecure|pickle")
_SWITCHES_OFF = re.compile(r"safe_|safetensors|weights_only")
"""Names of arguments that allow code where they are true, and where they are false."""
_OPTION = re.compile(r"--[a-z0-9][a-z0-9-]*(=(\d[\d.]*|true|false|yes|no|none))?|\d[\d.]*|true|false|yes|no|none")
_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_BARE = re.compile(r"[A-Za-z_][\w./-]*")
_NAMED = 3


class _File(Protocol):
    @property
    def path(self) -> Any: ...
    @property
    def keys(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class CodeSetting:
    """A setting with a value that can run code."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key}={_written(self.value)}"


def code_settings(values: Mapping[str, Any]) -> tuple[CodeSetting, ...]:
    """Return the settings of a run that can run code and that a file cannot set. Where the points of a sweep run is left out.

    The values may be those of an invalid configuration.
    """
    runtime = values.get("runtime")
    words = {"runtime.engine": traits_of(str(runtime.get("type"))).words if isinstance(runtime, Mapping) else {}}
    return tuple(found for found in _marked(RunConfig, values, "", words) if not found.key.startswith(f"{LAUNCHER}."))


def launcher_settings(values: Mapping[str, Any]) -> tuple[CodeSetting, ...]:
    """Return the settings of a launcher that can run code."""
    return tuple(_marked(LauncherConfig, values, f"{LAUNCHER}.", {f"{LAUNCHER}.extra": SCHEDULER_WORDS}))


def may_run_code(text: str) -> bool:
    """Return whether KEY=VALUE sets something that can run code, with some value."""
    key = text.partition("=")[0]
    return any(key == marked or key.startswith(f"{marked}.") for marked in _marked_keys(RunConfig, ""))


def _marked_keys(kind: type[Any], prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from _marked_keys(hints[item.name], f"{prefix}{item.name}.")
        elif FROM_FILES in item.metadata:
            yield f"{prefix}{item.name}"


def typed_settings(overrides: Iterable[str]) -> tuple[CodeSetting, ...]:
    """Return what overrides set, with one entry for each value inside a mapping. Raise ConfigError for one that sets nothing."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    found: list[CodeSetting] = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
            if not override.is_delete() and not override.is_sweep_override():
                found += _leaves(override.key_or_group, override.value())
        except (HydraException, ValueError, RecursionError) as error:
            raise ConfigError(f"'{text}' is not a setting: {first_sentence(error)}", SEE_HELP) from error
    return tuple(found)


@dataclass(frozen=True)
class Stored:
    """A file that settings were read from, and the command line that may allow them to run code."""

    file: Path
    command: str
    """What was typed, without settings: they are added to it."""
    words: tuple[str, ...] = ()
    """KEY=VALUE as typed: settings of the file that may run code."""

    def allowed(self, asked: Iterable[CodeSetting]) -> tuple[CodeSetting, ...]:
        """Return those settings that were typed with the same value; raise a ConfigError if another one can run code."""
        wanted = list(_distinct(asked))
        typed = typed_settings(self.words)
        refuse(_not_among(wanted, typed), str(self.file), lambda texts: f"`{self.command} {shlex.join(texts)}`")
        return tuple(wanted)

    def check_words(self, asked: Iterable[CodeSetting]) -> None:
        """Raise a ConfigError for a word that none of the settings needs: nothing else of a file can be changed."""
        wanted = list(asked)
        for text in self.words:
            if not all(any(one == other for other in wanted) for one in typed_settings([text])):
                fact = f"The settings in {self.file} are used as they are: `{self.command}` does not take {text}."
                raise ConfigError(fact, "Give no settings but those of them that can run code, with their values.")


def refuse(settings: Sequence[CodeSetting], file: str, typed: Callable[[Sequence[str]], str]) -> None:
    """Raise a ConfigError if there are such settings; `typed` returns what to type from their texts."""
    if not settings:
        return
    shown = ", ".join(map(str, settings[:_NAMED])) + (f" and {len(settings) - _NAMED} more" * (len(settings) > _NAMED))
    fact = f"{file} sets {shown}, which can run code: a file cannot allow that."
    raise ConfigError(fact, f"Give it on the command line, if you trust it: {typed([str(one) for one in settings])}.")


def not_typed(values: Mapping[str, Any], overrides: Iterable[str]) -> list[CodeSetting]:
    """Return the settings that can run code and are not among the overrides, which are typed."""
    keys = {one.key for one in typed_settings(overrides)}
    launcher = values.get(LAUNCHER)
    found = (*code_settings(values), *launcher_settings(launcher if isinstance(launcher, Mapping) else {}))
    return [one for one in found if one.key not in keys]


def refuse_in_files(values: Mapping[str, Any], files: Sequence[_File], overrides: Iterable[str]) -> None:
    """Raise a ConfigError that names the file if one of them, and not an override, sets what can run code."""
    for one in not_typed(values, overrides):
        setting = [str(file.path) for file in files if any(f"{one.key}.".startswith(f"{key}.") for key in file.keys)]
        refuse([one], setting[0] if setting else "A project file", " ".join)


def refuse_code(config: RunConfig, allowed: Collection[CodeSetting]) -> None:
    """Raise a ConfigError if a setting can run code without being allowed: the last check before a run starts."""
    refuse(_not_among(code_settings(dataclasses.asdict(config)), allowed), "The configuration", " ".join)


def _not_among(settings: Iterable[CodeSetting], allowed: Collection[CodeSetting]) -> list[CodeSetting]:
    return [one for one in settings if not any(one == other for other in allowed)]


def _distinct(settings: Iterable[CodeSetting]) -> Iterator[CodeSetting]:
    seen: list[CodeSetting] = []
    for one in settings:
        if one not in seen:  # a value may be a list, which has no hash
            seen.append(one)
            yield one


# --- what a file may set ----------------------------------------------------------------------------------------------


def _marked(
    kind: type[Any], values: Mapping[str, Any], prefix: str, words: Mapping[str, Mapping[str, str]]
) -> Iterator[CodeSetting]:
    """Yield the settings of a record that are marked in its dataclass and have values that a file cannot set."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        key, value = f"{prefix}{item.name}", values.get(item.name)
        if dataclasses.is_dataclass(hints[item.name]) and isinstance(value, Mapping):
            yield from _marked(hints[item.name], value, f"{key}.", words)
        elif (permitted := item.metadata.get(FROM_FILES)) is not None:
            for leaf in _leaves(key, list(value) if isinstance(value, tuple) else value):
                name = leaf.key.removeprefix(f"{key}.")
                if not _is_harmless(permitted, name, leaf.value, words.get(key, {})):
                    yield leaf


def _leaves(key: str, value: Any) -> Iterator[CodeSetting]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{str(name).replace('.', chr(92) + '.')}", inner)
    else:
        yield CodeSetting(key, value)


def _is_harmless(permitted: FromFiles, name: str, value: Any, words: Mapping[str, str]) -> bool:
    if value in (None, "", [], {}):
        return True
    if permitted == "nothing":
        return value is False
    if permitted == "word":
        return isinstance(value, str) and _WORD.fullmatch(value) is not None
    if permitted == "switches":
        return all(_OPTION.fullmatch(str(word)) for word in (value if isinstance(value, list) else str(value).split()))
    if permitted == "shape":
        return not _SWITCHES_ON.search(name) and _is_shape(value)
    return _is_figure(name, value) or (isinstance(value, str) and re.fullmatch(words.get(name, "(?!)"), value) is not None)


def _is_figure(name: str, value: Any) -> bool:
    """Return whether an argument is a number, a switch that allows no code, or a list of such."""
    if isinstance(value, list):
        return all(_is_figure(name, item) for item in value)
    if not isinstance(value, (bool, int, float)):
        return False
    return not (_SWITCHES_ON if value else _SWITCHES_OFF).search(name)


def _is_shape(value: Any) -> bool:
    """Return whether a field of an architecture names neither a path nor an object in Python nor a repository."""
    if isinstance(value, list):
        return all(map(_is_shape, value))
    if isinstance(value, Mapping):
        return all(_is_harmless("shape", str(name), inner, {}) for name, inner in value.items())
    return not (isinstance(value, str) and re.search(r"[/\\:@]", value))


def _written(value: Any) -> str:
    """Return a value as an override has it."""
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) and value.lower() not in ("true", "false", "null", "nan", "inf") else quoted(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_written(inner)}' for key, inner in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
