"""Run git so that no setting of a repository runs a program.

A repository's configuration may name programs: filters, a file system monitor, hooks, textconv, ssh commands. Git never reads it
here. Each call gets another common folder (GIT_COMMON_DIR), made for it: with links to the repository's objects and references,
without its hooks and remotes, and with a configuration of its own. That contains only settings from which git learns how files
are compared (`_HARMLESS`), read as data. The user's configuration is treated in the same way, except for fetching.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.inside import link, make_folder, open_new
from llm_perf_opt.core.processes import Answer, answer
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.core.urls import without_password
from llm_perf_opt.core.user_files import read_bytes

LOCAL_S = 120.0
NO_TRANSPORT = "none"
"""No other repository may be accessed."""
_HARMLESS = frozenset(
    {
        *("core.filemode", "core.symlinks", "core.ignorecase", "core.precomposeunicode", "core.checkstat", "core.trustctime"),
        *("core.autocrlf", "core.eol", "core.excludesfile", "core.attributesfile", "status.showuntrackedfiles"),
        *("core.sparsecheckout", "core.sparsecheckoutcone", "index.sparse"),
    }
)
"""Settings that decide whether a file counts as changed or untracked, and name no program."""
_FILES = {"core.excludesfile": "ignore", "core.attributesfile": "attributes"}
"""Settings that name a file, and its name in the user's folder for git if the setting is not used."""
_FORMAT = re.compile(r"core\.repositoryformatversion|extensions\.(?!worktreeconfig$|partialclone$)[a-z0-9-]+")
"""How the repository is stored. Git itself rejects values that it does not know."""
_SHARED = ("refs", "packed-refs", "reftable", "shallow", "logs")
"""Data of a repository; `hooks`, `config`, `remotes`, `branches` and `modules` are left out."""
_INFO = ("info/exclude", "info/attributes")
"""The same, if they are files: git reads what they lead to, however long it is."""
_SETTINGS = (
    *("core.hooksPath=/dev/null", "core.fsmonitor=false", "advice.detachedHead=false", "gc.auto=0", "maintenance.auto=false"),
    *("submodule.recurse=false", "fetch.recurseSubmodules=false", "init.defaultBranch=main"),
)
_OF_USER = re.compile(r"GIT_(?:SSH|SSL|HTTP|PROXY|EXEC_PATH|CONFIG_|ALLOW_PROTOCOL)")
"""Variables that are kept for a fetch. Others may belong to a repository, such as the one whose hook calls this program."""
_DRIVER = re.compile(r"filter\.(.+)\.(?:clean|smudge|process)", re.DOTALL)
_WORD = re.compile(r"[A-Za-z0-9-]+")
Setting: TypeAlias = tuple[str, str | None]
_READING = frozenset(
    {
        *("cat-file", "check-attr", "config", "diff-files", "diff-index", "for-each-ref", "hash-object", "ls-files", "rev-parse"),
        *("sparse-checkout", "status"),
    }
)
"""Commands that, as they are called here, write nothing."""
_LARGEST_POINTER = 1 << 16
"""Bytes of a file that names a path or a reference."""


class GitError(ResourceError):
    """Git failed; `output` is what it printed."""

    def __init__(self, fact: str, remedy: str, output: str = "", *, timed_out: bool = False) -> None:
        super().__init__(fact, remedy)
        self.output = output
        self.timed_out = timed_out


@dataclass(frozen=True)
class Repository:
    """The folders of a repository with files."""

    top: Path
    """The folder of its files."""
    own: Path
    """Its HEAD and index."""
    common: Path
    """Its objects, references and configuration; differs from `own` for a linked worktree."""


def find_repository(folder: Path) -> Repository | None:
    """Return the repository that contains the folder.

    Like git, stop at the root of a file system. Unlike git, ignore bare repositories: any folder of another one can be one.
    """
    here = Path(os.path.realpath(folder))
    try:
        device = here.stat().st_dev
        for top in (here, *here.parents):
            if top.stat().st_dev != device:
                return None
            if found := _repository_at(top):
                return found
    except OSError:  # as for git, a .git that cannot be read is not passed over
        return None
    return None


