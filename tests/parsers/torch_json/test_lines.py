"""Reading events by their lines gives what decoding them gives, wherever they are in such lines."""

import gzip
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.errors import ParseError
from llm_perf_opt.events import Columns, Trace
from llm_perf_opt.parsers.torch_json import event_chunks
from llm_perf_opt.parsers.torch_json.columns import TorchColumns
from llm_perf_opt.parsers.torch_json.lines import Lined, TorchLines
from llm_perf_opt.parsers.torch_json.trace import read_torch_trace
from synthetic_traces import Recipe, kinds, write_trace

REAL = Path(__file__).parents[2] / "fixtures" / "h200" / "torch_trace.json.gz"
TRIES = int(os.environ.get("LLM_PERF_FUZZ", "2000")) // 4
OLDER, NEWER = False, True
"""A line for several values, or for each."""


def rows_of(trace: Trace) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of all tables, names as text, in an order of their own."""

    def spelled(table: Columns) -> list[tuple[Any, ...]]:
        columns = table.columns()
        for name in ("name", "shapes", "domain"):
            if name in columns:  # without spaces: where one event of a chunk is odd, decoding spells the shapes of all anew
                columns[name] = [trace.name_of(code).replace(" ", "") if code >= 0 else "" for code in columns[name]]
        return sorted(zip(*columns.values(), strict=True))

    return {name: spelled(getattr(trace, name)) for name in ("work", "calls", "operators", "ranges")}


class Reader:
    """Reads a file by its lines and by decoding alone."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.by_line = 0
        self._patch = monkeypatch
        self._read = TorchLines.read

    def _counting(self, lines: TorchLines, array: bytes | memoryview) -> Lined | None:
        found = self._read(lines, array)
        self.by_line += found.events if found else 0
        return found

    def lined(self) -> Trace:
        self._patch.setattr(TorchLines, "read", lambda lines, array: self._counting(lines, array))
        return read_torch_trace(self.path)

    def decoded(self) -> Trace:
        self._patch.setattr(TorchLines, "read", lambda lines, array: None)
        return read_torch_trace(self.path)

    def assert_same(self) -> Trace:
        lined, decoded = self.lined(), self.decoded()
        assert rows_of(lined) == rows_of(decoded)
        assert lined.problems == decoded.problems
        assert lined.facts == decoded.facts
        return lined


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(tmp_path / "trace.json", monkeypatch)


def in_lines(event: dict[str, Any], newer: bool) -> str:
    """An event with a length, an arrow or an instant as torch lays it out."""
    part, last = (",\n    ", "\n    ") if newer else (", ", "")
    said = {key: value if key in ("ts", "dur", "args") else json.dumps(value) for key, value in event.items()}
    if event["ph"] != "X":
        begin, end = (
            part.join(f'"{key}": {said[key]}' for key in keys) for keys in (("ph", "id", "pid", "tid", "ts"), ("cat", "name"))
        )
        return f"{begin},\n    {end}{last}" + (', "bp": "e"' if event["ph"] == "f" else "")
    head = part.join(f'"{key}": {said[key]}' for key in ("ph", "cat", "name", "pid", "tid"))
    return f'{head},\n    "ts": {said["ts"]}{part}"dur": {said["dur"]}{last},\n    "args": {{\n      {said["args"]}\n    }}'


def write(path: Path, events: list[str]) -> None:
    path.write_text('{"traceEvents": [\n  {\n    ' + "\n  },\n  {\n    ".join(events) + '\n  }\n  ],\n  "traceName": "x"\n}')


def event(
    cat: str, args: str, name: str = "a name", ts: str = "3904425331755.097", dur: str = "12.345", **more: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 607, "tid": 608, "ts": ts, "dur": dur, "args": args, **more}


