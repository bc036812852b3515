"""The image encoder of Qwen2.5-VL and Qwen3-VL: patches of images of any size in one sequence, merged at its end."""

from collections.abc import Iterator
from dataclasses import dataclass

from llm_perf_opt.analysis.cost_model.blocks import Fields, head_size, layer_number
from llm_perf_opt.analysis.cost_model.vision import (
    Attended,
    EncoderLayer,
    Maps,
    ModuleWork,
    Views,
    embedded,
    linear,
    positions,
    table,
    whole,
)

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


@dataclass(frozen=True)
class QwenVision:
    """The encoder; it ends with the merger, which is the projector."""

    layer: EncoderLayer
    layers: int
    whole_layers: int
    """Layers in which a patch attends to its whole frame; in the others to its window."""
    window: int
    """Side of a window in merged patches; 0 if there are none."""
    patch_values: int
    patch_bias: bool
    merge: int
    outputs: int
    merger_norm_params: int
    position_rows: int = 0
    more_mergers: int = 0
    """Additional mergers, after single layers (DeepStack)."""
    more_mergers_used: int = 0

    def work(self, module: str, grids: tuple[Grid, ...]) -> Iterator[ModuleWork]:
        """Yield the work of the encoder on images with these grids."""
        hidden = self.layer.hidden
        frames: Views = tuple(Maps(count, rows, columns) for count, rows, columns in grids)
        number = positions(frames)
        yield embedded(
            f"{module}.patch_embed", number, self.patch_values, hidden, bias=self.patch_bias, pixels=number * self.patch_values
        )
        largest = max((maps.height * maps.width for maps in frames), default=0)
        yield table(module, self.position_rows * hidden, used=min(self.position_rows, largest) * hidden)
        yield from self.layer.work(f"{module}.blocks", self.whole_layers, whole(frames))
        windowed = Attended(number, sum(self._window_pairs(maps) for maps in frames))
        yield from self.layer.work(f"{module}.blocks", self.layers - self.whole_layers, windowed)
        yield from self._mergers(f"{module}.merger", number, 1, self.merger_norm_params)
        if self.more_mergers:
            path, norms = f"{module}.deepstack_merger_list", 2 * hidden * self.merge**2
            yield from self._mergers(path, number, self.more_mergers_used, norms)
            yield from _idle(self._mergers(path, 0, self.more_mergers - self.more_mergers_used, norms))

    def _mergers(self, module: str, number: int, count: int, norm_params: int) -> Iterator[ModuleWork]:
        width, rows = self.layer.hidden * self.merge**2, number // self.merge**2
        yield linear(module, "projector", rows, width, width, count=count)
        yield linear(module, "projector", rows, width, self.outputs, count=count)
        yield table(module, count * norm_params, component="projector")

    def _window_pairs(self, maps: Maps) -> int:
        """Return the pairs inside the windows of these frames; those at the edges are smaller."""
        across, down = (_squares(side // self.merge, self.window) for side in (maps.height, maps.width))
        return maps.count * self.merge**4 * across * down


def _squares(length: int, window: int) -> int:
    """Return the sum of the squares of the windows of a line."""
    return length // window * window**2 + (length % window) ** 2 if window else 0


def _idle(found: Iterator[ModuleWork]) -> Iterator[ModuleWork]:
    """Yield modules that do not run: only their parameters count."""
    for entry in found:
        yield table(entry.module, entry.params, used=0, component=entry.component)


def qwen2_5_vision(f: Fields) -> QwenVision:
    """Return the encoder of Qwen2.5-VL."""
    layer = EncoderLayer(
        _qwen_hidden(f, 3584),
        f.size("intermediate_size", default=3420),
        norm_params=2 * f.size("hidden_size", default=3584),
        gated=True,
        packed=True,
    )
    number, merge, patch = layer_number(f, "depth", default=32), f.size("spatial_merge_size", default=2), _qwen_patch(f, 14)
    window = f.size("window_size", default=112) // merge // patch
    whole_layers = sum(index < number for index in f.indices("fullatt_block_indexes", (7, 15, 23, 31)))
    if whole_layers < number and not window:
        raise f.error("window_size", f"is smaller than a merged patch ({merge * patch} pixels).")
    return QwenVision(
        layer=layer,
        layers=number,
        whole_layers=whole_layers,
        window=window,
        patch_values=_qwen_patch_values(f, patch),
        patch_bias=False,
        merge=merge,
        outputs=f.size("out_hidden_size", default=3584),
        merger_norm_params=layer.hidden,
    )


def qwen3_vision(f: Fields) -> QwenVision:
    """Return the encoder of Qwen3-VL."""
    hidden = _qwen_hidden(f, 1152)
    number, mergers = layer_number(f, "depth", default=27), f.indices("deepstack_visual_indexes", (8, 16, 24))
    return QwenVision(
        layer=EncoderLayer(hidden, f.size("intermediate_size", default=4304), 4 * hidden, packed=True),
        layers=number,
        whole_layers=number,
        window=0,
        patch_values=_qwen_patch_values(f, _qwen_patch(f, 16)),
        patch_bias=True,
        merge=f.size("spatial_merge_size", default=2),
        outputs=f.size("out_hidden_size", default=3584),
        merger_norm_params=2 * hidden,
        position_rows=f.size("num_position_embeddings", default=2304),
        more_mergers=len(mergers),
        more_mergers_used=sum(index < number for index in mergers),
    )


def _qwen_hidden(f: Fields, default: int) -> int:
    hidden = f.size("hidden_size", default=default)
    head_size(f, hidden, f.size("num_heads", default=16), "num_heads")
    return hidden


def _qwen_patch(f: Fields, default: int) -> int:
    return f.size("patch_size", default=default)


def _qwen_patch_values(f: Fields, patch: int) -> int:
    return f.size("in_channels", "in_chans", default=3) * f.size("temporal_patch_size", default=2) * patch**2
