"""The families of vision-language models that run with images: the sub-stages of each, and how it takes an image.

The sizes follow from the model's configuration. They are those that the family's forward in transformers computes.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from llm_perf_opt.config.parallel import ranks_of
from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.config.schema import DatasetConfig, RunConfig
from llm_perf_opt.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Size = tuple[int, int]
"""Height and width in pixels."""
Grid = tuple[int, int, int]
"""Frames, rows and columns in patches."""
LANGUAGE = "language"
"""The sub-stage of the text decoder. It is marked in prefill only: in a decode step it is nearly the whole step."""
_LOCAL_TILE = 768
"""Side of the tiles of DeepSeek-OCR-2: `tile_size` of its image processor in transformers."""
_FREE_TOKENS_PER_SIDE = 16
"""Default size of an image for families without a size of their own: 16 × 16 tokens, as many as Gemma 3 and InternVL use."""


@dataclass(frozen=True)
class ImageLayout:
    """One image as the model takes it."""

    size: Size
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of its rows in each tensor of pixels, by the argument of the model's forward."""
    grids: tuple[Grid, ...]
    """Patches of each of its rows in `pixel_values`."""
    tokens: int
    """Tokens that stand for it in the prompt."""
    tiles: int = 0


@dataclass(frozen=True)
class VisionFamily:
    """How a family of models takes images."""

    substages: tuple[tuple[str, str], ...]
    """(name, path of the submodule) of each vision sub-stage; a path that ends with `.*` means every child."""
    default_size: Callable[[Any], Size]
    layout: Callable[[Any, Size, int], ImageLayout]
    """Takes the configuration, the size of the image and the number of tiles."""
    fixed: bool = True
    """Whether every image must have the default size: the position embeddings fit no other."""
    tiled: bool = False
    """Whether large images are cut into tiles."""
    marked_by: Literal["", "token_type_ids", "mm_token_type_ids"] = ""
    """The argument that marks image tokens with 1."""
    brackets: tuple[str, str] | None = None
    """Fields of the configuration with the ids of the tokens before and after an image."""
    grid_argument: str = ""
    """The argument that takes the grids."""
    tiles_argument: str = ""
    """The argument that takes the number of tiles of each image, if these have a tensor of their own."""


def _pair(value: Any) -> Size:
    """Return a size of transformers, which is one number if both sides are equal."""
    height, width = value if isinstance(value, (list, tuple)) else (value, value)
    return int(height), int(width)


def _patches(patch_size: Any, size: Size) -> Grid:
    height, width = _pair(patch_size)
    return 1, size[0] // height, size[1] // width


def _vision_size(config: Any) -> Size:
    return _pair(config.vision_config.image_size)


def _llava(config: Any, size: Size, tiles: int) -> ImageLayout:
    vision = config.vision_config
    if vision.model_type not in ("clip_vision_model", "siglip_vision_model"):
        raise ConfigError(
            f"Images for a LLaVA model with the encoder {vision.model_type} are not supported: clip_vision_model and "
            "siglip_vision_model are.",
            "Add dataset.images=0 to run it on text only.",
        )
    grid = _patches(vision.patch_size, size)
    class_token = 1 if vision.model_type == "clip_vision_model" else 0
    dropped = 1 if config.vision_feature_select_strategy == "default" else 0
    return ImageLayout(size, {"pixel_values": (1, vision.num_channels, *size)}, (grid,), math.prod(grid) + class_token - dropped)


def _gemma3(config: Any, size: Size, tiles: int) -> ImageLayout:
    vision = config.vision_config
    grid = _patches(vision.patch_size, size)
    return ImageLayout(size, {"pixel_values": (1, vision.num_channels, *size)}, (grid,), int(config.mm_tokens_per_image))


def _views(tiles: int) -> int:
    """Return the views of an image: its tiles and, if there are any, a small view of the whole image."""
    return tiles + 1 if tiles else 1


def _internvl(config: Any, size: Size, tiles: int) -> ImageLayout:
    vision, views = config.vision_config, _views(tiles)
    grid = _patches(vision.patch_size, size)
    tokens = int(grid[1] * config.downsample_ratio) * int(grid[2] * config.downsample_ratio)
    shapes = {"pixel_values": (views, vision.num_channels, *size)}
    return ImageLayout(size, shapes, (grid,) * views, tokens * views, tiles)


def _halved_twice(side: int) -> int:
    """Return the side of a feature map after two convolutions with a kernel of 3, stride 2 and padding 1."""
    return math.ceil(math.ceil(side / 2) / 2)


def _got_ocr2(config: Any, size: Size, tiles: int) -> ImageLayout:
    vision, views = config.vision_config, _views(tiles)
    grid = _patches(vision.patch_size, size)
    tokens = _halved_twice(grid[1]) * _halved_twice(grid[2])
    shapes = {"pixel_values": (views, vision.num_channels, *size)}
    return ImageLayout(size, shapes, (grid,) * views, tokens * views, tiles)


