"""Modules of a graph's kernels from the eager trace."""

import pytest

from llm_perf_opt.analysis.trace.attribution import attribute
from llm_perf_opt.analysis.trace.graph_modules import AttributedTrace, BorrowedModules, borrow_modules, borrowed_table
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import Trace
from trace_builders import Builder

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
    assert found.coverage == {"own": 0.0, "name": 1.0, "class": 0.0, "between": 0.0, "nothing": 0.0}


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
