"""The images of a folder, with optional annotations: which are used, and their pixels.

An image is refused before it is decoded if its header promises too much: a small file can decompress to gigabytes.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.schema import DatasetConfig
from llm_perf_opt.core.errors import ConfigError, ResourceError, words_of
from llm_perf_opt.core.user_files import check_ordinary, read_bytes
from llm_perf_opt.workspace.data.layout import DatasetFolder, VariantFolder, dangling, dangling_error

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]
    """Height × width × RGB."""

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP"}
"""Supported file names and Pillow's name of their format. No other decoder of Pillow is used."""
MOST_FILE_BYTES = 128 * 1024**2
MOST_PIXELS = 2**26
"""64 megapixels, 192 MiB decoded: an A3 page scanned at 500 dpi has 48."""
MOST_SIDE = 2**16
MOST_FILES = 1_000_000
_MOST_JSON_BYTES = 512 * 1024**2

_CACHE_BLOBS = "blobs"
"""The folder of the Hugging Face cache that the files of a snapshot link to."""
_INSTALL = "Install Pillow: pip install 'llm-perf-opt[images]'."


@dataclass(frozen=True)
class FolderImage:
    """An image of the folder."""

    path: Path
    name: str
    """Its path below the folder, with slashes."""
    attributes: dict[str, str]
    """Attributes of the page in the annotations, such as its language."""


@dataclass(frozen=True)
class ImageFolder:
    """The images that a dataset offers, in the order of their names."""

    path: Path
    images: tuple[FolderImage, ...]
    annotations: str
    """Name of the file that lists them; empty if they are those found in the folder."""

    def choose(self, count: int, seed: int) -> list[FolderImage]:
        """Return `count` images in random order, or all if there are fewer; the same for the same folder and seed."""
        draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
        return draw.sample(self.images, min(count, len(self.images)))


def open_folder(dataset: DatasetConfig) -> ImageFolder:
    """Return the images of the dataset, or raise an error that says what is missing."""
    if find_spec("PIL") is None:
        raise ResourceError("dataset=image_folder needs the package Pillow, which is not installed.", _INSTALL)
    path = _folder(dataset)
    try:
        if dangling(path):
            raise dangling_error(path)
        if not path.is_dir():
            given = f"dataset.path={path}" if dataset.path else str(path)
            raise ConfigError(f"{given}: no such folder.", "Give a folder of images.")
        listing = _annotations_file(path, dataset.annotations)
        images = _listed(path, listing) if listing else _found(path)
    except OSError as error:
        raise ResourceError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # a NUL or an unpaired surrogate
        raise ResourceError(f"{path} contains a name that cannot be a file: {words_of(error)}.", "Correct the name.") from error
    if not images:
        raise ResourceError(f"{path} contains no images.", f"Supported: {', '.join(FORMATS)}.")
    return ImageFolder(path, tuple(images), listing.name if listing else "")


def _folder(dataset: DatasetConfig) -> Path:
    """Return the folder of the images: the given one, or the source or a variant of a dataset in the tree."""
    if dataset.path or not dataset.root:
        return Path(dataset.path or "")
    if dataset.variant is None:
        return DatasetFolder(Path(dataset.root)).source
    variant = VariantFolder(Path(dataset.root) / dataset.variant)
    return variant.made_data if variant.made_data.is_dir() else variant.path


def _found(folder: Path) -> list[FolderImage]:
    root = folder.resolve()
    names: list[str] = []
    for path in _files(folder):
        names.append(path.relative_to(folder).as_posix())
        if len(names) > MOST_FILES:
            raise ResourceError(f"{folder} contains more than {MOST_FILES:,} images.", "Give a smaller folder.")
    return [FolderImage(_inside(root, name, folder), name, {}) for name in sorted(names)]


def _files(folder: Path) -> Iterator[Path]:
    """Yield the images below a folder; hidden files and links to other folders are left out."""
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if not entry.is_symlink():
                yield from _files(entry)
        elif entry.suffix.lower() in FORMATS:
            yield entry


# --- annotations ------------------------------------------------------------------------------------------------------


def _annotations_file(folder: Path, wanted: str | None) -> Path | None:
    if wanted is not None:
        path = Path(wanted) if Path(wanted).is_file() else folder / wanted
        check_ordinary(path)
        if not path.is_file():
            raise ConfigError(
                f"dataset.annotations={wanted}: no such file in the current directory or in {folder}.", "Give a .json file."
            )
        return path
    found = sorted(path for path in folder.iterdir() if path.suffix == ".json" and not path.name.startswith("."))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:5])
        raise ConfigError(f"{folder} contains {len(found)} JSON files: {names}.", "Choose one: dataset.annotations=NAME.")
    return found[0] if found else None


