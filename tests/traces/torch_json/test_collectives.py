"""What torch traces state about collectives."""

import gc
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.torch_json.collectives import element_size, states_collective
from llm_perf_opt.traces.torch_json.trace import read_torch_trace

RANKS = Path(__file__).parents[2] / "fixtures" / "ranks"


def rows(trace: Trace, on_device: int) -> Counter[tuple[str, str, str, int]]:
    """Collective, group, ranks and input of each row."""
    table = trace.collectives.rows(trace.collectives.on_device == on_device)
    names = [[trace.name_of(index) for index in column] for column in (table.collective, table.process_group, table.group_ranks)]
    return Counter(zip(*names, table.in_bytes.tolist(), strict=True))


def stated(folder: Path, *arguments: dict[str, object]) -> Trace:
    """A trace of collectives with these arguments."""
    common = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    file = folder / "trace.json"
    file.write_text(json.dumps({"traceEvents": [{**common, "args": given} for given in arguments]}))
    return read_torch_trace(file)


def test_metadata_of_nccl_is_read() -> None:
    trace = read_torch_trace(RANKS / "nccl_excerpt.json.gz")
    kernels = rows(trace, 1)
    assert kernels.total() == 21
    assert {key[:3] for key in kernels} == {("allreduce", "0", "[0, 1]"), ("broadcast", "0", "[0, 1]")}
    assert kernels["broadcast", "0", "[0, 1]", 53_120 * 4] == 3
    assert set(trace.collectives.group_size[trace.collectives.on_device == 1].tolist()) == {2}
    assert json.loads(trace.facts["distributed_groups"]) == [["0", [0, 1]]]


def test_labels_of_gloo_give_the_size_of_their_input() -> None:
    trace = read_torch_trace(RANKS / "gloo_tp4_rank0.json.gz")
    table = trace.collectives
    found = Counter(zip([trace.name_of(name) for name in table.name], table.in_bytes.tolist(), strict=True))
    assert found == {
        ("gloo:all_reduce", 2048): 63,
        ("gloo:all_reduce", 65536): 9,
        ("gloo:all_gather", 2048): 7,
        ("gloo:all_gather", 65536): 1,
        ("gloo:barrier", -1): 1,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {"Collective name": 5, "dtype": [], "In msg nelems": "many", "Group size": -3, "Process Group Ranks": {}},
        {"Collective name": None, "In msg nelems": 2**70, "Seq": 1.5},
        {"In msg nelems": True, "dtype": "Float", "Input Dims": [[2, "x"]], "Input type": ["float"]},
        {},
    ],
)
def test_values_of_another_type_are_unknown(tmp_path: Path, arguments: dict[str, object]) -> None:
    trace = stated(tmp_path, arguments)
    assert rows(trace, 0) == {("", "", "", -1): 1}
    assert trace.collectives.group_size.tolist() == [0]
    assert trace.collectives.sequence.tolist() == [-1]


LARGE = 2**61


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ([[2, 3], []], 28),
        ([[LARGE, LARGE, 0]], 0),
        ([[2**40, 2**40]], -1),
        ([[1, -1]], -1),
        ([[LARGE] * 400_000], -1),
        ([[LARGE] * 399_999 + [0]], 0),
    ],
)
def test_the_size_of_inputs_by_their_shapes(tmp_path: Path, shapes: list[list[int]], size: int) -> None:
    """Of 400,000 sizes, the product would have 24 million bits and take many minutes."""
    arguments: dict[str, object] = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
    assert stated(tmp_path, arguments).collectives.in_bytes.tolist() == [size]


def test_long_types_are_not_kept(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        trace = stated(tmp_path, *({"Input Dims": [[1]], "Input type": [f"{number}{'x' * 100_000}"]} for number in range(100)))
        assert trace.collectives.in_bytes.tolist() == [-1] * 100
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2_000_000


def test_types_and_names() -> None:
    assert [element_size(name) for name in ("BFloat16", "c10::Half", "Float8_e4m3fn", "long int", "Float", "what")] == [
        2,
        2,
        1,
        8,
        4,
        0,
    ]
    assert states_collective("user_annotation", "nccl:all_reduce")
    assert states_collective("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    assert not states_collective("user_annotation", "decode: x")
    assert not states_collective("cpu_op", "c10d::allreduce_")
