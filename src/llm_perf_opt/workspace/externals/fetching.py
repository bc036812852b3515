"""Fetch one commit into a new repository without its history, and verify it."""

from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.workspace.externals.git import FETCH_S, Git, GitError, reason
from llm_perf_opt.workspace.externals.listing import External
from llm_perf_opt.workspace.externals.safe_text import schemes_for

_NOT_SERVED = ("not our ref", "unadvertised object", "couldn't find remote ref", "no such remote ref")
"""Messages of servers that do not serve a commit by its id, or do not have it."""


def remote_git(entry: External, folder: Path) -> Git:
    """Return git with access to this entry's URL."""
    return Git(folder, schemes_for(entry.source))


def new_repository(entry: External, folder: Path) -> Git:
    """Create an empty repository with its remote."""
    folder.mkdir()
    git = remote_git(entry, folder)
    git.text("init", "--quiet", "--template=")
    git.text("config", "remote.origin.url", entry.source)
    git.text("config", "remote.origin.fetch", "+refs/heads/*:refs/remotes/origin/*")
    return git


def fetch_commit(git: Git, entry: External, *, without_files: bool = False) -> None:
    """Fetch the pinned commit; with `without_files`, file contents are fetched on checkout."""
    only_trees = ["--filter=blob:none"] if without_files else []
    try:
        git.text(*("fetch", "--quiet", "--no-tags", "--depth", "1"), *only_trees, "--", "origin", entry.commit, timeout_s=FETCH_S)
    except GitError as error:
        if not any(sign in error.said.lower() for sign in _NOT_SERVED):
            raise unreachable(entry, error) from error
        _fetch_everything(git, entry)


def _fetch_everything(git: Git, entry: External) -> None:
    """Fetch branches and tags, for servers that serve nothing else; one of them may contain the commit."""
    try:
        git.text("fetch", "--quiet", "--tags", "--", "origin", timeout_s=FETCH_S)
    except GitError as error:
        raise unreachable(entry, error) from error
    if git.try_text("cat-file", "-e", f"{entry.commit}^{{commit}}") is None:
        raise ConfigError(f"{entry.name}: {entry.source} has no commit {entry.commit}.", "Pin an existing commit.")


def check_out(git: Git, entry: External) -> None:
    """Check out the pinned commit, and ask git what was checked out."""
    try:
        git.text("checkout", "--quiet", "--detach", entry.commit, timeout_s=FETCH_S)
        if entry.submodules:
            git.text("submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1", timeout_s=FETCH_S)
    except GitError as error:
        raise unreachable(entry, error) from error
    head = git.text("rev-parse", "HEAD")
    if head != entry.commit:
        raise ResourceError(
            f"{entry.name}: checked out {head}, not the pinned {entry.commit}.", "Check the configuration of git on this machine."
        )


def unreachable(entry: External, error: GitError) -> ResourceError:
    """Return the error for a failed fetch: one line with the source and the reason."""
    why = "it took too long" if error.said == "timed out" else reason(error.said)
    if "not allowed" in why and "transport" in why:
        return ResourceError(
            f"{entry.name}: {entry.source} was not fetched: {why}.", "GIT_ALLOW_PROTOCOL or git's configuration forbids it."
        )
    return ResourceError(
        f"{entry.name}: {entry.source} cannot be fetched: {why}.",
        "Check the URL, the network and your access. Nothing was changed.",
    )
