"""Modules of a graph's kernels from the eager trace."""

import itertools
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.trace.attribution import attribute
from llm_perf_opt.analysis.trace.graph_modules import (
    AttributedTrace,
    BorrowedModules,
    MatchedBy,
    align_modules,
    borrow_from_capture,
    borrow_modules,
    borrowed_table,
    capture_table,
    common_subsequence,
)
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.open_trace import read_trace
from llm_perf_opt.traces.projection import through
from trace_builders import Builder

SEQUENCE = st.lists(st.integers(0, 4), max_size=24)


def longest(first: list[int], second: list[int]) -> int:
    @cache
    def at(left: int, right: int) -> int:
        if left == len(first) or right == len(second):
            return 0
        if first[left] == second[right]:
            return 1 + at(left + 1, right + 1)
        return max(at(left + 1, right), at(left, right + 1))

    return at(0, 0)


@given(SEQUENCE, SEQUENCE)
def test_the_common_subsequence_is_one_and_none_is_longer(first: list[int], second: list[int]) -> None:
    partner = common_subsequence(np.array(first, np.int64), np.array(second, np.int64))
    pairs = [(int(left), right) for right, left in enumerate(partner) if left >= 0]
    assert all(first[left] == second[right] for left, right in pairs)
    assert all(earlier[0] < later[0] for earlier, later in itertools.pairwise(pairs))
    assert len(pairs) == longest(first, second)


def test_it_does_not_lose_what_greedy_matching_loses() -> None:
    first, second = "xaaaabbb", "abbbxaaaa"
    partner = common_subsequence(np.array([*map(ord, first)], np.int64), np.array([*map(ord, second)], np.int64))
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    assert int((partner >= 0).sum()) >= sum(block.size for block in matcher.get_matching_blocks())


EAGER = [
    "embedding",
    "rms_norm",
    "nvjet_a",
    "rope_kernel",
    "flash_fwd_kernel",
    "nvjet_b",
    "rms_norm",
    "nvjet_c",
    "silu",
    "mul",
    "nvjet_d",
]
MODULES = [0, 1, 2, 2, 2, 2, 3, 4, 4, 4, 4]


def aligned(names: list[str]) -> tuple[list[int], list[str], dict[MatchedBy, float | None]]:
    found = align_modules(EAGER, np.array(MODULES, np.int64), names, np.full(len(names), 10, np.int64))
    return found.module.tolist(), [MatchedBy(rule).name for rule in found.matched_by], found.coverage


def test_the_same_kernels_have_the_same_modules() -> None:
    modules, rules, coverage = aligned(EAGER)
    assert modules == MODULES
    assert set(rules) == {"NAME"}
    assert coverage[MatchedBy.NAME] == 1


def test_another_tile_of_the_same_product_is_found_by_its_class_and_fused_work_by_its_neighbors() -> None:
    names = ["embedding", "triton_red_fused_mean_rsqrt_0", "nvjet_x", "triton_poi_fused_1", "flash_fwd_kernel", "nvjet_b",
             "triton_red_fused_mean_rsqrt_2", "nvjet_c", "triton_poi_fused_mul_silu_3", "nvjet_d", "unheard_of"]  # fmt: skip
    modules, rules, coverage = aligned(names)
    assert modules == [0, 1, 2, 2, 2, 2, 3, 4, 4, 4, -1]
    assert rules == ["NAME", "CLASS", "CLASS", "CLASS", "NAME", "NAME", "CLASS", "NAME", "BETWEEN", "NAME", "NOTHING"]
    assert coverage[MatchedBy.NOTHING] == pytest.approx(1 / 11)
    assert sum(share or 0 for share in coverage.values()) == pytest.approx(1)


def test_nothing_in_common_gives_no_modules() -> None:
    modules, rules, _ = aligned(["frob", "nicate"])
    assert modules == [-1, -1]
    assert set(rules) == {"NOTHING"}


