"""A submodule: its own history, its commit recorded by the project."""

import os
from pathlib import Path

from llm_perf_opt.core import inside
from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.git_changes import GITLINK
from llm_perf_opt.core.urls import without_password
from llm_perf_opt.workspace.externals.git import (
    check_out,
    checkout_standing,
    command,
    fetch_commit,
    is_checkout,
    is_empty_or_missing,
    modules_of,
    new_repository,
    remote_git,
)
from llm_perf_opt.workspace.externals.listing import External, Standing
from llm_perf_opt.workspace.externals.places import Locked, Places


def standing(places: Places, entry: External, locked: Locked | None) -> Standing:
    """Compare the checkout with the pin, then with the project's index and .gitmodules."""
    folder = places.folder(entry)
    if is_empty_or_missing(folder):
        return Standing("missing")
    if not is_checkout(folder):
        return Standing("foreign", "a folder or file that is not a submodule")
    found = checkout_standing(folder, entry)
    if found.differs:
        return found
    recorded = recorded_commit(places, entry)
    if recorded is None or _configured(places, entry, "url") is None:
        return Standing("unregistered", "checked out, but the project does not record it as a submodule", found.commit)
    if recorded != entry.commit:
        return Standing("other commit", f"the project records {recorded}", found.commit)
    if (url := _configured(places, entry, "url")) != entry.source:
        return Standing("other commit", f".gitmodules has another url: {without_password(url or '')}", found.commit)
    return found


def make(places: Places, entry: External) -> Locked:
    """Clone to a temporary folder, rename it into place, and record it in the index and .gitmodules, without a commit."""
    folder = places.make_room(entry)
    if not is_checkout(folder):
        with places.staging() as staging:
            clone = staging / "clone"
            git = new_repository(entry, clone)
            fetch_commit(git, entry)
            check_out(git, entry)
            inside.move(places.third_party, clone, folder)  # git may have left an empty folder for the submodule
        try:
            _register(places, entry)
        except BaseException:
            inside.remove_if_possible(places.third_party, folder)
            raise
    else:
        _register(places, entry)
    return Locked(entry.commit)


def move(places: Places, entry: External) -> Locked:
    """Fetch the new commit, check it out, record it."""
    folder = places.make_room(entry)
    git = remote_git(entry, folder)
    git.configure("remote.origin.url", entry.source)
    if git.try_text("cat-file", "-e", f"{entry.commit}^{{commit}}") is None:
        fetch_commit(git, entry)
    check_out(git, entry)
    _register(places, entry)
    return Locked(entry.commit)


def recorded_commit(places: Places, entry: External) -> str | None:
    """Return the commit in the project's index, or None."""
    shown = places.shown(entry)
    for line in places.git.text("ls-files", "--stage", "-z", "--", shown).split("\0"):
        about, _, path = line.partition("\t")
        if path == shown and about.startswith(GITLINK):
            return about.split()[1]
    return None


def _register(places: Places, entry: External) -> None:
    shown, git = places.shown(entry), places.git
    for key, value in (("path", shown), ("url", entry.source), ("shallow", "true")):
        git.configure(f"submodule.{shown}.{key}", value, ".gitmodules")
    git.text("add", "--", ".gitmodules")
    git.text("update-index", "--add", "--cacheinfo", f"{GITLINK},{entry.commit},{shown}")
    for key, value in (("active", "true"), ("url", entry.source)):
        git.configure(f"submodule.{shown}.{key}", value)
    _absorb(places, entry)
    recorded = recorded_commit(places, entry)
    if recorded != entry.commit:
        raise ResourceError(
            f"{entry.name}: the project records {recorded}, not {entry.commit}.", f"See `{command('.', 'status', shown)}`."
        )


def _absorb(places: Places, entry: External) -> None:
    """Move the clone's .git to the project's .git/modules, as `git submodule absorbgitdirs` does."""
    folder = places.folder(entry)
    dot_git, kept = folder / ".git", places.git.repository.common / "modules" / places.shown(entry)
    # An earlier submodule of this name may have left commits there: keep it, and keep .git here. Submodules inside refer to it.
    if dot_git.is_symlink() or not dot_git.is_dir() or os.path.lexists(kept) or (dot_git / "modules").exists():
        return
    inside.make_folder(places.git.repository.common, kept.parent)
    inside.move(Path(os.path.commonpath((kept, dot_git))), dot_git, kept)
    inside.write(folder, dot_git, f"gitdir: {os.path.relpath(kept, folder)}\n".encode())
    places.git.text("config", "--file", str(kept / "config"), "core.worktree", os.path.relpath(folder, kept))


def _configured(places: Places, entry: External, key: str) -> str | None:
    return modules_of(places.root).get(f"submodule.{places.shown(entry)}.{key}")
