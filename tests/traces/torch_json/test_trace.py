"""Torch traces: a recorded one, generated ones with known values, and malformed ones."""

import gzip
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import NO_NAME, Trace, WorkKind
from llm_perf_opt.traces.torch_json import event_chunks
from llm_perf_opt.traces.torch_json.codes import MODULE_DOMAIN
from llm_perf_opt.traces.torch_json.columns import TorchColumns
from llm_perf_opt.traces.torch_json.events import EXACT_BELOW_US, EventDecoder
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from synthetic_traces import ORIGIN_NS, PROCESS, THREAD, Recipe, Truth, kinds, write_trace

REAL = Path(__file__).parents[2] / "fixtures" / "h200" / "torch_trace.json.gz"


def kernel(ts: Any, dur: Any = 1.5, correlation: Any = 7, **more: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "correlation": correlation, "grid": [2, 3, 4], "block": [128, 1, 1]}
    return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args, **more}


def launch(ts: Any, dur: Any = 1.0, correlation: Any = 7, **more: Any) -> dict[str, Any]:
    args = {"correlation": correlation}
    event = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2, "ts": ts, "dur": dur, "args": args}
    return {**event, **more}


def operator(ts: Any, dur: Any = 1.0, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": ts, "dur": dur, "args": args}


PAIR = [launch(100.0), kernel(102.0)]


def read(tmp_path: Path, content: Any) -> Trace:
    """Return the trace of these events, this object or these bytes."""
    path = tmp_path / "trace.json"
    if isinstance(content, list):
        content = {"schemaVersion": 1, "traceEvents": content, "traceName": "x"}
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return read_torch_trace(path)


def problems(trace: Trace) -> dict[str, bool]:
    return {problem.id: problem.fatal for problem in trace.problems}


# --- what is known to be true ------------------------------------------------------------------------------------------


def test_the_real_trace() -> None:
    trace = read_torch_trace(REAL)
    assert trace.complete
    assert trace.problems == ()
    kernels = trace.work.rows(trace.work.kind == WorkKind.KERNEL)
    assert len(kernels) == 1711
    assert (kernels.end_ns - kernels.start_ns).sum() == 5_521_227
    assert (trace.work.kind == WorkKind.MEMSET).sum() == 22
    assert len(trace.calls) == 1700 + 338
    assert len(trace.operators) == 5796
    labels = [trace.name_of(name) for name in trace.ranges.name]  # the device's own copies of labels are none
    assert sorted(labels) == ["decode", *["decode_step"] * 8, "prefill", "profile"]
    assert labels[0] == "profile"
    assert (trace.ranges.domain == NO_NAME).all()
    assert set(trace.work.process) == set(trace.calls.process) == {506}
    assert np.isin(trace.work.correlation, trace.calls.correlation).all()
    assert trace.facts["devices"] == "NVIDIA H200"
    assert trace.facts["events"] == "13420"


def test_the_real_trace_against_a_plain_reading_of_it() -> None:
    """Every time of every event, compared with the decimal text of the file."""
    from decimal import Decimal

    events = json.loads(gzip.decompress(REAL.read_bytes()), parse_float=Decimal)["traceEvents"]
    tables = {"work": ("kernel", "gpu_memcpy", "gpu_memset"), "calls": ("cuda_runtime", "cuda_driver"), "operators": ("cpu_op",)}
    trace = read_torch_trace(REAL)
    for table, categories in tables.items():
        spans = [event for event in events if event.get("cat") in categories and event["ph"] == "X"]
        expected = sorted((int(e["ts"] * 1000), int((e["ts"] + e["dur"]) * 1000), e["name"]) for e in spans)
        rows = getattr(trace, table)
        found = zip(rows.start_ns.tolist(), rows.end_ns.tolist(), [trace.names[name] for name in rows.name], strict=True)
        assert sorted(found) == expected


def assert_true(trace: Trace, truth: Truth) -> None:
    work = trace.work
    duration = work.end_ns - work.start_ns
    assert trace.facts["events"] == str(truth.events)
    for kind, count, total in (
        (WorkKind.KERNEL, truth.kernels, truth.kernel_ns),
        (WorkKind.MEMCPY, truth.copies, truth.copy_ns),
        (WorkKind.MEMSET, truth.memsets, truth.memset_ns),
    ):
        assert (work.kind == kind).sum() == count
        assert duration[work.kind == kind].sum() == total
    assert work.size_bytes[work.kind == WorkKind.MEMCPY].sum() == truth.copy_bytes
    assert (len(trace.calls), len(trace.operators)) == (truth.calls, truth.operators)
    by_name: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, ns, kind in zip(work.name, duration, work.kind, strict=True):
        if kind == WorkKind.KERNEL:
            by_name[trace.names[name]][0] += 1
            by_name[trace.names[name]][1] += int(ns)
    assert by_name == truth.by_name
    launched = dict(zip(trace.calls.correlation.tolist(), trace.calls.start_ns.tolist(), strict=True))
    rows = zip(work.start_ns.tolist(), work.end_ns.tolist(), work.correlation.tolist(), strict=True)
    assert sorted((start, end, launched[correlation]) for start, end, correlation in rows) == sorted(truth.work)
    walls = sorted(
        zip((trace.names[name] for name in trace.ranges.name), trace.ranges.end_ns - trace.ranges.start_ns, strict=True)
    )
    assert [pair for pair in walls if pair[0] != "profile"] == sorted((stage.name, stage.wall_ns) for stage in truth.stages)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", range(7))
def test_generated_traces_are_read_exactly(tmp_path: Path, kind: int, seed: int) -> None:
    recipe = list(kinds(seed))[kind]
    truth = write_trace(tmp_path / "trace.json", recipe)
    assert truth.events > 5_000
    trace = read_torch_trace(tmp_path / "trace.json")
    assert_true(trace, truth)
    assert trace.complete
    assert problems(trace) == {}
    assert (trace.work.graph_node > 0).any() == recipe.graph
    assert len(np.unique(trace.work.stream)) == recipe.streams


def test_order_layout_and_packing_do_not_matter(tmp_path: Path) -> None:
    plain = tmp_path / "plain.json"
    truth = write_trace(plain, Recipe(copies=True, streams=2))
    content = json.loads(plain.read_bytes())
    random.Random(3).shuffle(content["traceEvents"])
    content = {"traceEvents": content.pop("traceEvents"), **content}  # what stood before the events now stands behind them
    variants = {
        "compact.json": json.dumps(content, separators=(",", ":")).encode(),
        "indented.json": json.dumps(content, indent=4).encode(),
        "sorted.json": json.dumps(content, sort_keys=True).encode(),
        "marked.json": b"\xef\xbb\xbf" + json.dumps(content).encode(),
        "packed.json.gz": gzip.compress(json.dumps(content).encode()),
        "array.json": json.dumps(content["traceEvents"]).encode(),
    }
    for name, data in variants.items():
        (tmp_path / name).write_bytes(data)
        trace = read_torch_trace(tmp_path / name)
        assert_true(trace, truth)
        assert trace.problems == (), name
        assert ("devices" in trace.facts) == (name != "array.json")


@pytest.mark.parametrize("size", [64, 1000, 4096])
def test_the_size_of_a_chunk_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    truth = write_trace(tmp_path / "trace.json", Recipe(steps=2, kernels_per_step=5, copies=True))
    monkeypatch.setattr(event_chunks, "CHUNK_BYTES", size)
    trace = read_torch_trace(tmp_path / "trace.json")
    assert_true(trace, truth)
    assert trace.problems == ()


def test_rows_come_in_the_order_of_their_start_the_outer_first(tmp_path: Path) -> None:
    trace = read(tmp_path, [*PAIR, operator(5.0, 1.0), operator(3.0, 1.0), operator(3.0, 4.0)])
    starts_and_ends = list(zip(trace.operators.start_ns.tolist(), trace.operators.end_ns.tolist(), strict=True))
    assert starts_and_ends == [(3000, 7000), (3000, 4000), (5000, 6000)]


def test_fields_of_a_kernel_a_copy_and_an_operator(tmp_path: Path) -> None:
    copy = kernel(110.0, correlation=8, cat="gpu_memcpy", name="Memcpy HtoD")
    copy["args"] = {"device": 1, "stream": 9, "correlation": 8, "bytes": 4096}
    node = kernel(120.0, correlation=9)
    node["args"]["graph node id"] = 17179869184
    calls = [launch(90.0), launch(91.0, correlation=8), launch(92.0, correlation=9)]
    trace = read(tmp_path, [*calls, kernel(102.0), copy, node, operator(1.0, **{"Input Dims": [[1, 2], []]})])
    work = trace.work
    assert work.kind.tolist() == [WorkKind.KERNEL, WorkKind.MEMCPY, WorkKind.KERNEL]
    assert work.grid.tolist() == [24, 0, 24]
    assert work.block.tolist() == [128, 0, 128]
    assert work.size_bytes.tolist() == [-1, 4096, -1]
    assert work.device.tolist() == [0, 1, 0]
    assert work.stream.tolist() == [7, 9, 7]
    assert work.graph_node.tolist() == [0, 0, 17179869184]
    assert work.process.tolist() == [1, 1, 1]
    assert trace.name_of(int(trace.operators.shapes[0])) == "[[1, 2], []]"


def test_frames_of_modules_are_ranges_of_their_own_domain(tmp_path: Path) -> None:
    frame = {"ph": "X", "cat": "python_function", "pid": 1, "tid": 2, "ts": 1.0, "dur": 2.0, "args": {"Python id": 1}}
    trace = read(tmp_path, [*PAIR, {**frame, "name": "nn.Module: Linear_0"}, {**frame, "name": "model.py(3): forward"}])
    assert [trace.name_of(name) for name in trace.ranges.name] == ["nn.Module: Linear_0"]
    assert [trace.name_of(domain) for domain in trace.ranges.domain] == [MODULE_DOMAIN]


def test_categories_of_old_and_other_makers(tmp_path: Path) -> None:
    old = [launch(1.0, cat="Runtime"), kernel(2.0, cat="Kernel"), {**operator(0.5), "cat": "Operator"}]
    trace = read(tmp_path, old)
    assert (len(trace.calls), len(trace.work), len(trace.operators)) == (1, 1, 1)
    assert trace.complete


# --- exact times -------------------------------------------------------------------------------------------------------


def nanoseconds(tmp_path: Path, *texts: str) -> list[int]:
    events = ",".join(
        f'{{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": {text}, "dur": 0}}' for text in texts
    )
    path = tmp_path / "times.json"
    path.write_text(f'{{"traceEvents": [{events}]}}')
    return [int(ns) for ns in read_torch_trace(path).operators.start_ns]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, int(EXACT_BELOW_US) * 1000 - 1), min_size=1, max_size=20))
