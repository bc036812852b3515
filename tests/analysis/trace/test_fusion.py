"""Fusion: hand-computed bounds, and measurements of a compiled decode."""

import gzip
import json
from typing import Any

import numpy as np
import pytest

from kernel_fixtures import H200
from llm_perf_opt.analysis.trace.host_calls import fusion_of
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import WorkKind
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from trace_builders import Builder

ADD, CAST, PRODUCT = "vectorized_elementwise_kernel<add>", "direct_copy_kernel", "nvjet_sm90"
TOP_K, SORT, HISTOGRAM = "at::native::sbtopk::gatherTopK<float>", "bitonicSortKVInPlace<long>", "kernelHistogram1D<int>"
SUM, SCAN, EXPERTS = "reduce_kernel<512, 1>", "at_cuda_detail::cub::DeviceScanKernel", "prepare_grouped_gemm_data<bf16>"


def _trace(*kernels: tuple[str, int, int]) -> Builder:
    made = Builder()
    for place, (name, length, grid) in enumerate(kernels):
        made.launch(place * 1000, place * 1000 + 100, place * 1000 + 100 + length, name, grid=grid, block=1)
    return made


def test_runs_between_products_by_hand() -> None:
    """Two runs: add 10 and cast 30 of one size with an add of another size; then a single add after the product."""
    trace = _trace((ADD, 10, 4), (CAST, 30, 4), (ADD, 20, 8), (PRODUCT, 500, 9), (ADD, 40, 4)).trace()
    found = fusion_of(trace, np.zeros(5, np.int64))
    assert (found.kept_kernels, found.kept_ns) == (1, 500)
    assert (found.fusable_kernels, found.fusable_ns) == (4, 100)
    assert (found.runs, found.least_ns) == (2, 30 + 40)
    assert (found.sizes, found.most_ns) == (3, 30 + 20 + 40)
    assert found.kernels == 1 + 2.5
    assert found.saved_ns == 100 - 80


def test_nothing_fuses_across_steps_and_other_stages_are_left_out() -> None:
    trace = _trace((ADD, 10, 4), (ADD, 30, 4), (ADD, 99, 4)).trace()
    found = fusion_of(trace, np.array([0, 1, -1]))
    assert (found.runs, found.least_ns, found.fusable_ns) == (2, 40, 40)


def test_a_stage_without_small_kernels_has_nothing_to_fuse() -> None:
    found = fusion_of(_trace((PRODUCT, 5, 1)).trace(), np.zeros(1, np.int64))
    assert (found.fusable_kernels, found.runs, found.saved_ns, found.kernels) == (0, 0, 0, 1)


def test_expert_routing_is_one_loop_but_for_sums_scans_and_sorts() -> None:
    """After the top-k: an add, a sort and an add of other sizes; a scan and an add; then the experts; an add, a sum, an add."""
    trace = _trace(
        (TOP_K, 400, 1), (ADD, 10, 1), (SORT, 30, 2), (ADD, 20, 3), (HISTOGRAM, 100, 1), (SCAN, 15, 4), (ADD, 25, 5),
        (EXPERTS, 900, 1), (ADD, 11, 6), (SUM, 35, 7), (ADD, 12, 8), (PRODUCT, 500, 9), (ADD, 8, 1), (SUM, 9, 2),
    ).trace()  # fmt: skip
    found = fusion_of(trace, np.zeros(len(trace.work), np.int64))
    assert (found.kept_kernels, found.kept_ns) == (4, 400 + 100 + 900 + 500)
    assert (found.runs, found.least_ns) == (4, 30 + 25 + 35 + 9)
    # at worst: the sort and the rest, the scan and the rest, the sum and the rest; after the product a kernel for each size
    assert (found.sizes, found.most_ns) == (8, (30 + 20) + (15 + 25) + (35 + 12) + (8 + 9))


def test_without_grouped_products_a_top_k_is_the_samplers_and_changes_nothing() -> None:
    kernels = [(TOP_K, 400, 1), (ADD, 10, 1), (SUM, 20, 2), (ADD, 5, 3)]
    trace = _trace(*kernels, (PRODUCT, 500, 9), *kernels, (EXPERTS, 9, 1)).trace()
    steps = np.array([0] * 5 + [1] * 4 + [2])
    found = fusion_of(trace, steps)
    assert (found.runs, found.sizes) == (2, 6), "the experts of another step are not those of this top-k"


def test_the_sort_of_a_top_k_stays_with_it() -> None:
    trace = _trace((TOP_K, 400, 1), (SORT, 30, 1), (ADD, 10, 1), (SORT, 20, 1)).trace()
    found = fusion_of(trace, np.zeros(4, np.int64))
    assert (found.kept_kernels, found.kept_ns) == (2, 430)
    assert (found.fusable_kernels, found.fusable_ns) == (2, 30)


def test_copies_within_the_device_fuse_and_those_of_the_host_are_no_kernels() -> None:
    made = _trace((ADD, 10, 4), (PRODUCT, 500, 9))
    for place, name in ((3, "Memcpy DtoD (Device -> Device)"), (4, "Memcpy HtoD (Pageable -> Device)")):
        made.kernel(place * 1000, place * 1000 + 7, name, kind=WorkKind.MEMCPY, grid=0, block=0)
    found = fusion_of(made.trace(), np.zeros(4, np.int64))
    assert (found.fusable_kernels, found.fusable_ns, found.runs) == (2, 17, 2)


def _step(recorded: dict[str, Any]) -> Builder:
    """One decode step as it was recorded, its kernels back to back."""
    made, at = Builder(), 0
    for name, kind, length, grid, block in recorded["work"]:
        made.kernel(at, at + length, recorded["names"][name], kind=WorkKind(kind), grid=grid, block=block)
        at += length
    return made


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "qwen3_30b_a3b"])
def test_what_a_compiler_left_of_a_mixture_of_experts(model: str) -> None:
    """Eager steps of an H200 against compiled ones of the same model there: kernels, their time, and the measured step."""
    recorded = json.loads(gzip.decompress((H200 / "moe_decode_steps.json.gz").read_bytes()))[model]
    eager = _step(recorded["eager"]).trace()
    found = fusion_of(eager, np.zeros(len(eager.work), np.int64))
    compiled = [length for _, _, length, _, _ in recorded["graphs"]["work"]]
    assert found.kernels == pytest.approx(len(compiled), rel=0.08)
    assert found.kept_ns + found.fused_ns == pytest.approx(sum(compiled), rel=0.09)
    between = 859 / 2  # ns from kernel to kernel in a graph, half of what `llm-perf ceilings` measured there
    predicted = found.kept_ns + found.fused_ns + between * found.kernels
    assert predicted == pytest.approx(recorded["graphs"]["step_ns"], rel=0.09)


def test_the_prediction_for_a_dense_model_is_unchanged() -> None:
    """Eight steps of a Qwen2-shaped model on an H200: what its predictions, right within 5 %, are made from."""
    trace = read_torch_trace(H200 / "torch_trace.json.gz")
    found = fusion_of(trace, find_stages(trace).of_stage("decode_step"))
    assert (found.kept_kernels, found.kept_ns, found.fusable_kernels, found.fusable_ns) == (344, 2_854_100, 1184, 1_698_742)
    assert (found.runs, found.sizes, found.least_ns, found.most_ns) == (176, 536, 349_639, 914_374)
