"""Pipes, devices and kernel files are refused at once with exit code 2, and never block."""

import gzip
import os
import random
import shutil
import signal
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from typer.testing import CliRunner

from builders import clean_timings, manifest, torch_pass
from llm_perf_opt.cli.app import app
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError
from llm_perf_opt.core.records import SCHEMA
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.user_files import (
    SpecialFileError,
    TooLargeError,
    check_folder,
    check_ordinary,
    open_ordinary,
    open_unpacked,
    read_bytes,
    read_text,
    read_unpacked,
)
from llm_perf_opt.traces.trace_mark import tables_of
from llm_perf_opt.workflows.sweep_folder import PlannedPoint, Sweep, SweepFolder
from writing import write_record

REAL = Path(__file__).parents[1] / "fixtures" / "h200" / "torch_trace.json.gz"
HANG_S = 300
"""No test here takes a second; one that blocks would never end."""


@pytest.fixture(autouse=True)
def _nothing_waits() -> Iterator[None]:
    def give_up(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"still waiting after {HANG_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def kernel_file(path: Path) -> None:
    path.symlink_to("/proc/self/status")


def device_attribute(path: Path) -> None:
    target = Path("/sys/devices/system/cpu/online")
    if not target.exists():
        pytest.skip("there is no /sys")
    path.symlink_to(target)


SPECIAL: list[Callable[[Path], None]] = [pipe, device, kernel_file, device_attribute]


def refused(*words: str | Path) -> LlmPerfError:
    """Return the error of a verb."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, LlmPerfError), done.output
    assert done.exception.exit_code == 2, done.exception.fact
    assert "not a regular file" in done.exception.fact
    assert done.exception.remedy
    return done.exception


def a_run(path: Path) -> RunFolder:
    folder = RunFolder.create(path)
    folder.write_manifest(manifest())
    write_record(folder.clean_file, clean_timings())
    write_record(folder.torch_file, torch_pass())
    folder.config_file.write_text("experiment: x\n")
    return folder


def swapped(file: Path, make: Callable[[Path], None]) -> None:
    """Replace a file by a special file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    make(file)


# --- the functions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SPECIAL)
def test_what_is_no_ordinary_file_is_not_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    for read in (check_ordinary, open_ordinary, read_bytes, read_text):
        with pytest.raises(SpecialFileError, match="not a regular file") as caught:
            read(tmp_path / "x")
        assert isinstance(caught.value, ConfigError)
        assert isinstance(caught.value, ParseError), "who goes on without a damaged file goes on without this one"


def test_files_and_folders_and_nothing_are_let_through(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\r\nb")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"a\r\nb"
    assert read_text(tmp_path / "file") == "a\nb"
    for name in ("file", "link", "none", "", "nul\0"):
        check_ordinary(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_ordinary(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        open_ordinary(tmp_path)


def test_what_a_shell_puts_in_place_of_standard_input_is_read(tmp_path: Path) -> None:
    """`< file` is a link under /proc to a regular file."""
    (tmp_path / "file").write_bytes(b"content")
    with (tmp_path / "file").open("rb") as file:
        assert read_bytes(Path(f"/proc/self/fd/{file.fileno()}")) == b"content"


@pytest.mark.parametrize("name", ["file", "file.gz"])
def test_unpacking_ends_at_the_limit(tmp_path: Path, name: str) -> None:
    """It neither unpacks more nor holds what it has unpacked twice."""
    limit = 8 << 20
    content = b"0123456789abcdef" * (1 << 10) + random.Random(1).randbytes(1 << 14) * 63
    with gzip.open(tmp_path / name, "wb") if name.endswith(".gz") else (tmp_path / name).open("wb") as file:
        for _ in range(64):
            file.write(content)
    (tmp_path / "exact").write_bytes(b"x" * limit)
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match="larger than 8 MiB"):
            read_unpacked(tmp_path / name, limit)
        with open_unpacked(tmp_path / name) as unpacked:
            assert unpacked.read(16) == b"0123456789abcdef"
        assert len(read_unpacked(tmp_path / "exact", limit)) == limit
        assert tracemalloc.get_traced_memory()[1] < 1.5 * limit
    finally:
        tracemalloc.stop()


def test_a_damaged_or_hostile_gzip_file_is_refused_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.gz"
    for content, words in (
        (b"no gzip", "damaged gzip"),
        (gzip.compress(b"x" * 1000)[:-9], "damaged gzip"),
        (gzip.compress(bytes(17 << 20)), "200 times"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_unpacked(file, 1 << 30)


def test_a_file_that_becomes_a_pipe_meanwhile_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x")
    seen = (tmp_path / "file").stat()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(Path, "stat", lambda path: seen)
    with pytest.raises(SpecialFileError, match="named pipe"):
        open_ordinary(tmp_path / "pipe")


def test_a_folder_is_looked_through(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "gone").symlink_to("nowhere")
    (tmp_path / "a" / "round").symlink_to(tmp_path)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))  # nothing waits for it
    check_folder(tmp_path)
    check_folder(tmp_path / "none")
    os.mkfifo(tmp_path / "a" / "b" / "pipe")
    with pytest.raises(SpecialFileError, match="b/pipe"):
        check_folder(tmp_path)


# --- verbs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SPECIAL)
@pytest.mark.parametrize("name", ["trace.json", "trace.sqlite", "trace.json.gz"])
def test_in_place_of_a_trace(tmp_path: Path, make: Callable[[Path], None], name: str) -> None:
    make(tmp_path / name)
    refused("analyze", tmp_path / name)
    refused("analyze", tmp_path / name, "--no-cache")
    refused("sql", tmp_path / name, "select 1")


def test_in_place_of_a_trace_that_has_tables(tmp_path: Path) -> None:
    """Checking whether tables are up to date reads the source; that must not block either."""
    trace = Path(shutil.copy(REAL, tmp_path / "trace.json.gz"))
    assert CliRunner().invoke(app, ["sql", str(trace), "select 1"]).exit_code == 0
    swapped(trace, pipe)
    refused("sql", trace, "select 1")
    refused("analyze", trace)


def test_in_place_of_a_table_of_a_trace(tmp_path: Path) -> None:
    """The tables are regenerated."""
    trace = Path(shutil.copy(REAL, tmp_path / "trace.json.gz"))
    for name in ("meta.json", "kernels.parquet", "names.parquet", "analysis.json"):
        assert CliRunner().invoke(app, ["analyze", str(trace)]).exit_code == 0
        (tables,) = tables_of(trace)
        swapped(tables / name, pipe)
        assert CliRunner().invoke(app, ["analyze", str(trace)]).exit_code == 0, name


RUN_FILES: list[Callable[[RunFolder], Path]] = [
    lambda run: run.manifest_file,
    lambda run: run.config_file,
    lambda run: run.env_file,
    lambda run: run.clean_file,
    lambda run: run.torch_file,
    lambda run: run.torch_trace_file,
    lambda run: run.telemetry_file,
    lambda run: run.ceilings_file,
    lambda run: run.timeline_file("nsys"),
    lambda run: run.counters_file("ncu_decode"),
    lambda run: run.selection_file("ncu_decode"),
    lambda run: run.wrapped_file("nsys"),
    lambda run: run.verify_file,
    lambda run: run.derived_tables / "stages.parquet",
]


@pytest.mark.parametrize("which", range(len(RUN_FILES)))
def test_in_place_of_any_file_of_a_run(tmp_path: Path, which: int) -> None:
    run = a_run(tmp_path / "run")
    other = a_run(tmp_path / "other")
    swapped(RUN_FILES[which](run), SPECIAL[which % len(SPECIAL)])
    refused("report", run.path)
    refused("analyze", run.path)
    refused("sql", run.path, "select 1")
    refused("advise", run.path)
    refused("compare", run.path, other.path)
    refused("compare", other.path, run.path)


@pytest.mark.parametrize("make", SPECIAL)
def test_in_place_of_the_configuration_of_a_run(tmp_path: Path, make: Callable[[Path], None]) -> None:
    run = a_run(tmp_path / "run")
    swapped(run.config_file, make)
    refused("report", run.path)
    refused("advise", run.path)


@pytest.mark.parametrize("make", SPECIAL)
def test_in_place_of_a_file_of_a_sweep(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = SweepFolder.create(tmp_path / "sweep")
    run = a_run(folder.point_folder(0))
    points = (PlannedPoint(("runtime.batch_size=1",), ("runtime.batch_size=1",)),)
    folder.write_plan(Sweep(SCHEMA, "0.1.0", "2026-01-02", ("llm-perf", "run", "-m"), None, points))
    swapped(run.clean_file, make)
    refused("report", folder.path)
    refused("run", "--resume", folder.path)
    swapped(folder.sweep_file, make)
    refused("report", folder.path)
    refused("run", "--resume", folder.path)


def test_a_list_of_runs_names_what_is_wrong_with_one(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "good")
    swapped(a_run(tmp_path / "runs" / "bad").manifest_file, pipe)
    swapped(a_run(tmp_path / "runs" / "nameless").config_file, pipe)
    done = CliRunner().invoke(app, ["runs", str(tmp_path / "runs"), "--json"])
    assert done.exit_code == 0, done.output
    assert "named pipe" in done.stdout


def test_in_place_of_the_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = a_run(tmp_path / "runs" / "one")
    os.mkfifo(tmp_path / "runs" / "baselines.json")
    refused("baseline", "list")
    refused("baseline", "set", "main", run.path)


@pytest.mark.parametrize("make", SPECIAL)
def test_in_place_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    make(tmp_path / "data" / "x.jsonl")
    refused("dataset", "add", "one", "--source", tmp_path / "data" / "x.jsonl")
    refused("dataset", "add", "one", "--source", tmp_path / "data")
    refused("run", f"dataset.path={tmp_path}/data/x.jsonl", "dataset=sample_prompts", "--dry-run")


def test_in_place_of_a_file_that_configures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    os.mkfifo(tmp_path / "conf" / "model" / "mine.yaml")
    refused("run", "model=mine", "--dry-run")
    os.mkfifo(tmp_path / "config.json")
    refused("cost", "--model-config", tmp_path / "config.json")
