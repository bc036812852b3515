"""A folder is created completely or not at all, whatever happens meanwhile."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.workspace.data.layout import made_whole


def test_it_appears_at_the_end_and_nothing_else_is_left(tmp_path: Path) -> None:
    with made_whole(tmp_path, tmp_path / "new" / "v") as part:
        (part / "data").mkdir()
        (part / "data" / "a").write_text("a")
        assert not (tmp_path / "new" / "v").exists()
    assert sorted(path.name for path in (tmp_path / "new").rglob("*")) == ["a", "data", "v"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), SystemExit(1)])
def test_whatever_ends_it_early_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), made_whole(tmp_path, tmp_path / "v") as part:  # noqa: PT012
        (part / "half").write_text("a")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="No space left on the disk") as caught, made_whole(tmp_path, tmp_path / "v"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []


def test_what_appeared_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already exists"), made_whole(tmp_path, tmp_path / "v") as part:  # noqa: PT012
        (part / "a").write_text("mine")
        (tmp_path / "v").mkdir()
        (tmp_path / "v" / "a").write_text("theirs")
    assert (tmp_path / "v" / "a").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


def test_another_process_at_work_is_refused_and_a_dead_one_cleared(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from llm_perf_opt.workspace.data.layout import made_whole\n"
        "with made_whole(Path(sys.argv[1]).parent, Path(sys.argv[1])) as part:\n"
        "    (part / 'left').mkdir(); (part / 'left' / 'x').write_text('x'); print('here', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "v")], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        with pytest.raises(ResourceError, match="being created by another process"), made_whole(tmp_path, tmp_path / "v"):
            pass
        assert (tmp_path / ".v.part" / "left" / "x").exists(), "the other's work is untouched"
    finally:
        other.kill()
        other.communicate()
    with made_whole(tmp_path, tmp_path / "v") as part:
        assert [path.name for path in part.iterdir()] == [".lock"]
    assert list((tmp_path / "v").iterdir()) == []


def test_a_place_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be used"), made_whole(tmp_path, tmp_path / "file" / "v"):
        pass
    (tmp_path / ".w.part").symlink_to(tmp_path)
    with pytest.raises(ResourceError, match="not followed"), made_whole(tmp_path, tmp_path / "w"):
        pass
