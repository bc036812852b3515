"""Which traces of a run folder belong to it."""

import gzip
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from llm_perf_opt.core.records import SCHEMA, Manifest, Missing, PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.timelines import Timeline, timelines
from llm_perf_opt.traces.nsys_sqlite import read_nsys
from llm_perf_opt.workflows.analyze_kernels import analyze_regions
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.run_reader import RunReader

RECORDED = Path(__file__).parents[1] / "fixtures" / "h200" / "nsys_decode.sqlite.gz"


def folder_with(tmp_path: Path, created: str, argv: tuple[str, ...] = ()) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run")
    entry = PassRecord("nsys", "complete", argv, seconds=20.0)
    folder.write_manifest(Manifest(SCHEMA, "0", "complete", created, ("llm-perf",), (entry,)))
    folder.raw("nsys").mkdir(parents=True)
    folder.timeline_file("nsys").write_bytes(gzip.decompress(RECORDED.read_bytes()))
    return folder


def began(tmp_path: Path) -> datetime:
    """When the recording itself says that it began."""
    file = tmp_path / "recorded.sqlite"
    file.write_bytes(gzip.decompress(RECORDED.read_bytes()))
    return datetime.fromtimestamp(int(read_nsys(file).facts["started_utc_ns"]) / 1e9, timezone.utc)


@pytest.mark.parametrize(
    ("later", "mine"),
    [
        (timedelta(seconds=-30), True),
        (timedelta(seconds=2), True),  # clocks are rounded
        (timedelta(minutes=1), False),
        (timedelta(hours=-2), False),
    ],
)
def test_a_recording_of_another_time_is_not_the_runs(tmp_path: Path, later: timedelta, mine: bool) -> None:
    folder = folder_with(tmp_path, (began(tmp_path) + later).isoformat(timespec="seconds"))
    (found,) = timelines(folder)
    assert isinstance(found, Timeline) is mine
    if isinstance(found, Missing):
        assert "another run" in found.why


def test_a_recording_of_another_command_is_in_none_of_the_pages(tmp_path: Path) -> None:
    """It would pass for the run's: the same program, the same ranges."""
    created = (began(tmp_path) - timedelta(seconds=9)).isoformat(timespec="seconds")
    folder = folder_with(tmp_path, created, ("nsys", "profile", "python", "--config", "/runs/of-another/config.yaml"))
    (found,) = timelines(folder)
    assert isinstance(found, Missing)
    assert "another run" in found.why
    regions = analyze_regions(RunReader(folder), {})
    assert isinstance(regions, Missing)
    assert "another run" in regions.why
    trace = analyze(RunReader(folder)).trace
    assert isinstance(trace, Missing) or not trace.complete
