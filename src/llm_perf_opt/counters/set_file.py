"""Named sets as a YAML file holds them: read, checked key by key, and nothing resolved yet."""

from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any, get_args

from llm_perf_opt.config.schema import TorchPreset
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.counters.catalog import CounterRoles

ROLE = "role:"
ROLES = tuple(field.name for field in fields(CounterRoles) if field.name not in ("chip", "note"))
PRESETS: tuple[TorchPreset, ...] = get_args(TorchPreset)
"""From the least to the most that torch.profiler records."""
TRACE_MODULES = (
    *("cuda", "nvtx", "osrt", "cublas", "cublas-verbose", "cusparse", "cusparse-verbose", "cudnn", "mpi", "oshmem", "ucx"),
    *("opengl", "opengl-annotations", "openacc", "openmp", "nvvideo", "vulkan", "vulkan-annotations", "python-gil"),
)
"""What `nsys profile --help` offers for --trace."""
_KEYS = ("description", "ncu", "sections", "trace", "gpu_metrics", "torch", "notes")


@dataclass(frozen=True)
class Section:
    """A section of Nsight Compute, and the counter a chip must have for it to hold anything."""

    name: str
    needs: str = ""


@dataclass(frozen=True)
class MetricSet:
    """One named set, as written."""

    name: str
    description: str
    ncu: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    trace: tuple[str, ...] = ()
    gpu_metrics: bool = False
    torch: TorchPreset | None = None
    notes: tuple[str, ...] = ()


@lru_cache
def shipped_sets() -> dict[str, MetricSet]:
    """The sets that come with the package, by name, `base` first."""
    text = resources.files("llm_perf_opt.counters").joinpath("sets.yaml").read_text(encoding="utf-8")
    return read_sets(text, "sets.yaml")


def read_sets(text: str, where: str) -> dict[str, MetricSet]:
    """Sets from YAML; whatever is not understood is an error that names the set and the key."""
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}.", "Mend the file at the line named.") from error
    if not isinstance(content, dict) or "base" not in content:
        raise ConfigError(f"{where} holds no set called base.", "Begin with `base:`, which every request includes.")
    return {name: _read_set(f"{where}: {name}", name, body) for name, body in content.items()}


def _read_set(where: str, name: Any, body: Any) -> MetricSet:
    if not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise ConfigError(f"{where} is no name for a set.", "Use letters, digits and '_'.")
    if not isinstance(body, dict):
        raise ConfigError(f"{where} is not a mapping.", f"Give it a description, and any of: {', '.join(_KEYS[1:])}.")
    for key in body:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}.{nearest(str(key), _KEYS)}", f"Known keys: {', '.join(_KEYS)}.")
    description = body.get("description")
    if not isinstance(description, str) or not description.strip():
        raise ConfigError(f"{where}: the description is missing.", "Say in a line what the set is for.")
    return MetricSet(
        name=name,
        description=description.strip(),
        ncu=_counters(where, body),
        sections=_sections(where, body),
        trace=_trace(where, body),
        gpu_metrics=_switch(where, body),
        torch=_preset(where, body),
        notes=_texts(where, "notes", body),
    )


def _list(where: str, key: str, body: dict[str, Any]) -> list[Any]:
    value = body.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {key} is not a list.", f"Write {key}: [ONE, TWO].")
    return value


def _texts(where: str, key: str, body: dict[str, Any]) -> tuple[str, ...]:
    found = _list(where, key, body)
    for one in found:
        if not isinstance(one, str) or not one.strip():
            raise ConfigError(f"{where}: {key} holds {one!r}, which is not text.", "Put it in quotes if it is meant as text.")
    return tuple(found)


def _counters(where: str, body: dict[str, Any]) -> tuple[str, ...]:
    found = _texts(where, "ncu", body)
    for one in found:
        role = one.removeprefix(ROLE)
        if role != one and role not in ROLES:
            raise ConfigError(f"{where}: no role {role!r}.{nearest(role, ROLES)}", f"Known roles: {', '.join(ROLES)}.")
    return found


def _sections(where: str, body: dict[str, Any]) -> tuple[Section, ...]:
    found = []
    for one in _list(where, "sections", body):
        if isinstance(one, str):
            found.append(Section(one))
        elif isinstance(one, dict) and one.keys() == {"section", "needs"} and all(isinstance(v, str) for v in one.values()):
            found.append(Section(one["section"], one["needs"]))
        else:
            raise ConfigError(f"{where}: sections holds {one!r}.", "Write a name, or {section: NAME, needs: COUNTER}.")
    return tuple(found)


def _trace(where: str, body: dict[str, Any]) -> tuple[str, ...]:
    found = _texts(where, "trace", body)
    for one in found:
        if one == "nvlink":
            raise ConfigError(
                f"{where}: nvlink is no trace module of Nsight Systems.", "Use gpu_metrics: true, or its ncu counters."
            )
        if one not in TRACE_MODULES:
            raise ConfigError(
                f"{where}: no trace module {one!r}.{nearest(one, TRACE_MODULES)}", f"Known: {', '.join(TRACE_MODULES)}."
            )
    return found


def _switch(where: str, body: dict[str, Any]) -> bool:
    value = body.get("gpu_metrics", False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: gpu_metrics is {value!r}.", "Write true or false.")
    return value


def _preset(where: str, body: dict[str, Any]) -> TorchPreset | None:
    value = body.get("torch")
    for preset in PRESETS:
        if value == preset:
            return preset
    if value is not None:
        raise ConfigError(f"{where}: torch is {value!r}, which is no preset.", f"Known presets: {', '.join(PRESETS)}.")
    return None
