"""A sparse checkout: some folders of a large repository, in a clone that the project's git ignores."""

from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.git import Git
from llm_perf_opt.workspace.externals.git import (
    check_out,
    checkout_standing,
    fetch_commit,
    is_checkout,
    is_empty_or_missing,
    new_repository,
)
from llm_perf_opt.workspace.externals.listing import External, Standing
from llm_perf_opt.workspace.externals.places import Locked, Places


def standing(places: Places, entry: External, locked: Locked | None) -> Standing:
    """Compare the clone with the pin, and its folders with the requested ones."""
    folder = places.folder(entry)
    if is_empty_or_missing(folder):
        return Standing("missing")
    if not is_checkout(folder):
        return Standing("foreign", "a folder or file that is not a clone")
    found = checkout_standing(folder, entry)
    if found.differs:
        return found
    paths = (Git(folder).try_text("sparse-checkout", "list") or "").splitlines()
    if set(paths) != set(entry.paths):
        return Standing("edited", f"has {', '.join(paths) or 'everything'}; requested: {', '.join(entry.paths)}", found.commit)
    return found


def make(places: Places, entry: External) -> Locked:
    """Clone the requested folders to a temporary folder, then rename it into place."""
    folder = places.make_room(entry)
    with places.staging() as staging:
        clone = staging / "clone"
        git = new_repository(entry, clone)
        git.text("sparse-checkout", "init", "--cone")
        git.text("sparse-checkout", "set", *entry.paths)
        fetch_commit(git, entry, without_files=True)
        for path in entry.paths:
            _must_be_folder(git, entry, path)
        check_out(git, entry)
        if places.in_git:
            places.ignore(entry)
        places.put(clone, folder)
    return Locked(entry.commit)


def move(places: Places, entry: External) -> Locked:
    """Replace the clone, which stays until the new one is complete; one with the user's work is not touched."""
    git, locked = Git(places.folder(entry)), places.locked().get(entry.name)
    own = git.text("for-each-ref", "--format=%(refname)", "refs/heads", "refs/stash").split()
    head = git.text("rev-parse", "HEAD")
    if own or head not in (entry.commit, locked.commit if locked else None):
        what = f"contains {', '.join(own)}" if own else f"is at {head}, which `llm-perf externals` did not check out"
        raise ResourceError(
            f"{entry.name}: the clone in {places.shown(entry)} {what}, and would be lost.",
            f"Save what you need elsewhere, then delete {places.shown(entry)} and run `llm-perf externals init`.",
        )
    return make(places, entry)


def _must_be_folder(git: Git, entry: External, path: str) -> None:
    kind = git.try_text("cat-file", "-t", f"{entry.commit}:{path}")
    if kind != "tree":
        fault = "does not exist" if kind is None else "is a file"
        raise ConfigError(
            f"{entry.name}: {path} {fault} in commit {entry.commit}.",
            "paths takes folders; files at the top level are always included.",
        )