def _repository_at(top: Path) -> Repository | None:
    dot_git = top / ".git"
    pointer = _pointer(dot_git, "gitdir: ") if dot_git.is_file() else ".git"
    own = top / pointer
    if not pointer or not own.is_dir():
        return None
    own = Path(os.path.realpath(own))
    common = Path(os.path.realpath(own / _pointer(own / "commondir"))) if (own / "commondir").is_file() else own
    whole = os.path.lexists(own / "HEAD") and (common / "objects").is_dir() and (common / "refs").is_dir()
    return Repository(top, own, common) if whole else None


def _points_back(repository: Repository, given: list[Setting]) -> bool:
    """Return whether git recorded the folder of the files in the repository: as a linked worktree, or as a submodule."""
    back = repository.own / "gitdir"
    if back.is_file():
        known = repository.own.parent == repository.common / "worktrees"
        return known and os.path.realpath(repository.own / _pointer(back)) == str(repository.top / ".git")
    top = next((value for key, value in reversed(given) if key == "core.worktree"), None)
    return bool(top) and os.path.realpath(repository.own / str(top)) == str(repository.top)


def _links(folder: Path) -> Iterator[Path]:
    """Yield the links in a folder of git, except in other repositories inside it."""
    for here, folders, files in os.walk(folder):
        yield from (path for name in (*folders, *files) if (path := Path(here, name)).is_symlink())
        if Path(here) == folder:
            folders[:] = [name for name in folders if name not in ("modules", "worktrees")]


def _pointer(file: Path, prefix: str = "") -> str:
    """Return the path in a file that git wrote; empty if there is none."""
    if file.stat().st_size > _LARGEST_POINTER:
        return ""
    first = os.fsdecode(read_bytes(file)).rstrip("\n")
    return first.removeprefix(prefix) if first.startswith(prefix) and "\0" not in first else ""


