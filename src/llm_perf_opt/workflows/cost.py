"""`llm-perf cost`: resolve the model, the sizes and the hardware, then compute cost and roofline time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_perf_opt.analysis.cost_model.architecture import Architecture
from llm_perf_opt.analysis.cost_model.cost import Formats, ModelCost, model_cost
from llm_perf_opt.analysis.cost_model.models import architecture_described
from llm_perf_opt.analysis.cost_model.vision_inputs import ImageRequest
from llm_perf_opt.analysis.cost_model.vision_models import ImagePrompt, Vision, vision_of, with_images
from llm_perf_opt.analysis.limits.hardware import Hardware, hardware_named, hardware_of_device
from llm_perf_opt.analysis.limits.links import Link, measured_link
from llm_perf_opt.analysis.limits.parallel import ParallelRow
from llm_perf_opt.analysis.limits.peaks import measured_hardware
from llm_perf_opt.analysis.limits.roofline import RooflineTime, TurningPoint, WhatIf, turning_point, what_if
from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.errors import ConfigError, words_of
from llm_perf_opt.core.machine_records import read_ceilings
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.user_files import check_ordinary, read_text
from llm_perf_opt.workflows.cost_parallel import ParallelRequest, parallel_rows, plain, row_json
from llm_perf_opt.workspace.data.model_tree import model_folder

_LARGEST_CONFIG = 16 * 1024 * 1024


@dataclass(frozen=True)
class CostRequest:
    """The options of the command."""

    overrides: Sequence[str]
    model_config: Path | None
    config_dir: Path | None
    batch: str
    prompt: str
    context: str | None
    """None: the whole prompt, with its images."""
    dtype: str
    kv_dtype: str
    mla: str | None
    hardware: str | None
    decoder_only: bool = False
    images: int | None = None
    """Per prompt; None: one, if the model takes images."""
    image_height: int | None = None
    image_width: int | None = None
    image_tiles: int | None = None
    parallel: ParallelRequest = field(default_factory=ParallelRequest)
    peaks: Path | None = None
    """Measured peaks, as `llm-perf ceilings` and runs write them."""


@dataclass(frozen=True)
class CostResult:
    """The cost for single sizes; with hardware, the roofline times of every combination."""

    cost: ModelCost | None
    hardware: Hardware | None
    rows: list[WhatIf]
    turning: list[TurningPoint]
    part_of: str | None = None
    """The model, if only its text decoder was counted."""
    parallel: tuple[ParallelRow, ...] = ()
    """The same rows on the devices of a plan; empty for a model with images."""
    model: str = ""
    """The name of the model."""

    def to_json(self) -> dict[str, Any]:
        """Return the data that `--json` prints."""
        found: dict[str, Any] = self.cost.to_json() if self.cost else {}
        if self.part_of:
            found["text_decoder_of"] = self.part_of
        if self.hardware:
            found["hardware"] = {"key": self.hardware.key, "name": self.hardware.name, "source": self.hardware.source}
            found["floors"] = [_row_json(row) for row in self.rows]
            found["turning_points"] = [
                {
                    "context": point.context,
                    "dtype": point.formats.weights,
                    "step_batch": plain(point.step),
                    "weights_batch": plain(point.weights),
                }
                for point in self.turning
            ]
        if self.parallel:
            found["parallel"] = [row_json(row) for row in self.parallel]
        return found


def estimate_cost(request: CostRequest) -> CostResult:
    """Return everything that `llm-perf cost` prints."""
    name, fields = _named_architecture(request)
    architecture = architecture_described(fields, decoder_only=request.decoder_only)
    images = _image_prompt(request, vision_of(fields) if architecture.vision_params else None)
    batches, prompts = _numbers("batch", request.batch), _numbers("prompt", request.prompt)
    added = images.tokens if images else 0
    contexts = [prompt + added for prompt in prompts] if request.context is None else _numbers("context", request.context)
    formats = [_formats(dtype, request) for dtype in _words("dtype", request.dtype)]
    _check_effect(request, architecture)
    single = len(batches) == len(prompts) == len(contexts) == len(formats) == 1
    hardware, measured = _hardware(request)
    if not single and hardware is None:
        raise ConfigError("Lists of sizes or dtypes work only with --hardware.", "Add it, as in --hardware h100_sxm.")
    if len(prompts) > 1:
        raise ConfigError("--prompt takes one length.", "Give --batch, --context and --dtype as lists.")
    cost, decoder_of = None, None if architecture.vision_params else architecture.part_of
    if single:
        cost = model_cost(architecture, batch=batches[0], prompt=prompts[0], context=contexts[0], formats=formats[0])
        cost = with_images(cost, images) if images else cost
    if hardware is None:
        if request.parallel.given:
            remedy = "Add --hardware, as in --hardware h100_sxm, or --peaks."
            raise ConfigError(f"{request.parallel.given} works only with hardware.", remedy)
        return CostResult(cost, None, [], [], decoder_of)
    rows = what_if(
        architecture, hardware, batches=batches, contexts=contexts, formats=formats, prompt=prompts[0], images=images,
        memory_share=request.parallel.share,
    )  # fmt: skip
    turning = [turning_point(architecture, hardware, context, chosen) for chosen in formats for context in contexts]
    parallel = parallel_rows(request.parallel, architecture, hardware, rows, measured)
    return CostResult(cost, hardware, rows, turning, decoder_of, tuple(parallel), name or architecture.model_type)


def _hardware(request: CostRequest) -> tuple[Hardware | None, Link | None]:
    """Return the hardware and, if it was measured, the link between several of it."""
    named = None if request.hardware is None else hardware_named(request.hardware)
    if request.peaks is None:
        return named, None
    check_ordinary(request.peaks)
    if not request.peaks.is_file():
        remedy = "Give raw/ceilings/ceilings.json of a run, or the file that `llm-perf ceilings` names."
        raise ConfigError(f"{request.peaks}: no such file.", remedy)
    found = read_ceilings(request.peaks)
    product = hardware_of_device(found.ceilings.device_name)
    if isinstance(product, Missing):
        name = found.ceilings.device_name
        raise ConfigError(f"{request.peaks} has the peaks of '{name}', which is not in the hardware table.", "Omit --peaks.")
    if found.doubts:
        raise ConfigError(f"{request.peaks} was measured under bad conditions: {found.doubts[0]}.", "Measure again.")
    if named is not None and named.key != product.key:
        raise ConfigError(f"{request.peaks} has the peaks of {product.name}, not of --hardware {named.key}.", "Omit one of them.")
    return measured_hardware(product, found.ceilings), measured_link(found.ceilings)


def _image_prompt(request: CostRequest, vision: Vision | None) -> ImagePrompt | None:
    """Return the images that the options describe; None for a model or a request without images."""
    given = {
        "--images": request.images,
        "--image-height": request.image_height,
        "--image-width": request.image_width,
        "--image-tiles": request.image_tiles,
    }
    named = next((option for option, value in given.items() if value is not None), None)
    if vision is None:
        if named is not None:
            why = "--decoder-only counts no images" if request.decoder_only else "the model takes no images"
            raise ConfigError(f"{named} has no effect: {why}.", "Omit it.")
        return None
    if (request.image_height is None) != (request.image_width is None):
        raise ConfigError("--image-height and --image-width belong together.", "Give both, or omit both.")
    size = None
    if request.image_height is not None and request.image_width is not None:
        size = request.image_height, request.image_width
    images = 1 if request.images is None else request.images
    return ImagePrompt(vision, ImageRequest(images, size, request.image_tiles or 0))


def _check_effect(request: CostRequest, architecture: Architecture) -> None:
    """Reject options that would have no effect."""
    if request.decoder_only and architecture.part_of is None:
        raise ConfigError(f"--decoder-only has no effect: {architecture.model_type} is only a text decoder.", "Omit it.")
    if request.mla is not None and not architecture.has_latent_attention:
        raise ConfigError(f"--mla {request.mla} has no effect: {architecture.model_type} has no latent attention.", "Omit it.")


def _named_architecture(request: CostRequest) -> tuple[str, Any]:
    """Return the name of the model, possibly empty, and the fields of its configuration."""
    file = request.model_config
    if file is not None:
        if request.overrides:
            raise ConfigError(f"--model-config and '{request.overrides[0]}' both name a model.", "Give one of them.")
        return file.parent.name if file.name == "config.json" else file.stem, _read_json(file)
    for word in request.overrides:
        if "=" in word and not word.lstrip("+~").startswith("model"):
            raise ConfigError(
                f"'{word}' does not change the cost of a model.", "cost takes model=NAME and model.architecture.FIELD=VALUE."
            )
    model = compose(request.overrides, request.config_dir).config.model
    if model.source == "pretrained":
        return model.name, _read_json(model_folder(model.path or "") / "config.json")
    return model.name, model.architecture


def _read_json(path: Path) -> Any:
    try:
        check_ordinary(path)
        if path.stat().st_size > _LARGEST_CONFIG:
            raise ConfigError(f"{path} is too large to be a model's config.json.")
        return json.loads(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.", "Give a Hugging Face config.json.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {words_of(error)}", "Give a Hugging Face config.json.") from error


def _formats(dtype: str, request: CostRequest) -> Formats:
    if request.mla is None:
        return Formats(dtype, request.kv_dtype)
    return Formats(dtype, request.kv_dtype, request.mla)  # type: ignore[arg-type]  # Formats checks it


def _words(name: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"--{name} is empty.")
    return words


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(word) for word in _words(name, text)]
    except ValueError:
        raise ConfigError(f"--{name}={text}: expected a whole number, or several with commas.") from None


def _row_json(row: WhatIf) -> dict[str, Any]:
    return {
        "dtype": row.formats.weights,
        "kv_dtype": row.formats.kv,
        "batch": row.batch,
        "prompt": row.prompt,
        "context": row.context,
        "weight_bytes": row.weight_bytes,
        "kv_cache_bytes": row.kv_cache_bytes,
        "fits": plain(row.fits),
        "memory_share": row.memory_share,
        "prefill": _roofline_json(row.prefill),
        "decode": _roofline_json(row.decode),
        "decode_tokens_per_s": plain(row.decode_tokens_per_s),
    }


def _roofline_json(value: Maybe[RooflineTime]) -> Any:
    if isinstance(value, Missing):
        return plain(value)
    return {
        "seconds": value.seconds,
        "compute_s": value.compute_s,
        "memory_s": value.memory_s,
        "bound": value.bound,
        "parts": [{"name": part.name, "seconds": part.seconds, "bound": part.bound} for part in value.components],
    }
