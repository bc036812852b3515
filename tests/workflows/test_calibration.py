"""Trials in the user's cache: appended once, per device, and safe against damage."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from llm_perf_opt.analysis.tuning.calibration import CalibrationPoint
from llm_perf_opt.core.records import Missing
from llm_perf_opt.workflows.calibration import add_calibration, calibration_file, read_calibration

POINT = CalibrationPoint("some_change", "NVIDIA H200", "tiny", "run", "2026", 10_000, 6_000, 5_000)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def file() -> Path:
    found = calibration_file("NVIDIA H200")
    assert not isinstance(found, Missing)
    return found


def test_points_are_kept_once_and_by_device() -> None:
    other = replace(POINT, device="a/../processor")
    assert add_calibration([POINT, other]) == ""
    assert add_calibration([POINT]) == ""
    assert read_calibration("NVIDIA H200") == ((POINT,), ())
    assert read_calibration("a/../processor")[0] == (other,)
    assert file().parent.name == "calibration"
    assert len(list(file().parent.glob("[!.]*"))) == 2
    assert read_calibration("none") == ((), ())


@pytest.mark.parametrize("damage", [b'{"finding": "ha', b"\xff\xfe\n", b"[]\n", b'{"finding": 3}\n', b"\n\n"])
def test_damaged_lines_are_left_out_and_the_next_is_readable(damage: bytes) -> None:
    add_calibration([POINT])
    with file().open("ab") as stream:
        stream.write(damage)
    second = replace(POINT, run="second")
    assert add_calibration([second]) == ""
    found, notes = read_calibration("NVIDIA H200")
    assert found == (POINT, second)
    assert bool(notes) == bool(damage.strip())


def test_impossible_figures_are_left_out() -> None:
    add_calibration([POINT])
    with file().open("a") as stream:
        stream.write(file().read_text().replace("10000", "0"))
    found, notes = read_calibration("NVIDIA H200")
    assert found == (POINT,)
    assert "1 lines" in notes[0]


def test_several_writers_lose_nothing() -> None:
    points = [replace(POINT, run=str(number)) for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda point: add_calibration([point]), points)) == {""}
    assert {point.run for point in read_calibration("NVIDIA H200")[0]} == {point.run for point in points}


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "llm-perf-opt").write_text("a file")
    assert "were not kept" in add_calibration([POINT])
