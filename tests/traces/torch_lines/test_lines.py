"""The fast reader gives the same result as decoding, for events in its layout and for all others."""

import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzzing import SEED, TRIES
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import Columns, Trace
from llm_perf_opt.traces.torch_json import event_chunks
from llm_perf_opt.traces.torch_json.columns import PartialRead, TorchColumns
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from llm_perf_opt.traces.torch_lines.lines import TorchLines
from synthetic_traces import Recipe, kinds, write_trace

REAL = Path(__file__).parents[2] / "fixtures" / "h200" / "torch_trace.json.gz"
OLDER, NEWER = False, True
"""Several values per line, or one."""


def rows_of(trace: Trace) -> dict[str, list[tuple[Any, ...]]]:
    """Return all rows of all tables, sorted, with names as text."""

    def spelled(table: Columns) -> list[tuple[Any, ...]]:
        columns = table.columns()
        for name in {"name", "shapes", "domain"} & columns.keys():
            columns[name] = [trace.name_of(code) if code >= 0 else "" for code in columns[name]]
        if "shapes" in columns:  # where one event of a chunk is odd, decoding spells the shapes of all anew
            columns["shapes"] = [shapes.replace(" ", "") for shapes in columns["shapes"]]
        return sorted(zip(*columns.values(), strict=True))

    return {name: spelled(getattr(trace, name)) for name in ("work", "calls", "operators", "ranges")}


