"""Run git so that a repository cannot make it do more than fetch and check out.

No hooks, no prompts, no filters that fetch large files, no recursion into submodules, only the transports that are named,
and a time limit on everything.
"""

import os
import re
import shlex
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.inside import make_folder
from llm_perf_opt.core.processes import Answer, answer
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.workspace.externals.listing import External, Standing, schemes_for

_SHOWN = 3
"""Maximum number of edited files to name; the rest are counted."""


def checkout_standing(folder: Path, entry: External, *, only_below: bool = False) -> Standing:
    """Compare a checkout with its pin. `only_below`: the folder may be part of a repository, whose rest does not matter."""
    git = Git(folder)
    try:
        head = git.text("rev-parse", "--verify", "HEAD")
        changed = git.text("status", "--porcelain", "-z", "--untracked-files=all", *(["--", "."] if only_below else []))
    except GitError as error:
        return Standing("foreign", f"not a readable git checkout: {reason(error.output)}")
    if head != entry.commit:
        return Standing("other commit", f"at {head}", head)
    if changed:
        return Standing("edited", edited([line[3:] for line in changed.split("\0") if line]), head)
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


LOCAL_S = 120.0
FETCH_S = 1800.0
"""Time limit of a fetch; a connection without progress for a minute is dropped earlier."""
_NO_TRANSPORT = "none"
_SETTINGS = (
    *("core.hooksPath=/dev/null", "core.fsmonitor=false", "advice.detachedHead=false", "gc.auto=0", "maintenance.auto=false"),
    *("submodule.recurse=false", "fetch.recurseSubmodules=false", "core.autocrlf=false", "init.defaultBranch=main"),
    *("filter.lfs.smudge=", "filter.lfs.process=", "filter.lfs.clean=", "filter.lfs.required=false"),
)
_OF_A_REPOSITORY = frozenset(
    {
        *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CONFIG", "GIT_OBJECT_DIRECTORY"),
        *("GIT_DIR", "GIT_WORK_TREE", "GIT_IMPLICIT_WORK_TREE", "GIT_GRAFT_FILE", "GIT_INDEX_FILE", "GIT_NO_REPLACE_OBJECTS"),
        *("GIT_REPLACE_REF_BASE", "GIT_PREFIX", "GIT_INTERNAL_SUPER_PREFIX", "GIT_SHALLOW_FILE", "GIT_COMMON_DIR"),
    }
)
"""Most of what `git rev-parse --local-env-vars` lists: a hook of one repository must not affect another."""
_CREDENTIALS = re.compile(r"://[^/@\s]+@")


class GitError(ResourceError):
    """Git failed; `output` is what it printed."""

    def __init__(self, fact: str, remedy: str, output: str = "", *, timed_out: bool = False) -> None:
        super().__init__(fact, remedy)
        self.output = output
        self.timed_out = timed_out


class Git:
    """Git in a folder. Without `schemes` it cannot access any other repository."""

    def __init__(self, folder: Path, schemes: str = _NO_TRANSPORT, index: Path | None = None) -> None:
        self.folder = folder
        self._schemes = schemes
        self._index = index

    def with_index(self, index: Path) -> "Git":
        """Return the same with another index."""
        return Git(self.folder, self._schemes, index)

    def text(self, *words: str, timeout_s: float = LOCAL_S, stdin: Path | None = None) -> str:
        """Return the output, or raise a GitError with git's reason."""
        return os.fsdecode(self.content(*words, timeout_s=timeout_s, stdin=stdin)).rstrip("\n")

    def content(self, *words: str, timeout_s: float = LOCAL_S, stdin: Path | None = None) -> bytes:
        """Return the raw output."""
        done = self._run(words, timeout_s, stdin)
        if done.timed_out:
            raise GitError(
                f"git {words[0]} took longer than {timeout_s:.0f} s and was stopped.", "Try again.", "timed out", timed_out=True
            )
        if done.exit_code != 0:
            raise GitError(
                f"git {words[0]} failed in {self.folder}: {reason(done.errors)}.", "See the message of git.", done.errors
            )
        return done.output

    def try_text(self, *words: str) -> str | None:
        """Return the output, or None if git failed."""
        done = self._run(words, LOCAL_S, None)
        return None if done.exit_code != 0 else os.fsdecode(done.output).rstrip("\n")

    def _run(self, words: tuple[str, ...], timeout_s: float, stdin: Path | None) -> Answer:
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        argv = ["git", "--no-pager", *settings, *words]
        return answer(argv, folder=self.folder, environment=self._environment(), timeout_s=timeout_s, stdin=stdin)

    def _environment(self) -> dict[str, str]:
        given = {key: value for key, value in os.environ.items() if key not in _OF_A_REPOSITORY}
        fixed = {
            "GIT_ALLOW_PROTOCOL": _narrowed(self._schemes, given.get("GIT_ALLOW_PROTOCOL")),
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "true",
            "SSH_ASKPASS_REQUIRE": "never",
            "GIT_LFS_SKIP_SMUDGE": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_HTTP_LOW_SPEED_LIMIT": "1000",
            "GIT_HTTP_LOW_SPEED_TIME": "60",
            "GCM_INTERACTIVE": "never",
            "LC_ALL": "C",
        }
        if "ssh" in self._schemes and "GIT_SSH" not in given:
            fixed["GIT_SSH_COMMAND"] = f"{given.get('GIT_SSH_COMMAND', 'ssh')} -oBatchMode=yes -oConnectTimeout=15"
        if self._index is not None:
            fixed["GIT_INDEX_FILE"] = str(self._index)
        return {**given, **fixed}


def reason(errors: str) -> str:
    """Return the line with git's reason, without secrets in a URL."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    errors_first = [line for line in lines if line.lower().startswith(("fatal:", "error:"))] or lines[-1:]
    first = errors_first[0] if errors_first else "it gave no reason"
    plain = re.sub(r"^(?:(?:fatal|error|remote error): )+", "", first, flags=re.IGNORECASE)
    return _CREDENTIALS.sub("://", one_line(plain)).rstrip(".")[:300]


def command(folder: str, *words: str) -> str:
    """Return a git command for the user to type."""
    return shlex.join(["git", "-C", folder, *words])


def _narrowed(schemes: str, by_user: str | None) -> str:
    """Return the protocols allowed by both GIT_ALLOW_PROTOCOL and this program."""
    if by_user is None:
        return schemes
    return ":".join(scheme for scheme in schemes.split(":") if scheme in by_user.split(":")) or _NO_TRANSPORT


# --- fetching ---------------------------------------------------------------------------------------------------------


_NOT_SERVED = ("not our ref", "unadvertised object", "couldn't find remote ref", "no such remote ref")
"""Messages of servers that do not serve a commit by its id, or do not have it."""


def remote_git(entry: External, folder: Path) -> Git:
    """Return git with access to this entry's URL."""
    return Git(folder, schemes_for(entry.source))


def new_repository(entry: External, folder: Path) -> Git:
    """Create an empty repository with its remote."""
    make_folder(folder.parent, folder)
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
    why = "it took too long" if error.timed_out else reason(error.output)
    if "not allowed" in why and "transport" in why:
        return ResourceError(
            f"{entry.name}: {entry.source} was not fetched: {why}.", "GIT_ALLOW_PROTOCOL or git's configuration forbids it."
        )
    return ResourceError(
        f"{entry.name}: {entry.source} cannot be fetched: {why}.",
        "Check the URL, the network and your access. Nothing was changed.",
    )
