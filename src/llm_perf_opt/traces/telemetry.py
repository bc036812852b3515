"""The sampler's JSON lines → `Telemetry`."""

from pathlib import Path

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.records import CpuSample, GpuSample, Telemetry, TelemetryHeader
from llm_perf_opt.core.user_files import read_bytes


class _Line(msgspec.Struct):
    """A line holds one of these."""

    header: TelemetryHeader | None = None
    cpu: CpuSample | None = None
    gpu: GpuSample | None = None


def read_telemetry(path: Path) -> Telemetry:
    """All readings; a last line cut short by a kill is dropped, damage elsewhere is a ParseError."""
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror}.") from error
    decoder = msgspec.json.Decoder(_Line)
    header: TelemetryHeader | None = None
    gpu: list[GpuSample] = []
    cpu: list[CpuSample] = []
    for number, line in enumerate(lines[:-1], 1):
        if not line:
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