KERNEL = (
    '"External id": 41521,      "queued": 0, "device": 0, "context": 1,      "stream": 7, "correlation": 454401,'
    '      "registers per thread": 213,      "grid": [1, 2, 1],      "block": [128, 1, 1],      "est. achieved occupancy %": 0'
)
CALL = '"External id": 41521,      "cbid": 652, "correlation": 454401'
OPERATOR = '"External id": 5,"Record function id": 0, "Input type": ["float"], "Input Dims": [[2, 8], []], "Ev Idx": 4'
FRAME = '"Python parent id": 1, "Python id": 139, "Python module id": 0, "Ev Idx": 159'
USUAL = [
    event("cpu_op", OPERATOR, "aten::mm"),
    event("cuda_runtime", CALL, "cudaLaunchKernel"),
    event("kernel", KERNEL, "gemm", pid=0, tid=7),
    event("user_annotation", '"External id": 1,"Record function id": 0, "Ev Idx": 0', "decode"),
    event("python_function", FRAME, "nn.Module: Linear_0"),
    event("python_function", FRAME, "threading.py(1030): _bootstrap"),
    event("gpu_user_annotation", '"External id": 11389', "decode"),
]


@pytest.mark.parametrize("newer", [OLDER, NEWER])
def test_generated_traces_are_read_by_their_lines(reader: Reader, newer: bool) -> None:
    for recipe in (*kinds(3), Recipe(steps=40, kernels_per_step=30, line_a_value=newer)):
        reader.by_line = 0
        truth = write_trace(reader.path, recipe)
        assert len(reader.assert_same().work) == truth.kernels + truth.copies + truth.memsets
        assert reader.by_line >= truth.events - truth.copies - truth.memsets - 2  # copies, and the two at the file's ends


@pytest.mark.parametrize("newer", [OLDER, NEWER])
def test_the_real_trace_in_lines(reader: Reader, newer: bool) -> None:
    """What the H200 recorded, written as torch writes it: the fixture is without its lines."""
    found = [one for one in json.loads(gzip.decompress(REAL.read_bytes()))["traceEvents"] if one["ph"] in "Xsf"]
    usual = [one for one in found if one["ph"] != "X" or ("args" in one and isinstance(one["pid"], int))]
    for one in usual:
        one["ts"] = f"{one['ts']:.3f}"
        if one["ph"] == "X":
            one["dur"] = f"{one['dur']:.3f}"
            one["args"] = json.dumps(one["args"])[1:-1]
    write(reader.path, [in_lines(one, newer) for one in usual])
    trace = reader.assert_same()
    assert sum(1 for one in trace.work.kind if one == 0) == 1711
    assert reader.by_line >= 0.99 * len(usual)


def test_what_torch_writes_here_is_read_by_its_lines(reader: Reader) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, record_shapes=True, with_stack=True, with_modules=True, profile_memory=True) as recorded:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        with record_function("decode"):
            model(torch.ones(2, 8)).sum().backward()
    recorded.export_chrome_trace(str(reader.path))
    trace = reader.assert_same()
    assert len(trace.operators) > 10
    assert len(trace.ranges) > 3
    assert reader.by_line >= 0.9 * int(trace.facts["events"])


