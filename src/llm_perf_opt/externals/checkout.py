"""How a git checkout of its own stands: which commit, and whether somebody edited it."""

import os
from pathlib import Path

from llm_perf_opt.externals.entry import External, Standing
from llm_perf_opt.externals.git import Git, GitError, reason
from llm_perf_opt.terminal import one_line

_SHOWN = 3
"""So many edited files are named; the rest is counted."""


def checkout_standing(folder: Path, entry: External, *, only_below: bool = False) -> Standing:
    """Against the pin. `only_below`: the folder may be a part of a repository, and the rest of it does not matter."""
    git = Git(folder)
    try:
        head = git.text("rev-parse", "--verify", "HEAD")
        changed = git.text("status", "--porcelain", "-z", "--untracked-files=all", *(["--", "."] if only_below else []))
    except GitError as error:
        return Standing("foreign", f"not a git checkout that can be read: {reason(error.said)}")
    if head != entry.commit:
        return Standing("other commit", f"at {head}", head)
    if changed:
        return Standing("edited", edited([line[3:] for line in changed.split("\0") if line]), head)
    return Standing("ok", "", head)


def edited(paths: list[str]) -> str:
    """The first edited files by name."""
    named = ", ".join(one_line(path) for path in paths[:_SHOWN])
    return named + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")


def is_checkout(folder: Path) -> bool:
    """Whether a repository of its own begins here; git would otherwise answer for the project around it."""
    return not folder.is_symlink() and (folder / ".git").exists()


def is_empty_or_missing(folder: Path) -> bool:
    """Whether nothing would be overwritten; git leaves an empty folder where a submodule is to come."""
    if folder.is_symlink() or not os.path.lexists(folder):
        return not folder.is_symlink()
    return folder.is_dir() and not any(folder.iterdir())