def test_every_ns_below_101_days_survives_the_way_through_a_float(times: list[int]) -> None:
    columns = TorchColumns("trace.json")
    texts = [f'{{"ph":"X","cat":"cpu_op","name":"a","ts":{ns // 1000}.{ns % 1000:03d},"dur":0}}' for ns in times]
    EventDecoder(columns.take)(f"[{','.join(texts)}]".encode())
    from llm_perf_opt.traces.events import Operators

    assert columns.table(Operators).start_ns.tolist() == sorted(times)


@pytest.mark.parametrize(
    "ns",
    [
        2**42 * 1000 + 1,
        2**42 * 1000 + 999,
        4_503_599_627_370_495,  # just below 2⁵² ns, where a product of floats would be rounded to halves
        4_500_000_000_000_977,
        int(EXACT_BELOW_US) * 1000 - 1,
    ],
)
def test_times_where_floats_are_coarsest(tmp_path: Path, ns: int) -> None:
    around = [ns + step for step in range(-40, 1)]
    assert nanoseconds(tmp_path, *(f"{time // 1000}.{time % 1000:03d}" for time in around)) == around


def test_times_since_1970_keep_their_digits(tmp_path: Path) -> None:
    assert nanoseconds(tmp_path, "1690000000000000.123", "1690000000000000.124") == [1690000000000000123, 1690000000000000124]
    assert nanoseconds(tmp_path, "1690000000000001", "1690000000000002") == [1690000000000001000, 1690000000000002000]


