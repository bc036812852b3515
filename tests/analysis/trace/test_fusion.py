"""What fusing leaves: bounds by hand, and the measured truth of a compiled decode."""

import numpy as np

from llm_perf_opt.analysis.trace.fusion import fusion_of
from traces import Builder

ADD, CAST, PRODUCT = "vectorized_elementwise_kernel<add>", "direct_copy_kernel", "nvjet_sm90"


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