def test_empty_sides() -> None:
    assert aligned([])[0] == []
    assert aligned([])[2] == dict.fromkeys(MatchedBy)
    nothing = align_modules([], np.empty(0, np.int64), ["a"], np.array([5], np.int64))
    assert nothing.module.tolist() == [-1]


@given(st.lists(st.sampled_from([*EAGER, "other", "nvjet_z"]), max_size=20))
def test_partners_never_cross(names: list[str]) -> None:
    found = align_modules(EAGER, np.array(MODULES, np.int64), names, np.ones(len(names), np.int64))
    by_name = found.partner[found.matched_by == MatchedBy.NAME].tolist()
    assert by_name == sorted(by_name)
    assert ((found.module == -1) == (found.matched_by == MatchedBy.NOTHING)).all()


def test_between_two_instances_of_a_label_that_every_layer_has_nothing_is_filled() -> None:
    """Two layers: projection, product of the MLP, projection. The compiled MLP has unknown kernels."""
    eager_names, eager_modules = ["proj_a", "nvjet_mlp", "proj_b"], np.array([0, 1, 0])
    names = ["proj_a", "frobnicate_1", "frobnicate_2", "proj_b"]
    found = align_modules(eager_names, eager_modules, names, np.full(4, 10))
    assert found.module.tolist() == [0, -1, -1, 0]
    assert found.coverage[MatchedBy.NOTHING] == 0.5


KERNELS = [("rms_norm", "Norm_0"), ("nvjet_a", "Attention_0"), ("flash_fwd", "Attention_0"), ("nvjet_b", "Mlp_0")]
STEPS = 3


def attributed(trace: Trace) -> AttributedTrace:
    stages = find_stages(trace)
    return AttributedTrace(trace, stages, attribute(trace, stages))


def eager() -> AttributedTrace:
    built = Builder()
    for step in range(STEPS):
        begin = step * 1000
        built.range(begin, begin + 900, "decode_step")
        for place, (kernel, module) in enumerate(KERNELS):
            at = begin + 10 + 100 * place
            built.range(at, at + 50, f"nn.Module: {module}", "nn.Module")
            built.launch(at + 5, at + 10, at + 30, kernel)
    return attributed(built.trace())


def graph(kernels: list[str]) -> AttributedTrace:
    built = Builder()
    for step in range(STEPS):
        begin = step * 1000
        built.range(begin, begin + 900, "decode_step")
        built.call(begin + 10, begin + 20, "cudaGraphLaunch", correlation=step + 1)
        for place, kernel in enumerate(kernels):
            start = begin + 30 + 20 * place
            built.kernel(start, start + 10, kernel, correlation=step + 1, graph_node=place + 1)
    return attributed(built.trace())


def named(found: BorrowedModules) -> list[str | None]:
    return [found.modules[index] if index >= 0 else None for index in found.module.tolist()]


def test_the_same_kernels_without_labels_get_them_back_in_every_step() -> None:
    found = borrow_modules(eager(), graph([kernel for kernel, _ in KERNELS]))
    assert named(found) == [module for _, module in KERNELS] * STEPS
    assert found.coverage == {"own": 0.0, "name": 1.0, "class": 0.0, "between": 0.0, "capture": 0.0, "nothing": 0.0}


def test_what_the_eager_pass_does_not_know_stays_without_and_is_shown() -> None:
    found = borrow_modules(eager(), graph(["rms_norm", "nvjet_a", "triton_poi_fused_1", "flash_fwd", "frobnicate"]))
    assert named(found)[:5] == ["Norm_0", "Attention_0", "Attention_0", "Attention_0", None]
    assert found.coverage["between"] == pytest.approx(0.2)
    assert found.coverage["nothing"] == pytest.approx(0.2)
    assert sum(share or 0 for share in found.coverage.values()) == pytest.approx(1)


def test_existing_modules_are_kept() -> None:
    found = borrow_modules(eager(), eager())
    assert found.coverage["own"] == 1
    assert named(found) == [module for _, module in KERNELS] * STEPS