class Git:
    """Git in a folder. Without `schemes` it cannot access any other repository."""

    def __init__(
        self,
        folder: Path,
        *,
        schemes: str = NO_TRANSPORT,
        index: Path | None = None,
        settings: Mapping[str, str] | None = None,
        limit_s: float = LOCAL_S,
        made_here: bool = False,
    ) -> None:
        """`made_here`: this program made the repository just now, so that its configuration can be used."""
        self.folder = folder
        self._settings = dict(settings or {})
        self.limit_s = limit_s
        self._schemes = schemes
        self._index = index
        self._made_here = made_here

    @classmethod
    def create(cls, folder: Path, *, schemes: str, settings: Mapping[str, str]) -> "Git":
        """Create an empty repository."""
        make_folder(folder.parent, folder)
        argv = ["--no-pager", "-c", "init.defaultBranch=main", "init", "--quiet", "--template="]
        done = _started(argv, folder, {**_without_user(str(folder)), "GIT_DIR": str(folder / ".git")}, LOCAL_S, None)
        if done.exit_code != 0:
            raise GitError(f"git init failed in {folder}: {reason(done.errors)}.", "See the message of git.", done.errors)
        return cls(folder, schemes=schemes, settings=settings, made_here=True)

    @property
    def repository(self) -> Repository:
        """Return the repository of the folder, or raise a GitError."""
        found = find_repository(self.folder)
        if found is None:
            raise GitError(f"{self.folder} is not in a git repository.", "Run `git init` there.", "not a git repository")
        return found

    def with_index(self, index: Path) -> "Git":
        """Return the same with another index."""
        return Git(self.folder, schemes=self._schemes, index=index, settings=self._settings, limit_s=self.limit_s)

    def at(self, folder: Path, limit_s: float | None = None) -> "Git":
        """Return the same in another folder."""
        return Git(folder, schemes=self._schemes, settings=self._settings, limit_s=limit_s or self.limit_s)

    def text(self, *words: str, timeout_s: float | None = None, stdin: Path | None = None) -> str:
        """Return the output, or raise a GitError with git's reason."""
        return os.fsdecode(self.content(*words, timeout_s=timeout_s, stdin=stdin)).rstrip("\n")

    def content(self, *words: str, timeout_s: float | None = None, stdin: Path | None = None) -> bytes:
        """Return the raw output."""
        limit = timeout_s or self.limit_s
        done = self._run(words, limit, stdin)
        if done.timed_out:
            raise GitError(
                f"git {words[0]} took longer than {limit:.0f} s and was stopped.", "Try again.", "timed out", timed_out=True
            )
        if done.exit_code != 0:
            raise GitError(
                f"git {words[0]} failed in {self.folder}: {reason(done.errors)}.", "See the message of git.", done.errors
            )
        return done.output

    def try_text(self, *words: str) -> str | None:
        """Return the output, or None if git failed."""
        try:
            return self.text(*words)
        except GitError:
            return None

    def configure(self, key: str, value: str, file: str = "") -> None:
        """Write a setting of the repository for the user's git, or to a file of its top folder, such as `.gitmodules`."""
        self.require_writable()
        path = self.repository.top / file if file else self.repository.common / "config"
        if path.is_symlink():
            raise ConfigError(f"{path} is a link.", "Replace it by a file.")
        self.text("config", "--file", str(path), "--replace-all", key, value)

    def drivers(self) -> frozenset[str]:
        """Return the filters that git would run to compare a file with the index."""
        return _drivers([*self._users, *self.given])

    def _run(self, words: tuple[str, ...], timeout_s: float, stdin: Path | None) -> Answer:
        repository = self.repository
        if words[0] not in _READING and not self._made_here:
            self.require_writable()
        settings = list(_SETTINGS)
        variables = {"GIT_DIR": str(repository.own), "GIT_WORK_TREE": str(repository.top)}
        with tempfile.TemporaryDirectory(prefix="llm-perf-git-") as folder:
            if not self._made_here:
                _fill(Path(folder), repository, self.given)
                settings += _harmless([*self._users, *self.given], repository.top)
                variables |= {"GIT_COMMON_DIR": folder, "GIT_OBJECT_DIRECTORY": str(repository.common / "objects")}
            if self._schemes == NO_TRANSPORT:
                variables |= _without_user(folder)
            else:
                settings += [f"filter.{name}.{key}" for name in _drivers(self._users) for key in _NO_FILTER]
                variables |= _for_fetching(self._schemes)
            if self._index is not None:
                variables["GIT_INDEX_FILE"] = str(self._index)
            settings += [f"{key}={value}" for key, value in self._settings.items()]
            argv = ["--no-pager", *(word for setting in settings for word in ("-c", setting)), *words]
            return _started(argv, self.folder, variables, timeout_s, stdin)

    def require_writable(self) -> None:
        """Raise a ConfigError if something would be written elsewhere: through a link, or to the repository of another folder."""
        if self._misplaced:
            raise ConfigError(self._misplaced, "Replace it by the file or folder itself, or clone the repository again.")

    @cached_property
    def _misplaced(self) -> str:
        repository = self.repository
        dot_git = repository.top / ".git"
        if dot_git.is_symlink():
            return f"{dot_git} is a link to {os.path.realpath(dot_git)}."
        if dot_git.is_file() and not _points_back(repository, self.given):
            return f"{dot_git} names {repository.own}, which belongs to another checkout."
        for path in (*_links(repository.own), *_links(repository.common)):
            target = Path(os.path.realpath(path))
            if not target.is_relative_to(repository.own) and not target.is_relative_to(repository.common):
                return f"{path} is a link to {target}, outside of its repository."
        return ""

    @cached_property
    def given(self) -> list[Setting]:
        """The configuration of the repository, as data: keys in lower case, in the order in which later ones count."""
        repository = self.repository
        found = read_settings(repository.common / "config", self.limit_s)
        if any(key == "extensions.worktreeconfig" and value != "false" for key, value in found):
            found += read_settings(repository.own / "config.worktree", self.limit_s)
        return found

    @cached_property
    def _users(self) -> list[Setting]:
        """The configuration of the user and the system."""
        return _listed(self.limit_s)


_NO_FILTER = ("clean=", "smudge=", "process=", "required=false")


def _drivers(given: list[Setting]) -> frozenset[str]:
    return frozenset(found[1] for key, _ in given if (found := _DRIVER.fullmatch(key)))


def read_settings(file: Path, limit_s: float = LOCAL_S) -> list[Setting]:
    """Return the settings of a file in git's format; none if it is missing. A setting without `=` has the value None."""
    return _listed(limit_s, "--file", str(file), "--includes") if file.is_file() else []


def _listed(limit_s: float, *words: str) -> list[Setting]:
    """Return settings as data. Outside of any repository, so that none affects how they are read."""
    variables = {**_for_fetching(NO_TRANSPORT), "GIT_DIR": f"{os.devnull}/none"}
    done = _started(["--no-pager", "config", *words, "--null", "--list"], Path("/"), variables, limit_s, None)
    if done.exit_code != 0:
        raise GitError(f"The configuration of git cannot be read: {reason(done.errors)}.", "Fix this file.", done.errors)
    found = [setting.partition("\n") for setting in os.fsdecode(done.output).split("\0") if setting]
    return [(key, value if equals else None) for key, equals, value in found]


