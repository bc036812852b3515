"""The record of the images that a vision-language model was given."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VisionInput:
    """The images of one request as the model received them, in tensors, patches and tokens of the prompt."""

    images: int
    """Over all sequences of the batch; repeated images are counted each time."""
    pixel_shapes: dict[str, tuple[int, ...]]
    """Shape of each tensor of pixels, by the argument of the model's forward that takes it, such as `pixel_values`."""
    grids: tuple[tuple[int, int, int], ...]
    """(frames, rows, columns) in patches of the encoder that reads `pixel_values`: one per image, or per tile of an image."""
    image_tokens: tuple[int, ...]
    """Per sequence: how many of the prompt's tokens stand for images."""
    source: str
    """Random pixels and their seed, or the folder that the images were read from."""
    tiles: tuple[int, ...] = ()
    """Per image: how many tiles it was cut into, in addition to the view of the whole image; empty if no image was cut."""
    files: tuple[str, ...] = ()
    """Per image: the file's path below the folder; empty for random pixels."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Per image: (height, width) of its file in pixels; empty for random pixels."""

    attributes: tuple[dict[str, str], ...] = ()
    """Per image: attributes of the page in the annotations; empty without annotations."""

    @property
    def patches(self) -> int:
        """Patches of `pixel_values`, over all images and tiles."""
        return sum(frames * rows * columns for frames, rows, columns in self.grids)
