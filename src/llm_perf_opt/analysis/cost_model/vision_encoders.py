"""Image encoders: vision transformers (CLIP, SigLIP, InternVL) and SAM.

Fields that are absent have the default that transformers uses for the model_type.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.cost_model.blocks import Fields, head_size, layer_number
from llm_perf_opt.analysis.cost_model.vision import (
    EncoderLayer,
    Maps,
    ModuleWork,
    Views,
    attention_core,
    convolution,
    linear,
    patch_embedding,
    patches,
    positions,
    table,
    whole,
)
from llm_perf_opt.analysis.cost_model.work import ComponentName
from llm_perf_opt.core.errors import ConfigError, nearest

# --- vision transformers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vit:
    """A vision transformer over the patches of an image of fixed size."""

    layer: EncoderLayer
    layers: int
    channels: int
    patch: tuple[int, int]
    image: tuple[int, int]
    """Height and width that its position table is made for."""
    class_token: bool
    patch_bias: bool
    norm_params: int
    """Outside the layers."""
    has_positions: bool = True
    unused_params: int = 0
    has_head: bool = False
    """Whether attention with one learned query pools the tokens; its result is not used for text."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches in an image."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    def patches_in(self, size: tuple[int, int]) -> int:
        """Return the patches of an image of this size."""
        return (size[0] // self.patch[0]) * (size[1] // self.patch[1])

    def work(self, module: str, pixels: Views) -> Iterator[ModuleWork]:
        """Yield the work of the encoder on these images."""
        hidden, extra = self.layer.hidden, int(self.class_token)
        yield patch_embedding(module, pixels, self.channels, hidden, self.patch, bias=self.patch_bias)
        position_rows = self.grid[0] * self.grid[1] + extra if self.has_positions else 0
        read = self.norm_params + hidden * (extra + position_rows)
        yield table(module, read + self.unused_params, used=read)
        attended = whole(patches(pixels, self.patch), extra)
        yield from self.layer.work(module, self.layers, attended)
        if self.has_head:
            yield from self._head(module, sum(maps.count for maps in pixels), attended.rows)

    def _head(self, module: str, images: int, tokens: int) -> Iterator[ModuleWork]:
        hidden = self.layer.hidden
        component: ComponentName = "vision_attention_projections"
        yield linear(module, component, images, hidden, hidden, count=2)  # query and output
        yield linear(module, component, tokens, hidden, hidden, count=2)  # keys and values
        yield attention_core(module, 4 * hidden * tokens)
        yield linear(module, "vision_mlp", images, hidden, self.layer.intermediate)
        yield linear(module, "vision_mlp", images, self.layer.intermediate, hidden)
        yield table(module, hidden + 2 * hidden)  # the learned query and a norm


def vit(f: Fields) -> Vit:
    """Return the vision transformer that a vision_config describes."""
    if f.model_type not in _VITS:
        raise ConfigError(
            f"The cost model does not cover the image encoder '{f.model_type}'.{nearest(f.model_type, _VITS)}",
            f"Known: {', '.join(_VITS)}. Add --decoder-only to count the text decoder alone.",
        )
    return _VITS[f.model_type](f)


def _clip(f: Fields) -> Vit:
    layer = _plain_layer(f)
    return Vit(
        layer=layer,
        layers=layer_number(f, default=12),
        channels=f.size("num_channels", default=3),
        patch=f.pair("patch_size", 32),
        image=f.pair("image_size", 224),
        class_token=True,
        patch_bias=False,
        norm_params=4 * layer.hidden,  # before and after the layers
    )


def _siglip(f: Fields) -> Vit:
    layer = _plain_layer(f)
    return Vit(
        layer=layer,
        layers=layer_number(f, default=12),
        channels=f.size("num_channels", default=3),
        patch=f.pair("patch_size", 16),
        image=f.pair("image_size", 224),
        class_token=False,
        patch_bias=True,
        norm_params=2 * layer.hidden,
        has_head=f.flag("vision_use_head", True),
    )


def _plain_layer(f: Fields) -> EncoderLayer:
    hidden = f.size("hidden_size", default=768)
    head_size(f, hidden, f.size("num_attention_heads", default=12))
    return EncoderLayer(hidden, f.size("intermediate_size", default=3072), norm_params=4 * hidden)


def _internvl(f: Fields) -> Vit:
    hidden = f.size("hidden_size", default=1024)
    head_size(f, hidden, f.size("num_attention_heads", default=16))
    norms = 2 * hidden * (1 if f.word("norm_type", "layer_norm", ("layer_norm", "rms_norm")) == "rms_norm" else 2)
    query_key_norms = 2 * hidden if f.flag("use_qk_norm", False) else 0
    return Vit(
        layer=EncoderLayer(
            hidden,
            f.size("intermediate_size", default=4096),
            norm_params=norms + query_key_norms + 2 * hidden,  # two learned scales
            qkv_bias=f.flag("attention_bias", False),
        ),
        layers=layer_number(f, default=24),
        channels=f.size("num_channels", default=3),
        patch=f.pair("patch_size", 14),
        image=f.pair("image_size", 448),
        class_token=True,
        patch_bias=True,
        norm_params=0 if f.flag("use_mean_pooling", True) else 2 * hidden,
        has_positions=f.flag("use_absolute_position_embeddings", True),
        unused_params=hidden if f.flag("use_mask_token", False) else 0,
    )


_VITS: Mapping[str, Callable[[Fields], Vit]] = {
    "clip_vision_model": _clip,
    "internvl_vision": _internvl,
    "siglip_vision_model": _siglip,
}

# --- SAM --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sam:
    """The image encoder of Segment Anything: attention in windows except in some layers, then two convolutions."""

    layer: EncoderLayer
    layers: int
    whole_layers: int
    """Layers that attend to the whole image."""
    window: int
    image: tuple[int, int]
    """Height and width that its position tables are made for."""
    channels: int
    patch: tuple[int, int]
    head_dim: int
    has_positions: bool
    relative: bool
    """Whether relative positions are added to the scores: one product for the rows and one for the columns."""
    outputs: int

    def work(self, module: str, pixels: Views) -> Iterator[ModuleWork]:
        """Yield the work of the encoder on these images."""
        hidden = self.layer.hidden
        maps = patches(pixels, self.patch)
        yield patch_embedding(module, pixels, self.channels, hidden, self.patch, bias=True)
        yield table(module, hidden * self._side * self._side if self.has_positions else 0)
        windowed = self.layers - self.whole_layers
        windows = self._windows(maps) if windowed else ()
        for count, views, side in ((windowed, windows, self.window), (self.whole_layers, maps, self._side)):
            relative = 2 * (2 * side - 1) * self.head_dim if self.relative else 0
            layer = replace(self.layer, norm_params=self.layer.norm_params + relative)
            yield from layer.work(module, count, whole(views), positions(maps))
            if count and self.relative:
                per_layer = sum(2 * hidden * view.positions * (view.height + view.width) for view in views)
                yield attention_core(module, count * per_layer)
        yield from sam_neck(module, maps, hidden, self.outputs)

    @property
    def _side(self) -> int:
        return self.image[0] // self.patch[0]

    def _windows(self, maps: Views) -> Views:
        """Return the windows; those at the edges are padded to full size."""
        side = self.window
        return tuple(Maps(view.count * -(-view.height // side) * -(-view.width // side), side, side) for view in maps)


def sam(f: Fields, mlp_default: int | None = None) -> Sam:
    """Return the encoder that a vision_config in the form of SAM describes; `mlp_default` replaces the ratio of its MLP."""
    hidden, heads = f.size("hidden_size", default=768), f.size("num_attention_heads", default=12)
    patch, image = f.pair("patch_size", 16), f.pair("image_size", 1024)
    number, window = layer_number(f, default=12), f.count("window_size", 14)
    intermediate = f.size("mlp_dim", default=mlp_default or int(hidden * f.number("mlp_ratio", 4.0)))
    whole_layers = f.indices("global_attn_indexes", (2, 5, 8, 11))
    return Sam(
        layer=EncoderLayer(hidden, intermediate, 4 * hidden, packed=True, qkv_bias=f.flag("qkv_bias", True)),
        layers=number,
        whole_layers=sum(index < number for index in whole_layers) if window else number,
        window=window,
        image=image,
        channels=f.size("num_channels", default=3),
        patch=patch,
        head_dim=head_size(f, hidden, heads),
        has_positions=f.flag("use_abs_pos", True),
        relative=f.flag("use_rel_pos", True),
        outputs=f.size("output_channels", default=256),
    )


def sam_neck(module: str, maps: Views, inputs: int, outputs: int) -> Iterator[ModuleWork]:
    """Yield two convolutions without bias, each followed by a norm."""
    yield convolution(module, maps, inputs, outputs, 1)[0]
    yield convolution(module, maps, outputs, outputs, 3)[0]
    yield table(module, 4 * outputs)
