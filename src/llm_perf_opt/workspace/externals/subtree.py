"""A subtree: the files of one commit as plain files of the project, staged for the user to commit."""

from pathlib import Path

from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.git import GitError, reason
from llm_perf_opt.core.inside import write
from llm_perf_opt.workspace.externals.git import (
    FETCH_S,
    edited,
    fetch_commit,
    is_empty_or_missing,
    new_repository,
)
from llm_perf_opt.workspace.externals.listing import External, Standing
from llm_perf_opt.workspace.externals.places import Locked, Places


def standing(places: Places, entry: External, locked: Locked | None) -> Standing:
    """Compare the project's index with the tree of the pin, then the files with the index."""
    tree = staged_tree(places, entry)
    if tree is None:
        empty = is_empty_or_missing(places.folder(entry))
        return Standing("missing") if empty else Standing("foreign", "files that the project's git does not track")
    if locked is None or not locked.tree:
        return Standing("unverified", "externals.lock.json has no content for the commit")
    if locked.commit != entry.commit:
        return Standing("other commit", f"at {locked.commit}", locked.commit)
    if tree != locked.tree:
        return Standing("edited", "what is staged or committed differs from the pinned commit", locked.commit)
    how = ("--porcelain", "-z", "--untracked-files=all", "--no-renames", "--ignore-submodules=dirty")
    lines = places.git.text("status", *how, "--", places.shown(entry)).split("\0")
    changed = [line[3:] for line in lines if line and line[1] != " "]
    if changed:
        return Standing("edited", edited(changed), locked.commit)
    return Standing("ok", "staged, not committed yet" if any(lines) else "", locked.commit)


def make(places: Places, entry: External) -> Locked:
    """Fetch to a temporary repository, copy the objects, and update index and working tree in one git command.

    There is no history and no commit: a shallow fetch into the project would make the project itself shallow.
    """
    places.make_room(entry)
    with places.staging() as staging:
        tree = _copy_objects(places, entry, staging)
        if tree != staged_tree(places, entry):
            _put(places, entry, tree, staging)
    found = staged_tree(places, entry)
    if found != tree:
        raise ResourceError(f"{entry.name}: staged {found}, but the pinned commit has {tree}.", "See `git status`.")
    return Locked(entry.commit, tree=tree)


move = make
"""The same for an update: git merges the old tree with the new one, and fails if edits conflict."""


def staged_tree(places: Places, entry: External) -> str | None:
    """Return the tree of the entry's folder in the project's index, or None."""
    shown = places.shown(entry)
    if not places.git.text("ls-files", "-z", "--", shown):
        return None
    return places.git.try_text("write-tree", "--missing-ok", f"--prefix={shown}/")


def _copy_objects(places: Places, entry: External, staging: Path) -> str:
    git = new_repository(entry, staging / "fetched")
    fetch_commit(git, entry)
    tree = git.text("rev-parse", "--verify", f"{entry.commit}^{{tree}}")
    wanted = staging / "wanted"
    write(staging, wanted, f"{tree}\n".encode())
    name = git.text("pack-objects", "--quiet", "--revs", str(staging / "pack"), stdin=wanted, timeout_s=FETCH_S).splitlines()[-1]
    places.git.text("index-pack", "--stdin", stdin=staging / f"pack-{name}.pack", timeout_s=FETCH_S)
    return tree


def _put(places: Places, entry: External, tree: str, staging: Path) -> None:
    git, shown = places.git, places.shown(entry)
    try:
        before = git.text("write-tree")
        other = git.with_index(staging / "index")
        other.text("read-tree", before)
        if other.text("ls-files", "-z", "--", shown):
            other.text("rm", "--quiet", "-r", "--cached", "--", shown)
        other.text("read-tree", f"--prefix={shown}/", tree)
        after = other.text("write-tree")
        git.text("update-index", "-q", "--really-refresh", "--unmerged")
        git.text("read-tree", "-m", "-u", before, after)
    except GitError as error:
        raise ResourceError(
            f"{entry.name}: {shown} cannot be staged: {reason(error.output)}.",
            "Finish any merge in progress, and move untracked or edited files away from there.",
        ) from error
