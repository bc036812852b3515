"""The images of a request: random pixels, or the images of a folder as the model's image processor prepares them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_perf_opt.config.schema import DatasetConfig, ModelConfig, RunConfig
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.host import available_memory_bytes
from llm_perf_opt.core.vision_records import VisionInput
from llm_perf_opt.runners.models import gib
from llm_perf_opt.runners.vision_families import (
    FAMILIES,
    ImageLayout,
    Size,
    check_image_request,
    family_of,
    image_size,
    layout_of,
)
from llm_perf_opt.workspace.data.images import FolderImage, open_folder, read_pixels, resized
from llm_perf_opt.workspace.data.model_tree import model_folder
from llm_perf_opt.workspace.data.prompts import ImageTokens, PromptImages, Prompts

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from llm_perf_opt.workspace.data.images import Pixels

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class RequestImages:
    """The images of a batch and their tokens, before they are placed in the prompts."""

    images: PromptImages
    tokens: ImageTokens
    text: str
    """Describes them in the source of the prompts."""

    def longest_prompt(self, text_tokens: int) -> int:
        """Return the length of the longest prompt with this many tokens of text."""
        return text_tokens + self.tokens.added(len(self.images.record.image_tokens))

    @property
    def pixels(self) -> int:
        """Numbers in all tensors of pixels."""
        return sum(int(np.prod(shape, dtype=np.int64)) for shape in self.images.record.pixel_shapes.values())

    def placed(self, prompts: Prompts) -> Prompts:
        """Return the prompts with the images in them."""
        source = f"{prompts.source}; {self.text}"
        return replace(prompts, ids=self.tokens.placed(prompts.ids), source=source, images=self.images)


def request_images(config: RunConfig, architecture: "PretrainedConfig") -> RequestImages | None:
    """Return the images of the batch; None for a text model, or if no images are requested."""
    dataset, batch_size = config.dataset, config.runtime.batch_size
    check_image_request(config, str(architecture.model_type))
    if family_of(architecture) is None or not dataset.images:
        return None
    number = batch_size * dataset.images
    if dataset.kind == "image_folder":
        return _from_folder(dataset, config.model, architecture, number, batch_size)
    layout = layout_of(architecture, image_size(dataset), dataset.image_tiles)
    shapes = {name: (number * rows, *rest) for name, (rows, *rest) in layout.shapes.items()}
    source = f"random pixels, seed {dataset.seed}"
    record = VisionInput(number, shapes, layout.grids * number, (), source, (layout.tiles,) * number if layout.tiles else ())
    return _request([layout] * number, record, architecture, batch_size, dataset)


def _request(
    layouts: Sequence[ImageLayout],
    record: VisionInput,
    architecture: "PretrainedConfig",
    prompts: int,
    dataset: DatasetConfig,
    arrays: Arrays | None = None,
) -> RequestImages:
    token_id = int(architecture.image_token_id)
    tokens = ImageTokens(tuple(layout.tokens for layout in layouts), token_id, _brackets(architecture, token_id))
    record = replace(record, image_tokens=tokens.per_prompt(prompts))
    sizes = dict.fromkeys(layout.size for layout in layouts)
    shown = ", ".join(f"{height} × {width}" for height, width in list(sizes)[:3]) + (", …" if len(sizes) > 3 else "")
    what = "one image" if dataset.images == 1 else f"{dataset.images} images"
    counts = sorted(set(record.image_tokens))
    taken = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
    text = f"{what} each of {shown} pixels, {taken} of the prompt's tokens ({record.source})"
    return RequestImages(PromptImages(record, token_id, dataset.seed, arrays or {}), tokens, text)


def _brackets(architecture: "PretrainedConfig", token_id: int) -> tuple[int, int] | None:
    """Return the ids of the tokens around an image; a model whose vocabulary lacks them gets an ordinary token instead."""
    family = FAMILIES[str(architecture.model_type)]
    if family.brackets is None:
        return None
    vocabulary = int(architecture.get_text_config(decoder=True).vocab_size)
    found = [getattr(architecture, name, None) for name in family.brackets]
    usual = 0 if token_id else 1
    first, last = (one if isinstance(one, int) and 0 <= one < vocabulary and one != token_id else usual for one in found)
    return first, last


# --- images of a folder -----------------------------------------------------------------------------------------------


def _from_folder(
    dataset: DatasetConfig, model: ModelConfig, architecture: "PretrainedConfig", number: int, prompts: int
) -> RequestImages:
    folder = open_folder(dataset)
    chosen = folder.choose(min(dataset.image_count or number, number), dataset.seed)
    prepared = _Preparation(architecture, model, image_size(dataset))
    unique = _all_prepared(prepared, chosen, number)
    order = [index % len(unique) for index in range(number)]
    layouts = [unique[index].layout for index in order]
    names = dict.fromkeys(name for entry in unique for name in entry.arrays)
    arrays = {
        name: np.concatenate([unique[index].arrays[name] for index in order if name in unique[index].arrays]) for name in names
    }
    source = f"{len(chosen)} of {len(folder.images)} images in {folder.path}, seed {dataset.seed}, {prepared.how}"
    record = VisionInput(
        images=number,
        pixel_shapes={name: array.shape for name, array in arrays.items()},
        grids=tuple(grid for layout in layouts for grid in layout.grids),
        image_tokens=(),
        source=source,
        tiles=tuple(layout.tiles for layout in layouts) if any(layout.tiles for layout in layouts) else (),
        files=tuple(chosen[index].name for index in order),
        sizes=tuple(unique[index].size for index in order),
        attributes=tuple(chosen[index].attributes for index in order) if folder.annotations else (),
    )
    return _request(layouts, record, architecture, prompts, dataset, arrays)


@dataclass(frozen=True)
class _Prepared:
    """One image as arrays."""

    layout: ImageLayout
    arrays: dict[str, "np.ndarray[Any, Any]"]
    size: Size
    """In the file."""

    @property
    def bytes(self) -> int:
        """Of all its arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def _all_prepared(preparation: "_Preparation", chosen: Sequence[FolderImage], number: int) -> list[_Prepared]:
    """Return the images as arrays; raise as soon as those so far show that the batch of `number` images needs too much memory."""
    found: list[_Prepared] = []
    available, taken = available_memory_bytes(), 0
    for image in chosen:
        found.append(preparation.image(image))
        taken += found[-1].bytes
        need = taken * (len(chosen) + number) // len(found)  # each image, and the batch that is made of them
        if need > available:
            raise ResourceError(
                f"{number:,} images need about {gib(need)} of memory, but {gib(available)} are available.",
                "Use a smaller runtime.batch_size, fewer dataset.images, or a smaller image size.",
            )
    return found


