"""Overrides as the profiling guides write them, translated to the settings of llm-perf.

An override with an equivalent setting is replaced by it, with a note. An override without one is rejected with an error that
names what to use instead. All others are returned unchanged. docs/from-the-guides.md lists them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.config.guide_keys import MOVED, NO_EFFECT, torch_preset
from llm_perf_opt.core.errors import ConfigError, nearest

DEEP, LIGHT = "stage2", "minimal"
"""The options of `profiling` that `run.mode=deep` and `run.mode=light` select."""
_MODES = {"deep": DEEP, "light": LIGHT}
_TORCH_GROUPS = ("profiling/torch", "profiling/torch@profiling")
_RENAMED = {
    **MOVED,
    "repeats": "runtime.max_repeats",
    "artifacts.stage2_dir": "hydra.run.dir",
}
_WITHOUT_EFFECT = ("hydra.job.chdir", "hydra.output_subdir", "profiling.outputs.write_ops_csv", "runtime.torch_profiler.warmup")
"""Keys of NO_EFFECT that are accepted on the command line; the others are translated or rejected with what to use."""
_ELSEWHERE = {
    "artifacts": "hydra.run.dir=DIR sets the run folder; docs/run-folder.md lists its files.",
    "inputs": "inputs.manifest=FILE repeats the prompts of a run's inputs.yaml; dataset=NAME selects others.",
    "run": f"profiling={DEEP} or {LIGHT} selects the passes; profiling.ncu.top=N is how many kernels are counted.",
    "profiling.outputs": "Every report is written to the run folder; docs/run-folder.md lists the files.",
    "runtime.torch_profiler": (
        "profiling.torch.enable=true profiles one iteration; profiling.torch.preset and profiling.torch.decode_steps set how."
    ),
    "hydra.job": "experiment=NAME names a run; hydra.run.dir=DIR sets its folder.",
    "hydra.sweep": "With -m, hydra.run.dir=DIR is the folder of the sweep.",
    "hydra.sweeper": "Add -m, and write the values with commas: runtime.batch_size=1,4,16.",
    "hydra.mode": "Add -m to run a sweep.",
}
_ACTIVITIES = {"cpu", "cuda"}


@dataclass(frozen=True)
class Translated:
    """Overrides of llm-perf, and a sentence for each that was written in another form."""

    overrides: list[str]
    notes: tuple[str, ...] = ()


def from_guides(overrides: Sequence[str]) -> Translated:
    """Return the overrides with those of the guides translated; raise a ConfigError for one without an equivalent."""
    found: list[str] = []
    notes: list[str] = []
    for place, text in enumerate(overrides):
        key, separator, value = text.partition("=")
        name = key.lstrip("+").lstrip("/")
        translate = _translation(name, value) if separator else None
        if translate is None:
            found.append(text)
            continue
        settings, note = translate(_unquoted(value), [other for index, other in enumerate(overrides) if index != place])
        found += settings
        notes.append(note or f"{text} was translated to {' '.join(settings)}.")
        if name == "run.mode" and (
            later := [word for word in overrides[place + 1 :] if word.lstrip("+").startswith("profiling=")]
        ):
            notes[-1] = f"{text} has no effect: {later[-1]} follows it and selects the passes."
    return Translated(found, tuple(notes))


_Translate = Callable[[str, Sequence[str]], tuple[list[str], str]]
"""Takes the value and the other overrides; returns the settings, and a note if "was translated to …" does not fit."""


def _translation(name: str, value: str) -> _Translate | None:
    """Return how to translate an override of the guides; None for any other."""
    if name in _RENAMED:
        return lambda text, _: ([f"{_RENAMED[name]}={_plain(text, one=text != value)}"], "")
    special = {"run.mode": _mode, "device": _device, "inputs.manifest": _manifest, "profiling.activities": _activities}
    if name in special:
        return special[name]
    if name in _TORCH_GROUPS or (name == "profiling" and value.startswith("@")):
        return _torch_file
    if name == "runtime.torch_profiler.steps" and value == "1":
        return lambda _, __: ([], "runtime.torch_profiler.steps=1 is the default: the torch pass profiles one iteration.")
    if name in _WITHOUT_EFFECT:
        return lambda value, _: ([], f"{name}={value} has no effect: {NO_EFFECT[name]}.")
    for group, remedy in _ELSEWHERE.items():
        if name == group or name.startswith(f"{group}."):
            raise ConfigError(f"{name} is not a setting of llm-perf.", remedy)
    return None


def _mode(value: str, _: Sequence[str]) -> tuple[list[str], str]:
    modes = value.split(",")
    for mode in modes:
        if mode not in _MODES:
            raise ConfigError(f"run.mode={mode} is not known.{nearest(mode, _MODES)}", f"Known: {', '.join(_MODES)}.")
    return [f"profiling={','.join(_MODES[mode] for mode in modes)}"], ""


def _device(value: str, _: Sequence[str]) -> tuple[list[str], str]:
    kind, _, index = value.partition(":")
    if kind in ("cpu", "auto") and not index:
        return [f"hardware.device={kind}"], ""
    if kind not in ("cuda", "gpu") or (index and not index.isdigit()):
        raise ConfigError(f"device={value} is not known.", "Use device=cpu, device=cuda or device=cuda:N.")
    return ["hardware.device=cuda", f"hardware.device_index={index or 0}"], ""


def _activities(value: str, _: Sequence[str]) -> tuple[list[str], str]:
    names = [name.strip().lower() for name in value.strip("[]").split(",") if name.strip()]
    for name in names:
        if name not in _ACTIVITIES:
            raise ConfigError(f"profiling.activities: {name} is not known.", "Known: cpu, cuda.")
    return [], f"profiling.activities={value} has no effect: torch.profiler always records the CPU and, in a GPU run, the GPU."


def _torch_file(value: str, _: Sequence[str]) -> tuple[list[str], str]:
    preset = torch_preset(f"profiling={value}", value)
    return [f"profiling={LIGHT}", *([f"profiling.torch.preset={preset}"] if preset != "minimal" else [])], ""


def _manifest(value: str, others: Sequence[str]) -> tuple[list[str], str]:
    """Repeat the prompts of another run, with as many and as long as they were, unless other overrides set these."""
    from llm_perf_opt.core.recorded_inputs import read_inputs

    recorded = read_inputs(Path(value))
    sizes = {
        "runtime.batch_size": len(recorded.ids),
        "runtime.prompt_tokens": recorded.longest,
        "runtime.num_new_tokens": recorded.new_tokens,
    }
    given = {text.lstrip("+").partition("=")[0] for text in others}
    settings = [f"{key}={size}" for key, size in sizes.items() if key not in given]
    return ["dataset=recorded", f"dataset.path={_plain(value, one=True)}", *settings], ""


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _plain(value: str, *, one: bool) -> str:
    """Return a value for Hydra's grammar, quoted if it contains a character that the grammar may interpret.

    `one`: a comma is part of the value and does not separate the values of a sweep.
    """
    if re.fullmatch(r"[\w./,:${}%@~+-]*", value) and not (one and "," in value):
        return value
    if '"' in value or "\\" in value:
        raise ConfigError(f"{value} contains a quotation mark or a backslash.", "Rename the file.")
    return f'"{value}"'