def test_times_as_text_and_in_other_spellings(tmp_path: Path) -> None:
    assert nanoseconds(tmp_path, '"3851303535517.651"') == [3851303535517651]
    assert nanoseconds(tmp_path, "1.5e3", "2", "-0.001") == [-1, 2000, 1500000]


@pytest.mark.parametrize("field", ["ts", "dur", "pid"])
@pytest.mark.parametrize(
    "text",
    [
        "1e9994242",
        "-1e9994242",
        "1e-9994242",
        '"NaN"',
        '"sNaN"',
        '"-Infinity"',
        '"1e9994242"',
        "1e400",
        "1e9999999999999999999",
        "-1e-9999999999999999999",
        '"1e9999999999999999999"',
        f"1e{'1' * 6000}",
    ],
)
def test_numbers_beyond_all_bounds_cost_at_most_their_event(tmp_path: Path, field: str, text: str) -> None:
    fields = {"ph": '"X"', "cat": '"cpu_op"', "name": '"odd"', "pid": "1", "tid": "1", "ts": "7.0", "dur": "2.0", field: text}
    odd = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    path = tmp_path / "odd.json"
    path.write_text(f'{{"traceEvents": [{{{odd}}}, {json.dumps(operator(5.0, 1.0))}]}}')
    operators = read_torch_trace(path).operators
    assert (5000, 6000) in zip(operators.start_ns.tolist(), operators.end_ns.tolist(), strict=True)
    assert len(operators) <= 2


