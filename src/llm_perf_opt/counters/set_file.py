"""Read named metric sets from YAML and check every key. `manifest.resolve` turns them into counters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
"""The values that `nsys profile --trace` accepts."""
_KEYS = ("description", "ncu", "sections", "trace", "gpu_metrics", "torch", "notes")
FILE = "file"
"""Added to the content of a user's file: where it came from."""


@dataclass(frozen=True)
class Section:
    """A section of Nsight Compute, and the counter that a chip needs for it."""

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
    file: str = ""
    """The user's file that defines it; empty for a packaged set."""
    origin: str = ""
    """A sentence that names the file."""

    @property
    def collected_by(self) -> frozenset[str]:
        """The passes that collect something of it: ncu, nsys, torch. Empty: it adds nothing to what every run records."""
        needs = {"ncu": self.ncu or self.sections, "nsys": self.trace or self.gpu_metrics, "torch": self.torch}
        return frozenset(name for name, needed in needs.items() if needed)


def known_sets(defined: Mapping[str, Any] | None = None) -> dict[str, MetricSet]:
    """Return the packaged sets and the user's own by name. An own set replaces a packaged one of the same name."""
    if defined is not None and not isinstance(defined, Mapping):
        raise ConfigError(f"profiling.metrics.defined={defined!r} is not a mapping.", "Write the sets by name.")
    packaged = shipped_sets()
    own = {name: _own_set(name, body, replaces=name in packaged) for name, body in (defined or {}).items()}
    return {**packaged, **own}


def _own_set(name: str, body: Any, *, replaces: bool) -> MetricSet:
    file = str(body.get(FILE, "")) if isinstance(body, dict) else ""
    where = file or f"profiling.metrics.defined.{name}"
    if name == "base":
        raise ConfigError(f"{where}: the set base cannot be replaced.", "Every request includes it. Choose another name.")
    if isinstance(body, dict):
        described = body.get("description") or f"Defined in {where}."
        body = {**{key: value for key, value in body.items() if key != FILE}, "description": described}
    found = _read_set(where, name, body)
    origin = f"The metric set {name} is that of {where}{', not the packaged one' if replaces else ''}."
    return replace(found, file=where, origin=origin)


@lru_cache
def shipped_sets() -> dict[str, MetricSet]:
    """Return the sets of the package by name, `base` first."""
    text = resources.files("llm_perf_opt.counters").joinpath("sets.yaml").read_text(encoding="utf-8")
    return read_sets(text, "sets.yaml")


def read_sets(text: str, where: str) -> dict[str, MetricSet]:
    """Return the sets in a YAML text. Raise a ConfigError that names the set and the key of anything unknown."""
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}.", "Fix the file at that line.") from error
    if not isinstance(content, dict) or "base" not in content:
        raise ConfigError(f"{where} has no set called base.", "Add `base:`, which every request includes.")
    return {name: _read_set(f"{where}: {name}", name, body) for name, body in content.items()}


def _read_set(where: str, name: Any, body: Any) -> MetricSet:
    if not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise ConfigError(f"{where} is not a valid name for a set.", "Use letters, digits and '_'.")
    if not isinstance(body, dict):
        raise ConfigError(f"{where} is not a mapping.", f"Give it a description, and any of: {', '.join(_KEYS[1:])}.")
    for key in body:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}.{nearest(str(key), _KEYS)}", f"Known keys: {', '.join(_KEYS)}.")
    description = body.get("description")
    if not isinstance(description, str) or not description.strip():
        raise ConfigError(f"{where}: the description is missing.", "Describe in one line what the set is for.")
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
    for item in found:
        if not isinstance(item, str) or not item.strip():
            raise ConfigError(f"{where}: {key} contains {item!r}, which is not text.", "Quote it if it is meant as text.")
    return tuple(found)


def _counters(where: str, body: dict[str, Any]) -> tuple[str, ...]:
    found = _texts(where, "ncu", body)
    for name in found:
        role = name.removeprefix(ROLE)
        if role != name and role not in ROLES:
            raise ConfigError(f"{where}: no role {role!r}.{nearest(role, ROLES)}", f"Known roles: {', '.join(ROLES)}.")
    return found


def _sections(where: str, body: dict[str, Any]) -> tuple[Section, ...]:
    found = []
    for item in _list(where, "sections", body):
        if isinstance(item, str):
            found.append(Section(item))
        elif isinstance(item, dict) and item.keys() == {"section", "needs"} and all(isinstance(v, str) for v in item.values()):
            found.append(Section(item["section"], item["needs"]))
        else:
            raise ConfigError(f"{where}: sections contains {item!r}.", "Write a name, or {section: NAME, needs: COUNTER}.")
    return tuple(found)


def _trace(where: str, body: dict[str, Any]) -> tuple[str, ...]:
    found = _texts(where, "trace", body)
    check_trace_modules(found, where)
    return found


def check_trace_modules(names: Iterable[str], where: str, known: Sequence[str] = TRACE_MODULES) -> None:
    """Raise a ConfigError for a trace module that Nsight Systems does not have."""
    for module in names:
        if module == "nvlink":
            raise ConfigError(
                f"{where}: nvlink is not a trace module of Nsight Systems.", "Use gpu_metrics: true, or its ncu counters."
            )
        if module not in known:
            raise ConfigError(f"{where}: no trace module {module!r}.{nearest(module, known)}", f"Known: {', '.join(known)}.")


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
        raise ConfigError(f"{where}: torch is {value!r}, which is not a preset.", f"Known presets: {', '.join(PRESETS)}.")
    return None
