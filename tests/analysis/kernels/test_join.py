"""Sampled launches joined to a trace's kernels; the tables built from them are tested elsewhere."""

from kernel_fixtures import launch
from llm_perf_opt.analysis.kernels.join import join, weighted
from llm_perf_opt.core.machine_records import KernelUse
from llm_perf_opt.core.records import Missing

TENSOR = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"


def test_each_launch_size_has_its_samples_or_those_of_other_grids_weighted_by_calls() -> None:
    uses = [KernelUse("decode", "f", grid, 128, calls, 100) for grid, calls in ((1, 1), (2, 3), (9, 5))]
    found = join([launch("f", 1, tensor=10), launch("f", 2, tensor=50), launch("gone", 1)], uses)
    assert found.unused == 1
    assert found.counters == {TENSOR}
    assert [found.found[("f", grid, 128)].counter(TENSOR) for grid in (1, 2)] == [10, 50]
    stand_in = found.found[("f", 9, 128)]
    assert stand_in.by_name
    assert stand_in.counter(TENSOR) == (10 + 3 * 50) / 4
    assert stand_in.counter("another.sum") == Missing("the counter was not collected")


def test_a_missing_value_spoils_a_mean_only_where_it_has_weight() -> None:
    assert weighted([1.0, Missing("lost")], [1, 0]) == 1.0
    assert weighted([1.0, Missing("lost")], [1, 1]) == Missing("lost")