@pytest.mark.parametrize("field", ["ts", "dur"])
@pytest.mark.parametrize(
    "text",
    ["4e15", "4.7e18", "-4.7e18", '"1e30"', "1e400", "9" * 400, "1e9999999999999999999", "1.5E+9999999999999999999",
     "10e999999999999999999",
     '"1e9999999999999999999"'],
)  # fmt: skip
def test_a_time_beyond_all_clocks_costs_its_event_and_is_named(tmp_path: Path, field: str, text: str) -> None:
    """It is not read as zero: a kernel of a million years would have no duration."""
    odd = json.dumps(kernel(**{"ts": 200.0, field: "@"})).replace('"@"', text)
    trace = read(tmp_path, b'{"traceEvents": [%b, %b]}' % (odd.encode(), json.dumps(PAIR)[1:-1].encode()))
    assert trace.work.end_ns.tolist() == [103_500]
    assert problems(trace)["unreadable_events"]


# --- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Truth]:
    path = tmp_path_factory.mktemp("small") / "trace.json"
    truth = write_trace(path, Recipe(steps=2, kernels_per_step=3))
    return path.read_bytes(), truth


@pytest.mark.slow
def test_a_file_cut_anywhere_is_truncated_or_no_trace(tmp_path: Path, small: tuple[bytes, Truth]) -> None:
    data, truth = small
    events_end = data.rindex(b"]")
    seen = []
    for cut in [*range(0, events_end, 97), events_end, events_end + 1, len(data) - 1]:
        try:
            trace = read(tmp_path, data[:cut])
        except ParseError:
            assert cut <= data.index(b"[", data.index(b"traceEvents"))
            continue
        assert (cut > events_end) or problems(trace)["truncated"]
        assert (cut > events_end) != (not trace.complete)
        seen.append(int(trace.facts["events"]))
    assert seen == sorted(seen)
    assert seen[-1] == truth.events