class Reader:
    """Reads a file with the fast reader and by decoding only."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.by_line = 0
        self._patch = monkeypatch
        self._read = TorchLines.read

    def _counting(self, lines: TorchLines, array: bytes | memoryview) -> PartialRead | None:
        found = self._read(lines, array)
        self.by_line += found.events if found else 0
        return found

    def lined(self) -> Trace:
        self._patch.setattr(TorchLines, "read", lambda lines, array: self._counting(lines, array))
        return read_torch_trace(self.path)

    def decoded(self) -> Trace:
        self._patch.setattr(TorchLines, "read", lambda lines, array: None)
        return read_torch_trace(self.path)

    def assert_same_or_refused(self) -> bool:
        """Return whether the file has a problem."""
        try:
            decoded = self.decoded()
        except ParseError as error:
            with pytest.raises(ParseError, match=re.escape(str(error))):
                self.lined()
            return True
        return bool(self._assert_like(decoded).problems)

    def assert_same(self) -> Trace:
        return self._assert_like(self.decoded())

    def _assert_like(self, decoded: Trace) -> Trace:
        lined = self.lined()
        assert rows_of(lined) == rows_of(decoded)
        assert lined.problems == decoded.problems
        assert lined.facts == decoded.facts
        return lined


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(tmp_path / "trace.json", monkeypatch)


def in_lines(event: dict[str, Any], newer: bool) -> str:
    """Return an event with a duration, an arrow or an instant in the layout of torch."""
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
FRAME = '"Python parent id": 1, "Python id": 139, "Ev Idx": 159'
MODULE_FRAME = '"Python parent id": 1, "Python id": 139, "Python module id": 0, "Ev Idx": 159'
USUAL = [
    event("cpu_op", OPERATOR, "aten::mm"),
    event("cuda_runtime", CALL, "cudaLaunchKernel"),
    event("kernel", KERNEL, "gemm", pid=0, tid=7),
    event("user_annotation", '"External id": 1,"Record function id": 0, "Ev Idx": 0', "decode"),
    event("python_function", MODULE_FRAME, "nn.Module: Linear_0"),
    event("python_function", FRAME, "threading.py(1030): _bootstrap"),
    event("gpu_user_annotation", '"External id": 11389', "decode"),
    {"ph": "s", "id": 454401, "pid": 607, "tid": 608, "ts": "3904425331755.097", "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 454401, "pid": 0, "tid": 7, "ts": "3904425331760.000", "cat": "ac2g", "name": "ac2g"},
]


def usual(times: int, newer: bool, first: int = 1) -> list[str]:
    """Return this many of each event, all at different times, as the order of rows with equal times is undefined."""
    found = []
    for number in range(first, first + times):
        for place, one in enumerate(USUAL):
            ts = f"{3904425331755 + 1000 * number + 20 * place}.{place:03}"
            found.append(in_lines({**one, "ts": ts}, newer).replace("454401", str(454401 + number)))
    return found


@pytest.mark.parametrize("newer", [OLDER, NEWER])
def test_the_profilers_own_work_is_no_operator(reader: Reader, newer: bool) -> None:
    """With both readers."""
    own = in_lines(event("overhead", '"External id": 1', "Command Buffer Full", ts="3904425330000.000"), newer)
    write(reader.path, [own, *usual(3, newer)])
    trace = reader.assert_same()
    assert [trace.name_of(name) for name in trace.operators.name] == ["aten::mm"] * 3
    assert "Command Buffer Full" not in {trace.name_of(int(name)) for name in trace.ranges.name}


@pytest.mark.parametrize("newer", [OLDER, NEWER])
@pytest.mark.slow
def test_generated_traces_are_read_by_their_lines(reader: Reader, newer: bool) -> None:
    for recipe in (*kinds(3), Recipe(steps=40, kernels_per_step=30, line_a_value=newer)):
        reader.by_line = 0
        truth = write_trace(reader.path, recipe)
        assert len(reader.assert_same().work) == truth.kernels + truth.copies + truth.memsets
        assert reader.by_line >= 0.99 * truth.events - truth.copies - truth.memsets


@pytest.mark.parametrize("newer", [OLDER, NEWER])
def test_the_real_trace_in_lines(reader: Reader, newer: bool) -> None:
    """The trace of the H200 in the layout of torch; the fixture is minified."""
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


@pytest.mark.slow
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
    "a root of all frames": event("python_function", '"Python parent id": null, "Python id": 1, "Ev Idx": 2'),
    "a frame with more": event("python_function", FRAME + ', "x": 1', "nn.Module: Linear_0"),
    "a stream below zero": event("kernel", KERNEL.replace('"stream": 7', '"stream": -5')),
    "a device further below zero": event("kernel", KERNEL.replace('"device": 0', '"device": -5')),
    "a device beyond words": event("kernel", KERNEL.replace('"device": 0', '"device": 4294967297')),
    "no correlation behind one": event("kernel", KERNEL + ', "correlation": 0'),
    "no device behind one": event("kernel", KERNEL + ', "device": -1'),
    "a key that ends like another": event("cuda_runtime", '"cbid": 652, "x\\"correlation": 454401'),
    "a kernel's key that ends like another": event("kernel", KERNEL.replace('"corr', '"x\\"corr')),
    "shapes that are a number": event("cpu_op", '"External id": 5, "Input Dims": 17'),
    "an arrow of more": {"ph": "s", "id": 1, "pid": 607, "tid": 608, "ts": "1.000", "cat": "ac2g", "name": "ac2g\\"},
    "an arrow of words": {"ph": "s", "id": 1, "pid": "a", "tid": "b", "ts": "1.5", "cat": "ac2g", "name": "ac2g"},
    "an object in the arguments": event("cpu_op", '"x": [{"ph": "X"}, {"ph": "X"}], "Ev Idx": 4'),
}


@pytest.mark.parametrize("newer", [OLDER, NEWER])
@pytest.mark.parametrize("odd", list(ODD))
def test_odd_events_are_read_as_decoding_reads_them(reader: Reader, odd: str, newer: bool) -> None:
    write(reader.path, [*usual(1, newer), in_lines(ODD[odd], newer), *usual(1, newer, 2)])
    reader.assert_same()
    assert reader.by_line >= 2 * len(USUAL) - 1  # the last event of a file is fed alone


SPOILT = [
    ('"id": ', '"id"; '),
    ('"Ev Idx": 159', '"Ev Idx": 159x'),
    ('"External id": ', '"External id"; '),
    (', "Ev Idx": ', ""),
    ('"External id": 41521,', ","),
    ('"External id": 5,', ","),
    ('"External id": 1,', ","),
    ('"id": 454401,', '"id": 454401 "": 0,'),
    (',\n    "cat": "ac2g"', '\n    "": 0, "cat": "ac2g"'),
    ('"est. achieved occupancy %": 0', '"x": "?", "correlation": 7, "stream": 9'),
    ('"Input Dims": [[2, 8], []], "Ev Idx": 4', '"Input Dims" : 17'),
    ('"Input Dims": [[2, 8], []], "Ev Idx": 4', '"Input \\u0044ims": 17'),
    ('"pid": 607', '"pid": null'),
    ('"pid": 607', '"pid": 1.5'),
    ('"pid": 607', '"pid": 9223372036854775807'),
    ('"tid": 608', '"tid": "zebra"'),
    ('"name": "a', '"name": null, "x": "a'),
    ("[[2, 8], []]", "null"),
    ('"ph": "', '"ph" "'),
    ('"cat": "', '"cat": x"'),
    ('"name": "', '"name": '),
    ('"name": "', '"name": "\\q'),
    ('"pid": ', '"pid": 0'),
    ('"tid": ', '"tid": -'),
    ('"tid": 608', '"tid": 608, "ts": 5'),
    ('"pid": ', '"ph": "i", "pid": '),
    ('"ts": 3', '"ts": 0'),
    ('"ts": 3', '"ts": x'),
    ('"ts": ', '"ts" :'),
    ('"ts": ', '"tz": '),
    ("5.097", "5x097"),
    ("5.097", "5.0x7"),
    ("5.097", "5.09"),
    ("5.097", "5.097 "),
    ("1755.097", "1755"),
    ('"dur": ', '"dux": '),
    ('"dur": ', '"dur":  '),
    ('"dur": 12', '"dur": 012'),
    ('"dur": 12', '"dur": '),
    ('"dur": 12', '"dur": 1x'),
    ("12.345", "12x345"),
    ("12.345", "12.x45"),
    ("12.345", "12.345]"),
    ('"args": {', '"argz": {'),
    ('"args": {', '"args": ['),
    ('"args": {', '"args": { '),
    ("\n    }", "\n    ]"),
    ("\n    }", "\n    } "),
    ("\n    }", "\n     "),
    ('"External id": ', '"External id": 0'),
    ('"External id": ', '"External id": -'),
    ('"External id": 41521,', '"External id": 41521 '),
    ('"correlation": ', '"correlation": 0'),
    ('"correlation": ', '"correlation" '),
    ('"correlation": 454401,', '"correlation": 454401 '),
    ('"correlation": 454401', '"correlation": '),
    ('"correlation": 454401', '"correlation": 45x401'),
    ('"Ev Idx": ', '"Ev Idx": 0'),
    ('"Ev Idx": 4', '"Ev Idx": '),
    ("[[2, 8], []]", "[[2, 8], []"),
    ('"est. achieved occupancy %": 0', '"est. achieved occupancy %": '),
    ('"grid": [1', '"grid": [01'),
    ('"Python id": ', '"Python id": 0'),
    ('"Python id": 139', '"Python id": '),
    (', "Python', ", Python"),
    ('"id": ', '"id": 0'),
    ('"id": ', '"id": x'),
    ('"name": "ac2g"', '"name": "ac2g'),
    ('"cat": "ac2g"', '"ph": "X"'),
    (',\n    "', '\n    "'),
    ('"bp": "e"', '"bp": e'),
]


@pytest.mark.slow
@pytest.mark.parametrize("newer", [OLDER, NEWER])
@pytest.mark.parametrize("which", range(len(USUAL)))
def test_one_spoilt_event_is_read_or_refused_as_decoding_does(reader: Reader, which: int, newer: bool) -> None:
    """Each alone: the problem of one event must not hide that of another."""
    told = 0
    for good, bad in SPOILT:
        spoilt = in_lines(USUAL[which], newer).replace(good, bad, 1)
        if spoilt != in_lines(USUAL[which], newer):
            write(reader.path, [*usual(2, newer), spoilt, *usual(2, newer, 3)])
            told += bool(reader.assert_same().problems)
    assert told >= 8


@pytest.mark.parametrize("newer", [OLDER, NEWER])
def test_kernels_of_more_streams_than_are_remembered(reader: Reader, newer: bool) -> None:
    streams = [10**digits for digits in range(12)] * 3
    write(reader.path, [in_lines(event("kernel", KERNEL.replace('"stream": 7', f'"stream": {one}')), newer) for one in streams])
    assert sorted(reader.assert_same().work.stream) == sorted(streams)


def test_other_json_is_left_to_decoding() -> None:
    lines = TorchLines(TorchColumns("trace.json").codes)
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


def _bases(path: Path) -> Iterator[bytes]:
    for newer in (OLDER, NEWER):
        write_trace(path, Recipe(steps=2, kernels_per_step=6, copies=True, line_a_value=newer))
        yield path.read_bytes()
        write(path, usual(12, newer))
        yield path.read_bytes()


@pytest.mark.fuzz
@pytest.mark.parametrize("size", [4 << 10, 256 << 10])
def test_damaged_files_are_read_as_decoding_reads_them(reader: Reader, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(event_chunks, "CHUNK_BYTES", size)
    told = 0
    for base in _bases(reader.path):
        for seed in range(TRIES // 64):
            reader.path.unlink()
            reader.path.write_bytes(_damaged(base, random.Random(SEED + seed)))
            told += reader.assert_same_or_refused()
    if SEED == 0:  # other choices may be one-sided by chance
        assert told > TRIES / 64


@pytest.mark.fuzz
@pytest.mark.parametrize("newer", [OLDER, NEWER])
def test_bytes_lost_between_any_two_places_of_events(reader: Reader, monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    """A gap from one event to a later one leaves what looks like one event."""
    monkeypatch.setattr(event_chunks, "CHUNK_BYTES", 64 << 10)
    write(reader.path, usual(5, newer))
    base = reader.path.read_bytes()
    marks = [at for at in range(len(base)) if base.startswith((b'"ts": ', b'": ', b"\n", b", "), at)]
    draw = random.Random(SEED + newer)
    for _ in range(TRIES // 16):
        first = draw.choice(marks[:-1])
        last = draw.choice([mark for mark in marks if first < mark < first + 2500] or [first])
        reader.path.unlink()
        reader.path.write_bytes(base[:first] + base[last + draw.choice([0, 0, 1, 3]) :])
        reader.assert_same_or_refused()


@pytest.mark.parametrize("newer", [OLDER, NEWER])
def test_events_inside_an_event_are_no_events(reader: Reader, newer: bool) -> None:
    inner = "\n  },\n  {\n    ".join(usual(1, newer, 9))
    outer = (
        f'"ph": "X", "cat": "cpu_op", "name": "outer", "ts": 1.000, "dur": 1.000, "args": {{"x": [\n  {{\n    {inner}\n  }}]}}'
    )
    write(reader.path, [*usual(2, newer), outer, *usual(2, newer, 3)])
    assert len(reader.assert_same().work) == 4
    # As many pieces as events: one piece holds two of them, two pieces are one.
    two = '"ph": "X", "cat": "cpu_op", "ts": 1.000, "dur": 1.000}, {"ph": "X", "cat": "cpu_op", "ts": 2.000, "dur": 1.000'
    write(reader.path, [*usual(2, newer), two, outer, *usual(2, newer, 3)])
    assert len(reader.assert_same().work) == 4


@pytest.mark.parametrize("newer", [OLDER, NEWER])
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("[\n  {\n    ", "[\n  {"),
        ("[\n  {\n    ", "[ \n \n  {\n    "),
        ("\n    }\n  },", "\n    }},"),
        ("\n  },\n  {", "\n  };\n  {"),
        ("\n  },\n  {", "\n  }, {"),
        ("\n  },\n  {\n", "\n  },\n  {}\n  ,\n  {\n"),
        ("\n  },\n  {\n", "\n  },\n  ,\n  {\n"),
        ("\n  },\n  {\n", "\n  },\n  [\n"),
        ("\n  }\n  ]", "\n  },\n  ]"),
        ("\n  }\n  ]", "}]"),
    ],
)
def test_what_parts_events_is_looked_at(reader: Reader, good: str, bad: str, newer: bool) -> None:
    write(reader.path, usual(3, newer))
    whole = reader.path.read_text()
    places = [found.start() for found in re.finditer(re.escape(good), whole)]
    for place in {places[0], places[len(places) // 2], places[-1]}:
        reader.path.write_text(whole[:place] + bad + whole[place + len(good) :])
        reader.assert_same_or_refused()


def test_times_beyond_all_clocks(reader: Reader) -> None:
    write(reader.path, [in_lines({**one, "ts": "9999999999999999.999"}, OLDER) for one in USUAL * 2])
    reader.assert_same_or_refused()


def test_text_that_is_no_utf8_hides_no_key(reader: Reader) -> None:
    hidden = in_lines(event("kernel", KERNEL + ', "x": "?", "correlation": 7, "stream": 9'), OLDER)
    write(reader.path, [*usual(1, OLDER), hidden, *usual(1, OLDER, 2)])
    reader.path.write_bytes(reader.path.read_bytes().replace(b'"?"', b'"\xff\xfe"'))
    reader.assert_same()


def test_texts_that_do_not_repeat_are_decoded(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_chunks, "CHUNK_BYTES", 8 << 10)
    write(reader.path, [in_lines(event("cpu_op", OPERATOR, f"operator {number}"), OLDER) for number in range(2000)])
    reader.assert_same()
    assert reader.by_line < 500


@pytest.mark.parametrize("newer", [OLDER, NEWER])
def test_a_first_event_unlike_the_others_makes_no_difference(reader: Reader, newer: bool) -> None:
    few = event("cpu_op", OPERATOR, ts="7.001")
    other = event("cpu_op", OPERATOR, "of another layout")
    write(reader.path, [in_lines(few, newer), in_lines(other, not newer), *usual(5, newer)])
    reader.assert_same()
    assert reader.by_line >= 5 * len(USUAL) - 1
