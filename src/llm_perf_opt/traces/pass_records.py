"""Read the records of the passes: times, the torch pass, telemetry. Only this module refuses impossible times."""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.engine_records import EngineMemory
from llm_perf_opt.core.errors import ParseError, words_of
from llm_perf_opt.core.machine_records import CpuSample, ExporterReading, GpuSample, Telemetry, TelemetryHeader
from llm_perf_opt.core.records import CleanTimings, Iteration, MemoryPeaks, Missing, ModelFacts, TorchPass, Workload
from llm_perf_opt.core.run_folder import read_record
from llm_perf_opt.core.user_files import open_unpacked
from llm_perf_opt.core.value_limits import check_json, check_plain, number_in
from llm_perf_opt.core.vision_records import VisionInput

LONGEST_NS = 2**63 - 1
"""The most that 64 bits of nanoseconds can represent: three centuries."""
_MOST = 2**63 - 1
"""The largest count: more is not a measurement and overflows when it is multiplied with a fraction."""

MOST_OF_THE_WHOLE = 1.01
"""The most that prefill and decode may take of their request, on the clock of the device; measured: 0.9986 to 1."""
TICK_NS = 1_000
"""The error of each time: device events have a resolution of half a microsecond."""
MOST_SAMPLES = 1_000_000
"""Lines of samples, which is 14 hours of one GPU at ten readings a second. In memory, they take about 500 MB."""
MOST_LINE_BYTES = 64 << 20
MOST_BYTES = 2**50
"""A pebibyte, which no device or host has."""


def read_timings(path: Path) -> CleanTimings:
    """Return the times of the unprofiled pass, or raise a ParseError that names the first impossible value."""
    timings = read_record(path, CleanTimings)
    try:
        check_plain(timings.model.architecture)
        check_plain(timings.model.counted)
    except ValueError as error:
        raise ParseError(f"{path} cannot be right: the architecture: {error}.", "The file is damaged or was edited.") from error
    flaw = next(_flaws(timings), "")
    if flaw:
        raise ParseError(f"{path} cannot be right: {flaw}.", "The file is damaged or was edited. Run it again.")
    return timings


def read_torch_pass(path: Path) -> TorchPass:
    """Return the record of the torch pass, or raise a ParseError."""
    return read_record(path, TorchPass)


def _flaws(timings: CleanTimings) -> Iterator[str]:
    yield from _workload_flaws(timings.workload)
    yield from _model_flaws(timings.model)
    if number_in(timings.load_s) is None or timings.load_s < 0:
        yield f"the model was loaded in {timings.load_s} s"
    yield from _memory_flaws(timings.memory)
    yield from _reserved_flaws(timings.runtime.memory if timings.runtime else None)
    yield from _host_flaws(timings)
    engine = timings.runtime is not None and timings.runtime.type != PYTORCH
    least_ns = 0 if engine else 1  # an engine may return two tokens at the same time
    for kind, iterations in (("repeat", timings.iterations), ("warm-up", timings.warmup)):
        for number, iteration in enumerate(iterations, start=1):
            for flaw in _iteration_flaws(iteration, timings.workload.decode_steps, least_ns):
                yield f"{kind} {number} {flaw}"


def _workload_flaws(work: Workload) -> Iterator[str]:
    for name, value in (("batch", work.batch_size), ("prompt", work.padded_tokens), ("number of new tokens", work.new_tokens)):
        if not 0 < value <= _MOST:
            yield f"the {name} is {_short(value)}"
    if len(work.prompt_tokens) != work.batch_size:
        yield f"it has the lengths of {len(work.prompt_tokens)} prompts, but a batch of {_short(work.batch_size)}"
    if any(not 0 < length <= work.padded_tokens for length in work.prompt_tokens):
        yield f"a prompt is not between 1 and {_short(work.padded_tokens)} tokens long"
    if work.vision is not None:
        yield from _vision_flaws(work.vision, work)


def _vision_flaws(vision: VisionInput, work: Workload) -> Iterator[str]:
    sizes = [*vision.pixel_shapes.values(), *vision.grids]
    if not 0 < vision.images <= _MOST or any(not 0 < math.prod(size) <= _MOST or min(size) < 1 for size in sizes if size):
        yield "the images have impossible sizes"
    if len(vision.image_tokens) != work.batch_size or any(
        not 0 <= tokens <= length for tokens, length in zip(vision.image_tokens, work.prompt_tokens, strict=False)
    ):
        yield "the image tokens do not fit the prompts"


def _model_flaws(model: ModelFacts) -> Iterator[str]:
    for name, value in (("parameters", model.parameters), ("bytes of weights", model.weight_bytes)):
        if not 0 <= value <= _MOST:
            yield f"the model has {_short(value)} {name}"


def _memory_flaws(memory: MemoryPeaks) -> Iterator[str]:
    for name, value in (
        ("tensors", memory.allocated_bytes),
        ("the allocator", memory.reserved_bytes),
        ("the device", memory.device_used_bytes),
        ("the process", memory.process_rss_bytes),
    ):
        if not isinstance(value, Missing) and not 0 <= value <= MOST_BYTES:
            yield f"the memory of {name} is {_short(value)} bytes"