def test_a_gzip_file_cut_short_keeps_its_whole_events(tmp_path: Path) -> None:
    data = REAL.read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(data[: len(data) // 2])
    trace = read_torch_trace(tmp_path / "cut.json.gz")
    assert problems(trace)["truncated"]
    assert 3_000 < int(trace.facts["events"]) < 13_420


def test_a_label_with_a_quote_as_torch_writes_it(tmp_path: Path, small: tuple[bytes, Truth]) -> None:
    """torch 2.13 exports record_function('a "b" c') without escaping the quotes."""
    data, truth = small
    broken = data.replace(b'"name": "prefill"', b'"name": "a "b" }, {"ph": c"')
    trace = read(tmp_path, broken)
    assert problems(trace) == {"repaired": False}
    assert 'a "b" }, {"ph": c' in trace.names
    assert trace.facts["events"] == str(truth.events)


def test_a_bare_quote_in_one_line_of_json_costs_no_other_event(tmp_path: Path) -> None:
    named = {"ph": "M", "name": "process_name", "pid": 1, "ts": 1.0, "args": {"name": "python"}}
    label = {"ph": "X", "cat": "user_annotation", "name": "HERE", "pid": 1, "tid": 2, "ts": 1.0, "dur": 5.0}
    text = json.dumps({"traceEvents": [named, *PAIR, label, named, *PAIR[:0], operator(3.0)]}, separators=(",", ":")).encode()
    trace = read(tmp_path, text.replace(b"HERE", b'say "hi", {"a":1}'))
    assert 'say "hi", {"a":1}' in trace.names
    assert trace.facts["events"] == "6"
    assert trace.complete


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b'"memory": 1', b'"memory": NaN'),
        (b'"memory": 1', b'"memory": -inf'),
        (b'"file": "x"', b'"file": "C:\\Users\\x"'),
        (b'"file": "x"', b'"file": "\x01\xff\xfe"'),
    ],
)
def test_known_slips_of_writers_are_mended(tmp_path: Path, good: bytes, bad: bytes) -> None:
    text = json.dumps({"traceEvents": [operator(1.0, memory=1, file="x"), *PAIR]}).encode()
    assert good in text
    trace = read(tmp_path, text.replace(good, bad))
    assert len(trace.operators) == 1
    assert trace.complete


def test_one_unreadable_event_costs_one_event(tmp_path: Path, small: tuple[bytes, Truth]) -> None:
    data, truth = small
    trace = read(tmp_path, data.replace(b'"cbid": 211', b'"cbid": @@@', 1))
    assert problems(trace)["unreadable_events"]
    assert int(trace.facts["events"]) == truth.events - 1
    assert not trace.complete


