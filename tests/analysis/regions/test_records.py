"""Selection of names by patterns."""

import pytest

from llm_perf_opt.analysis.regions.records import Selection
from llm_perf_opt.core.errors import ConfigError


def test_everything_passes_the_empty_filter() -> None:
    assert Selection().takes("anything")
    assert str(Selection()) == "all"


def test_a_shell_pattern_matches_the_whole_name_and_a_regex_any_part() -> None:
    assert Selection(include=("*gemm*",)).takes("void cutlass::gemm<float>\nkernel")
    assert not Selection(include=("gemm",)).takes("void gemm")
    assert not Selection(include=("emm*",)).takes("gemm")
    assert Selection(include=("regex:ge[m]{2}",)).takes("void gemm_nt")


def test_exclusion_wins_over_inclusion() -> None:
    chosen = Selection(include=("*gemm*",), exclude=("regex:^void small",))
    assert chosen.takes("void large_gemm")
    assert not chosen.takes("void small_gemm")
    assert str(chosen) == "only *gemm*; without regex:^void small"


def test_any_spelling_of_a_thing_may_match() -> None:
    assert Selection(include=("decode",)).takes("LLM@decode", "decode")
    assert not Selection(exclude=("decode",)).takes("LLM@decode", "decode")


@pytest.mark.parametrize("pattern", ["regex:(", "regex:*", "regex:", "", "  ", "regex:a{99999999999}"])
def test_a_bad_pattern_is_the_users_error(pattern: str) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        Selection(exclude=(pattern,))