def test_an_eager_trace_without_the_stage_lends_nothing() -> None:
    found = borrow_modules(attributed(Builder().trace()), graph(["nvjet_a"]))
    assert set(found.module.tolist()) == {-1}
    assert found.coverage["nothing"] == 1
    empty = borrow_modules(eager(), attributed(Builder().trace()))
    assert set(empty.coverage.values()) == {None}


def test_the_table_sums_to_what_has_a_module() -> None:
    other = graph(["rms_norm", "nvjet_a", "triton_poi_fused_1", "flash_fwd", "frobnicate"])
    table = borrowed_table(borrow_modules(eager(), other), other.trace, "eager.json")
    assert [(row.name, row.kernels, row.self_ns) for row in table.rows] == [("Attention_0", 9, 90), ("Norm_0", 3, 30)]
    assert sum(row.share for row in table.rows) == pytest.approx(1 - (table.coverage["nothing"] or 0))


ENGINES = Path(__file__).parents[2] / "fixtures" / "engines"


@pytest.mark.parametrize(
    ("capture", "replay", "nodes", "capture_ns", "operators"),
    [
        (
            "vllm_graph_capture",
            "vllm_decode_full_graph",
            421,
            10_388_482,
            {
                "aten::addmm": (72, 953_882),
                "aiter::rmsnorm2d_fwd_with_add_ck": (48, 326_031),
            },
        ),
        (
            "sglang_graph_capture_bs32",
            "sglang_Qwen3-8B_decode",
            544,
            9_656_404,
            {"aten::mm": (145, 5_782_257), "sgl_kernel::silu_and_mul": (36, 324_367)},
        ),
    ],
)
def test_each_kernel_of_a_replay_has_the_operator_of_its_captured_launch(
    capture: str, replay: str, nodes: int, capture_ns: int, operators: dict[str, tuple[int, int]]
) -> None:
    """Traces of one engine process each: as many captured launches as kernels in the replay, in the same order."""
    source, other = read_trace(ENGINES / f"{capture}.json.gz"), attributed(read_trace(ENGINES / f"{replay}.json.gz"))
    found = borrow_from_capture(source, other)
    assert int((found.matched_by == MatchedBy.CAPTURE).sum()) == nodes
    table = borrowed_table(found, other.trace, capture)
    lines = {line.name: (line.kernels, line.self_ns) for line in table.operators}
    assert {name: lines[name] for name in operators} == operators
    total = int((other.trace.work.end_ns - other.trace.work.start_ns)[other.trace.work.kind == 0].sum())
    assert round(found.coverage["capture"] * total) == capture_ns  # type: ignore[operator]
    captured = capture_table(source)
    assert captured is not None
    assert [line.nodes for line in captured.captures] == [nodes]
    assert sum(captured.operators.values()) == nodes


def test_a_capture_of_another_graph_gives_nothing() -> None:
    source = read_trace(ENGINES / "sglang_graph_capture_bs32.json.gz")
    found = borrow_from_capture(source, attributed(read_trace(ENGINES / "vllm_decode_full_graph.json.gz")))
    assert found.coverage["capture"] == 0


Node = tuple[str, str, str]
"""Operator, module and kernel of a graph's node."""
NODES: list[Node] = [
    ("aten::rms_norm", "Norm_0", "rms_norm"),
    ("aten::mm", "Attention_0", "nvjet_a"),
    ("vllm::unified_attention", "Attention_0", "flash_fwd"),
    ("aten::mm", "Mlp_0", "nvjet_b"),
]


