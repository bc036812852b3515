"""Nothing is written, moved or removed outside of a folder, whatever links lie in it."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_perf_opt.core import inside
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.inside import OutsideError, partial_of, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder next to one with something precious, and with links to it at every level."""
    precious = tmp_path / "precious"
    (precious / "deep").mkdir(parents=True)
    (precious / "file").write_text("mine")
    (precious / "deep" / "file").write_text("mine")
    home = tmp_path / "root"
    (home / "real" / "deep").mkdir(parents=True)
    (home / "out").symlink_to(precious)
    (home / "real" / "out").symlink_to("../../precious")
    (home / "real" / "file").symlink_to(precious / "file")
    (home / "up").symlink_to("..")
    (home / "within").symlink_to("real")
    return home


def contents(folder: Path) -> dict[str, str]:
    """Return every file below a folder with its text."""
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


OUTSIDE = (
    "out/file",
    "out/deep/file",
    "real/out/file",
    "up/precious/file",
    "../precious/file",
    "within/out/deep/file",
    "real/../../x",
)
WAYS: dict[str, Callable[[Path, Path], object]] = {
    "write": lambda root, path: inside.write(root, path, b"x"),
    "open_new": inside.open_new,
    "open_to_append": inside.open_to_append,
    "open_lock": inside.open_lock,
    "make_folder": lambda root, path: inside.make_folder(root, path / "new"),
    "new_folder": lambda root, path: inside.new_folder(root, path.with_name("new")),
    "remove": inside.remove,
    "remove_empty": inside.remove_empty,
    "remove_if_possible": inside.remove_if_possible,
    "move there": lambda root, path: inside.move(root, root / "real" / "deep", path),
    "move away": lambda root, path: inside.move(root, path, root / "moved"),
    "copy": lambda root, path: inside.copy(root, root / "real" / "file", path),
    "share": lambda root, path: inside.share(root, root / "real" / "file", path),
    "link": lambda root, path: inside.link(root, path.with_name("new"), root),
    "restrict": lambda root, path: inside.restrict(root, path.parent, bool),
}


@pytest.mark.parametrize("place", OUTSIDE)
@pytest.mark.parametrize("way", WAYS)
def test_a_path_that_leads_out_is_refused(root: Path, way: str, place: str) -> None:
    before = contents(root.parent / "precious")
    with pytest.raises(OutsideError) as caught:
        WAYS[way](root, root / place)
    assert isinstance(caught.value, ConfigError)
    assert caught.value.exit_code == 2
    assert contents(root.parent / "precious") == before
    assert not (root.parent / "x").exists()


def test_the_error_names_the_link_and_where_it_leads(root: Path) -> None:
    with pytest.raises(OutsideError) as caught:
        inside.write(root, root / "within" / "out" / "deep" / "file", b"x")
    assert str(root / "within" / "out") in caught.value.fact
    assert str(root.parent / "precious") in caught.value.fact


@pytest.mark.parametrize("place", ["", ".", "within/..", "real/.."])
def test_the_root_itself_is_neither_replaced_nor_removed(root: Path, place: str) -> None:
    before = contents(root)
    for way in (inside.remove, inside.remove_if_possible, inside.open_new):
        with pytest.raises(OutsideError):
            way(root, root / place)
    assert contents(root) == before


def test_links_that_stay_inside_are_followed_and_the_last_name_is_not(root: Path) -> None:
    inside.write(root, root / "within" / "deep" / "new" / "file", b"one")
    assert (root / "real" / "deep" / "new" / "file").read_text() == "one"
    inside.write(root, root / "real" / "file", b"two")
    assert (root / "real" / "file").read_text() == "two"
    assert not (root / "real" / "file").is_symlink()
    inside.remove(root, root / "real" / "out")
    inside.remove(root, root / "up")
    inside.remove(root, root / "gone")
    assert not os.path.lexists(root / "real" / "out")
    assert contents(root.parent / "precious") == {"file": "mine", "deep/file": "mine"}
    inside.remove(root, root / "real")
    assert not (root / "real").exists()


