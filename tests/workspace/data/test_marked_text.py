"""Only text between the marks is replaced."""

import pytest

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.workspace.data.marked_text import README_MARKS, with_block

BEGIN, END = README_MARKS


@pytest.mark.parametrize("text", ["", "# Mine", "# Mine\n", "# Mine\n\n", "a\r\nb"])
def test_a_block_is_added_at_the_end_and_replaced_there(text: str) -> None:
    once = with_block(text, "one", README_MARKS, "README.md")
    assert once.startswith(text)
    assert once.endswith(f"{BEGIN}\none\n{END}\n")
    assert with_block(once, "one", README_MARKS, "README.md") == once
    assert with_block(once, "two\n\n", README_MARKS, "README.md") == once.replace("one", "two")


def test_text_around_the_block_stays() -> None:
    text = f"before\n{BEGIN}\nold\nlines\n{END}\nafter\n"
    assert with_block(text, "new", README_MARKS, "x") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


@pytest.mark.parametrize("text", [BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{END}{END}", f"{BEGIN}\n{BEGIN}\n{END}"])
def test_marks_that_are_no_pair_change_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match=r"README\.md cannot be updated"):
        with_block(text, "new", README_MARKS, "README.md")


def test_a_block_cannot_contain_its_own_end() -> None:
    made = with_block("", f"a {END} b", README_MARKS, "x")
    assert made.count(END) == 1
    assert with_block(made, "new", README_MARKS, "x") == f"{BEGIN}\nnew\n{END}\n"