def _listed(folder: Path, listing: Path) -> list[FolderImage]:
    """Return the images that the annotations name: a list of pages, each with `page_info.image_path`."""
    root = folder.resolve()
    by_name: dict[str, FolderImage] = {}
    for number, page in enumerate(_pages(listing), 1):
        info = page.get("page_info") if isinstance(page, dict) else None
        name = info.get("image_path") if isinstance(info, dict) else None
        if not isinstance(info, dict) or not isinstance(name, str) or not name or "\0" in name:
            raise ResourceError(
                f"{listing}, page {number}: it has no page_info.image_path.",
                "Expected the layout of OmniDocBench: a list of pages, each with page_info.",
            )
        place = name if (folder / name).is_file() or not (folder / "images" / name).is_file() else f"images/{name}"
        path = _inside(root, place, listing)
        if path.suffix.lower() not in FORMATS:
            raise ResourceError(f"{listing}, page {number}: {name!r} is not an image.", f"Supported: {', '.join(FORMATS)}.")
        by_name.setdefault(place, FolderImage(path, place, _attributes(info.get("page_attribute"))))
    return [by_name[name] for name in sorted(by_name)]


def _pages(listing: Path) -> list[Any]:
    if listing.stat().st_size > _MOST_JSON_BYTES:
        raise ResourceError(f"{listing} is larger than {_MOST_JSON_BYTES // 2**20} MiB.", "Split it.")
    try:
        pages = json.loads(read_bytes(listing))
    except (ValueError, RecursionError) as error:
        raise ResourceError(f"{listing} is not JSON: {words_of(error)}.", "Give a list of pages, or remove the file.") from error
    if not isinstance(pages, list) or len(pages) > MOST_FILES:
        raise ResourceError(f"{listing} is not a list of at most {MOST_FILES:,} pages.", "Expected the layout of OmniDocBench.")
    return pages


def _attributes(values: Any) -> dict[str, str]:
    """Return the plain attributes of a page, shortened: they are shown, never interpreted."""
    found = values.items() if isinstance(values, dict) else ()
    return {_shown(name, 60): _shown(value, 120) for name, value in list(found)[:20] if isinstance(value, (str, int, float))}


def _shown(value: Any, longest: int) -> str:
    return str(value)[:longest].encode(errors="replace").decode()  # an unpaired surrogate cannot be recorded


def _inside(root: Path, name: str, source: Path) -> Path:
    """Return the file `name` below `root`, or raise if it is missing or lies outside, also through a link."""
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        if path.parent.name == _CACHE_BLOBS:
            raise ResourceError(
                f"{source}: {name!r} is a link into the cache of Hugging Face, {path.parent}, outside the folder.",
                f"Copy the folder with the files that the links name: cp -rL {root} PAGES.",
            )
        raise ResourceError(f"{source}: {name!r} is outside the folder {root}.", "Copy the image into the folder.")
    if not path.is_file():
        raise ResourceError(f"{source}: the image {name!r} is missing.", f"It was looked for in {root}.")
    return path


# --- pixels -----------------------------------------------------------------------------------------------------------


def read_pixels(image: FolderImage) -> "Pixels":
    """Return the image in RGB; raise if it is damaged, huge or of another format."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    check_ordinary(image.path)
    if (length := image.path.stat().st_size) > MOST_FILE_BYTES:
        raise _refused(image, f"its file has {length:,} bytes; at most {MOST_FILE_BYTES:,} are read")
    try:
        with Image.open(image.path, formats=tuple(dict.fromkeys(FORMATS.values()))) as opened:
            _check_size(image, *opened.size)
            return np.asarray(opened.convert("RGB"))
    except UnidentifiedImageError:
        raise _refused(image, f"it is none of {', '.join(dict.fromkeys(FORMATS.values()))}") from None
    except Image.DecompressionBombError as error:
        raise _refused(image, words_of(error)) from error
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise _refused(image, f"it is damaged ({words_of(error)})") from error


def resized(pixels: "Pixels", size: tuple[int, int]) -> "Pixels":
    """Return the image with this height and width."""
    import numpy as np
    from PIL import Image

    if pixels.shape[:2] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BICUBIC))


def _check_size(image: FolderImage, width: int, height: int) -> None:
    if width * height > MOST_PIXELS or max(width, height) > MOST_SIDE:
        raise _refused(image, f"it has {width:,} × {height:,} pixels; at most {MOST_PIXELS:,} are decoded")
    if not width * height:
        raise _refused(image, "it has no pixels")


def _refused(image: FolderImage, why: str) -> ResourceError:
    return ResourceError(f"{image.path} cannot be used: {why}.", "Replace or remove the image.")


def check_images(dataset: DatasetConfig) -> None:
    """Raise if the folder has no images or the first one drawn cannot be read, before a model is loaded."""
    read_pixels(open_folder(dataset).choose(1, dataset.seed)[0])
