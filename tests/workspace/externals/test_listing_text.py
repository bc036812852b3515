"""Changing a pin leaves the rest of externals.yaml unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.workspace.externals.listing import External, read_listing, template, with_commit, with_hub_entry

OLD, NEW = "a" * 40, "b" * 40
TEXT = f"""# mine
x:   # first
  commit: {OLD}   # the pin
  way: submodule

  url: 'https://host.invalid/x'
y: {{way: subtree, url: /srv/y, commit: "{OLD}"}}   # in braces
"""


@pytest.mark.parametrize("name", ["x", "y"])
def test_only_the_pin_changes(name: str) -> None:
    changed = with_commit(TEXT, "externals.yaml", name, NEW)
    assert read_listing(changed, "externals.yaml")[name].commit == NEW
    expected = TEXT.replace(f"{OLD}   #", f'"{NEW}"   #') if name == "x" else TEXT.replace(f'"{OLD}"', f'"{NEW}"')
    assert changed == expected


def test_a_shared_pin_is_not_changed_for_two() -> None:
    text = f"x: &x\n  way: subtree\n  url: /srv/x\n  commit: '{OLD}'\ny:\n  <<: *x\n  into: github/y\n"
    assert set(read_listing(text, "externals.yaml")) == {"x", "y"}
    for name in ("x", "y"):
        with pytest.raises(ConfigError, match="cannot be changed in place"):
            with_commit(text, "externals.yaml", name, NEW)


def test_a_snapshot_is_added_at_the_end() -> None:
    entry = External("Name", "hub", "Owner/Name", NEW, "hf/Owner/Name")
    for text in (template(), TEXT, TEXT.rstrip("\n"), ""):
        changed = with_hub_entry(text, "externals.yaml", entry)
        assert changed.startswith(text)
        assert read_listing(changed, "externals.yaml")["Name"] == entry
    with pytest.raises(ConfigError, match="cannot be changed in place"):
        with_hub_entry("{}", "externals.yaml", entry)


@given(st.lists(st.sampled_from(["# note", "", "  # indented"]), max_size=5), st.integers(0, 2))
def test_comments_anywhere_stay(comments: list[str], quotes: int) -> None:
    quote = ["", "'", '"'][quotes]
    text = "\n".join(
        ["x:", *comments, "  way: subtree", *comments, f"  commit: {quote}{OLD}{quote}", *comments, "  url: /srv/x", ""]
    )
    changed = with_commit(text, "externals.yaml", "x", NEW)
    assert changed == text.replace(f"{quote}{OLD}{quote}", f'"{NEW}"')