class _Preparation:
    """Prepares images with the folder's image processor or, for random weights and folders without one, by resizing."""

    def __init__(self, architecture: "PretrainedConfig", model: ModelConfig, size: Size | None) -> None:
        self._config = architecture
        self._size = size
        self._processor, self._options = _image_processor(model, str(architecture.model_type))
        self.how = "prepared by the model's image processor" if self._processor else "resized, without an image processor"

    def image(self, image: FolderImage) -> _Prepared:
        """Return the pixels of an image as the model takes them."""
        pixels = read_pixels(image)
        size = (pixels.shape[0], pixels.shape[1])
        if self._processor is None:
            layout = layout_of(self._config, self._size, 0)
            views = {
                wanted: resized(pixels, wanted) for wanted in {_view_size(shape, layout) for shape in layout.shapes.values()}
            }
            return _Prepared(layout, _resized_arrays(self._config, layout, views), size)
        try:
            given = pixels if self._size is None else resized(pixels, self._size)
            found = self._processor(images=[given], return_tensors="np", **self._options)
        except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
            raise ResourceError(f"{image.path}: the model's image processor failed: {error}") from error
        return self._processed(found, size)

    def _processed(self, found: Mapping[str, Any], size: Size) -> _Prepared:
        """Return what the processor made, or raise if it does not fit the model."""
        views = int(np.ravel(found["num_patches"])[0]) if "num_patches" in found else 1
        tiles = int(np.ravel(found["num_local_patches"])[0]) if "num_local_patches" in found else views - 1
        if "image_grid_thw" in found:
            _, rows, columns = (int(count) for count in found["image_grid_thw"][0])
            patch = int(self._config.vision_config.patch_size)
            seen = (rows * patch, columns * patch)
        else:
            largest = found["high_res_pixel_values" if "high_res_pixel_values" in found else "pixel_values"]
            seen = (int(largest.shape[-2]), int(largest.shape[-1]))
        layout = layout_of(self._config, seen, tiles)
        arrays = {name: np.asarray(found[name], dtype=np.float32) for name in layout.shapes if name in found}
        made = {name: array.shape for name, array in arrays.items()}
        if made != dict(layout.shapes):
            raise ConfigError(
                f"The model's image processor makes {made}, but the model takes {dict(layout.shapes)}.",
                "Check preprocessor_config.json: it must belong to the model.",
            )
        return _Prepared(layout, arrays, size)


