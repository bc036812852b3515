"""Vision-language models: what their image encoders and projectors compute, and the tensors that an image becomes.

To add a family: a function that yields the work of its modules, one that returns the tensors of its images, and a row in
FAMILIES. Fields that are absent have the default that transformers uses for the model_type.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.cost_model.architecture import Architecture, GroupedAttention, Layer
from llm_perf_opt.analysis.cost_model.blocks import (
    Fields,
    decoder,
    experts,
    gated_mlp,
    grouped_attention,
    head_size,
    layer_number,
    no_window,
    qwen_window,
    uniform_layers,
    windows,
)
from llm_perf_opt.analysis.cost_model.vision import (
    Attended,
    EncoderLayer,
    Maps,
    ModuleWork,
    Views,
    convolution,
    linear,
    patches,
    positions,
    table,
)
from llm_perf_opt.analysis.cost_model.vision_encoders import Vit, sam, sam_neck, vit
from llm_perf_opt.analysis.cost_model.vision_inputs import (
    ImageRequest,
    ImageTensors,
    check_multiple,
    pixel_tensor,
    pixel_views,
    whole_images,
)
from llm_perf_opt.analysis.cost_model.vision_qwen import QwenVision, qwen2_5_vision, qwen3_vision
from llm_perf_opt.core.vision_records import VisionInput

_TOWER = "model.vision_tower"
_PROJECTOR = "model.multi_modal_projector"

# --- one vision transformer -------------------------------------------------------------------------------------------


def _llava(c: Fields, width: int, images: VisionInput) -> Iterator[ModuleWork]:
    encoder, pixels = vit(c.section("vision_config", "clip_vision_model")), pixel_views(c, images, "pixel_values")
    yield from encoder.work(_TOWER, pixels)
    tokens = sum(maps.count * _llava_tokens(c, encoder, (maps.height, maps.width)) for maps in pixels)
    bias = c.flag("multimodal_projector_bias", True)
    inputs = encoder.layer.hidden * c.entries("vision_feature_layer")
    yield linear(_PROJECTOR, "projector", tokens, inputs, width, bias=bias)
    yield linear(_PROJECTOR, "projector", tokens, width, width, bias=bias)


def _llava_tokens(c: Fields, encoder: Vit, size: tuple[int, int]) -> int:
    drops_first = c.word("vision_feature_select_strategy", "default", ("default", "full")) == "default"
    return encoder.patches_in(size) + encoder.class_token - drops_first


def _llava_tensors(c: Fields, request: ImageRequest) -> ImageTensors:
    encoder = vit(c.section("vision_config", "clip_vision_model"))
    return replace(whole_images(c, request, encoder.image, encoder.patch), tokens=_llava_tokens(c, encoder, encoder.image))


def _gemma3(c: Fields, width: int, images: VisionInput) -> Iterator[ModuleWork]:
    encoder, pixels = vit(c.section("vision_config", "siglip_vision_model")), pixel_views(c, images, "pixel_values")
    yield from encoder.work(_TOWER, pixels)
    rows = sum(maps.count for maps in pixels) * _gemma3_tokens(c, encoder)
    yield linear(_PROJECTOR, "projector", rows, encoder.layer.hidden, width, bias=False)
    yield table(_PROJECTOR, encoder.layer.hidden, component="projector")


def _gemma3_tokens(c: Fields, encoder: Vit) -> int:
    """Return the tokens of an image: its patches, averaged over squares."""
    side, wanted = encoder.grid[0], int(c.size("mm_tokens_per_image", default=256) ** 0.5)
    if wanted > side:
        raise c.error("mm_tokens_per_image", f"is larger than the number of patches ({side} × {side}).")
    averaged = side // (side // wanted)
    return averaged * averaged


def _gemma3_tensors(c: Fields, request: ImageRequest) -> ImageTensors:
    encoder = vit(c.section("vision_config", "siglip_vision_model"))
    return replace(whole_images(c, request, encoder.image, encoder.patch), tokens=_gemma3_tokens(c, encoder))


def _internvl(c: Fields, width: int, images: VisionInput) -> Iterator[ModuleWork]:
    encoder, pixels = vit(c.section("vision_config", "internvl_vision")), pixel_views(c, images, "pixel_values")
    yield from encoder.work(_TOWER, pixels)
    rows = sum(maps.count * _internvl_tokens(c, encoder, (maps.height, maps.width)) for maps in pixels)
    inputs = encoder.layer.hidden * int(1 / c.number("downsample_ratio", 0.5)) ** 2
    yield table(_PROJECTOR, 2 * inputs, component="projector")
    yield linear(_PROJECTOR, "projector", rows, inputs, width)
    yield linear(_PROJECTOR, "projector", rows, width, width)


def _internvl_tokens(c: Fields, encoder: Vit, size: tuple[int, int]) -> int:
    """Return the tokens of a view: a square of patches becomes one token."""
    side = int(int(encoder.patches_in(size) ** 0.5) * c.number("downsample_ratio", 0.5))
    return side * side


def _internvl_tensors(c: Fields, request: ImageRequest) -> ImageTensors:
    encoder, views = vit(c.section("vision_config", "internvl_vision")), request.tiles + 1
    found = whole_images(c, request, encoder.image, encoder.patch, views=views)
    return replace(found, tokens=views * _internvl_tokens(c, encoder, encoder.image))


# --- SAM --------------------------------------------------------------------------------------------------------------

_GOT_MLP = 3072
"""Default `mlp_dim` of got_ocr2."""


def _got_ocr2(c: Fields, width: int, images: VisionInput) -> Iterator[ModuleWork]:
    encoder, pixels = sam(c.section("vision_config", "got_ocr2_vision"), _GOT_MLP), pixel_views(c, images, "pixel_values")
    yield from encoder.work(_TOWER, pixels)
    first, maps = convolution(_PROJECTOR, patches(pixels, encoder.patch), encoder.outputs, 2 * encoder.outputs, 3, stride=2)
    second, maps = convolution(_PROJECTOR, maps, 2 * encoder.outputs, width, 3, stride=2)
    yield from (first, second, linear(_PROJECTOR, "projector", positions(maps), width, width))


def _got_ocr2_tensors(c: Fields, request: ImageRequest) -> ImageTensors:
    encoder, views = sam(c.section("vision_config", "got_ocr2_vision"), _GOT_MLP), request.tiles + 1
    found = whole_images(c, request, encoder.image, encoder.patch, views=views)
    return replace(found, tokens=views * positions(_quartered(patches((Maps(1, *encoder.image),), encoder.patch))))


def _quartered(views: Views) -> Views:
    """Return the maps after two convolutions with a stride of 2."""
    return tuple(Maps(maps.count, -(-maps.height // 4), -(-maps.width // 4)) for maps in views)


def _deepseek_vl_hybrid(c: Fields, width: int, images: VisionInput) -> Iterator[ModuleWork]:
    low = vit(c.section("vision_config", "siglip_vision_model"))
    high = sam(c.section("high_res_vision_config", "sam_vision_model"))
    pixels, high_pixels = pixel_views(c, images, "pixel_values"), pixel_views(c, images, "high_res_pixel_values")
    yield from low.work("model.vision_model", pixels)
    yield from high.work("model.high_res_vision_model", high_pixels)
    maps = patches(high_pixels, high.patch)
    yield from sam_neck("model.high_res_vision_neck", maps, high.layer.hidden, high.outputs)
    # Both the last maps and those of an earlier layer are resized to four times the side of the other encoder's grid.
    number, side = sum(view.count for view in maps), 4 * low.grid[0]
    path, resized = "model.high_res_vision_proj", (Maps(2 * number, side, side),)
    first, halved = convolution(path, resized, high.outputs, 2 * high.outputs, 3, stride=2)
    second, quartered = convolution(path, halved, 2 * high.outputs, 4 * high.outputs, 3, stride=2)
    yield from (first, second, table(path, 1))
    rows = positions(patches(pixels, low.patch))
    yield linear("model.aligner", "projector", rows, low.layer.hidden, width // 2)
    yield linear("model.aligner", "projector", positions(quartered) // 2, 4 * high.outputs, width // 2)
    yield linear("model.aligner", "projector", rows, width, width)


def _deepseek_vl_hybrid_tensors(c: Fields, request: ImageRequest) -> ImageTensors:
    low = vit(c.section("vision_config", "siglip_vision_model"))
    high = sam(c.section("high_res_vision_config", "sam_vision_model"))
    whole_images(c, request, high.image, high.patch)
    found = whole_images(c, replace(request, size=None), low.image, low.patch)
    shapes = {**found.shapes, "high_res_pixel_values": pixel_tensor(request.images, high.image)}
    return ImageTensors(shapes, found.grids, low.patches_in(low.image))


# --- DeepSeek-OCR-2 ---------------------------------------------------------------------------------------------------

_TILE = (768, 768)
"""Size of a tile: the default `tile_size` of the image processor."""
_QUERIES = (144, 256)
"""Sizes of the two tables of learned queries. The first is used for maps with at most as many positions."""


def _deepseek_ocr2(c: Fields, width: int, images: VisionInput) -> Iterator[ModuleWork]:
    f = c.section("vision_config", "deepseek_ocr2_vision")
    pixels = pixel_views(c, images, "pixel_values")
    if "pixel_values_local" in images.pixel_shapes:
        pixels += pixel_views(c, images, "pixel_values_local")
    maps = yield from _ocr2_sam(f, pixels)
    encoder = f.section("encoder_config", "deepseek_ocr2_encoder")
    hidden = encoder.size("hidden_size", default=4096)
    yield from _query_encoder(encoder, f"{_TOWER}.vision_encoder", maps)
    used = {_queries(view) for view in maps if view.count}
    yield table(f"{_TOWER}.vision_encoder", sum(_QUERIES) * hidden, used=sum(used) * hidden)
    rows = sum(view.count * _queries(view) for view in maps)
    yield linear(_PROJECTOR, "projector", rows, hidden, width)
    yield table(_PROJECTOR, width, component="projector")  # separates the views of an image


def _ocr2_sam(f: Fields, pixels: Views) -> Generator[ModuleWork, None, Views]:
    """Yield the work of SAM and two convolutions, and return the maps of the second."""
    own, path = f.section("sam_config", "deepseek_ocr2_sam_vision_model"), f"{_TOWER}.sam_encoder"
    encoder, channels = sam(own), own.pair("downsample_channels", (512, 896))
    yield from encoder.work(path, pixels)
    first, maps = convolution(path, patches(pixels, encoder.patch), encoder.outputs, channels[0], 3, stride=2)
    second, maps = convolution(path, maps, channels[0], channels[1], 3, stride=2)
    yield from (first, second)
    return maps


def _query_encoder(f: Fields, module: str, views: Views) -> Iterator[ModuleWork]:
    """Yield the work of an encoder over maps and learned queries: maps attend to themselves, queries to all before them."""
    hidden, heads = f.size("hidden_size", default=4096), f.size("num_attention_heads", default=32)
    kv_heads = f.nullable_size("num_key_value_heads", 32) or heads
    layer = EncoderLayer(
        hidden,
        f.size("intermediate_size", default=22016),
        norm_params=2 * hidden,
        key_values=kv_heads * head_size(f, hidden, heads),
        gated=True,
        out_bias=False,
        mlp_bias=False,
    )
    rows = pairs = full = 0
    for maps in views:
        own, queries = maps.height * maps.width, _queries(maps)
        rows += maps.count * (own + queries)
        pairs += maps.count * (own * own + own * queries + queries * (queries + 1) // 2)
        full += maps.count * (own + queries) ** 2
    yield from layer.work(module, layer_number(f, default=32), Attended(rows, pairs, full - pairs))
    yield table(module, hidden)


def _queries(maps: Maps) -> int:
    """Return the learned queries, which are the image tokens, of each of these maps."""
    return _QUERIES[0] if maps.height * maps.width <= _QUERIES[0] else _QUERIES[1]


def _deepseek_ocr2_tensors(c: Fields, request: ImageRequest) -> ImageTensors:
    f = c.section("vision_config", "deepseek_ocr2_vision").section("sam_config", "deepseek_ocr2_sam_vision_model")
    encoder = sam(f)

    def tokens(size: tuple[int, int]) -> int:
        return _queries(_quartered(patches((Maps(1, *size),), encoder.patch))[0])

    found = whole_images(c, request, encoder.image, encoder.patch, fixed=False)
    whole = tokens(request.size or encoder.image) + 1
    if not request.tiles:
        return replace(found, tokens=whole)
    shapes = {**found.shapes, "pixel_values_local": pixel_tensor(request.images * request.tiles, _TILE)}
    return ImageTensors(shapes, found.grids, whole + request.tiles * tokens(_TILE))


def _deepseek_ocr2_text(f: Fields) -> Architecture:
    number, heads, hidden = layer_number(f), f.size("num_attention_heads"), f.size("hidden_size")
    bias = f.flag("attention_bias", False)
    attention = grouped_attention(f, head_dim=head_size(f, hidden, heads), qkv_bias=bias, out_bias=bias)
    mlp_bias = f.flag("mlp_bias", False)
    kinds = f.words("mlp_layer_types", length=number, allowed=frozenset({"dense", "sparse"}))
    if kinds is None:
        raise f.error("mlp_layer_types", "is missing.", "It says for each layer whether it has experts.")
    dense = gated_mlp(f, f.size("intermediate_size"), bias=mlp_bias)
    norms = 2 * hidden
    if "sparse" not in kinds:
        return decoder(f, [Layer(attention, dense, norms)] * number)
    expert = gated_mlp(f, f.size("moe_intermediate_size", default=1407))
    shared = gated_mlp(f, expert.intermediate * f.size("n_shared_experts", default=2), bias=mlp_bias)
    moe = experts(f, expert, f.size("n_routed_experts", "num_experts", default=64), shared)
    return decoder(f, [Layer(attention, moe if kind == "sparse" else dense, norms) for kind in kinds])


# --- Qwen -------------------------------------------------------------------------------------------------------------


_QWEN_SIDE = 16
"""Default size of an image, in tokens per side, because the model has no size of its own: as many as Gemma 3 and InternVL use."""


def _qwen2_5_vl(c: Fields, width: int, images: VisionInput) -> Iterator[ModuleWork]:
    return qwen2_5_vision(c.section("vision_config", "qwen2_5_vl_vision")).work("model.visual", images.grids)


def _qwen2_5_vl_tensors(c: Fields, request: ImageRequest) -> ImageTensors:
    f = c.section("vision_config", "qwen2_5_vl_vision")
    return _qwen_tensors(c, request, qwen2_5_vision(f), f.size("patch_size", default=14))


def _qwen2_5_vl_text(f: Fields) -> Architecture:
    attention = grouped_attention(f, kv_default=8, qkv_bias=True)
    window, first = qwen_window(f), f.count("max_window_layers", 80)
    sliding = [window is not None and index >= first for index in range(layer_number(f))]
    return _qwen_decoder(f, attention, windows(f, window, sliding))


def _qwen3_vl(c: Fields, width: int, images: VisionInput) -> Iterator[ModuleWork]:
    return qwen3_vision(c.section("vision_config", "qwen3_vl_vision")).work("model.visual", images.grids)


def _qwen3_vl_tensors(c: Fields, request: ImageRequest) -> ImageTensors:
    f = c.section("vision_config", "qwen3_vl_vision")
    return _qwen_tensors(c, request, qwen3_vision(f), f.size("patch_size", default=16))


def _qwen3_vl_text(f: Fields) -> Architecture:
    bias = f.flag("attention_bias", False)
    attention = grouped_attention(f, kv_default=32, head_dim=128, qkv_bias=bias, out_bias=bias, norm="head")
    return _qwen_decoder(f, attention, no_window(f, layer_number(f)))


def _qwen_decoder(f: Fields, attention: GroupedAttention, layer_windows: list[int | None]) -> Architecture:
    return decoder(f, uniform_layers(attention, gated_mlp(f, f.size("intermediate_size")), layer_windows))


def _qwen_tensors(c: Fields, request: ImageRequest, encoder: QwenVision, patch: int) -> ImageTensors:
    step = patch * encoder.merge
    size = request.size or (_QWEN_SIDE * step, _QWEN_SIDE * step)
    check_multiple(c, size, (step, step))
    grid = (1, size[0] // patch, size[1] // patch)
    number = grid[1] * grid[2]
    shape = (request.images * number, encoder.patch_values)
    return ImageTensors({"pixel_values": shape}, (grid,) * request.images, number // encoder.merge**2)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A vision-language model."""

    text_type: str
    """model_type of the text decoder if its config does not name it."""
    work: Callable[[Fields, int, VisionInput], Iterator[ModuleWork]]
    """Yields the work of the modules, from the config, the width of the text decoder, and the images."""
    tensors: Callable[[Fields, ImageRequest], ImageTensors]
    text: Callable[[Fields], Architecture] | None = None
    """Builds the text decoder if only this family has it."""
    tied: bool = False
    """Whether embedding and head are tied if the config does not say it."""
    tied_by_text: bool = False
    """Whether they are also tied if only the config of the text decoder says so."""
    has_tiles: bool = False
    attends_in_blocks: bool = False
    """Whether the tokens of an image attend to its later tokens in the text decoder."""


FAMILIES: Mapping[str, Family] = {
    "deepseek_ocr2": Family("deepseek_ocr2_text", _deepseek_ocr2, _deepseek_ocr2_tensors, _deepseek_ocr2_text, has_tiles=True),
    "deepseek_vl_hybrid": Family("llama", _deepseek_vl_hybrid, _deepseek_vl_hybrid_tensors, tied=True),
    "gemma3": Family("gemma3_text", _gemma3, _gemma3_tensors, tied=True, attends_in_blocks=True),
    "got_ocr2": Family("qwen2", _got_ocr2, _got_ocr2_tensors, tied=True, has_tiles=True),
    "internvl": Family("qwen2", _internvl, _internvl_tensors, tied=True, has_tiles=True),
    "llava": Family("llama", _llava, _llava_tensors, tied_by_text=True),
    "qwen2_5_vl": Family("qwen2_5_vl_text", _qwen2_5_vl, _qwen2_5_vl_tensors, _qwen2_5_vl_text, tied_by_text=True),
    "qwen3_vl": Family("qwen3_vl_text", _qwen3_vl, _qwen3_vl_tensors, _qwen3_vl_text),
}
