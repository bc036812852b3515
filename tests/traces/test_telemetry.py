"""The telemetry file: complete, truncated and damaged."""

import io
import random
import tracemalloc
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import MS, cpu_sample, gpu_sample, telemetry
from fuzzing import SEED, TRIES
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.machine_records import CpuSample, ExporterReading, GpuSample, Telemetry, TelemetryHeader
from llm_perf_opt.core.records import Missing
from llm_perf_opt.runners.measure import nvml
from llm_perf_opt.traces import pass_records
from llm_perf_opt.traces.pass_records import read_telemetry


def as_written(record: Telemetry) -> bytes:
    """Return the bytes that the sampler writes for these samples."""
    file = io.BytesIO()
    nvml._write(file, header=record.header)
    for sample in record.cpu:
        nvml._write(file, cpu=sample)
    for reading in record.gpu:
        nvml._write(file, gpu=reading)
    for version in record.exporter:
        nvml._write(file, exporter=version)
    return file.getvalue()


def read(folder: Path, content: bytes) -> Telemetry:
    (folder / "samples.jsonl").write_bytes(content)
    return read_telemetry(folder / "samples.jsonl")


WHOLE = telemetry(
    gpu=[gpu_sample(0), gpu_sample(100 * MS, power_mw=Missing("NVML: Not Supported")), gpu_sample(200 * MS, energy_mj=2**63)],
    cpu=[cpu_sample(0), cpu_sample(100 * MS, frequency_mhz=Missing("the system does not tell the frequency"))],
    gpu_note="",
)


def test_what_the_sampler_writes_is_read_back(tmp_path: Path) -> None:
    assert read(tmp_path, as_written(WHOLE)) == WHOLE
    exported = ExporterReading(5, 7, {'a{b="c"}': 1.5}, {"a": "gauge"}, "odd")
    with_exporter = replace(WHOLE, exporter=(exported, exported))
    assert read(tmp_path, as_written(with_exporter)) == with_exporter


def test_the_file_of_an_exporter_is_read_when_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    reader = nvml.ExporterFile(file)
    missing = reader.changed(1)
    assert missing is not None
    assert (missing.series, "cannot be read" in missing.why) == ({}, True)
    assert reader.changed(2) is None
    file.write_text("a 1\n")
    found = reader.changed(3)
    assert found is not None
    assert (found.at_ns, found.series, found.why) == (3, {"a": 1.0}, "")
    assert found.written_utc_ns == file.stat().st_mtime_ns
    assert reader.changed(4) is None
    file.write_text("a 22\n")
    again = reader.changed(5)
    assert again is not None
    assert again.series == {"a": 22.0}


MAYBE_NUMBER = st.one_of(st.integers(0, 2**63 - 1), st.builds(Missing, st.text(max_size=20)))
GPU = st.builds(
    GpuSample,
    **{
        field.name: st.integers(0, 2**63 - 1) if field.name in ("at_ns", "device") else MAYBE_NUMBER
        for field in fields(GpuSample)
    },
)
FLOATS = st.floats(0, 1e6)
CPU = st.builds(
    CpuSample,
    at_ns=st.integers(0, 2**63 - 1),
    machine_pct=FLOATS,
    ours_pct=FLOATS,
    rss_bytes=st.integers(0, 2**63 - 1),
    frequency_mhz=st.one_of(FLOATS, st.builds(Missing, st.text(max_size=20))),
)
HEADER = st.builds(TelemetryHeader, interval_s=FLOATS, processors=st.integers(1, 4096), gpu_note=st.text(max_size=20))


@settings(deadline=None, max_examples=50)
@given(st.builds(Telemetry, HEADER, st.lists(GPU, max_size=4).map(tuple), st.lists(CPU, max_size=4).map(tuple)))
def test_any_readings_are_read_back(tmp_path_factory: pytest.TempPathFactory, record: Telemetry) -> None:
    assert read(tmp_path_factory.getbasetemp(), as_written(record)) == record


@pytest.mark.parametrize("kept", [1, 30, 60])
def test_a_last_line_cut_short_by_a_kill_is_dropped(tmp_path: Path, kept: int) -> None:
    whole = as_written(WHOLE)
    last = whole[:-1].rfind(b"\n") + 1
    found = read(tmp_path, whole[: last + kept])
    assert found.gpu == WHOLE.gpu[:-1]
    assert found.cpu == WHOLE.cpu