def test_objects_inside_an_event_are_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of objects in the arguments look like boundaries of events."""
    monkeypatch.setattr(event_chunks, "CHUNK_BYTES", 256)
    inner = [{"cat": "kernel", "ph": "X", "ts": number, "name": "no"} for number in range(40)]
    trace = read(tmp_path, [*[operator(float(number), inner=inner) for number in range(10)], *PAIR])
    assert (len(trace.operators), len(trace.work)) == (10, 1)
    assert trace.facts["events"] == "12"
    assert "no" not in trace.names


def test_values_of_odd_types_count_as_not_given(tmp_path: Path) -> None:
    odd = [
        kernel("3.5", "1", correlation="7"),
        kernel(4.0, None, correlation=10**30),
        {**kernel(5.0), "args": {"grid": [1, 2], "block": None, "device": True, "correlation": 7.0}},
        {**kernel(6.0), "args": None},
        {**kernel(7.0), "pid": "x", "tid": 10**40},
        17,
        None,
        "text",
    ]
    trace = read(tmp_path, [launch(1.0), *odd])
    assert trace.work.start_ns.tolist() == [3500, 4000, 5000, 6000, 7000]
    assert trace.work.correlation.tolist() == [7, 0, 7, 0, 7]
    assert trace.work.grid.tolist() == [24, 24, 0, 0, 24]
    assert problems(trace)["unreadable_events"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"  \n ", "empty"),
        (b"name,dur\n1,2\n", "begins with"),
        (b"\x00\x01\x02", "begins with"),
        ('{"traceEvents": []}'.encode("utf-16"), "begins with"),
        (b'{"a": 1, "b": 2}', "keys are a, b"),
        (b'{"a": {"traceEvents": {}}}', "keys are a"),
        (b'{"traceEvents": 5}', "without a list of traceEvents"),
        (b"{" + b'"a": {' * 100_000, "no list of traceEvents"),
    ],
)
def test_what_is_no_trace_is_called_that(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(ParseError, match="not a torch trace") as caught:
        read(tmp_path, content)
    assert words in caught.value.fact
    assert caught.value.remedy


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ParseError, match="cannot be read"):
            read_torch_trace(path)


def test_nesting_without_end_costs_its_event(tmp_path: Path) -> None:
    deep = b'{"traceEvents": [{"ph": "X", "args": {"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}}, "
    trace = read(tmp_path, deep + json.dumps(PAIR)[1:].encode() + b"}")
    assert problems(trace)["unreadable_events"]
    assert len(trace.work) == 1


# --- ways of decoding ---------------------------------------------------------------------------------------------------

UNUSUAL = {"ph": "X", "cat": "viztracer", "name": "f", "ts": 1, "dur": 1}
"""Events of a category that torch does not write."""
SAMPLE = {"ph": "C", "cat": "cpu_op", "name": "memory", "ts": 1, "args": {}}


@pytest.mark.parametrize("before", [[], [UNUSUAL], [SAMPLE], [operator(2**50 / 1.0)], [operator("1.5")], [17]])
def test_every_way_of_decoding_finds_the_same(tmp_path: Path, before: list[Any]) -> None:
    """Usual events, other events, exact times, odd types: the decoder that one event needs does not change the others."""
    arrows = [{"ph": "s", "id": 1, "ts": 100.0, "cat": "ac2g", "name": "ac2g"}, {"ph": "f", "id": 1, "ts": 1, "cat": "ac2g"}]
    others = [
        {"name": "process_name", "ph": "M", "args": {"name": "x"}},
        {"ph": "i", "cat": "kernel", "name": "not work", "ts": 3},
    ]
    shaped = operator(99.0, **{"Input Dims": [[2, 3], [3, 4]]})
    usual = read(tmp_path, [*PAIR, *arrows, *others, shaped])
    trace = read(tmp_path, [*before, *PAIR, *arrows, *others, shaped])
    for mine, expected in ((trace.work, usual.work), (trace.calls, usual.calls)):
        assert [trace.names[name] for name in mine.name] == [usual.names[name] for name in expected.name]
        for name, column in expected.columns().items():
            assert name == "name" or mine.columns()[name].tolist() == column.tolist()
    (row,) = np.flatnonzero(trace.operators.start_ns == 99_000)
    assert trace.names[trace.operators.shapes[row]] == "[[2, 3], [3, 4]]"


def test_a_number_beyond_all_bounds_costs_nothing_else(tmp_path: Path) -> None:
    trace = read(tmp_path, [*PAIR, launch(5.0, correlation=2**70, name="cudaMalloc")])
    assert len(trace.work) == 1
    assert sorted(trace.calls.correlation.tolist())[0] == 0


def test_a_zero_byte_within_shapes_moves_none_to_another_operator(tmp_path: Path) -> None:
    texts = [json.dumps(operator(float(number), **{"Input Dims": [number]})) for number in (1, 2, 3)]
    texts[0] = texts[0].replace("[1]", '["a\0b"]')
    trace = read(tmp_path, ('{"traceEvents": [' + ",".join(texts) + "]}").encode())
    assert [trace.names[index] for index in trace.operators.shapes[-2:]] == ["[2]", "[3]"]


# --- health ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], {"empty": True}),
        ([{"ph": "X", "cat": "viztracer", "name": "f", "ts": 1, "dur": 1}], {"foreign": True}),
        ([operator(1.0, **{"Input Dims": [[1]]})], {"no_device_work": False}),
        ([launch(1.0)], {"no_kernels": True}),
        (PAIR, {}),
        ([*PAIR, launch(200.0, correlation=9)], {"launches_without_kernels": True}),
        ([*PAIR, *PAIR[1:]], {"duplicate_events": True}),
        ([*PAIR, kernel(300.0, correlation=99)], {"work_without_calls": False}),
        ([launch(100.0), kernel(99.5)], {"clock_skew": False}),
        ([launch(100.0), kernel(101.0, -2.0)], {"negative_duration": True}),
        ([*PAIR, launch(100.0, -3.0, correlation=0, name="cudaMalloc")], {"negative_duration": False}),
        ([launch(100.0), kernel(101.0), kernel(None)], {"no_time": True}),
        ([*PAIR, operator(1.0)], {}),
        ([*PAIR, launch(1.0, correlation=0, pid=5, name="cudaMalloc")], {"several_processes": False}),
    ],
)
def test_problems_are_named(tmp_path: Path, events: list[Any], expected: dict[str, bool]) -> None:
    trace = read(tmp_path, events)
    assert problems(trace) == expected
    assert trace.complete == (not any(expected.values()))


@pytest.mark.parametrize(("devices", "expected"), [([], {}), ([{"id": 0, "name": "a GPU"}], {"no_device_work": False})])
def test_device_work_is_missed_only_where_there_was_a_device(
    tmp_path: Path, devices: list[Any], expected: dict[str, bool]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"deviceProperties": devices, "traceEvents": [operator(1.0)]}))
    assert problems(read_torch_trace(path)) == expected


def test_shapes_are_missed_only_where_something_needs_them(tmp_path: Path) -> None:
    collective = {**operator(1.0), "cat": "user_annotation", "name": "gloo:all_reduce"}
    assert problems(read(tmp_path, [*PAIR, collective])) == {"missing_shapes": False}
    assert problems(read(tmp_path, [*PAIR, {**collective, "args": {"Input Dims": [[4]], "Input type": ["float"]}}])) == {}


def test_a_few_launches_at_the_end_may_have_no_kernel(tmp_path: Path) -> None:
    pairs = [event for number in range(1, 101) for event in (launch(10.0 * number, correlation=number),
             kernel(10.0 * number + 2, correlation=number))]  # fmt: skip
    trace = read(tmp_path, [*pairs, launch(5000.0, correlation=500)])
    assert problems(trace) == {"launches_without_kernels": False}
    assert "1 of 101" in trace.problems[0].what


def test_launches_noted_down_while_a_graph_is_recorded_miss_no_kernel(tmp_path: Path) -> None:
    recording = [
        launch(1.0, correlation=1, name="cudaStreamBeginCapture_v10000"),
        *(launch(2.0 + number, 0.5, correlation=10 + number) for number in range(50)),
        launch(60.0, correlation=2, name="cudaStreamEndCapture_v10000"),
    ]
    assert problems(read(tmp_path, [*recording, launch(100.0), kernel(102.0)])) == {}
    assert problems(read(tmp_path, recording)) == {"no_device_work": False}
    lost = read(tmp_path, [*recording, launch(100.0), kernel(102.0), launch(200.0, correlation=200)])
    assert "1 of 2 launches" in lost.problems[0].what


def test_annotations_of_the_device_alone_are_said_to_be_that(tmp_path: Path) -> None:
    trace = read(tmp_path, [{"ph": "X", "cat": "gpu_user_annotation", "name": "decode", "ts": 1, "dur": 1}])
    assert problems(trace) == {"foreign": True}
    assert "categories: 'gpu_user_annotation'" in trace.problems[0].what


def test_what_the_profiler_says_of_lost_records(tmp_path: Path) -> None:
    said = {"WARNING": ["Exceeded max GPU buffer count (2 > 1) - terminating tracing", "GPU is idle"], "ERROR": "x"}
    trace = read(tmp_path, {"traceEvents": PAIR, **said})
    assert problems(trace) == {"dropped_records": True}
    assert "Exceeded max" in trace.problems[0].what
    assert "idle" not in trace.problems[0].what


def test_work_of_several_processes_goes_to_the_process_of_its_launch(tmp_path: Path) -> None:
    events = [launch(1.0, correlation=1, pid=10), launch(2.0, correlation=2, pid=20), kernel(5.0, correlation=1),
              kernel(7.0, correlation=2), kernel(9.0, correlation=3)]  # fmt: skip
    assert read(tmp_path, events).work.process.tolist()[:2] == [10, 20]


def test_negative_durations_have_no_length(tmp_path: Path) -> None:
    trace = read(tmp_path, [launch(100.0), kernel(101.0, -2.0)])
    assert (trace.work.end_ns - trace.work.start_ns).tolist() == [0]


def test_generated_identities(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", Recipe(steps=1, kernels_per_step=1))
    trace = read_torch_trace(tmp_path / "trace.json")
    assert (set(trace.calls.process), set(trace.calls.thread)) == ({PROCESS}, {THREAD})
    assert trace.ranges.start_ns[0] == ORIGIN_NS


@pytest.mark.parametrize("event", ["{}", '{"a":[[[]]]}'])
def test_empty_events_count_for_the_proportion_of_a_packed_file(tmp_path: Path, event: str) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(f'{{"traceEvents":[{",".join([event] * 400_000)}]}}'.encode()))
    with pytest.raises(ParseError, match="times its size"):
        read_torch_trace(path)