def _queries(grid: Grid) -> int:
    """Return the learned queries of DeepSeek-OCR-2 for a view: 144 up to 144 patches after SAM, else 256."""
    return 144 if _halved_twice(grid[1]) * _halved_twice(grid[2]) <= 144 else 256


def _deepseek_ocr2(config: Any, size: Size, tiles: int) -> ImageLayout:
    sam = config.vision_config.sam_config
    _check_multiple(size, _pair(sam.patch_size)[0])
    whole = _patches(sam.patch_size, size)
    shapes: dict[str, tuple[int, ...]] = {"pixel_values": (1, sam.num_channels, *size)}
    tokens = _queries(whole) + 1  # and the separator of the views
    if tiles:
        shapes["pixel_values_local"] = (tiles, sam.num_channels, _LOCAL_TILE, _LOCAL_TILE)
        tokens += tiles * _queries(_patches(sam.patch_size, (_LOCAL_TILE, _LOCAL_TILE)))
    return ImageLayout(size, shapes, (whole,), tokens, tiles)


def _deepseek_vl_hybrid(config: Any, size: Size, tiles: int) -> ImageLayout:
    low, high = config.vision_config, config.high_res_vision_config
    grid = _patches(low.patch_size, _pair(low.image_size))
    shapes = {
        "pixel_values": (1, low.num_channels, *_pair(low.image_size)),
        "high_res_pixel_values": (1, high.num_channels, *size),
    }
    return ImageLayout(size, shapes, (grid,), math.prod(grid))


def _qwen_size(config: Any) -> Size:
    side = _pair(config.vision_config.patch_size)[0] * config.vision_config.spatial_merge_size * _FREE_TOKENS_PER_SIDE
    return side, side


def _qwen(config: Any, size: Size, tiles: int) -> ImageLayout:
    vision = config.vision_config
    _check_multiple(size, _pair(vision.patch_size)[0] * vision.spatial_merge_size)
    grid = _patches(vision.patch_size, size)
    frames = _pair(vision.temporal_patch_size)[0]
    patch = vision.in_channels * frames * math.prod(_pair(vision.patch_size))
    tokens = math.prod(grid) // vision.spatial_merge_size**2
    return ImageLayout(size, {"pixel_values": (math.prod(grid), patch)}, (grid,), tokens)


def _check_multiple(size: Size, factor: int) -> None:
    if size[0] % factor or size[1] % factor:
        near = [max(factor, round(side / factor) * factor) for side in size]
        raise ConfigError(
            f"An image of {size[0]} × {size[1]} pixels cannot be cut into patches: this model needs multiples of {factor}.",
            f"Use dataset.image_height={near[0]} dataset.image_width={near[1]}.",
        )


_VISION = ("vision", "model.vision_tower")
_PROJECTOR = ("projector", "model.multi_modal_projector")
_QWEN = VisionFamily(
    (("vision", "model.visual"), ("projector", "model.visual.merger")),
    _qwen_size,
    _qwen,
    fixed=False,
    marked_by="mm_token_type_ids",
    brackets=("vision_start_token_id", "vision_end_token_id"),
    grid_argument="image_grid_thw",
)
FAMILIES: Mapping[str, VisionFamily] = {
    "deepseek_ocr2": VisionFamily(
        (("sam", "model.vision_tower.sam_encoder"), ("encoder", "model.vision_tower.vision_encoder"), _PROJECTOR),
        lambda config: _pair(config.vision_config.sam_config.image_size),
        _deepseek_ocr2,
        fixed=False,
        tiled=True,
        tiles_argument="num_local_patches",
    ),
    "deepseek_vl_hybrid": VisionFamily(
        (
            ("siglip", "model.vision_model"),
            ("sam", "model.high_res_vision_model"),
            ("sam_neck", "model.high_res_vision_neck"),
            ("sam_proj", "model.high_res_vision_proj"),
            ("projector", "model.aligner"),
        ),
        lambda config: _pair(config.high_res_vision_config.image_size),
        _deepseek_vl_hybrid,
    ),
    "gemma3": VisionFamily(
        (_VISION, _PROJECTOR),
        _vision_size,
        _gemma3,
        marked_by="token_type_ids",
        brackets=("boi_token_index", "eoi_token_index"),
    ),
    "got_ocr2": VisionFamily((_VISION, _PROJECTOR), _vision_size, _got_ocr2, tiled=True),
    "internvl": VisionFamily((_VISION, _PROJECTOR), _vision_size, _internvl, tiled=True),
    "llava": VisionFamily((_VISION, _PROJECTOR), _vision_size, _llava),
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": VisionFamily(
        (*_QWEN.substages, ("deepstack", "model.visual.deepstack_merger_list.*")),
        _qwen_size,
        _qwen,
        fixed=False,
        marked_by=_QWEN.marked_by,
        brackets=_QWEN.brackets,
        grid_argument=_QWEN.grid_argument,
    ),
}


