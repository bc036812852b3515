"""The limit on what a tool may write."""

from pathlib import Path

from llm_perf_opt.core.errors import CaptureError, ResourceError
from llm_perf_opt.profiling.vendor.child import DiskWatch


def test_what_was_there_before_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"x" * 500_000)
    watch = DiskWatch([tmp_path, tmp_path / "not there yet"], 300_000)
    assert watch.problem() is None
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "deeper" / "new").write_bytes(b"x" * 200_000)
    assert watch.problem() is None
    (tmp_path / "deep" / "newer").write_bytes(b"x" * 200_000)
    problem = watch.problem()
    assert isinstance(problem, CaptureError)
    assert "0.0003 GB of profiling.max_trace_gb" in problem.fact


def test_a_hole_in_a_file_takes_no_space(tmp_path: Path) -> None:
    watch = DiskWatch([tmp_path], 1_000_000)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10**9)
    assert watch.problem() is None


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    watch = DiskWatch([tmp_path / "out"], 100_000)
    (tmp_path / "elsewhere" / "large").write_bytes(b"x" * 500_000)
    (tmp_path / "out" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "out" / "file").symlink_to(tmp_path / "elsewhere" / "large")
    assert watch.problem() is None


def test_a_disk_that_runs_full_stops_the_pass(tmp_path: Path) -> None:
    problem = DiskWatch([tmp_path], 10**12, least_free_bytes=10**18).problem()
    assert isinstance(problem, ResourceError)
    assert str(tmp_path) in problem.fact


def test_it_looks_again_only_after_its_interval(tmp_path: Path) -> None:
    watch = DiskWatch([tmp_path], 1, interval_s=3600)
    assert watch.due()
    watch.problem()
    assert not watch.due()
