"""A submodule: its own history, its commit recorded by the project."""

from pathlib import Path

from llm_perf_opt.core import inside
from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.workspace.externals.git import (
    check_out,
    checkout_standing,
    command,
    fetch_commit,
    is_checkout,
    is_empty_or_missing,
    new_repository,
    remote_git,
)
from llm_perf_opt.workspace.externals.listing import External, Standing
from llm_perf_opt.workspace.externals.places import Locked, Places

GITLINK = "160000"


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
        return Standing("other commit", f".gitmodules has another url: {url}", found.commit)
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
    folder = places.folder(entry)
    git = remote_git(entry, folder)
    git.text("config", "remote.origin.url", entry.source)
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
        git.text("config", "-f", ".gitmodules", f"submodule.{shown}.{key}", value)
    git.text("add", "--", ".gitmodules")
    git.text("update-index", "--add", "--cacheinfo", f"{GITLINK},{entry.commit},{shown}")
    git.text("submodule", "--quiet", "init", "--", shown)
    git.text("config", f"submodule.{shown}.url", entry.source)
    kept = Path(git.text("rev-parse", "--path-format=absolute", "--git-path", f"modules/{shown}"))
    # An earlier submodule of this name may have left commits there: keep it, and keep .git here.
    if (places.folder(entry) / ".git").is_dir() and not kept.exists():
        git.text("submodule", "--quiet", "absorbgitdirs", "--", shown)
    recorded = recorded_commit(places, entry)
    if recorded != entry.commit:
        raise ResourceError(
            f"{entry.name}: the project records {recorded}, not {entry.commit}.", f"See `{command('.', 'status', shown)}`."
        )


def _configured(places: Places, entry: External, key: str) -> str | None:
    return places.git.try_text("config", "-f", ".gitmodules", "--get", f"submodule.{places.shown(entry)}.{key}")