def _reserved_flaws(memory: EngineMemory | None) -> Iterator[str]:
    if memory is None:
        return
    weights = 0 if memory.weights_bytes is None else memory.weights_bytes
    for value in (memory.cache_tokens, memory.cache_bytes, memory.needed_tokens, memory.needed_bytes, weights):
        if not isinstance(value, Missing) and not 0 <= value <= MOST_BYTES:
            yield f"a size of the engine's memory is {_short(value)}"
    if not isinstance(memory.share, Missing) and not 0 <= memory.share <= 1:
        yield f"the engine may use {memory.share} of the device's memory"


def _host_flaws(timings: CleanTimings) -> Iterator[str]:
    host, tokens = timings.host, timings.agreement
    if host is not None:
        counts = (
            host.wall_ns, host.processors, host.threads, host.main_delay_ns, host.other_delay_ns,
            host.involuntary_switches, host.voluntary_switches, host.runnable_before,
        )  # fmt: skip
        for value in counts:
            if not isinstance(value, Missing) and not 0 <= value <= _MOST:
                yield f"a figure of the load of the host is {_short(value)}"
        for seconds in (host.others_before, host.others_before_s):
            if not isinstance(seconds, Missing) and (number_in(seconds) is None or seconds < 0):
                yield f"a figure of the load of the host is {seconds}"
    quantized = timings.model.weights.quantized if timings.model.weights else None
    if quantized is not None and not all(
        0 <= value <= _MOST  # false for a number that is not finite, too
        for value in (quantized.weights, quantized.weight_bytes, quantized.scale_bytes, *quantized.component_bits.values())
    ):
        yield "the sizes of the quantized weights are impossible"
    if tokens is not None and not 0 <= tokens.equal <= tokens.compared <= _MOST:
        yield f"{_short(tokens.equal)} of {_short(tokens.compared)} tokens are equal"


def _iteration_flaws(iteration: Iteration, decode_steps: int, least_ns: int) -> Iterator[str]:
    steps = iteration.steps_ns
    if len(steps) != decode_steps:
        yield f"has {len(steps)} decode steps, but the request has {decode_steps}"
    if not 0 <= iteration.started_ns <= LONGEST_NS:
        yield f"began at {_short(iteration.started_ns)} ns"
    for name, value in (("took", iteration.wall_ns), ("has a prefill of", iteration.prefill_ns)):
        if not 0 < value <= LONGEST_NS:
            yield f"{name} {_short(value)} ns"
    for number, value in enumerate(steps):
        if not least_ns <= value <= LONGEST_NS:
            yield f"has a decode step, {number}, of {_short(value)} ns"
    if steps and not 0 < sum(steps) <= LONGEST_NS:
        yield "has decode steps that take no time, or more than a clock can represent"
    if iteration.total_ns > MOST_OF_THE_WHOLE * iteration.wall_ns + TICK_NS * (1 + len(steps)):
        yield f"took {iteration.wall_ns} ns, but its prefill and decode steps take {iteration.total_ns} ns"
    used = (*iteration.steps_cpu_ns, *(() if iteration.prefill_cpu_ns is None else (iteration.prefill_cpu_ns,)))
    if used and len(used) != len(steps) + 1:
        yield f"has CPU times of {len(used)} stages, but {len(steps) + 1} stages"
    if any(not 0 <= value <= LONGEST_NS for value in used):
        yield "has a CPU time beyond what a clock can represent"
    for span in iteration.substages:
        if not (0 <= span.start_ns <= LONGEST_NS and 0 <= span.duration_ns <= LONGEST_NS):
            yield "has a substage beyond what a clock can represent"


def _short(value: int) -> str:
    return str(value) if abs(value) <= _MOST else f"a number of {value.bit_length()} bits"


# --- telemetry --------------------------------------------------------------------------------------------------------


class _Line(msgspec.Struct):
    """A line, which has one of these."""

    header: TelemetryHeader | None = None
    cpu: CpuSample | None = None
    gpu: GpuSample | None = None
    exporter: ExporterReading | None = None


def read_telemetry(path: Path) -> Telemetry:
    """Return all samples. A truncated last line is ignored; damage elsewhere raises a ParseError."""
    decoder = msgspec.json.Decoder(_Line)
    header: TelemetryHeader | None = None
    gpu: list[GpuSample] = []
    cpu: list[CpuSample] = []
    exporter: list[ExporterReading] = []
    for number, line in enumerate(_lines(path), 1):
        if number > MOST_SAMPLES:
            raise ParseError(f"{path} has more than {MOST_SAMPLES:,} lines: raise profiling.nvml.interval_s for so long a run.")
        if line == b"\n":
            continue
        try:
            check_json(line)
            record = decoder.decode(line)
        except (ValueError, RecursionError) as error:
            raise ParseError(f"{path}, line {number}: {words_of(error)}") from error
        header = record.header or header
        if record.gpu:
            gpu.append(record.gpu)
        if record.cpu:
            cpu.append(record.cpu)
        if record.exporter:
            exporter.append(record.exporter)
    if header is None:
        raise ParseError(f"{path} has no header: the sampler ended before its first sample.")
    return Telemetry(header, tuple(gpu), tuple(cpu), tuple(exporter))


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file."""
    try:
        with open_unpacked(path) as file:
            while line := file.readline(MOST_LINE_BYTES + 1):
                if len(line) > MOST_LINE_BYTES:
                    raise ValueError(f"a line is longer than {MOST_LINE_BYTES >> 20} MiB")
                if line.endswith(b"\n"):
                    yield line
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ParseError(f"{path} cannot be read: {error}.", "The file is damaged.") from error