def family_of(config: "PretrainedConfig") -> VisionFamily | None:
    """Return the family of a model; None for a text model and for families that are run on text only."""
    return FAMILIES.get(str(config.model_type))


def default_substages(model_type: str) -> dict[str, str]:
    """Return the sub-stages of a family, name → path of the submodule; empty for others."""
    family = FAMILIES.get(model_type)
    return {**dict(family.substages), LANGUAGE: "model.language_model"} if family else {}


def layout_of(config: "PretrainedConfig", size: Size | None, tiles: int) -> ImageLayout:
    """Return how the model takes an image of this size, or raise if it cannot."""
    family = FAMILIES[str(config.model_type)]
    if tiles and not family.tiled:
        raise ConfigError(
            f"dataset.image_tiles={tiles} has no effect on a {config.model_type} model, which does not cut images into tiles.",
            "Use dataset.images=N for several images per prompt.",
        )
    usual = family.default_size(config)
    if family.fixed and size is not None and size != usual:
        raise ConfigError(
            f"This {config.model_type} model takes images of {usual[0]} × {usual[1]} pixels only, not {size[0]} × {size[1]}.",
            "Leave out dataset.image_height and dataset.image_width.",
        )
    return family.layout(config, size or usual, tiles)


def image_size(dataset: DatasetConfig) -> Size | None:
    """Return the requested size of an image; None for the default of the model."""
    return None if dataset.image_height is None or dataset.image_width is None else (dataset.image_height, dataset.image_width)


def check_image_request(config: RunConfig, model_type: str) -> None:
    """Raise if the model takes no images and they are requested, or if other settings of the request exclude its images."""
    dataset, runtime = config.dataset, config.runtime
    if model_type not in FAMILIES:
        _refuse_images(dataset, model_type)
        return
    if not dataset.images:
        return
    folder = dataset.kind == "image_folder"
    text_only = f"{'dataset=sample_prompts ' if folder else ''}dataset.images=0 to run the model on text only."
    if dataset.kind == "recorded":
        fact = f"dataset=recorded repeats token ids only, but {config.model.name} needs images."
        raise ConfigError(fact, "Choose another dataset.")
    traits = traits_of(runtime.type)
    if not traits.images:
        fact = f"runtime={runtime.type} accepts token ids only, not the images of {config.model.name}."
        declares = f" A runner that takes images declares it: images=True in its Runtime ({traits.provided_by})."
        raise ConfigError(fact, f"Use runtime=pytorch, or {text_only}{declares if traits.provided_by else ''}")
    if ranks_of(config) > 1:
        fact = f"runtime.tensor_parallel={ranks_of(config)}: prompts with images are not supported."
        raise ConfigError(fact, f"Use runtime.tensor_parallel=1, or {text_only}")
    if runtime.quantization != "none":
        fact = f"runtime.quantization={runtime.quantization} does not support images: it would also quantize the encoders."
        raise ConfigError(fact, f"Use runtime.quantization=none, or {text_only}")


def check_random_images(config: RunConfig, fields: Mapping[str, Any]) -> None:
    """Raise if the model cannot take random images of the requested size or tiles, as far as its configuration shows that.

    A field that the configuration leaves to transformers' default is not known here; the measured process checks it.
    """
    dataset = config.dataset
    if str(fields.get("model_type")) not in FAMILIES or not dataset.images or dataset.kind == "image_folder":
        return
    with suppress(AttributeError, TypeError, ValueError, ZeroDivisionError):
        layout_of(_attributes(fields), image_size(dataset), dataset.image_tiles)


def _attributes(value: Any) -> Any:
    """Return the fields of a configuration as attributes, as transformers has them."""
    return SimpleNamespace(**{str(key): _attributes(one) for key, one in value.items()}) if isinstance(value, Mapping) else value


def _refuse_images(dataset: DatasetConfig, model_type: str) -> None:
    """Raise for settings of images that a text model would ignore. One image per prompt is the default, not a request."""
    asked = {"images": dataset.images > 1, "image_height": dataset.image_height, "image_tiles": dataset.image_tiles}
    given = [name for name, value in asked.items() if value]
    wrong = f"dataset={dataset.name}" if dataset.kind == "image_folder" else f"dataset.{given[0]}" if given else ""
    if wrong:
        raise ConfigError(
            f"{wrong} needs a vision-language model; {model_type} models run on text only.",
            f"Families that take images: {', '.join(FAMILIES)}.",
        )
