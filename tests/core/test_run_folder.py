"""The run folder: unique names, files that are complete or missing, and a correct manifest."""

import errno
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import clean_timings, manifest, torch_pass
from command import HANG_S
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import SCHEMA, CleanTimings, Manifest, PassRecord, TorchPass
from llm_perf_opt.core.run_folder import RunFolder, read_record, read_values
from writing import full_disk, write_record, write_whole


def everything_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- a folder of its own ----------------------------------------------------------------------------------------------


def test_a_new_run_gets_the_folder_it_asks_for(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "baseline" / "tiny" / "now")
    assert folder.path == tmp_path / "runs" / "baseline" / "tiny" / "now"
    assert everything_under(folder.path) == []


def test_a_taken_name_is_never_entered(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "now")
    (first.path / "run.json").write_text("{}")
    second, third = RunFolder.create(tmp_path / "now"), RunFolder.create(tmp_path / "now")
    assert [folder.path.name for folder in (first, second, third)] == ["now", "now-2", "now-3"]
    assert everything_under(second.path) == everything_under(third.path) == []
    assert (first.path / "run.json").read_text() == "{}"


def test_a_file_or_a_dangling_link_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "now").write_text("mine")
    (tmp_path / "now-2").symlink_to("nowhere")
    assert RunFolder.create(tmp_path / "now").path.name == "now-3"
    assert (tmp_path / "now").read_text() == "mine"


def test_the_path_does_not_depend_on_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(Path("runs/now"))
    monkeypatch.chdir("/")
    assert folder.path == tmp_path / "runs" / "now"


def test_threads_that_start_at_once_get_a_folder_each(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def create(_: int) -> Path:
        together.wait()
        return RunFolder.create(tmp_path / "deep" / "now").path

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(create, range(8)))
    assert len(set(paths)) == 8
    assert set(paths) == set((tmp_path / "deep").iterdir())


CREATE_TWENTY = """
import sys
from pathlib import Path
from llm_perf_opt.core.run_folder import RunFolder
print("ready", flush=True)
sys.stdin.readline()
print(*[RunFolder.create(Path(sys.argv[1])).path for _ in range(20)], sep="\\n")
"""


def test_processes_that_start_at_once_get_a_folder_each(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CREATE_TWENTY, str(tmp_path / "deep" / "now")]
    children = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    paths = [path for child in children for path in child.communicate(timeout=HANG_S)[0].split()]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(set(paths)) == 3 * 20
    assert sorted(paths) == sorted(str(path) for path in (tmp_path / "deep").iterdir())


def test_an_endless_row_of_taken_names_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: Any, **__: Any) -> None:
        raise FileExistsError(errno.EEXIST, "File exists")

    wanted = tmp_path / "now"
    monkeypatch.setattr(Path, "mkdir", lambda path, *_, **options: None if "parents" in options else taken())
    with pytest.raises(ResourceError, match="are taken"):
        RunFolder.create(wanted)


@pytest.mark.parametrize("below", ["x", "x/y"])
def test_a_file_where_a_folder_should_be_is_said_so(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError) as caught:
        RunFolder.create(tmp_path / "file" / below)
    assert caught.value.exit_code == 3
    assert str(tmp_path / "file" / below) in caught.value.fact
    assert "hydra.run.dir" in caught.value.remedy


def test_a_folder_that_may_not_be_written_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(ResourceError, match="Permission denied") as caught:
        RunFolder.create(tmp_path / "now")
    assert caught.value.remedy.startswith(f"Check the permissions of {tmp_path}, or choose another folder: hydra.run.dir=DIR")
    assert "--out DIR" in caught.value.remedy


def test_a_nearly_full_disk_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 15 blocks of 4 MiB are 60 MiB, 62.9 MB: less than the 64 MiB, 67.1 MB, that a run needs at least
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=15, f_frsize=4 * 1024 * 1024))
    with pytest.raises(ResourceError, match=r"has 63 MB of disk space left.*at least 67 MB"):
        RunFolder.create(tmp_path / "now")
    assert everything_under(tmp_path) == []
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=16, f_frsize=4 * 1024 * 1024))
    RunFolder.create(tmp_path / "now")


# --- an existing run --------------------------------------------------------------------------------------------------


def saved_run(folder: Path, **changes: Any) -> RunFolder:
    run = RunFolder.create(folder / "now")
    run.write_manifest(manifest(**changes))
    return run