ODD: dict[str, dict[str, Any]] = {
    "a quote in the name": event("cpu_op", OPERATOR, 'say "x", "pid": 3'),
    "an end of an event in the name": event("cpu_op", OPERATOR, "\n  },\n  {\n"),
    "letters beyond ASCII": event("user_annotation", '"Ev Idx": 0', "décode ✓ \\ / \t"),
    "a very long name": event("kernel", KERNEL, "k" * 5000),
    "words for a process": event("cuda_runtime", CALL, pid="Spans", tid="12"),
    "a category of its own": event("mine", '"x": 1'),
    "no number of an operator": event("cpu_op", '"Input Dims": [[3]], "Ev Idx": 4'),
    "no number at the end": event("cpu_op", '"External id": 7,"Input Dims": [[3]]'),
    "a number of an operator alone": event("cpu_op", '"External id": 7'),
    "a long number of an operator": event("cpu_op", OPERATOR.replace("5,", "12345678901,", 1)),
    "no arguments": event("cpu_op", ""),
    "shapes that are null": event("cpu_op", OPERATOR.replace("[[2, 8], []]", "null")),
    "no time at all": event("cpu_op", OPERATOR, dur="0.000", ts="0.000"),
    "a long time": event("cpu_op", OPERATOR, dur="1234567890.123"),
    "few digits": event("cpu_op", OPERATOR, ts="7.001"),
    "times since 1970": event("cpu_op", OPERATOR, ts="1790857026000123.457"),
    "whole times": event("kernel", KERNEL, ts="3904425331755", dur="12"),
    "one decimal": event("kernel", KERNEL, ts="3904425331755.5", dur="12.5"),
    "six decimals": event("kernel", KERNEL, ts="390442533175.097123", dur="12.000499"),
    "an exponent": event("kernel", KERNEL, dur="1.5e3"),
    "a negative length": event("kernel", KERNEL, dur="-1.500"),
    "a negative start": event("kernel", KERNEL, ts="-3904425331755.097"),
    "another stream": event("kernel", KERNEL.replace('"stream": 7', '"stream": 107')),
    "no stream": event("kernel", KERNEL.replace('      "stream": 7, ', "")),
    "a device below zero": event("kernel", KERNEL.replace('"device": 0', '"device": -1')),
    "a correlation at the end": event("kernel", '"device": 1, "stream": 3, "grid": [2, 2, 2], "correlation": 77'),
    "a correlation first": event("kernel", '"correlation": 77, "device": 1, "stream": 3, "grid": [2, 2, 2]'),
    "two correlations": event("kernel", KERNEL + ', "correlation": 5'),
    "no correlation": event("kernel", '"External id": 3, "device": 1, "stream": 3'),
    "a correlation below zero": event("cuda_runtime", CALL.replace("454401", "-454401")),
    "a correlation of many digits": event("cuda_runtime", CALL.replace("454401", "1844674407370955")),
    "a correlation beyond words": event("cuda_runtime", CALL.replace("454401", "18446744073709551615")),
    "a fraction of a correlation": event("cuda_runtime", CALL.replace("454401", "4.5")),
    "a correlation in a text": event("cuda_runtime", CALL.replace("454401", '"454401"')),
    "something behind the correlation": event("cuda_runtime", CALL + ', "x": 5'),
    "a node of a graph": event("kernel", KERNEL + ', "graph id": 5, "graph node id": 17179869184'),
    "a grid beyond words": event("kernel", KERNEL.replace("[1, 2, 1]", "[4294967296, 4294967296, 4294967296]")),
    "a grid of two": event("kernel", KERNEL.replace("[1, 2, 1]", "[1, 2]")),
    "a grid of text": event("kernel", KERNEL.replace("[1, 2, 1]", '"N/A"')),
    "a copy": event("gpu_memcpy", KERNEL + ', "bytes": 4096'),
    "much to say in a range": event("user_annotation", '"Ev Idx": 1, "more": "' + "m" * 500 + '"'),
    "arguments in lines": event("cpu_op", OPERATOR.replace(', "Input', ',\n      "Input')),
    "an object in the arguments": event("cpu_op", '"x": [{"ph": "X"}, {"ph": "X"}], "Ev Idx": 4'),
}


@pytest.mark.parametrize("newer", [OLDER, NEWER])
@pytest.mark.parametrize("odd", list(ODD))
def test_odd_events_are_read_as_decoding_reads_them(reader: Reader, odd: str, newer: bool) -> None:
    write(reader.path, [in_lines(one, newer) for one in (*USUAL, ODD[odd], *USUAL)])
    reader.assert_same()
    assert reader.by_line >= 2 * len(USUAL) - 1  # the last event of a file is fed alone