def captured(*graphs: list[Node], replayed: tuple[str, ...] = ()) -> Trace:
    """A trace that captures these graphs and replays one with these kernels."""
    built = Builder()
    for number, nodes in enumerate(graphs):
        begin = 10_000 * number
        built.call(begin, begin + 1, "cudaStreamBeginCapture", correlation=100 * number + 1)
        for place, (operator, module, _) in enumerate(nodes):
            at = begin + 10 + 20 * place
            built.range(at, at + 10, f"nn.Module: {module}", "nn.Module")
            built.operator(at + 1, at + 9, operator)
            built.call(at + 2, at + 4, "cudaLaunchKernel", correlation=100 * number + 2 + place)
        built.call(begin + 9000, begin + 9001, "cudaStreamEndCapture", correlation=100 * number + 99)
    if replayed:
        built.call(10**6, 10**6 + 10, "cudaGraphLaunch", correlation=10_000)
        for place, kernel in enumerate(replayed):
            start = 10**6 + 20 + 20 * place
            built.kernel(start, start + 10, kernel, correlation=10_000, graph_node=place + 1)
    return built.trace()


def owners(trace: Trace) -> tuple[list[str], list[str]]:
    """Operator and module of each kernel, in the trace that has the captures."""
    found = attribute(trace, find_stages(trace))
    names = through(found.operator, trace.operators.name.astype(np.int64)).tolist()
    return [trace.name_of(name) for name in names], [found.modules[index] if index >= 0 else "" for index in found.module]


def borrowed(*graphs: list[Node], replayed: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The same, if the captures are in another trace."""
    other = captured(replayed=replayed)
    found = borrow_from_capture(captured(*graphs), attributed(other))
    return [found.operators[index] if index >= 0 else "" for index in found.operator], [name or "" for name in named(found)]


def renamed(module: str) -> list[Node]:
    return [(operator, f"{name}{module}", kernel) for operator, name, kernel in NODES]


REPLAY = tuple(kernel for _, _, kernel in NODES)
OPERATORS = [operator for operator, _, _ in NODES]


@pytest.mark.parametrize(
    ("graphs", "replayed", "operators", "modules"),
    [
        ([NODES], REPLAY, OPERATORS, [module for _, module, _ in NODES]),
        ([NODES, NODES], REPLAY, OPERATORS, [module for _, module, _ in NODES]),
        ([NODES, renamed("1")], REPLAY, OPERATORS, [""] * 4),
        ([NODES, NODES[::-1]], REPLAY, OPERATORS, [module for _, module, _ in NODES]),
        ([NODES[::-1]], REPLAY, [""] * 4, [""] * 4),
        ([[("aten::bmm", "", ""), *NODES[1:3], NODES[3]]], REPLAY, [""] * 4, [""] * 4),
    ],
    ids=["one", "several that agree", "layers", "the kernels decide", "another order", "a product that runs a norm"],
)
def test_a_replay_belongs_to_the_captures_that_fit_as_far_as_they_agree(
    graphs: list[list[Node]], replayed: tuple[str, ...], operators: list[str], modules: list[str]
) -> None:
    assert owners(captured(*graphs, replayed=replayed)) == (operators, modules)
    assert borrowed(*graphs, replayed=replayed) == (operators, modules)


def test_a_replay_in_the_trace_of_its_capture_has_the_captured_modules() -> None:
    built = Builder()
    built.call(0, 1, "cudaStreamBeginCapture", correlation=500)
    for place, (_, module) in enumerate(KERNELS):
        at = 10 + 20 * place
        built.range(at, at + 10, f"nn.Module: {module}", "nn.Module")
        built.call(at + 2, at + 4, "cudaLaunchKernel", correlation=501 + place)
    built.call(200, 201, "cudaStreamEndCapture", correlation=600)
    for step in range(STEPS):
        begin = 1000 * (step + 1)
        built.call(begin + 10, begin + 20, "cudaGraphLaunch", correlation=step + 1)
        for place, (kernel, _) in enumerate(KERNELS):
            built.kernel(begin + 30 + 20 * place, begin + 40 + 20 * place, kernel, correlation=step + 1, graph_node=place + 1)
    trace = built.trace()
    found = attribute(trace, find_stages(trace))
    assert [found.modules[index] for index in found.module] == [module for _, module in KERNELS] * STEPS
    assert found.coverage["module"] == 1.0
    assert trace.name_of(int(trace.calls.name[found.call[0]])) == "cudaGraphLaunch", "it was launched by the replay"
