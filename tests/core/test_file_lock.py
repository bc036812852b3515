"""A lock between processes."""

import multiprocessing
import os
from pathlib import Path

from command import HANG_S
from llm_perf_opt.core.file_lock import locked


def test_one_process_at_a_time_holds_it(tmp_path: Path) -> None:
    """Each adds one to a number in a file; without the lock, additions would be lost."""
    file = tmp_path / "number"
    file.write_text("0")

    def add() -> None:
        for _ in range(50):
            with locked(tmp_path, tmp_path / "lock", HANG_S) as held:
                assert held
                number = int(file.read_text())
                os.sched_yield()
                file.write_text(str(number + 1))

    processes = [multiprocessing.get_context("fork").Process(target=add) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_S)
    assert file.read_text() == "150"


def test_patience_ends_and_a_folder_without_locks_is_no_error(tmp_path: Path) -> None:
    with locked(tmp_path, tmp_path / "lock", 0) as held:
        assert held
        child = multiprocessing.get_context("fork").Process(target=_refused, args=(tmp_path / "lock",))
        child.start()
        child.join(HANG_S)
    assert child.exitcode == 0
    (tmp_path / "file").write_text("")
    with locked(tmp_path, tmp_path / "file" / "lock", 0) as held:
        assert not held


def _refused(path: Path) -> None:
    with locked(path.parent, path, 0) as held:
        assert not held


def test_all_who_may_write_in_a_shared_folder_can_take_its_lock(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with locked(tmp_path, tmp_path / "lock", 0) as held:
            assert held
    finally:
        os.umask(before)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664
