"""The tensors that images become, and the image tokens of a prompt."""

from dataclasses import dataclass

from llm_perf_opt.analysis.cost_model.blocks import Fields
from llm_perf_opt.analysis.cost_model.vision import Maps, Views
from llm_perf_opt.analysis.stats import whole_number
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.vision_records import VisionInput

_CHANNELS = 3


@dataclass(frozen=True)
class ImageRequest:
    """Images of one size."""

    images: int
    size: tuple[int, int] | None = None
    """Height and width in pixels; None: the size that the model is made for."""
    tiles: int = 0
    """Tiles of each image in addition to its whole view."""

    def __post_init__(self) -> None:
        whole_number("images", self.images, at_least=1)
        whole_number("image_tiles", self.tiles, at_least=0)
        for name, length in zip(("image_height", "image_width"), self.size or (), strict=False):
            whole_number(name, length, at_least=1)


@dataclass(frozen=True)
class ImageTensors:
    """What a processor makes of images: tensors, patches, and tokens of the prompt."""

    shapes: dict[str, tuple[int, ...]]
    grids: tuple[tuple[int, int, int], ...]
    tokens: int
    """Of one image."""


def pixel_tensor(views: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the shape of the tensor of these views."""
    return views, _CHANNELS, *size


def pixel_views(c: Fields, images: VisionInput, name: str) -> Views:
    """Return the views in a tensor of pixels."""
    shape = images.pixel_shapes.get(name, ())
    if len(shape) != 4:
        raise ConfigError(
            f"'{c.model_type}' takes {name} with 4 dimensions; the images have {tuple(shape) if shape else 'no such tensor'}."
        )
    return (Maps(shape[0], shape[2], shape[3]),)


def whole_images(
    c: Fields, request: ImageRequest, own: tuple[int, int], patch: tuple[int, int], *, fixed: bool = True, views: int = 1
) -> ImageTensors:
    """Return the tensors of images in `views` views each, without their tokens. `own` is the size that the model is made for.

    A model with a `fixed` size takes no other; one without takes whole patches.
    """
    size = request.size or own
    if fixed and size != own:
        raise ConfigError(
            f"{c.model_type} takes images of {own[0]} × {own[1]} pixels, not {size[0]} × {size[1]}.",
            "Its processor resizes every image. Omit the size.",
        )
    check_multiple(c, size, patch)
    number = request.images * views
    grid = (1, size[0] // patch[0], size[1] // patch[1])
    return ImageTensors({"pixel_values": pixel_tensor(number, size)}, (grid,) * number, 0)


def check_multiple(c: Fields, size: tuple[int, int], step: tuple[int, int]) -> None:
    """Raise a ConfigError unless height and width are multiples of a patch."""
    if size[0] % step[0] or size[1] % step[1]:
        near = " × ".join(str(max(1, round(length / part)) * part) for length, part in zip(size, step, strict=True))
        raise ConfigError(
            f"{c.model_type} takes heights and widths in multiples of {step[0]} × {step[1]} pixels, not {size[0]} × {size[1]}.",
            f"The nearest size is {near}.",
        )
