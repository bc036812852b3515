"""Write the figures of the cost model into tests/fixtures/cost/figures.json.gz, so that another implementation can be compared.

The file holds names, configurations and whole numbers only; tests/fixtures/cost/README.md describes it. Run it from the root:

    python tests/freeze_cost.py
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from llm_perf_opt.analysis.cost_model import cost
from llm_perf_opt.analysis.cost_model.architecture import Architecture
from llm_perf_opt.analysis.cost_model.communication import EXPERT_EXCHANGES, ExpertExchange, stage_collectives
from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.cost_model.linears import linear_layers
from llm_perf_opt.analysis.cost_model.sharding import DeviceStage, Plan, device_stages
from llm_perf_opt.analysis.cost_model.vision import ModuleWork
from llm_perf_opt.analysis.cost_model.vision_inputs import ImageRequest
from llm_perf_opt.analysis.cost_model.vision_models import Vision, modules_cost, prefill_cost, vision_of
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.core.errors import ConfigError

FILE = Path(__file__).parent / "fixtures" / "cost" / "figures.json.gz"
Figures = dict[str, Any]
"""Names to whole numbers, to other figures, or to lists of such; ready for JSON."""

_PREFILLS = (
    (1, 0, "last"),
    *((*size, logits) for size in ((33, 0), (2048, 0), (96, 1000)) for logits in ("last", "all", "none")),
)
_DECODES = tuple((1, cached, "last") for cached in (1, 511, 4096, 131072))
STEPS: dict[str, dict[str, Any]] = {
    f"b{batch} n{new} c{cached} {logits}": {"batch": batch, "new_tokens": new, "cached_tokens": cached, "logits": logits}
    for batch in (1, 7)
    for new, cached, logits in (*_PREFILLS, *_DECODES)
}
PREFILL, DECODE = "b7 n33 c0 last", "b7 n1 c511 last"
"""The steps of linear layers, and those with fp8 weights."""
DEVICE_STEPS = ("b1 n2048 c0 last", "b7 n33 c0 all", "b7 n96 c1000 none", "b1 n1 c4096 last", "b7 n1 c4096 last")
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"weights": "bf16", "kv": "bf16", "mla": "reexpand"},
    "fp8 weights, fp16 cache": {"weights": "fp8", "kv": "fp16", "mla": "reexpand"},
    "bf16 expand_once": {"weights": "bf16", "kv": "bf16", "mla": "expand_once"},
    "bf16 absorb": {"weights": "bf16", "kv": "bf16", "mla": "absorb"},
}
"""The last two differ from the first in latent attention only."""
CACHES = {f"b{batch} t{tokens}": {"batch": batch, "tokens": tokens} for batch in (1, 7) for tokens in (0, 1, 511, 4096, 131072)}
PLANS: dict[str, dict[str, int]] = {
    f"tp{tp} pp{pp} ep{ep}": {"tp": tp, "pp": pp, "ep": ep}
    for tp, pp, ep in (
        *((2, 1, 1), (4, 1, 1), (8, 1, 1), (1, 2, 1), (2, 2, 1)),
        *((2, 1, 2), (4, 1, 4), (8, 1, 8), (1, 1, 8), (2, 1, 8), (4, 1, 8), (1, 2, 8), (2, 2, 8)),
    )
}
IMAGES, SEQUENCES, TEXT_TOKENS = (1, 3), (1, 2), 7


def cases() -> Figures:
    """Return the models: every packaged preset, and those that are compared with the framework."""
    from transformers import AutoConfig

    from analysis.test_cost_against_framework import VARIANTS
    from analysis.test_vision_cost_against_framework import CASES, FULL_SIZE

    found = {name: _case(fields) for name, fields in {**presets(), **VARIANTS}.items()}
    encoded = {name: fields for name, fields in presets().items() if "text_config" in fields}
    found |= {f"{name}, decoder only": _case(fields, decoder_only=True) for name, fields in encoded.items()}
    found |= {f"{name} with images": _case(case.fields, case.request) for name, case in CASES.items()}
    for name, (fields, request) in FULL_SIZE.items():
        whole = AutoConfig.for_model(name, **fields).to_dict()
        found[f"{name} of full size"] = _case({key: whole[key] for key in whole if key != "transformers_version"}, request)
    return found


def presets() -> Figures:
    """Return the configuration of every packaged preset that has one."""
    files = resources.files("llm_perf_opt.config.conf").joinpath("model").iterdir()
    read = {file.name.removesuffix(".yaml"): yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}
    return {name: fields["architecture"] for name, fields in read.items() if fields.get("architecture")}


def _case(fields: Figures, request: ImageRequest | None = None, *, decoder_only: bool = False) -> Figures:
    request = request or ImageRequest(1)
    return {"config": fields, "decoder_only": decoder_only, "image_size": request.size, "image_tiles": request.tiles}


def figures(case: Figures) -> Figures:
    """Return everything that the cost model says of a model."""
    architecture = architecture_of(case["config"], decoder_only=case["decoder_only"])
    vision = None if case["decoder_only"] else vision_of(case["config"])
    names = _names(architecture)
    found = text_figures(architecture)
    if vision:
        size = case["image_size"] and tuple(case["image_size"])
        requests = [(ImageRequest(images, size, case["image_tiles"]), sequences) for images in IMAGES for sequences in SEQUENCES]
        found["images"] = {
            f"{of.images} in each of {number}": _images(architecture, vision, of, number, names) for of, number in requests
        }
    else:
        found["plans"] = {name: _devices(architecture, Plan(**sizes), names) for name, sizes in PLANS.items()}
    plain: Figures = json.loads(json.dumps(found))
    return plain


def text_figures(architecture: Architecture) -> Figures:
    """Return the figures of a model on one device, without images."""
    found: Figures = {
        "params": architecture.params,
        "active_params": architecture.active_params,
        "formats": {name: _sizes_and_steps(architecture, name) for name in _names(architecture)},
        "linear_layers": _linear_layers(architecture, STEPS[PREFILL]),
    }
    plain: Figures = json.loads(json.dumps(found))
    return plain


def _names(architecture: Architecture) -> list[str]:
    """Return the formats that make a difference for the model."""
    return [name for name in FORMATS if architecture.has_latent_attention or FORMATS[name]["mla"] == "reexpand"]


def _sizes_and_steps(architecture: Architecture, name: str) -> Figures:
    formats = cost.Formats(**FORMATS[name])
    steps = STEPS if formats.weights == "bf16" else (PREFILL, DECODE)
    return {
        "weight_bytes": cost.weight_bytes(architecture, formats),
        "kv_bytes_per_token": cost.kv_bytes_per_token(architecture, formats),
        "kv_cache_bytes": {key: cost.kv_cache_bytes(architecture, **sizes, formats=formats) for key, sizes in CACHES.items()},
        "steps": {step: _parts(cost.step_cost(architecture, Step(**STEPS[step]), formats)) for step in steps},
    }


def _parts(stage: cost.StageCost) -> Figures:
    names = ("flops", "flops_full_attention", "bytes", "within")
    return {part.name: {name: getattr(part, name) for name in names} for part in stage.components}


def _linear_layers(architecture: Architecture, prefill: Figures, modules: Iterable[ModuleWork] = ()) -> list[Figures]:
    found = linear_layers(architecture, Step(**prefill), Step(**STEPS[DECODE]), modules)
    return _rows(found, "in_features", "out_features", "prefill_rows", "decode_rows", "count")


def _rows(records: Iterable[object], *names: str) -> list[Figures]:
    """Return these fields of each record, in an order that does not depend on that of the records."""
    return [dict(zip(names, row, strict=True)) for row in sorted(attrgetter(*names)(record) for record in records)]


def _images(architecture: Architecture, vision: Vision, request: ImageRequest, sequences: int, names: Iterable[str]) -> Figures:
    images = vision.input(request, sequences)
    modules = vision.work(images)
    step: Figures = {"batch": sequences, "new_tokens": images.image_tokens[0] + TEXT_TOKENS}
    inside = {path: [entry for entry in modules if entry.module == path] for path in {entry.module for entry in modules}}
    every = {name: cost.Formats(**FORMATS[name]) for name in names}
    return {
        "image_tokens": images.image_tokens,
        "pixel_shapes": images.pixel_shapes,
        "grids": images.grids,
        "step": step,
        "modules": {path: {"params": sum(entry.params for entry in entries)} for path, entries in inside.items()},
        "formats": {
            name: {
                "modules": {path: _parts(modules_cost(entries, formats)) for path, entries in inside.items()},
                "prefill": _parts(prefill_cost(architecture, Step(**step), formats, vision, images)),
            }
            for name, formats in every.items()
        },
        "linear_layers": _linear_layers(architecture, step, modules),
    }


def _devices(architecture: Architecture, plan: Plan, names: Iterable[str]) -> list[Figures] | None:
    try:
        stages = device_stages(architecture, plan)
    except ConfigError:
        return None
    return [{"params": stage.params, "formats": {name: _device(stage, name) for name in names}} for stage in stages]


def _device(stage: DeviceStage, name: str) -> Figures:
    formats = cost.Formats(**FORMATS[name])
    exchanges = EXPERT_EXCHANGES if stage.plan.replicas > 1 else EXPERT_EXCHANGES[:1]
    steps = DEVICE_STEPS if formats.weights == "bf16" else (DECODE,)
    return {
        "weight_bytes": stage.weight_bytes(formats),
        "kv_cache_bytes": {key: stage.kv_cache_bytes(**sizes, formats=formats) for key, sizes in CACHES.items()},
        "steps": {key: _parts(stage.cost(Step(**STEPS[key]), formats)) for key in steps},
        "collectives": {
            exchange: {key: _collectives(stage, Step(**STEPS[key]), formats, exchange) for key in steps} for exchange in exchanges
        },
    }


def _collectives(stage: DeviceStage, step: Step, formats: cost.Formats, exchange: ExpertExchange) -> list[Figures]:
    return _rows(stage_collectives(stage, step, formats, exchange), "kind", "group", "purpose", "ranks", "bytes", "count")


def differences(frozen: Any, found: Any, path: str = "") -> Iterator[str]:
    """Yield where two figures differ, and how."""
    if isinstance(frozen, dict) and isinstance(found, dict):
        for name in sorted(frozen.keys() | found.keys()):
            yield from differences(frozen.get(name, "absent"), found.get(name, "absent"), f"{path}/{name}")
    elif isinstance(frozen, list) and isinstance(found, list):
        if len(frozen) != len(found):
            yield f"{path}: {len(frozen)} rows are now {len(found)}"
        for index, (one, other) in enumerate(zip(frozen, found, strict=False)):
            yield from differences(one, other, f"{path}/{index}")
    elif type(frozen) is not type(found) or frozen != found:
        yield f"{path}: {frozen} is now {found}"


def read() -> Figures:
    """Return what the file holds."""
    held: Figures = json.loads(gzip.decompress(FILE.read_bytes()))
    return held


def main() -> None:
    """Write the file."""
    inputs = {"formats": FORMATS, "steps": STEPS, "caches": CACHES, "plans": PLANS}
    models = {name: {**case, "figures": figures(case)} for name, case in cases().items()}
    text = json.dumps({**inputs, "models": models}, sort_keys=True, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
