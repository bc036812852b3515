"""Every file with name, size and hash; dangling and circular links are errors."""

import hashlib
import os
from pathlib import Path

import pytest

from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.user_files import SpecialFileError
from llm_perf_opt.workspace.data.inventory import FileEntry, content_sha256, files_below, inventory


def test_every_file_below_is_found_through_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b").write_bytes(b"two")
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "a.txt").write_bytes(b"one")
    (source / "deep" / "b.txt").symlink_to(tmp_path / "blobs" / "b")
    (source / "linked").symlink_to(tmp_path / "blobs")
    found = files_below(source)
    assert list(found) == ["a.txt", "deep/b.txt", "linked/b"]
    told: list[int] = []
    entries = inventory(found, told.append)
    assert entries["deep/b.txt"] == FileEntry(3, hashlib.sha256(b"two").hexdigest())
    assert sum(told) == 9


def test_one_file_may_be_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "a.jsonl")
    assert list(files_below(tmp_path / "link")) == ["a.jsonl"]


def test_a_file_of_a_cache_keeps_the_name_it_was_given_by(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0a1b").write_text("{}")
    (tmp_path / "b.jsonl").symlink_to("blobs/0a1b")
    (tmp_path / "source-data").symlink_to(tmp_path / "b.jsonl")
    for given in ("b.jsonl", "source-data"):
        assert files_below(tmp_path / given) == {"b.jsonl": tmp_path.resolve() / "b.jsonl"}
    assert list(files_below(tmp_path / "blobs" / "0a1b")) == ["0a1b"]


def test_a_circle_of_links_ends_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    with pytest.raises(ResourceError, match="a/up is a link to a folder that contains it"):
        files_below(tmp_path)
    (tmp_path / "a" / "up").unlink()
    (tmp_path / "self").symlink_to(tmp_path / "self")
    with pytest.raises(ResourceError, match="self is a link to"):
        files_below(tmp_path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ResourceError, match=r"gone is a link to .*nowhere, which does not exist"):
        files_below(tmp_path)
    with pytest.raises(ResourceError, match="which does not exist"):
        files_below(tmp_path / "gone")
    (tmp_path / "gone").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecialFileError, match="named pipe"):
        files_below(tmp_path)
    with pytest.raises(ResourceError, match="no such file or folder"):
        files_below(tmp_path / "nothing")


def test_the_content_hash_sees_names_sizes_and_bytes(tmp_path: Path) -> None:
    one = {"a": FileEntry(1, "x"), "b": FileEntry(2, "y")}
    assert content_sha256(one) == content_sha256(dict(reversed(one.items()))), "the order does not matter"
    others = [
        {"a": FileEntry(1, "x")},
        {"a": FileEntry(1, "y"), "b": FileEntry(2, "x")},
        {"c": FileEntry(1, "x"), "b": FileEntry(2, "y")},
    ]
    assert len({content_sha256(entries) for entries in [one, *others]}) == 4
