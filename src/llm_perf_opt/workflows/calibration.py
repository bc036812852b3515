"""Trials of findings, kept per kind of device in the user's cache: one JSON object per line."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from llm_perf_opt.analysis.tuning.calibration import CalibrationPoint
from llm_perf_opt.core.errors import LlmPerfError, ParseError, words_of
from llm_perf_opt.core.file_lock import changing
from llm_perf_opt.core.host import user_cache_folder
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import write_whole
from llm_perf_opt.core.user_files import read_bytes

_KIND = "calibration"
_MOST_BYTES = 16 << 20
"""A file is not read beyond this: some 50,000 trials."""


def calibration_file(device: str) -> Maybe[Path]:
    """Return the file of a kind of device."""
    folder = user_cache_folder(_KIND)
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", device).strip("._")[:80] or "unknown"
    return folder if isinstance(folder, Missing) else folder / f"{name}.jsonl"


def read_calibration(device: str) -> tuple[tuple[CalibrationPoint, ...], tuple[str, ...]]:
    """Return the trials on a kind of device, and a note on lines that cannot be read; these are left out."""
    file = calibration_file(device)
    if isinstance(file, Missing) or not file.exists():
        return (), ()
    try:
        content = read_bytes(file)[:_MOST_BYTES]
    except (OSError, ParseError) as error:
        return (), (f"Earlier trials in {file} were not used: {error}",)
    found, damaged = [], 0
    for line in content.splitlines():
        try:
            point = msgspec.json.decode(line, type=CalibrationPoint)
        except ValueError:  # msgspec's errors, and text that is not UTF-8
            damaged += bool(line.strip())
            continue
        if point.sound and point.device == device:
            found.append(point)
        else:
            damaged += 1
    note = f"{damaged} lines of {file} cannot be used and were left out." if damaged else ""
    return tuple(_unique(found)), (note,) if note else ()


def add_calibration(points: Sequence[CalibrationPoint]) -> str:
    """Append trials that are not there yet. Return why they could not be kept; empty if they were."""
    for device in dict.fromkeys(point.device for point in points):
        file = calibration_file(device)
        if isinstance(file, Missing):
            return f"Trials were not kept for later predictions: {file.why}."
        try:
            _append(file, [point for point in points if point.device == device])
        except (OSError, LlmPerfError) as error:
            return f"Trials were not kept for later predictions: {words_of(error)}"
    return ""


def _append(file: Path, points: Sequence[CalibrationPoint]) -> None:
    with changing(file.parent, file):
        known = {(point.run, point.made, point.finding) for point in read_calibration(points[0].device)[0]}
        new = [point for point in points if (point.run, point.made, point.finding) not in known]
        if new:
            before = read_bytes(file) if file.exists() else b""
            end = b"\n" if before and not before.endswith(b"\n") else b""
            write_whole(file.parent, file, before + end + b"".join(msgspec.json.encode(point) + b"\n" for point in new))


def _unique(points: Sequence[CalibrationPoint]) -> list[CalibrationPoint]:
    return list({(point.run, point.made, point.finding): point for point in points}.values())