def _view_size(shape: tuple[int, ...], layout: ImageLayout) -> Size:
    """Return the size of the view in a tensor of this shape: images × channels × height × width, or rows of patches."""
    return (shape[2], shape[3]) if len(shape) == 4 else layout.size


def _resized_arrays(config: Any, layout: ImageLayout, views: Mapping[Size, "Pixels"]) -> dict[str, "np.ndarray[Any, Any]"]:
    """Return each view with values from -1 to 1."""
    arrays = {}
    for name, shape in layout.shapes.items():
        view = (views[_view_size(shape, layout)].astype(np.float32) / 127.5 - 1).transpose(2, 0, 1)
        arrays[name] = view[None] if len(shape) == 4 else _as_patches(config.vision_config, view, layout)
    return arrays


def _as_patches(vision: Any, view: "np.ndarray[Any, Any]", layout: ImageLayout) -> "np.ndarray[Any, Any]":
    """Return an image as rows of patches, in the order of Qwen's models: the patches of one token are neighbors."""
    (_, rows, columns), merge, side = layout.grids[0], int(vision.spatial_merge_size), int(vision.patch_size)
    frames = np.repeat(view[None], int(vision.temporal_patch_size), axis=0)
    cut = frames.reshape(frames.shape[0], view.shape[0], rows // merge, merge, side, columns // merge, merge, side)
    return np.ascontiguousarray(cut.transpose(2, 5, 3, 6, 1, 0, 4, 7)).reshape(rows * columns, -1)


def _image_processor(model: ModelConfig, model_type: str) -> tuple[Any, dict[str, Any]]:
    """Return the folder's image processor and the options with which the model's processor calls it; None without one."""
    if model.source == "random":
        return None, {}
    folder = model_folder(model.path or "")
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return None, {}
    from transformers import AutoImageProcessor
    from transformers.models.auto import processing_auto

    try:
        found = AutoImageProcessor.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise _processor_error(folder, error) from error
    known: Any = processing_auto
    kind = known.processor_class_from_name(str(known.PROCESSOR_MAPPING_NAMES.get(model_type)))
    before_5_23 = getattr(getattr(kind, "valid_processor_kwargs", None), "_defaults", {})
    options = {**getattr(kind, "images_kwargs", {}), **before_5_23.get("images_kwargs", {})}
    return found, {name: value for name, value in options.items() if hasattr(found, name) and name != "return_tensors"}


def _processor_error(folder: Path, error: Exception) -> ResourceError:
    words = " ".join(str(error).split())[:400]
    return ResourceError(f"The image processor in {folder} cannot be loaded: {words}", "Check preprocessor_config.json.")


# --- arguments of the forward -----------------------------------------------------------------------------------------


def forward_arguments(model_type: str, images: PromptImages, input_ids: "torch.Tensor", dtype: "torch.dtype") -> dict[str, Any]:
    """Return what the model's forward takes in addition to the ids: pixels in `dtype`, grids, and which tokens are images."""
    import torch

    family, record = FAMILIES[model_type], images.record
    generator = torch.Generator().manual_seed(images.seed)
    found: dict[str, Any] = {}
    for name, shape in record.pixel_shapes.items():
        values = torch.from_numpy(images.arrays[name]) if images.arrays else torch.randn(shape, generator=generator)
        found[name] = values.to(input_ids.device, dtype)
    if family.grid_argument:
        found[family.grid_argument] = torch.tensor(record.grids, dtype=torch.long, device=input_ids.device)
    if family.tiles_argument and record.tiles:
        found[family.tiles_argument] = list(record.tiles)
    if family.marked_by:
        found[family.marked_by] = (input_ids == images.token_id).long()
    return found
