"""The pre-commit guard: third_party/ may contain only listed entries, exactly as pinned.

It reads the index, which is what will be committed, and needs no network.
"""

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.git import Git
from llm_perf_opt.core.git_changes import GITLINK
from llm_perf_opt.core.inside import write
from llm_perf_opt.core.processes import IMPORTING_NOTHING_HERE
from llm_perf_opt.core.urls import without_password
from llm_perf_opt.workspace.externals.listing import TRACKED_WAYS, External, read_listing
from llm_perf_opt.workspace.externals.places import IGNORE, LICENSES, LISTING, LOCK, THIRD_PARTY, Locked, Places, read_lock

CONTROL_FILES = frozenset({LISTING, LOCK, IGNORE, "README.md"})
"""Files at the top of third_party/ that belong to no entry."""


def owner(path: str, entries: Iterable[External]) -> External | None:
    """Return the entry whose folder contains a path under third_party/."""
    below = PurePosixPath(path)
    for entry in entries:
        into = PurePosixPath(entry.into)
        if below == into or into in below.parents:
            return entry
    return None


def strays(places: Places, entries: Iterable[External]) -> list[str]:
    """Return the paths that belong to no entry: the topmost folder of each, not every file."""
    listed = list(entries)
    leading = {parent.as_posix() for entry in listed for parent in PurePosixPath(entry.into).parents}
    names = {entry.name for entry in listed}
    found: list[str] = []
    waiting = ["."] if places.third_party.is_dir() else []
    while waiting:
        here = waiting.pop()
        for path in sorted((places.third_party / here).iterdir()):
            below = path.relative_to(places.third_party).as_posix()
            if owner(below, listed) or (here == "." and (below in CONTROL_FILES or below.startswith("."))):
                continue
            is_folder = path.is_dir() and not path.is_symlink()
            if is_folder and (below in leading or below == LICENSES):
                waiting.append(below)
            elif not (here == LICENSES and path.name in names) and not (is_folder and not any(path.iterdir())):
                found.append(f"{THIRD_PARTY}/{below}")
    return sorted(found)


_HOOK = """#!/bin/sh
# Reference code under third_party/ is read-only: see `llm-perf externals --help`.
exec {python} -c '{code}' externals guard
"""
_HOOKED = f"{IMPORTING_NOTHING_HERE}from llm_perf_opt.cli.__main__ import main; main()"
"""Not `-m llm_perf_opt`: Python would search the repository for modules first."""


@dataclass(frozen=True)
class Problem:
    """A path that may not be committed, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class _Staged:
    mode: str
    blob: str


def guard(places: Places, *, everything: bool = False) -> list[Problem]:
    """Return the problems of what is staged. If nothing is staged under third_party/, check only with `everything`."""
    if not places.in_git:
        raise ConfigError(f"{places.root} is not the top of a git repository.", "The guard checks what is staged there.")
    index = os.environ.get("GIT_INDEX_FILE")  # `git commit -a` and `git commit FILE` give a hook its own index
    git = places.git.with_index(Path(index).absolute()) if index else places.git
    if not everything and not _touched(git):
        return []
    staged = _staged(git)
    listing = _listing(git, staged)
    locked = _locked(git, staged)
    problems = [problem for path in staged if (problem := _unreviewed(path, staged[path], listing, locked))]
    for entry in listing.values():
        problems += _entry_problems(git, entry, staged, locked.get(entry.name))
    return sorted(problems, key=lambda problem: problem.path)


def install(places: Places, python: str) -> Path:
    """Install the guard as the repository's pre-commit hook; an existing hook is not changed."""
    if not places.in_git:
        raise ConfigError(f"{places.root} is not the top of a git repository.", "Run it in one.")
    places.git.require_writable()
    hooks = places.git.repository.common / "hooks"
    hook = hooks / "pre-commit"
    configured = dict(Git(places.root).given).get("core.hookspath")
    if configured:
        raise ConfigError(f"core.hooksPath is {configured}.", "Call `llm-perf externals guard` from the pre-commit hook there.")
    if hook.exists() or hook.is_symlink():
        raise ConfigError(f"{hook} already exists.", "Add `llm-perf externals guard` to it.")
    write(hooks, hook, _HOOK.format(python=shlex.quote(python), code=_HOOKED).encode(), 0o777)
    return hook


def _touched(git: Git) -> bool:
    has_commit = git.try_text("rev-parse", "--verify", "--quiet", "HEAD") is not None
    base = "HEAD" if has_commit else git.text("hash-object", "-t", "tree", os.devnull)
    return bool(git.text("diff-index", "--cached", "--name-only", "-z", base, "--", THIRD_PARTY, ".gitmodules"))


def _staged(git: Git) -> dict[str, _Staged]:
    """Return the index entries under third_party/ by relative path; for a conflict, the last side."""
    found = {}
    for line in git.text("ls-files", "--stage", "-z", "--", THIRD_PARTY).split("\0"):
        if line:
            about, _, path = line.partition("\t")
            mode, blob, _ = about.split()
            found[path.removeprefix(f"{THIRD_PARTY}/")] = _Staged(mode, blob)
    return found


def _listing(git: Git, staged: dict[str, _Staged]) -> dict[str, External]:
    if LISTING not in staged:
        return {}
    text = git.content("cat-file", "blob", staged[LISTING].blob).decode("utf-8", errors="replace")
    return read_listing(text, f"{THIRD_PARTY}/{LISTING} (as staged)")