def test_wherever_the_end_is_cut_what_stands_before_is_kept(tmp_path: Path) -> None:
    whole = as_written(WHOLE)
    header_ends = whole.index(b"\n") + 1
    for end in range(header_ends, len(whole) + 1, 3):
        found = read(tmp_path, whole[:end])
        assert len(found.cpu) + len(found.gpu) == whole[:end].count(b"\n") - 1


@pytest.mark.parametrize("end", [0, 1, 20])
def test_a_sampler_killed_before_its_first_line_is_said_so(tmp_path: Path, end: int) -> None:
    with pytest.raises(ParseError, match="has no header") as caught:
        read(tmp_path, as_written(WHOLE)[:end])
    assert caught.value.exit_code == 5


DAMAGED = {
    "not JSON": b"hello",
    "a list": b"[]",
    "a number": b"7",
    "a field missing": b'{"cpu":{"at_ns":1}}',
    "a wrong type": b'{"cpu":{"at_ns":"1","machine_pct":0,"ours_pct":0,"rss_bytes":0,"frequency_mhz":0}}',
    "a number that is none": b'{"cpu":{"at_ns":1,"machine_pct":NaN,"ours_pct":0,"rss_bytes":0,"frequency_mhz":0}}',
    "not UTF-8": b'{"header":{"interval_s":1,"processors":1,"gpu_note":"\xff"}}',
    "nested without end": b'{"color":' + b"[" * 100_000,
    "zeros": bytes(40),
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_in_the_middle_is_a_parse_error_with_its_line(tmp_path: Path, line: bytes) -> None:
    before, after = as_written(telemetry(cpu=[cpu_sample(0)])), as_written(WHOLE)
    with pytest.raises(ParseError, match=r"samples\.jsonl, line 4: "):
        read(tmp_path, before + b"\n" + line + b"\n" + after)


def test_empty_lines_and_lines_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    assert read(tmp_path, as_written(WHOLE) + b'\n\n{"npu": {"at_ns": 1}}\n{}\n') == WHOLE


@pytest.mark.parametrize("what", ["nowhere", "folder"])
def test_a_file_that_cannot_be_read_is_a_parse_error(tmp_path: Path, what: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ParseError, match="cannot be read"):
        read_telemetry(tmp_path / what)


INSERTED = [b"\n", b'"', b"{", b"}", b"null", b"-", b"1e999", b"\\u12", b"\xff", b"[" * 50, b"9" * 30]


def mutated(draw: random.Random, whole: bytes) -> bytes:
    content = bytearray(whole)
    for _ in range(draw.randint(1, 3)):
        place, kind = draw.randrange(len(content) + 1), draw.randrange(6)
        if kind == 0:
            content[place : place + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            content[place : place + draw.randint(1, 40)] = b""
        elif kind == 2:
            content[place:place] = draw.choice(INSERTED)
        elif kind == 3:
            content[place:place] = content[draw.randrange(len(content) + 1) :][: draw.randint(1, 60)]
        elif kind == 4:
            content = content[:place]
        else:
            lines = content.split(b"\n")
            draw.shuffle(lines)
            content = bytearray(b"\n".join(lines))
    return bytes(content)


@pytest.mark.fuzz
def test_damaged_files_end_in_readings_or_a_parse_error(tmp_path: Path) -> None:
    draw, whole = random.Random(SEED + 20260102), as_written(WHOLE)
    outcomes: Counter[str] = Counter()
    for _ in range(TRIES):
        try:
            found: Any = read(tmp_path, mutated(draw, whole))
        except ParseError:
            found = None
        outcomes["refused" if found is None else "read"] += 1
        assert found is None or isinstance(found, Telemetry)
    if SEED == 0:  # other choices may be one-sided by chance
        assert min(outcomes["refused"], outcomes["read"]) > TRIES * 0.15, "the damage was neither harmless nor always fatal"


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    """Two lists of all samples take sixteen bytes per sample."""
    path = tmp_path / "nvml.jsonl"
    path.write_bytes(as_written(telemetry()) + b"\n" * 100_000)
    tracemalloc.start()
    try:
        assert read_telemetry(path) == telemetry()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_too_many_samples_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = as_written(WHOLE)
    monkeypatch.setattr(pass_records, "MOST_SAMPLES", content.count(b"\n"))
    assert read(tmp_path, content) == WHOLE
    with pytest.raises(ParseError, match="has more than 6 lines"):
        read(tmp_path, content + content)