BAD = {
    "a number that begins with zero": ('"correlation": 454401', '"correlation": 0454401'),
    "an operator that begins with zero": ('"External id": 5', '"External id": 05'),
    "a start that begins with zero": ('"ts": 3904425331755.097', '"ts": 0904425331755.097'),
    "a value that is missing": ('"Ev Idx": 4', '"Ev Idx": '),
    "a letter in a number": ('"dur": 12.345', '"dur": 1x.345'),
    "a name that does not end": ('"name": "aten::mm"', '"name": "aten::mm'),
    "shapes that do not end": ("[[2, 8], []]", "[[2, 8], []"),
    "no comma": ('"External id": 41521,', '"External id": 41521 '),
}


@pytest.mark.parametrize("newer", [OLDER, NEWER])
@pytest.mark.parametrize("bad", list(BAD))
def test_what_is_no_json_is_not_read_by_its_lines_either(reader: Reader, bad: str, newer: bool) -> None:
    good, spoilt = BAD[bad]
    spoilt_events = [in_lines(one, newer).replace(good, spoilt) for one in USUAL[:3]]
    write(reader.path, [in_lines(one, newer) for one in USUAL * 3] + spoilt_events)
    assert any(spoilt in one for one in spoilt_events)
    assert reader.assert_same().problems


@pytest.mark.parametrize("newer", [OLDER, NEWER])
def test_kernels_of_more_streams_than_are_remembered(reader: Reader, newer: bool) -> None:
    streams = [10**digits for digits in range(12)] * 3
    write(reader.path, [in_lines(event("kernel", KERNEL.replace('"stream": 7', f'"stream": {one}')), newer) for one in streams])
    assert sorted(reader.assert_same().work.stream) == sorted(streams)


def test_other_json_is_left_to_decoding() -> None:
    lines = TorchLines(TorchColumns().codes)
    one = json.dumps({"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.5, "dur": 1.5})
    for text in ("[]", "[ ]", "[5]", f"[{one}]", f"[{one},{one}]", "[\n  {\n  },\n  {\n  }\n]", "[\n  {\n" * 20 + "]"):
        assert lines.read(text.encode()) is None


# --- damage ---------------------------------------------------------------------------------------------------------------------


def _damaged(base: bytes, draw: random.Random) -> bytes:
    data = bytearray(base)
    at = draw.randrange(len(data))
    size = min(draw.choice([1, 2, 8, 60, 200, 600, 2000]), len(data) - at)
    kind = draw.randrange(6)
    if kind == 0:
        del data[at : at + size]
    elif kind == 1:
        data[at : at + size] = draw.randbytes(size).replace(b"\n", b"x")
    elif kind == 2:
        other = draw.randrange(len(data))
        data[at : at + size] = data[other : other + size]
    else:
        data[at : at + size] = [b" ", b"\0", b"7"][kind - 3] * size
    return bytes(data)


def _counts(trace: Trace) -> tuple[int, ...]:
    return len(trace.work), len(trace.calls), len(trace.operators), len(trace.ranges)


def _bases(path: Path) -> Iterator[bytes]:
    for newer in (OLDER, NEWER):
        write_trace(path, Recipe(steps=2, kernels_per_step=6, copies=True, line_a_value=newer))
        yield path.read_bytes()
        write(path, [in_lines(one, newer) for one in USUAL * 12])
        yield path.read_bytes()


def test_damage_is_told_or_costs_no_row(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decoding finds sound, lines read the same. What only decoding finds unsound lies where nobody needs it."""
    monkeypatch.setattr(event_chunks, "CHUNK_BYTES", 16 << 10)
    told = 0
    for base in _bases(reader.path):
        reader.path.write_bytes(base)
        whole = _counts(reader.lined())
        for seed in range(TRIES // 4):
            reader.path.unlink()
            reader.path.write_bytes(_damaged(base, random.Random(seed)))
            try:
                decoded = reader.decoded()
            except ParseError:
                with pytest.raises(ParseError):
                    reader.lined()
                continue
            lined = reader.lined()
            if not decoded.problems:
                assert rows_of(lined) == rows_of(decoded), seed
                assert not lined.problems
            elif not lined.problems:
                assert _counts(lined) == whole, seed
            else:
                told += 1
    assert told > TRIES / 4
