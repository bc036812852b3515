"""The images of a folder: which are found and drawn, annotations, and what is refused before it is decoded."""

import json
import os
import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.config.schema import DatasetConfig
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.workspace.data import images
from llm_perf_opt.workspace.data.images import FolderImage, check_images, open_folder, read_pixels, resized


def dataset(folder: Path, **more: Any) -> DatasetConfig:
    return DatasetConfig("image_folder", "image_folder", str(folder), "text", 0, **more)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, rows: bytes | None = None) -> bytes:
    """Return a PNG in one color, written without the decoder under test."""
    if rows is None:
        rows = (b"\0" + bytes((200, 100, 50)) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


NOISE = png(16, 16, b"".join(b"\0" + random.Random(row).randbytes(48) for row in range(16)))


def folder_of(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(png(8, 6))
    return path


@pytest.fixture
def pillow() -> None:
    pytest.importorskip("PIL")


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "find_spec", lambda _: None)
    with pytest.raises(ResourceError) as raised:
        open_folder(dataset(tmp_path))
    assert "pip install" in raised.value.remedy


@pytest.mark.usefixtures("pillow")
class TestFolder:
    def test_images_are_found_in_all_folders_and_ordered_by_name(self, tmp_path: Path) -> None:
        folder_of(tmp_path, "b.png", "a/z.PNG", "a/.hidden.png", "c.txt")
        assert [image.name for image in open_folder(dataset(tmp_path)).images] == ["a/z.PNG", "b.png"]

    def test_the_seed_decides_which_are_drawn(self, tmp_path: Path) -> None:
        found = open_folder(dataset(folder_of(tmp_path, *(f"{index}.png" for index in range(9)))))
        first = [image.name for image in found.choose(4, 1)]
        assert len(set(first)) == 4
        assert [image.name for image in found.choose(4, 1)] == first
        assert [image.name for image in found.choose(4, 2)] != first
        assert len(found.choose(100, 1)) == 9

    def test_a_missing_or_empty_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no such folder"):
            open_folder(dataset(tmp_path / "none"))
        with pytest.raises(ResourceError, match="no images"):
            open_folder(dataset(tmp_path))

    def test_a_link_out_of_the_folder_is_refused(self, tmp_path: Path) -> None:
        outside = folder_of(tmp_path / "outside", "secret.png")
        inside = tmp_path / "inside"
        inside.mkdir()
        (inside / "a.png").symlink_to(outside / "secret.png")
        with pytest.raises(ResourceError, match="outside the folder"):
            open_folder(dataset(inside))

    def test_a_snapshot_of_the_hugging_face_cache_is_named(self, tmp_path: Path) -> None:
        folder_of(tmp_path, "blobs/0a1b").joinpath("snapshots", "c2d3").mkdir(parents=True)
        snapshot = tmp_path / "snapshots" / "c2d3"
        (snapshot / "a.png").symlink_to(Path("../../blobs/0a1b"))
        with pytest.raises(ResourceError, match="cache of Hugging Face") as raised:
            open_folder(dataset(snapshot))
        assert f"cp -rL {snapshot}" in raised.value.remedy

    def test_the_images_of_a_dataset_in_the_tree_are_used(self, tmp_path: Path) -> None:
        root = folder_of(tmp_path / "datasets" / "pages", "gray/data/g.png", "small/s.png")
        (root / "source-data").symlink_to(folder_of(tmp_path / "original", "a.png"))

        def names(variant: str | None) -> list[str]:
            chosen = replace(dataset(root), path=None, root=str(root), variant=variant)
            return [image.name for image in open_folder(chosen).images]

        assert [names(None), names("gray"), names("small")] == [["a.png"], ["g.png"], ["s.png"]]
        with pytest.raises(ConfigError, match="no such folder"):
            names("none")
        (root / "source-data").unlink()
        (root / "source-data").symlink_to(tmp_path / "gone")
        with pytest.raises(ResourceError, match="does not exist"):
            names(None)


def page(name: Any, **attributes: Any) -> dict[str, Any]:
    return {"layout_dets": [], "page_info": {"image_path": name, "page_attribute": attributes}, "extra": {}}


@pytest.mark.usefixtures("pillow")
class TestAnnotations:
    def test_the_pages_of_the_only_json_file_are_used(self, tmp_path: Path) -> None:
        folder_of(tmp_path, "images/a.png", "images/b.png", "images/unlisted.png")
        pages = [page("b.png", language="en\ud800", special_issue=["skew"]), page("images/a.png"), page("b.png")]
        (tmp_path / "OmniDocBench.json").write_text(json.dumps(pages))
        found = open_folder(dataset(tmp_path))
        assert [(image.name, image.attributes) for image in found.images] == [
            ("images/a.png", {}),
            ("images/b.png", {"language": "en?"}),
        ]
        assert found.annotations == "OmniDocBench.json"

    def test_two_json_files_need_a_choice(self, tmp_path: Path) -> None:
        folder_of(tmp_path, "a.png")
        for name in ("one.json", "two.json"):
            (tmp_path / name).write_text(json.dumps([page("a.png")]))
        with pytest.raises(ConfigError, match=r"one\.json, two\.json"):
            open_folder(dataset(tmp_path))
        assert open_folder(dataset(tmp_path, annotations="two.json")).annotations == "two.json"
        with pytest.raises(ConfigError, match="no such file"):
            open_folder(dataset(tmp_path, annotations="three.json"))

    @pytest.mark.parametrize("name", ["../outside.png", "/etc/passwd", "gone.png", "\0", 7, "note.txt", "\ud800.png"])
    def test_a_page_without_its_image_is_refused(self, tmp_path: Path, name: Any) -> None:
        folder_of(tmp_path / "data", "a.png")
        folder_of(tmp_path, "outside.png")
        (tmp_path / "data" / "note.txt").write_text("text")
        (tmp_path / "data" / "pages.json").write_text(json.dumps([page("a.png"), page(name)]))
        with pytest.raises(ResourceError):
            open_folder(dataset(tmp_path / "data"))

    @pytest.mark.parametrize("content", ["{", "{}", "[1]", "[{}]", "[" * 100_000, '{"page_info": 1}'])
    def test_other_json_is_refused(self, tmp_path: Path, content: str) -> None:
        folder_of(tmp_path, "a.png")
        (tmp_path / "pages.json").write_text(content)
        with pytest.raises(ResourceError):
            open_folder(dataset(tmp_path))


def image(path: Path, content: bytes, name: str = "a.png") -> FolderImage:
    (path / name).write_bytes(content)
    return FolderImage(path / name, name, {})


@pytest.mark.usefixtures("pillow")
class TestPixels:
    def test_pixels_are_rgb_and_resized_on_request(self, tmp_path: Path) -> None:
        found = image(tmp_path, png(8, 6))
        assert read_pixels(found).shape == (6, 8, 3)
        assert read_pixels(found)[0, 0].tolist() == [200, 100, 50]
        assert resized(read_pixels(found), (12, 20)).shape == (12, 20, 3)

    @pytest.mark.parametrize("size", [(60_000, 60_000), (70_000, 2), (0, 5)])
    def test_a_header_that_promises_too_much_is_refused(self, tmp_path: Path, size: tuple[int, int]) -> None:
        """A file of some hundred bytes that would decode to gigabytes."""
        with pytest.raises(ResourceError, match="cannot be used"):
            read_pixels(image(tmp_path, png(*size, rows=b"\0")))

    @pytest.mark.parametrize(
        "content", [b"", b"text", png(8, 6)[:40], NOISE[:-300], png(8, 6).replace(b"IDAT", b"IDAX"), b"GIF89a" + bytes(40)]
    )
    def test_a_damaged_image_is_refused(self, tmp_path: Path, content: bytes) -> None:
        with pytest.raises(ResourceError, match="cannot be used"):
            read_pixels(image(tmp_path, content))

    def test_a_huge_file_is_refused_unread(self, tmp_path: Path) -> None:
        found = image(tmp_path, b"")
        os.truncate(found.path, images.MOST_FILE_BYTES + 1)
        with pytest.raises(ResourceError, match="bytes"):
            read_pixels(found)

    def test_the_first_image_is_checked_before_a_model_is_loaded(self, tmp_path: Path) -> None:
        image(tmp_path, b"text")
        with pytest.raises(ResourceError, match=r"a\.png"):
            check_images(dataset(tmp_path))
