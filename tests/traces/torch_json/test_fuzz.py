"""Mutated traces give an analysis or a ParseError, and no other error. `make test-all` tries thousands."""

import gzip
import random
import re
import resource
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fuzzing import SEED, TRIES
from llm_perf_opt.analysis.evidence import RunFacts
from llm_perf_opt.analysis.trace.document import TraceAnalysis
from llm_perf_opt.analysis.trace.stages import stage_columns
from llm_perf_opt.analysis.trace_analysis import document_of
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.torch_json import event_chunks
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from synthetic_traces import Recipe, write_cpu_trace, write_trace

TOKENS = [
    b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1e-999", b"9" * 400, b"0x10", b"1_000", b"+1", b".5", b"\x00",
    b"\xff\xfe", b'"', b'\\"', b"\\u12", b"[", b"]", b"{", b"}", b",", b":", b"[]", b"{}", b"\xf0\x28\x8c\xbc", b"[" * 3000,
    b'{"a":' * 3000, b'"traceEvents": [', b'}, {"ph":', b'"ts": "x"', b'"dur": -5', b'"args": 5', b'"args": [{}]',
    b'"grid": [1e30, -1, 2]', b'"correlation": -1', b'"pid": {"a": 1}', b'"cat": 3', b'"name": null',
    b'"graph node id": 18446744073709551615', b'"bytes": 1.5',
]  # fmt: skip

Mutator = Callable[[bytearray, random.Random], bytes]


def cut(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data[: draw.randrange(len(data))])


def flip(data: bytearray, draw: random.Random) -> bytes:
    for _ in range(draw.choice([1, 1, 2, 8, 64])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def insert(data: bytearray, draw: random.Random) -> bytes:
    for _ in range(draw.choice([1, 1, 3])):
        at = draw.randrange(len(data))
        data[at:at] = draw.choice(TOKENS)
    return bytes(data)


def overwrite(data: bytearray, draw: random.Random) -> bytes:
    token = draw.choice(TOKENS)
    at = draw.randrange(len(data))
    data[at : at + len(token)] = token
    return bytes(data)


def remove(data: bytearray, draw: random.Random) -> bytes:
    start = draw.randrange(len(data))
    del data[start : start + draw.choice([1, 2, 10, 500])]
    return bytes(data)


def move(data: bytearray, draw: random.Random) -> bytes:
    start, to = draw.randrange(len(data)), draw.randrange(len(data))
    length = draw.choice([5, 50, 500])
    data[to:to] = data[start : start + length]
    return bytes(data)


def replace_value(data: bytearray, draw: random.Random) -> bytes:
    """Replace a value after a colon."""
    at = draw.choice([found.end() for found in re.finditer(b":", data)])
    end = min(index for index in (data.find(b",", at), data.find(b"\n", at), len(data)) if index >= 0)
    data[at:end] = draw.choice(TOKENS)
    return bytes(data)


def other_encoding(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data).decode().encode(draw.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"]))


def packed_then_damaged(data: bytearray, draw: random.Random) -> bytes:
    packed = bytearray(gzip.compress(bytes(data), 1))
    return draw.choice([cut, flip, remove])(packed, draw)


MUTATORS: list[Mutator] = [cut, flip, flip, insert, insert, overwrite, remove, move, replace_value, replace_value, other_encoding,
                           packed_then_damaged]  # fmt: skip


def assert_analyzed(trace: Trace) -> None:
    """Check that a trace is analyzed or refused as a whole, that all sums are right, and that it can be written."""
    assert len(stage_columns(trace)["kernels"]["stage"]) == len(trace.work)
    found = document_of(trace, RunFacts(), "a mutant")
    assert msgspec.json.decode(msgspec.json.encode(found), type=TraceAnalysis) == found
    if found.complete and len(trace.work):
        gpu = found.gpu
        assert (gpu.busy_ns or 0) + (gpu.idle_ns or 0) == gpu.span_ns
        assert sum(line.ns for line in found.idle) == gpu.idle_ns
    for budget in found.budgets:
        assert sum(row.ns for row in budget.rows) == budget.wall_ns
        assert len(trace.work) or min(row.ns for row in budget.rows) >= 0


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(5))
def test_mutated_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Each base in chunks much smaller than it, to test the splitting as well."""
    path = tmp_path / "trace.json"
    base = bytearray()
    recipe = Recipe(steps=1, kernels_per_step=2, copies=part % 2 == 0, graph=part == 3, line_a_value=part in (1, 2), seed=part)
    if part == 4:
        write_cpu_trace(path, seed=part, steps=2)
    else:
        write_trace(path, recipe)
    base[:] = path.read_bytes()
    monkeypatch.setattr(event_chunks, "CHUNK_BYTES", [300, 900, 5000, 1 << 20, 700][part])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {"trace": 0, "error": 0}
    for number in range(TRIES // 10):
        draw = random.Random(SEED + part * TRIES + number)
        data = draw.choice(MUTATORS)(bytearray(base), draw)
        path.unlink(missing_ok=True)  # a new file is written faster than an old one anew
        path.write_bytes(data)
        try:
            trace = read_torch_trace(path)
            assert isinstance(trace, Trace)
            outcomes["trace"] += 1
            assert_analyzed(trace)
        except ParseError:
            outcomes["error"] += 1
    if SEED == 0:  # other choices may be one-sided by chance
        assert outcomes["trace"] > TRIES / 40  # most mutants are still traces, or this tests little
        assert outcomes["error"] > TRIES / 200
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 500


def test_the_mutators_change_what_they_are_given() -> None:
    draw = random.Random(0)
    data = b'{"a": 1, "traceEvents": [{"ph": "X"}]}' * 10
    for mutator in MUTATORS:
        assert any(mutator(bytearray(data), draw) != data for _ in range(5)), mutator