def _locked(git: Git, staged: dict[str, _Staged]) -> dict[str, Locked]:
    if LOCK not in staged:
        return {}
    return read_lock(git.content("cat-file", "blob", staged[LOCK].blob), f"{THIRD_PARTY}/{LOCK} (as staged)")


def _unreviewed(path: str, staged: _Staged, listing: dict[str, External], locked: dict[str, Locked]) -> Problem | None:
    shown = f"{THIRD_PARTY}/{path}"
    if path in CONTROL_FILES:
        return None if staged.mode.startswith("100") else Problem(shown, "must be a plain file")
    if path.startswith(f"{LICENSES}/"):
        _, name, *rest = path.split("/")
        known = locked[name].licenses.get("/".join(rest)) if name in listing and name in locked else None
        if known is None:
            return Problem(shown, f"not a license that `llm-perf externals init` copied, according to the staged {LOCK}")
        return None if known == staged.blob else Problem(shown, "was edited; licenses are copied by `llm-perf externals init`")
    entry = owner(path, listing.values())
    if entry is None:
        return Problem(shown, f"not listed in {THIRD_PARTY}/{LISTING}; list its repository and pin there")
    if entry.way not in TRACKED_WAYS:
        return Problem(
            shown,
            f"is local to one machine (way {entry.way}); run `git rm --cached` on it, and keep it in {THIRD_PARTY}/.gitignore",
        )
    return None


def _entry_problems(git: Git, entry: External, staged: dict[str, _Staged], locked: Locked | None) -> list[Problem]:
    """Check whether a tracked entry matches its pin."""
    shown = f"{THIRD_PARTY}/{entry.into}"
    mine = {path: item for path, item in staged.items() if owner(path, [entry])}
    if entry.way not in TRACKED_WAYS:
        return []
    if not mine:
        gone = locked is not None and entry.way != "hub"  # a snapshot may be kept out of git
        return [Problem(shown, f"was removed; remove {entry.name} from {LISTING} too, and run init")] if gone else []
    if entry.way == "submodule":
        return _submodule_problems(git, entry, mine)
    if locked is None:
        return [Problem(shown, f"is not in the staged {LOCK}; run `llm-perf externals init` and stage that file")]
    if locked.commit != entry.commit:
        return [Problem(shown, _other_pin(entry, f"made from {locked.commit}"))]
    if entry.way == "subtree":
        tree = git.try_text("write-tree", "--missing-ok", f"--prefix={shown}/")
        return [] if tree == locked.tree else _subtree_edits(git, shown)
    return _snapshot_problems(entry, mine, locked)


def _submodule_problems(git: Git, entry: External, mine: dict[str, _Staged]) -> list[Problem]:
    shown = f"{THIRD_PARTY}/{entry.into}"
    link = mine.get(entry.into)
    if link is None or link.mode != GITLINK:
        return [Problem(shown, "should be a submodule, but plain files are staged")]
    if link.blob != entry.commit:
        return [Problem(shown, _other_pin(entry, f"{link.blob} is staged"))]
    url = git.try_text("config", "--blob", ":.gitmodules", "--get", f"submodule.{shown}.url")
    if url != entry.source:
        return [
            Problem(
                ".gitmodules", f"has {without_password(url) if url else 'no url'} for {entry.name}; {LISTING} has {entry.source}"
            )
        ]
    return []


def _other_pin(entry: External, found: str) -> str:
    return (
        f"pinned to {entry.commit} in {LISTING} as staged, but {found}; "
        f"`git add {THIRD_PARTY}` if the pin was moved, or run `llm-perf externals update {entry.name}`"
    )


def _subtree_edits(git: Git, shown: str) -> list[Problem]:
    """Return the files whose change is staged; the folder itself if the edit was committed earlier."""
    why = "differs from the pinned commit; reference code is read-only: `git restore --staged --worktree` it"
    if git.text("diff-files", "--name-only", "-z", "--", f"{THIRD_PARTY}/{LOCK}", f"{THIRD_PARTY}/{LISTING}"):
        # `update` stages the code but not the list and the lock; restoring the code would undo it.
        why = (
            f"differs from the commit pinned in {LOCK} as staged, and {LISTING} or {LOCK} is changed and not staged: "
            f"`git add {THIRD_PARTY}` if the pin was moved"
        )
    if git.try_text("rev-parse", "--verify", "--quiet", "HEAD") is None:
        return [Problem(shown, why)]
    names = git.text("diff-index", "--cached", "--name-only", "-z", "HEAD", "--", shown).split("\0")
    return [Problem(name, why) for name in names if name][:20] or [Problem(shown, why)]


def _snapshot_problems(entry: External, mine: dict[str, _Staged], locked: Locked) -> list[Problem]:
    staged = {path.removeprefix(f"{entry.into}/"): item.blob for path, item in mine.items()}
    found = []
    for path in sorted({*staged, *locked.files}):
        if staged.get(path) != locked.files.get(path):
            fault = "is missing from" if path not in staged else "is not in" if path not in locked.files else "differs from"
            found.append(Problem(f"{THIRD_PARTY}/{entry.into}/{path}", f"{fault} the pinned commit; reference code is read-only"))
    return found
