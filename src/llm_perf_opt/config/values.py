"""Turn plain nested values, as in a run's config.yaml, into the typed configuration."""

import dataclasses
import shlex
import types
import typing
from collections.abc import Mapping
from typing import Any

from llm_perf_opt.config.schema import Dtype, canonical_dtype
from llm_perf_opt.core.errors import ConfigError, nearest

_FORMER = {"hardware": {"cpu_threads": "threads"}}
"""Former names of settings, which are still accepted."""
_ADDED: dict[str, dict[str, Any]] = {
    "hardware": {"threads": None, "cpus": None, "wait_policy": "auto", "devices": None},
    "runtime": {
        "quantization": "none",
        "tensor_parallel": 1,
        "rank_timeout_s": 300.0,
        "attention_backend": "auto",
        "compile_prefill": False,
        "coordinate_descent_tuning": False,
        "fuse_projections": False,
        "row_kernel": False,
    },
    "profiling.nvml": {"prometheus": None},
    "profiling.nsys": {"trace": None, "sample": "none", "args": [], "substage": None},
    "profiling.ncu": {
        "substage": None,
        "set": None,
        "sections": [],
        "kernel_regex": None,
        "launch_skip": None,
        "launch_count": None,
        "clock_control": "none",
        "cache_control": "none",
        "args": [],
    },
    "profiling.metrics": {"defined": {}},
    "dataset": {
        "images": 1,
        "image_height": None,
        "image_width": None,
        "image_tiles": 0,
        "image_count": None,
        "annotations": None,
        "prompt": None,
    },
}
"""Settings that configurations of older versions do not have, with their defaults."""
_WORDS = ("profiling.nsys.args", "profiling.ncu.args")
"""Lists that may be given as one text, which is split at spaces as a shell would, without running one."""
_COMMA_LISTS = ("profiling.nsys.trace",)


def current_key(key: str) -> str:
    """Return the current name of a setting."""
    group, _, name = key.rpartition(".")
    return f"{group}.{_FORMER.get(group, {}).get(name, name)}" if group else key


def is_added(key: str) -> bool:
    """Return whether configurations of older versions do not have this setting."""
    group, _, name = key.rpartition(".")
    return name in _ADDED.get(group, {})


def current(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an older configuration with the current names and with settings that it did not have."""
    found = _without_unused_set(values)
    for group, added in _ADDED.items():
        outer, _, inner = group.partition(".")
        section = found.get(outer)
        if inner and isinstance(section, Mapping) and isinstance(section.get(inner), Mapping):
            found[outer] = {**section, inner: {**added, **section[inner]}}
        elif not inner and isinstance(section, Mapping):
            renamed = {_FORMER.get(group, {}).get(str(name), name): value for name, value in section.items()}
            found[group] = {**added, **renamed}
    return found


def _without_unused_set(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without the default metric set of an older configuration that never counted."""
    found, profiling = dict(values), values.get("profiling")
    metrics, ncu = (profiling.get(name) if isinstance(profiling, Mapping) else None for name in ("metrics", "ncu"))
    if not (isinstance(profiling, Mapping) and isinstance(metrics, Mapping) and isinstance(ncu, Mapping)):
        return found
    if "defined" not in metrics and metrics.get("sets") == ["roofline"] and not ncu.get("enable"):
        found["profiling"] = {**profiling, "metrics": {**metrics, "sets": None}}
    return found


def _cpu_list_text(value: Any) -> Any:
    """Return a list of CPUs as text: YAML reads `0` as a number, and `[0,1]` is a list."""
    if isinstance(value, list) and all(isinstance(item, (int, str)) and not isinstance(item, bool) for item in value):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def build(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as `kind`, or raise a ConfigError with the key, the expected type and the value."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast("type[Any]", kind), value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return build(next(argument for argument in arguments if argument is not type(None)), value, where)
    if where == "hardware.cpus":
        value = _cpu_list_text(value)
    if where == "launcher.time" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and where in (*_WORDS, *_COMMA_LISTS):
        value = _listed(value, where)
    if kind == Dtype and isinstance(value, str):
        value = canonical_dtype(value)
    if origin is typing.Literal:
        if value not in arguments or not isinstance(value, str):
            raise ConfigError(
                f"{where}={value} is not known.{nearest(str(value), arguments)}",
                f"Known: {', '.join(map(str, arguments))}.",
            )
        return value
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r}: expected a mapping, such as {{name: value}}.")
        return {str(key): build(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}={value!r}: expected a list, such as [a,b].")
        return tuple(build(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    return value if kind is Any else _scalar(kind, value, where)


def _listed(text: str, where: str) -> list[str]:
    """Return the words of a text, or the parts between its commas."""
    if where in _COMMA_LISTS:
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{where}={text!r} cannot be split into words: {error}.", "Close the quotation mark.") from None


def _scalar(kind: type, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where}={str(value)[:20]}… is out of range: it has {len(str(value))} digits.") from None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        expected = {int: "an integer", float: "a number", str: "text", bool: "true or false"}[kind]
        raise ConfigError(f"{where}={value!r}: expected {expected}.")
    return value


def _build_dataclass(kind: type[Any], value: Any, where: str) -> Any:
    label = where or "the configuration"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{label}={value!r}: expected the fields {', '.join(typing.get_type_hints(kind))}.")
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in hints:
            raise ConfigError(f"'{key}' is not known in {label}.{nearest(str(key), hints)}", f"Known: {', '.join(hints)}.")
    needed = dataclasses.MISSING
    optional = {
        item.name for item in dataclasses.fields(kind) if item.default is not needed or item.default_factory is not needed
    }
    for key in hints:
        if key not in value and key not in optional:
            raise ConfigError(f"'{key}' is missing in {label}.", f"It needs all of: {', '.join(hints)}.")
    given = [(key, hint) for key, hint in hints.items() if key in value]
    return kind(**{key: build(hint, value[key], f"{where}.{key}" if where else key) for key, hint in given})
