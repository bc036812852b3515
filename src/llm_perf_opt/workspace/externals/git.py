"""Fetch, check out and compare reference code with git."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.git import Git, GitError, read_settings, reason
from llm_perf_opt.core.git_changes import GITLINK, changes
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.workspace.externals.listing import External, Standing, check_address, schemes_for

_SHOWN = 3
"""Maximum number of edited files to name; the rest are counted."""


def checkout_standing(folder: Path, entry: External, *, only_below: bool = False) -> Standing:
    """Compare a checkout with its pin. `only_below`: the folder may be part of a repository, whose rest does not matter."""
    git = Git(folder)
    try:
        if not only_below and str(git.repository.top) != os.path.realpath(folder):
            return Standing("foreign", "not a readable git checkout: its .git is damaged")
        head = git.text("rev-parse", "--verify", "HEAD")
        found = changes(git, *(["."] if only_below else []), untracked="all")
    except GitError as error:
        return Standing("foreign", f"not a readable git checkout: {reason(error.output)}")
    if head != entry.commit:
        return Standing("other commit", f"at {head}", head)
    if found.changed:
        return Standing("edited", edited(list(found.changed)), head)
    if found.unknown:
        return Standing("unverified" if only_below else "edited", one_line(found.unknown[0]), head)
    return Standing("ok", "", head)


def edited(paths: list[str]) -> str:
    """Return the names of the first edited files."""
    named = ", ".join(one_line(path) for path in paths[:_SHOWN])
    return named + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")


def is_checkout(folder: Path) -> bool:
    """Return whether the folder is the top of a repository; otherwise git would answer for the project around it."""
    return not folder.is_symlink() and (folder / ".git").exists()


def is_empty_or_missing(folder: Path) -> bool:
    """Return whether nothing would be overwritten; git leaves an empty folder for a submodule."""
    if folder.is_symlink() or not os.path.lexists(folder):
        return not folder.is_symlink()
    return folder.is_dir() and not any(folder.iterdir())


FETCH_S = 1800.0
"""Time limit of a fetch; a connection without progress for a minute is dropped earlier."""
EXACT = {"core.autocrlf": "false"}
"""Reference code is checked out as it was committed."""


def command(folder: str, *words: str) -> str:
    """Return a git command for the user to type."""
    return shlex.join(["git", "-C", folder, *words])


# --- fetching ---------------------------------------------------------------------------------------------------------


_NOT_SERVED = ("not our ref", "unadvertised object", "couldn't find remote ref", "no such remote ref")
"""Messages of servers that do not serve a commit by its id, or do not have it."""


def remote_git(entry: External, folder: Path) -> Git:
    """Return git in an existing clone, with access to this entry's URL whatever the clone's configuration names."""
    settings = {f"remote.origin.{key}": value for key, value in _remote(entry).items()}
    partial = {"remote.origin.promisor": "true", "remote.origin.partialclonefilter": "blob:none"} if entry.way == "sparse" else {}
    return Git(folder, schemes=schemes_for(entry.source), settings={**EXACT, **settings, **partial})


def new_repository(entry: External, folder: Path) -> Git:
    """Create an empty repository with its remote."""
    git = Git.create(folder, schemes=schemes_for(entry.source), settings=EXACT)
    for key, value in _remote(entry).items():
        git.configure(f"remote.origin.{key}", value)
    return git


def _remote(entry: External) -> dict[str, str]:
    return {"url": entry.source, "fetch": "+refs/heads/*:refs/remotes/origin/*"}


def fetch_commit(git: Git, entry: External, *, without_files: bool = False) -> None:
    """Fetch the pinned commit; with `without_files`, file contents are fetched on checkout."""
    only_trees = ["--filter=blob:none"] if without_files else []
    try:
        git.text(*("fetch", "--quiet", "--no-tags", "--depth", "1"), *only_trees, "--", "origin", entry.commit, timeout_s=FETCH_S)
    except GitError as error:
        if not any(sign in error.output.lower() for sign in _NOT_SERVED):
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
    except GitError as error:
        raise unreachable(entry, error) from error
    head = git.text("rev-parse", "HEAD")
    if head != entry.commit:
        raise ResourceError(
            f"{entry.name}: checked out {head}, not the pinned {entry.commit}.", "Check the configuration of git on this machine."
        )
    if entry.submodules:
        _check_out_submodules(git, entry)


def _check_out_submodules(git: Git, entry: External) -> None:
    """Fetch the submodules of a checkout. `git submodule` would obey the configuration of those that exist already."""
    top = git.repository.top
    names = {value: key.removesuffix(".path") for key, value in modules_of(top).items() if key.endswith(".path")}
    for line in git.text("ls-files", "--stage", "-z").split("\0"):
        about, _, path = line.partition("\t")
        if not about.startswith(GITLINK):
            continue
        name, folder = names.get(path), top / path
        if name is None or os.path.realpath(folder) != str(folder):
            raise ConfigError(f"{entry.name}: .gitmodules has no path for the submodule {path!r}.", "Write submodules: false.")
        url = _absolute(entry.source, modules_of(top).get(f"{name}.url", ""))
        where = f"{entry.name}: the url of the submodule {path!r}"
        inner = replace(entry, name=f"{entry.name}/{path}", source=check_address(where, url), commit=about.split()[1])
        if schemes_for(inner.source) != schemes_for(entry.source):
            raise ConfigError(f"{where} is a local path.", "Write submodules: false.")
        below = remote_git(inner, folder) if is_checkout(folder) else new_repository(inner, folder)
        if below.try_text("cat-file", "-e", f"{inner.commit}^{{commit}}") is None:
            fetch_commit(below, inner)
        check_out(below, inner)
        for key, value in (("active", "true"), ("url", inner.source)):
            git.configure(f"{name}.{key}", value)


def modules_of(top: Path) -> dict[str, str]:
    """Return the settings of .gitmodules; as for git, a link is not read."""
    file = top / ".gitmodules"
    return {} if file.is_symlink() else {key: value or "" for key, value in read_settings(file)}


def _absolute(source: str, url: str) -> str:
    """Return the URL of a submodule, which may be relative to that of the repository around it."""
    while url.startswith(("./", "../")):
        step, _, url = url.partition("/")
        source = source.rstrip("/").rpartition("/")[0] if step == ".." else source
        if not url.startswith(("./", "../")):
            return f"{source.rstrip('/')}/{url}"
    return url


def unreachable(entry: External, error: GitError) -> ResourceError:
    """Return the error for a failed fetch: one line with the source and the reason."""
    why = "it took too long" if error.timed_out else reason(error.output)
    if "not allowed" in why and "transport" in why:
        return ResourceError(
            f"{entry.name}: {entry.source} was not fetched: {why}.", "GIT_ALLOW_PROTOCOL or git's configuration forbids it."
        )
    return ResourceError(
        f"{entry.name}: {entry.source} cannot be fetched: {why}.",
        "Check the URL, the network and your access. Nothing was changed.",
    )
