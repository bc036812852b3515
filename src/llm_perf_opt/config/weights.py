"""Where the weights of a model come from: random, `model.path`, or the folder linked under the model's name in models/."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.core.user_files import PROJECT_MODELS, read_bytes

RANDOM_SUFFIX = "_random"
"""The end of the name of a run folder if the weights are random."""
USE_RANDOM = "model.source=random"
_SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "n_embd", "n_layer", "n_head",
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_routed_experts", "kv_lora_rank",
)  # fmt: skip
"""Fields that all versions of a model share; a fine-tuned one may have another vocabulary or more positions."""
_LARGEST_CONFIG = 10_000_000


@dataclass(frozen=True)
class Chosen:
    """The settings of the group `model`, with the weights decided."""

    model: dict[str, Any]
    notes: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    """How the folder's config.json differs from the architecture of the option."""


def choose_weights(
    model: Mapping[str, Any], option: str, given: frozenset[str], written: frozenset[str], *, named: bool
) -> Chosen:
    """Return the settings with `source` and `path` decided: a folder that is named or linked is used instead of random weights.

    `option` is the selected option, and `named` whether the user selected it. `given` are the keys of the command line,
    `written` those of the user's files.
    """
    path, random, decided = model.get("path"), model.get("source") == "random", "model.source" in given | written
    if not random and not decided:
        return Chosen(dict(model))  # an option for any folder
    if random and decided:
        if path and "model.path" not in given:
            note = f"The weights are random, as requested: model.path={path} is not used."
            return Chosen({**model, "path": None}, (note,))
        return Chosen(dict(model))
    if path is not None and not isinstance(path, str):
        return Chosen(dict(model))  # rejected by its type
    if path:
        if not named and "model.path" not in written:
            return Chosen(dict(model))  # a folder without a name: the check asks for one
        return _stored(model, option, path, given)
    place = PROJECT_MODELS / option
    if os.path.lexists(place) and (place.is_symlink() or place.is_dir()):
        target = f" → {place.readlink()}" if place.is_symlink() else ""
        note = f"model={option} uses the weights in {place}{target}. For random weights, add {USE_RANDOM}."
        return _stored(model, option, str(place), given, note)
    return Chosen(dict(model))


def _stored(model: Mapping[str, Any], option: str, path: str, given: frozenset[str], note: str = "") -> Chosen:
    shape = next((key for key in sorted(given) if key.startswith("model.architecture")), None)
    if shape is not None:
        raise ConfigError(
            f"{shape} has no effect on model={option}: its weights are read from {path}.",
            f"For random weights of another shape, add {USE_RANDOM}.",
        )
    differing = shape_differences(model.get("architecture") or {}, Path(path).expanduser())
    changed = {**model, "source": "pretrained", "path": path, "architecture": {}}
    return Chosen(changed, (note,) if note else (), tuple(differing))


def shape_differences(architecture: Mapping[str, Any], folder: Path) -> list[str]:
    """Return how the shape in a folder's config.json differs from an architecture; empty if it cannot be read."""
    try:
        if (folder / "config.json").stat().st_size > _LARGEST_CONFIG:
            return []
        fields = msgspec.json.decode(read_bytes(folder / "config.json"), type=dict[str, Any])
    except (OSError, ValueError, RecursionError, ParseError):  # what reads the folder reports it
        return []
    inner = fields.get("text_config")
    wanted = architecture.get("model_type")
    if isinstance(inner, Mapping) and wanted not in (None, fields.get("model_type")) and inner.get("model_type") == wanted:
        fields = dict(inner)
    names = [name for name in ("model_type", *_SHAPE) if name in architecture and name in fields]
    return [f"{name} is {fields[name]}, not {architecture[name]}" for name in names if fields[name] != architecture[name]]