def test_an_existing_run_is_opened(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    assert RunFolder.open(run.path).manifest() == manifest()


@pytest.mark.parametrize("what", ["nothing", "file", "empty", "run.json is a folder"])
def test_what_is_no_run_is_said_so(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "file":
        path.touch()
    elif what != "nothing":
        (path / "run.json" if "folder" in what else path).mkdir(parents=True)
    with pytest.raises(ConfigError if what == "nothing" else ParseError) as caught:
        RunFolder.open(path)
    assert caught.value.exit_code == (2 if what == "nothing" else 5)
    assert str(path) in caught.value.fact
    said = {"nothing": "No such file", "file": "not a folder"}.get(what, "no run.json")
    assert said in caught.value.fact
    assert "llm-perf run" in caught.value.remedy


def test_a_newer_schema_is_not_guessed_at(tmp_path: Path) -> None:
    run = saved_run(tmp_path, schema=SCHEMA + 1)
    with pytest.raises(ParseError, match=rf"schema {SCHEMA + 1}; this version reads {SCHEMA}") as caught:
        RunFolder.open(run.path)
    assert "Upgrade" in caught.value.remedy


def test_fields_a_later_version_adds_are_passed_over(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    values = json.loads(run.manifest_file.read_text()) | {"color": "blue"}
    run.manifest_file.write_text(json.dumps(values))
    assert RunFolder.open(run.path).manifest() == manifest()


DAMAGED = {
    "empty": b"",
    "cut short": b'{"schema": 1, "tool_version": "0.1',
    "not JSON": b"schema: 1",
    "a list": b"[]",
    "a wrong type": b'{"schema":"one","tool_version":"","status":"complete","created":"","command":[]}',
    "an unknown status": b'{"schema":1,"tool_version":"","status":"splendid","created":"","command":[]}',
    "a field missing": b'{"schema":1,"tool_version":"","status":"complete","created":""}',
    "not UTF-8": b'{"schema":1,"tool_version":"\xff\xfe","status":"complete","created":"","command":[]}',
    "nested without end": b'{"color":' + b"[" * 100_000,
    "zeros": bytes(64),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_manifest_is_a_parse_error_with_its_file(tmp_path: Path, damage: bytes) -> None:
    run = saved_run(tmp_path)
    run.manifest_file.write_bytes(damage)
    with pytest.raises(ParseError, match=r"damaged|another version") as caught:
        RunFolder.open(run.path)
    assert str(run.manifest_file) in caught.value.fact


@pytest.mark.parametrize("name", ["../../elsewhere", "/elsewhere", "..", "", "a/b", "a\0b"])
def test_the_name_of_a_pass_is_no_path(tmp_path: Path, name: str) -> None:
    folder = saved_run(tmp_path / "run", passes=(PassRecord(name, "failed"),))
    with pytest.raises(ParseError, match="outside of the run"):
        RunFolder.open(folder.path)


def test_one_pass_is_replaced_and_another_added(tmp_path: Path) -> None:
    run = saved_run(tmp_path, passes=(PassRecord("clean"), PassRecord("torch")))
    run.update_pass(PassRecord("clean", "complete", seconds=1.5))
    run.update_pass(PassRecord("nsys", "skipped", why="no nsys here"))
    assert [(entry.name, entry.status) for entry in run.manifest().passes] == [
        ("clean", "complete"),
        ("torch", "pending"),
        ("nsys", "skipped"),
    ]
    assert replace(run.manifest(), passes=()) == manifest(passes=()), "nothing else is touched"


def test_every_file_lies_inside_its_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "now")
    named = [value for name in dir(RunFolder) if name.endswith("_file") and isinstance(value := getattr(run, name), Path)]
    named += [run.raw("clean"), run.log_file("torch"), run.command_file("torch")]
    assert len(named) == len(set(named)), "no two of them are one file"
    assert all(run.path in path.parents for path in named)
    assert (run.manifest_file.name, run.report_file.name, run.summary_file.name) == (
        "run.json",
        "report.md",
        "stakeholder_summary.md",
    )
    assert run.log_file("torch").parent == run.raw("torch") == run.path / "raw" / "torch"


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "kind"), [(manifest(), Manifest), (clean_timings(), CleanTimings), (torch_pass(), TorchPass)], ids=type
)
def test_records_go_through_a_file_unchanged(tmp_path: Path, record: Any, kind: type[Any]) -> None:
    write_record(tmp_path / "x.json", record)
    assert read_record(tmp_path / "x.json", kind) == record
    assert (tmp_path / "x.json").read_bytes().endswith(b"}\n")


TEXTS = st.text(max_size=20)


PASSES = st.builds(
    PassRecord, name=TEXTS, exit_code=st.none() | st.integers(-255, 255), seconds=st.none() | st.floats(0, 1e9), why=TEXTS
)
MANIFESTS = st.builds(
    Manifest,
    schema=st.just(SCHEMA),
    tool_version=TEXTS,
    status=st.sampled_from(["complete", "partial", "failed"]),
    created=TEXTS,
    command=st.lists(TEXTS, max_size=3).map(tuple),
    passes=st.lists(PASSES, max_size=2).map(tuple),
    why=TEXTS,
    remedy=TEXTS,
)


@settings(deadline=None, max_examples=50)
@given(MANIFESTS)
def test_any_manifest_goes_through_a_file_unchanged(tmp_path_factory: pytest.TempPathFactory, record: Manifest) -> None:
    run = RunFolder(tmp_path_factory.getbasetemp())
    run.write_manifest(record)
    assert read_record(run.manifest_file, Manifest) == record


def test_a_record_that_is_not_there_says_what_that_means(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match=r"x\.json is missing") as caught:
        read_record(tmp_path / "x.json", Manifest)
    assert "run.json has the reason" in caught.value.remedy


def test_a_record_that_is_a_folder_is_a_parse_error(tmp_path: Path) -> None:
    for read in (lambda: read_record(tmp_path, Manifest), lambda: read_values(tmp_path)):
        with pytest.raises(ParseError, match="cannot be read") as caught:
            read()
        assert caught.value.fact.endswith("Is a directory")
        assert caught.value.fact.count(str(tmp_path)) == 1
        assert "Errno" not in caught.value.fact


# --- files that are whole ---------------------------------------------------------------------------------------------


def test_a_file_is_written_with_the_folders_above_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "a" / "b" / "x", b"one")
    write_whole(tmp_path / "a" / "b" / "x", b"two")
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"two"
    assert everything_under(tmp_path) == ["a", "a/b", "a/b/x"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Two threads write one file with contents of different length: a reader sees one of them, complete."""
    path, contents = tmp_path / "x", (b"a" * 300_000, b"b" * 500_000)
    write_whole(path, contents[0])
    stop = threading.Event()
    seen: set[bytes] = set()

    def write(content: bytes) -> None:
        while not stop.is_set():
            write_whole(path, content)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, content) for content in contents]
        for _ in range(400):
            seen.add(path.read_bytes())
        stop.set()
        for writer in writers:
            writer.result(timeout=HANG_S)
    assert seen <= set(contents)
    assert everything_under(tmp_path) == ["x"]


def test_until_the_rename_the_old_file_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_whole(path, b"old")
    found: list[bytes] = []
    sync = os.fsync

    def look(descriptor: int) -> None:
        found.append(path.read_bytes())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_whole(path, b"new")
    assert found == [b"old"], "the new bytes are on the disk before they get the name"
    assert path.read_bytes() == b"new"


def failing(code: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_resource_error_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    write_whole(tmp_path / "x", b"old")
    monkeypatch.setattr(os, "fsync", failing(code))
    with pytest.raises(ResourceError, match="No space left on the disk") as caught:
        write_whole(tmp_path / "x", b"new")
    assert caught.value.exit_code == 3
    assert str(tmp_path / "x") in caught.value.fact
    assert caught.value.remedy == "Free some space.", "not every command that writes can choose another folder"
    assert everything_under(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_device_that_is_really_full_is_a_resource_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, ".part")
    with pytest.raises(ResourceError, match="No space left on the disk"):
        write_record(tmp_path / "run.json", manifest())
    assert everything_under(tmp_path) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_another_failure_says_what_the_system_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    where: Any = os if step == "fsync" else Path
    monkeypatch.setattr(where, step, failing(errno.EIO))
    with pytest.raises(ResourceError, match=os.strerror(errno.EIO)):
        write_whole(tmp_path / "x", b"new")
    assert everything_under(tmp_path) == []


def test_an_interruption_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "x", b"new")
    assert everything_under(tmp_path) == []


@pytest.mark.parametrize("place", ["file/x", "file/x/y", "folder", "n" * 250])
def test_a_place_that_cannot_hold_a_file_is_a_resource_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(LlmPerfError) as caught:
        write_whole(tmp_path / place, b"new")
    assert isinstance(caught.value, ResourceError)
    assert "cannot be written" in caught.value.fact
    assert everything_under(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ('{"a": 18446744073709551615, "b": [-9223372036854775808]}', True),
        ('{"a": 18446744073709551616}', False),
        ('{"a": {"b": [1, {"c": -9223372036854775809}]}}', False),
        (f'{{"a": {10**400}}}', False),
        (f'{{"a": "{"0" * 64}", "b": 0.{"1" * 40}}}', True),
        (f'{{"a": "\\\\", "b": {"1" * 25}.5, "c": {"1" * 25}e-9, "d": "\\"{"1" * 25}"}}', True),
        (f'{{"a": "\\"", "b": [{"1" * 40}]}}', False),
        ('{"a": 1, "b": {"c": [-1, 00018446744073709551616]}}', False),
    ],
)
def test_a_number_that_nothing_measures_makes_a_file_damaged(tmp_path: Path, text: str, fine: bool) -> None:
    """Such a number would only fail later, in a computation."""
    file = tmp_path / "record.json"
    file.write_text(text)
    if fine:
        assert read_record(file, dict[str, Any])["a"]
    else:
        with pytest.raises(ParseError, match="beyond 64 bits"):
            read_record(file, dict[str, Any])
