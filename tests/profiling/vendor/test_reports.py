"""Converting the tools' reports: completely or not at all, with the tool's own error on failure."""

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from command import HANG_S
from llm_perf_opt.core.errors import CaptureError, ResourceError
from llm_perf_opt.profiling.vendor import tool_pass as reports
from llm_perf_opt.profiling.vendor.tool_pass import export_nsys, import_ncu_csv, import_qdstrm


def tool(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(b"a report")
    return path


EXPORT = 'for word in "$@"; do case "$word" in --output=*) out="${word#--output=}";; esac; done; '


def test_an_export_appears_whole(tmp_path: Path, report: Path) -> None:
    nsys = tool(tmp_path / "nsys", EXPORT + 'echo half > "$out"; ls -A "$(dirname "$out")" >&2; echo whole > "$out"')
    log = tmp_path / "log.txt"
    assert export_nsys(nsys, report, tmp_path / "run.sqlite", log=log) == ()
    assert (tmp_path / "run.sqlite").read_text() == "whole\n"
    assert "run.sqlite" not in log.read_text().split(), "while it is written it has another name"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "nsys", "run.nsys-rep", "run.sqlite"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('echo half > "$out"; echo "Exportation error: magic number mismatch." >&2; exit 1', "magic number mismatch"),
        ("exit 0", "wrote nothing"),
        ('echo "Unknown runtime API function index: 9"; exit 3', "newer than itself"),
    ],
)
def test_a_failed_export_leaves_nothing_and_says_why(tmp_path: Path, report: Path, body: str, says: str) -> None:
    log = tmp_path / "log.txt"
    log.write_text("No reports were generated\n")  # of an earlier step
    with pytest.raises(CaptureError, match=says):
        export_nsys(tool(tmp_path / "nsys", EXPORT + body), report, tmp_path / "run.sqlite", log=log)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "nsys", "run.nsys-rep"]


def test_an_export_that_takes_too_long_is_ended(tmp_path: Path, report: Path) -> None:
    with pytest.raises(CaptureError, match="took longer"):
        export_nsys(tool(tmp_path / "nsys", "exec sleep 60"), report, tmp_path / "x", log=tmp_path / "log", timeout_s=0.3)


@pytest.mark.parametrize("content", [None, b""])
def test_no_report_is_told(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.nsys-rep"
    if content is not None:
        path.write_bytes(content)
    for convert in (export_nsys, import_qdstrm):
        with pytest.raises(CaptureError, match="missing" if content is None else "empty"):
            convert(Path("nsys"), path, tmp_path / "out", log=tmp_path / "log")


def test_csv_goes_to_its_file_and_complaints_to_the_log(tmp_path: Path, report: Path) -> None:
    ncu = tool(tmp_path / "ncu", 'echo "$@"; echo "==WARNING== something" >&2')
    import_ncu_csv(ncu, report, "raw", tmp_path / "raw.csv", log=tmp_path / "log")
    assert (tmp_path / "raw.csv").read_text() == f"--import {report} --page raw --csv --print-units base\n"
    assert (tmp_path / "log").read_text() == "==WARNING== something\n"
    failing = tool(tmp_path / "ncu", "echo '==ERROR== Failed to load report file'; exit 1")
    with pytest.raises(CaptureError, match="Failed to load report file"):
        import_ncu_csv(failing, report, "raw", tmp_path / "other.csv", log=tmp_path / "log")
    assert not (tmp_path / "other.csv").exists()


def test_without_an_importer_the_stream_is_kept_and_the_way_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Path
) -> None:
    monkeypatch.setattr(reports, "find_importer", lambda nsys: None)
    with pytest.raises(ResourceError, match="no QdstrmImporter"):
        import_qdstrm(Path("nsys"), report, tmp_path / "out", log=tmp_path / "log")
    assert report.exists()


# --- the real tools -----------------------------------------------------------------------------------------------------


def test_what_is_no_report_is_refused_by_the_real_tools(real_nsys: Path, real_ncu: Path, tmp_path: Path, report: Path) -> None:
    log = tmp_path / "log.txt"
    with pytest.raises(CaptureError, match=r"rror|exit code"):
        export_nsys(real_nsys, report, tmp_path / "a.sqlite", log=log)
    stream = tmp_path / "run.qdstrm"
    shutil.copy(report, stream)
    with pytest.raises(CaptureError, match="incomplete or invalid"):
        import_qdstrm(real_nsys, stream, tmp_path / "b.nsys-rep", log=log)
    with pytest.raises(CaptureError, match="Failed to load report file"):
        import_ncu_csv(real_ncu, report, "raw", tmp_path / "c.csv", log=log)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "run.nsys-rep", "run.qdstrm"]


def test_two_exports_of_one_report_at_once_do_not_mix(tmp_path: Path, report: Path) -> None:
    """Each writes half, waits until the other has done so too, and writes the rest: with one name for both, halves would mix."""
    body = (
        'echo "$$ half" > "$out"; touch "$(dirname "$out")/at-$$"; '
        'until [ "$(ls "$(dirname "$out")" | grep -c "^at-")" = 2 ]; do sleep 0.05; done; echo "$$ whole" >> "$out"'
    )
    nsys, target = tool(tmp_path / "nsys", EXPORT + body), tmp_path / "run.sqlite"
    found: list[object] = []

    def convert(number: int) -> None:
        found.append(export_nsys(nsys, report, target, log=tmp_path / f"log{number}.txt", timeout_s=HANG_S))

    writers = [threading.Thread(target=convert, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert found == [(), ()]
    first, second = target.read_text().splitlines()
    assert (first.split()[0], first.split()[1:], second.split()[1:]) == (second.split()[0], ["half"], ["whole"])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_a_killed_writer_left_is_removed_and_a_living_one_left_alone(tmp_path: Path, report: Path) -> None:
    dead, alive = tmp_path / ".part-1-2-run.sqlite", tmp_path / ".part-3-4-run.sqlite"
    dead.write_text("half")
    alive.write_text("half")
    long_ago = time.time() - 3 * reports.CONVERT_S
    os.utime(dead, (long_ago, long_ago))
    export_nsys(tool(tmp_path / "nsys", EXPORT + 'echo whole > "$out"'), report, tmp_path / "run.sqlite", log=tmp_path / "log")
    assert (dead.exists(), alive.exists()) == (False, True)
