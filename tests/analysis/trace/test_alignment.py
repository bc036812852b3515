"""Modules for a graph's kernels from the eager pass."""

import itertools
from difflib import SequenceMatcher
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.trace.graph_modules import MatchedBy, align_modules, common_subsequence

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
