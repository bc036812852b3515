"""Keys in the guides' configuration files, and what replaces each of them.

A key with another name in llm-perf is moved. A key without an equivalent gets a note. Neither is ignored silently.
"""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llm_perf_opt.core.errors import ConfigError, nearest

SECTIONS = ("run", "artifacts", "inputs")
"""Sections of the guides' files that are not groups of llm-perf."""
TORCH_PRESETS = {"torch-profiler.min": "minimal", "torch-profiler.default": "default", "torch-profiler.max": "max"}
"""Presets of torch.profiler in the guides → `profiling.torch.preset`."""
MOVED = {
    "runtime.torch_profiler.enabled": "profiling.torch.enable",
    "runtime.torch_profiler.enable": "profiling.torch.enable",
    "run.top_n_kernels": "profiling.ncu.top",
}
"""Keys with another name in llm-perf."""
NO_EFFECT = {
    "runtime.torch_profiler.steps": (
        "the torch pass profiles one iteration; profiling.torch.decode_steps sets how many of its decode steps"
    ),
    "runtime.torch_profiler.warmup": "warm-up ends when the times have settled, after runtime.max_warmup iterations at most",
    "profiling.activities": "the torch pass records the CPU and the GPU",
    "profiling.outputs.write_ops_csv": "the torch pass always writes ops.csv",
    "run.mode": "profiling=stage2 is the deep mode, profiling=minimal the light one",
    "artifacts.stage2_dir": "hydra.run.dir sets the folder of a run",
    "hydra.job.name": "a run is named by its folder, which experiment=NAME changes",
    "hydra.job.chdir": "every file of a run is written to its folder, and the working directory stays as it is",
    "hydra.output_subdir": "the configuration is in config.yaml of the run",
    "hydra.sweep.dir": "-m with hydra.run.dir=DIR sets the folder of a sweep",
    "hydra.sweep.subdir": "the runs of a sweep are numbered",
}
"""Keys without an equivalent, and why."""
ON_THE_COMMAND_LINE = {
    "inputs.manifest": "Give it on the command line: inputs.manifest=FILE.",
}
"""Keys that a file cannot have, and what to do instead."""
RUN_DIR = "hydra.run.dir"
_STAGE2_DIR = "artifacts.stage2_dir"
_HYDRA = "hydra."


class _File(Protocol):
    @property
    def path(self) -> Any: ...
    @property
    def keys(self) -> Sequence[str]: ...


def is_answered(key: str) -> bool:
    """Return whether a key of a user's file is moved or gets a note."""
    return key in MOVED or key in NO_EFFECT or key.startswith(_HYDRA)


def torch_preset(written: str, value: str) -> str:
    """Return the preset of torch.profiler that a file or path of the guides means; `written` is quoted if there is none."""
    name = value.rpartition("/")[2].removesuffix(".yaml")
    if name not in TORCH_PRESETS:
        raise ConfigError(
            f"{written} is not known.{nearest(name, TORCH_PRESETS)}",
            f"Use profiling=minimal with profiling.torch.preset={' or '.join(TORCH_PRESETS.values())}.",
        )
    return TORCH_PRESETS[name]


def answer_keys(values: dict[str, Any], files: Sequence[_File], explicit: Container[str], run_dir: Path) -> list[str]:
    """Move the guides' keys in composed values to their new names, and return a note on each.

    `explicit` are the keys of the command line, which win over a moved one; so does the key itself in a user's file.
    """
    notes = []
    written = {key for file in files for key in file.keys}
    for file in files:
        for key in file.keys:
            if key in MOVED:
                notes.append(_moved(values, key, f"({file.path})", explicit, written))
            elif key == _STAGE2_DIR and Path(_text(_value(values, key))) == run_dir:
                notes.append(f"{_shown(values, key)} ({file.path}) is used as the run folder ({RUN_DIR}).")
            elif key in NO_EFFECT:
                notes.append(f"{_shown(values, key)} ({file.path}) has no effect: {NO_EFFECT[key]}.")
            elif key.startswith(_HYDRA) and key != RUN_DIR:
                notes.append(f"{key} ({file.path}) has no effect: llm-perf uses Hydra only to compose settings.")
    for key in written:
        if is_answered(key):
            _removed(values, key)
    for section in SECTIONS:
        values.pop(section, None)
    return notes


def _moved(values: dict[str, Any], key: str, where: str, explicit: Container[str], written: Container[str]) -> str:
    target, value = MOVED[key], _value(values, key)
    group, *path = target.split(".")
    if target in explicit or target in written:
        used = "the command line" if target in explicit else "a project file"
        return f"{_shown(values, key)} {where} is not used: {used} sets {target}."
    if value is False and group in explicit:  # the option of the group says which passes run, and some need others
        return f"{_shown(values, key)} {where} is not used: {group}= on the command line selects the passes."
    place: Any = values.get(group)
    for part in path[:-1]:
        place = place.get(part) if isinstance(place, dict) else None
    if isinstance(place, dict):
        place[path[-1]] = value
    return f"{_shown(values, key)} {where} was translated to {target}={_text(value)}."


def _shown(values: Mapping[str, Any], key: str) -> str:
    return key if key.startswith(_HYDRA) else f"{key}={_text(_value(values, key))}"


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _value(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _removed(values: dict[str, Any], key: str) -> None:
    """Remove a key, and the mappings that it leaves empty."""
    name, _, rest = key.partition(".")
    inner = values.get(name)
    if rest and isinstance(inner, dict):
        _removed(inner, rest)
        if not inner:
            del values[name]
    elif not rest:
        values.pop(name, None)