def _harmless(given: list[Setting], top: Path) -> list[str]:
    """Return the settings that are taken over, for `git -c`; the last of each counts. Only regular files are read."""
    user = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    found = {key: f"{user}/git/{name}" for key, name in _FILES.items()}
    for key, value in given:
        if key in _HARMLESS:
            found[key] = "true" if value is None else value
    for key in _FILES:
        file = str(top / os.path.expanduser(found[key]))  # noqa: PTH111 - Path raises an error for an unknown user
        found[key] = file if os.path.isfile(file) else os.devnull  # noqa: PTH113 - Path raises an error for a long name
    return [f"{key}={value}" for key, value in found.items()]


def _fill(stand_in: Path, repository: Repository, given: list[Setting]) -> None:
    """Fill the folder that replaces the common folder of a repository."""
    for name in _SHARED:
        link(stand_in, stand_in / name, repository.common / name)
    make_folder(stand_in, stand_in / "info")
    for name in _INFO:
        if (repository.common / name).is_file():
            link(stand_in, stand_in / name, repository.common / name)
    lines = ["[core]\n\tbare = false\n"]
    for key, value in given:
        if _FORMAT.fullmatch(key) and _WORD.fullmatch(value or "true"):
            section, _, name = key.partition(".")
            lines.append(f"[{section}]\n\t{name} = {value or 'true'}\n")
    with open_new(stand_in, stand_in / "config") as file:
        file.write("".join(lines).encode())


def _without_user(folder: str) -> dict[str, str]:
    """Return the variables with which git ignores the configuration of the user; old versions know only the first three."""
    return {
        "HOME": folder,
        "XDG_CONFIG_HOME": folder,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_ALLOW_PROTOCOL": NO_TRANSPORT,
        "GIT_NO_LAZY_FETCH": "1",
    }


def _for_fetching(schemes: str) -> dict[str, str]:
    """Return the variables with which git uses the user's configuration, credentials and proxies, and only these transports."""
    given = {key: value for key, value in os.environ.items() if _OF_USER.match(key)}
    fixed = {
        "GIT_ALLOW_PROTOCOL": _narrowed(schemes, given.get("GIT_ALLOW_PROTOCOL")),
        "SSH_ASKPASS_REQUIRE": "never",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_HTTP_LOW_SPEED_LIMIT": "1000",
        "GIT_HTTP_LOW_SPEED_TIME": "60",
        "GCM_INTERACTIVE": "never",
    }
    if "ssh" in schemes and "GIT_SSH" not in given:
        fixed["GIT_SSH_COMMAND"] = f"{given.get('GIT_SSH_COMMAND', 'ssh')} -oBatchMode=yes -oConnectTimeout=15"
    return {**given, **fixed}


def _narrowed(schemes: str, by_user: str | None) -> str:
    """Return the protocols allowed by both GIT_ALLOW_PROTOCOL and this program."""
    if by_user is None:
        return schemes
    return ":".join(scheme for scheme in schemes.split(":") if scheme in by_user.split(":")) or NO_TRANSPORT


def _started(argv: list[str], folder: Path, variables: Mapping[str, str], timeout_s: float, stdin: Path | None) -> Answer:
    given = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    fixed = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    fixed["GIT_LITERAL_PATHSPECS"] = "1"
    environment = {**given, **fixed, **variables}
    return answer([_program(), *argv], folder=folder, environment=environment, timeout_s=timeout_s, stdin=stdin)


def _program() -> str:
    """Return the path of git; relative folders in PATH are skipped, as they may lead into a repository."""
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if Path(folder).is_absolute()]
    return shutil.which("git", path=os.pathsep.join(folders)) or "git"


def reason(errors: str) -> str:
    """Return the line with git's reason, without secrets in a URL."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    errors_first = [line for line in lines if line.lower().startswith(("fatal:", "error:"))] or lines[-1:]
    first = errors_first[0] if errors_first else "it gave no reason"
    plain = re.sub(r"^(?:(?:fatal|error|remote error): )+", "", first, flags=re.IGNORECASE)
    return without_password(one_line(plain)).rstrip(".")[:300]
