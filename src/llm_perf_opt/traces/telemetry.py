"""The sampler's JSON lines → `Telemetry`."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.machine_records import CpuSample, GpuSample, Telemetry, TelemetryHeader
from llm_perf_opt.core.user_files import open_ordinary


class _Line(msgspec.Struct):
    """A line holds one of these."""

    header: TelemetryHeader | None = None
    cpu: CpuSample | None = None
    gpu: GpuSample | None = None


def read_telemetry(path: Path) -> Telemetry:
    """All readings; a last line cut short by a kill is dropped, damage elsewhere is a ParseError."""
    decoder = msgspec.json.Decoder(_Line)
    header: TelemetryHeader | None = None
    gpu: list[GpuSample] = []
    cpu: list[CpuSample] = []
    for number, line in enumerate(_lines(path), 1):
        if line == b"\n":
            continue
        try:
            record = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ParseError(f"{path}, line {number}: {error}") from error
        header = record.header or header
        if record.gpu:
            gpu.append(record.gpu)
        if record.cpu:
            cpu.append(record.cpu)
    if header is None:
        raise ParseError(f"{path} has no header: the sampler ended before its first reading.")
    return Telemetry(header, tuple(gpu), tuple(cpu))


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, one at a time."""
    try:
        with open_ordinary(path) as file:
            yield from (line for line in file if line.endswith(b"\n"))
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror}.") from error
