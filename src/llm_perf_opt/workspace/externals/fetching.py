"""Fetching one commit into a new repository, without the rest of the history, and checking that it is that commit."""

from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.workspace.externals.git import FETCH_S, Git, GitError, reason
from llm_perf_opt.workspace.externals.listing import External
from llm_perf_opt.workspace.externals.safe_text import schemes_for

_NOT_SERVED = ("not our ref", "unadvertised object", "couldn't find remote ref", "no such remote ref")
"""How servers say that they do not give out a commit by its id, or have none such."""


def remote_git(entry: External, folder: Path) -> Git:
    """Git that may reach this entry's address."""
    return Git(folder, schemes_for(entry.source))


def new_repository(entry: External, folder: Path) -> Git:
    """An empty repository that knows where to fetch from."""
    folder.mkdir()
    git = remote_git(entry, folder)
    git.text("init", "--quiet", "--template=")
    git.text("config", "remote.origin.url", entry.source)
    git.text("config", "remote.origin.fetch", "+refs/heads/*:refs/remotes/origin/*")
    return git


def fetch_commit(git: Git, entry: External, *, without_files: bool = False) -> None:
    """Have the pinned commit in the repository; `without_files`: file contents come when they are checked out."""
    only_trees = ["--filter=blob:none"] if without_files else []
    try:
        git.text(*("fetch", "--quiet", "--no-tags", "--depth", "1"), *only_trees, "--", "origin", entry.commit, timeout_s=FETCH_S)
    except GitError as error:
        if not any(sign in error.said.lower() for sign in _NOT_SERVED):
            raise unreachable(entry, error) from error
        _fetch_everything(git, entry)


def _fetch_everything(git: Git, entry: External) -> None:
    """For a server that gives out branches and tags only: the commit may lie below one of them."""
    try:
        git.text("fetch", "--quiet", "--tags", "--", "origin", timeout_s=FETCH_S)
    except GitError as error:
        raise unreachable(entry, error) from error
    if git.try_text("cat-file", "-e", f"{entry.commit}^{{commit}}") is None:
        raise ConfigError(f"{entry.name}: {entry.source} has no commit {entry.commit}.", "Pin an existing commit.")


def check_out(git: Git, entry: External) -> None:
    """The pinned commit in the working tree; what is then there is asked of git, not assumed."""
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
    """Git could not get it: one line that says from where and why."""
    why = "it took too long" if error.said == "timed out" else reason(error.said)
    if "not allowed" in why and "transport" in why:
        return ResourceError(
            f"{entry.name}: {entry.source} was not fetched: {why}.", "GIT_ALLOW_PROTOCOL or git's configuration forbids it."
        )
    return ResourceError(
        f"{entry.name}: {entry.source} cannot be fetched: {why}.",
        "Check the URL, the network and your access. Nothing was changed.",
    )