def test_the_root_may_be_reached_through_links(root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(root)
    inside.write(tmp_path / "other", tmp_path / "other" / "within" / "x", b"one")
    inside.write(root, tmp_path / "other" / "real" / "y", b"two")
    assert {name: text for name, text in contents(root / "real").items() if name in "xy"} == {"x": "one", "y": "two"}


def test_a_link_in_place_of_a_log_or_a_lock_is_not_followed_out(root: Path) -> None:
    (root / "lock").symlink_to(root.parent / "precious" / "file")
    for way in (inside.open_to_append, inside.open_lock):
        with pytest.raises((OutsideError, OSError)):
            way(root, root / "lock")
    (root / "log").symlink_to("real/log.txt")
    with inside.open_to_append(root, root / "log") as file:
        file.write(b"said")
    assert (root / "real" / "log.txt").read_text() == "said"
    assert contents(root.parent / "precious") == {"file": "mine", "deep/file": "mine"}


def test_a_relative_path_stays_inside_the_current_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    for place in (Path("out"), Path("up")):
        with pytest.raises(OutsideError):
            inside.make_folder(inside.root_of(place), place / "new")
    named = root.parent / "precious"
    assert inside.make_folder(inside.root_of(named), named / "new").is_dir(), "an absolute path is the user's own choice"
    assert inside.root_of(Path("../precious")) == Path("../precious")


def test_links_of_a_folder_of_someone_else_stay_inside(root: Path, tmp_path: Path) -> None:
    with pytest.raises(OutsideError):
        inside.check_links(root)
    safe = tmp_path / "safe"
    (safe / "a").mkdir(parents=True)
    (safe / "a" / "up").symlink_to("..")
    (safe / "gone").symlink_to("nowhere")
    (safe / "loop").symlink_to("loop")
    inside.check_links(safe)


def test_a_link_is_found_however_many_files_are_before_it_and_however_deep_it_is(root: Path, tmp_path: Path) -> None:
    deep = tmp_path / "given" / "/".join("abcdefgh")
    deep.mkdir(parents=True)
    (deep / "link").symlink_to(root)
    with pytest.raises(OutsideError):
        inside.check_links(tmp_path / "given")
    (deep / "link").unlink()
    for number in range(20_001):
        os.mkfifo(tmp_path / "given" / f"{number:05d}")
    (tmp_path / "given" / "z").symlink_to(root)
    with pytest.raises(OutsideError):
        inside.check_links(tmp_path / "given")


def test_private_files_are_for_their_owner_and_folders_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        inside.write(tmp_path, tmp_path / "a" / "private", b"x", inside.PRIVATE)
        inside.write(tmp_path, tmp_path / "a" / "shared", b"x")
        inside.open_to_append(tmp_path, tmp_path / "log", inside.PRIVATE).close()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"a": 0o775, "private": 0o600, "shared": 0o664, "log": 0o600}
    inside.restrict(tmp_path, tmp_path / "a", lambda path: path.name == "shared")
    assert stat.S_IMODE((tmp_path / "a" / "shared").stat().st_mode) == 0o600


def test_a_device_is_not_replaced() -> None:
    device = Path("/dev/null")
    with pytest.raises(OSError, match="device"):
        inside.open_new(device.parent, device)
    assert stat.S_ISCHR(device.stat().st_mode)


def test_a_writer_removes_what_ended_writers_of_the_same_file_left(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    mine = partial_of(tmp_path / "a.json").name
    left = mine.replace(f".{os.getpid()}-", f".{ended.pid}-")
    others = [
        left.replace(".a.json", ".b.json"),  # another file
        mine.replace(f".{os.getpid()}-", f".{os.getppid()}-"),  # a process that runs
        f".a.json.00000000.{ended.pid}-1.part",  # another machine
    ]
    (tmp_path / left).mkdir()
    (tmp_path / left / "kernels.parquet").touch()
    for name in others:
        (tmp_path / name).touch()
    write(tmp_path, tmp_path / "a.json", b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "a.json"])
