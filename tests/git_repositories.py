"""Git repositories made for a test, on local disk: an upstream with two commits, and a project that refers to it."""

import os
import subprocess
from pathlib import Path

from command import HANG_S
from llm_perf_opt.workspace.externals.places import Places

_AUTHOR = ("-c", "user.name=Test", "-c", "user.email=test@example.invalid", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str, **environment: str) -> str:
    """What git prints, run as a user would run it."""
    argv = ["git", "-C", str(folder), *_AUTHOR, "-c", "protocol.file.allow=always", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def new_repository(folder: Path) -> Path:
    """An empty one."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder


class Upstream:
    """A repository with the commits `first` and `second`; a tag and a branch stand on the second."""

    def __init__(self, folder: Path) -> None:
        self.folder = new_repository(folder)
        for path, content in {
            "LICENSE": "free\n",
            "src/one/a.py": "a = 1\n",
            "src/two/b.py": "b = 1\n",
            "docs/x.md": "x\n",
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        self.first = self.commit("first")
        (folder / "src" / "one" / "a.py").write_text("a = 2\n")
        (folder / "src" / "one" / "new.py").write_text("new = 1\n")
        (folder / "docs" / "x.md").unlink()
        self.second = self.commit("second")
        git(folder, "tag", "v1")

    def commit(self, message: str) -> str:
        git(self.folder, "add", "--all")
        git(self.folder, "commit", "--quiet", "--message", message)
        return git(self.folder, "rev-parse", "HEAD")

    @property
    def url(self) -> str:
        return f"file://{self.folder}"


def new_project(folder: Path) -> Places:
    """A project with one commit."""
    new_repository(folder)
    (folder / "main.py").write_text("x = 1\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "begin")
    return Places.find(folder)


def listing(places: Places, text: str) -> None:
    """Write externals.yaml."""
    places.third_party.mkdir(exist_ok=True)
    places.listing_file.write_text(text)


def entry(name: str, way: str, source: str, commit: str, more: str = "") -> str:
    """One entry as somebody would write it."""
    key = {"symlink": "path", "hub": "repo"}.get(way, "url")
    extra = "  paths: [src/one]\n" if way == "sparse" else ""
    return f'{name}:  # {name} of ours\n  way: {way}\n  {key}: {source}\n  commit: "{commit}"  # the pin\n{extra}{more}'


class Marker:
    """A program that leaves a mark when it is run, whatever runs it."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "program"
        self._marks = folder / "marks"
        folder.mkdir()
        self.program.write_text(f'#!/bin/sh\necho "$0 $*" >> {self._marks}\ncat\n')
        self.program.chmod(0o755)

    @property
    def marks(self) -> list[str]:
        """How it was called since the last time."""
        found = self._marks.read_text().splitlines() if self._marks.exists() else []
        self._marks.unlink(missing_ok=True)
        return found


PLACES = ("config", "include", "worktree")
"""Where the settings of a repository can be."""


def plant(folder: Path, marker: Marker, where: str = "config", attributes: str = "*.odd filter=odd diff=odd merge=odd\n") -> None:
    """Let every setting that can name a program name this one, and every hook be it, in a repository that exists."""
    own = Path(git(folder, "rev-parse", "--absolute-git-dir"))
    common = Path(git(folder, "rev-parse", "--path-format=absolute", "--git-common-dir"))
    file = {"config": common / "config", "include": common / "more", "worktree": own / "config.worktree"}[where]
    program = marker.program
    with file.open("a") as config:
        config.write(_PROGRAMS.replace("PROGRAM", str(program)))
    if where == "include":
        git(folder, "config", "include.path", "more")
    if where == "worktree":
        git(folder, "config", "extensions.worktreeConfig", "true")
    for name in _HOOKS:
        (common / "hooks").mkdir(exist_ok=True)
        (common / "hooks" / name).write_bytes(program.read_bytes())
        (common / "hooks" / name).chmod(0o755)
    (common / "info").mkdir(exist_ok=True)
    (common / "info" / "attributes").write_text(attributes)


_HOOKS = (
    *("applypatch-msg", "pre-commit", "post-checkout", "post-merge", "pre-push", "post-rewrite", "reference-transaction"),
    *("fsmonitor-watchman", "post-index-change", "pre-auto-gc", "sendemail-validate", "pre-receive", "update"),
)
_PROGRAMS = """
[core]
	fsmonitor = PROGRAM fsmonitor
	sshCommand = PROGRAM ssh
	gitProxy = PROGRAM proxy
	editor = PROGRAM editor
	pager = PROGRAM pager
	askPass = PROGRAM
	alternateRefsCommand = PROGRAM alternates
[pager]
	status = PROGRAM pager
	config = PROGRAM pager
[alias]
	status = !PROGRAM alias
	config = !PROGRAM alias
[gpg]
	program = PROGRAM
[credential]
	helper = !PROGRAM credential
[sequence]
	editor = PROGRAM
[interactive]
	diffFilter = PROGRAM
[diff]
	external = PROGRAM external
[diff "odd"]
	command = PROGRAM command
	textconv = PROGRAM textconv
[merge "odd"]
	driver = PROGRAM merge
[filter "odd"]
	clean = PROGRAM clean
	smudge = PROGRAM smudge
	required = true
[filter "process"]
	process = PROGRAM process
	required = true
[uploadpack]
	packObjectsHook = PROGRAM pack
[protocol]
	allow = always
[protocol "ext"]
	allow = always
[remote "origin"]
	uploadpack = PROGRAM uploadpack
	promisor = true
	partialclonefilter = blob:none
	url = ext::PROGRAM remote
[url "ext::PROGRAM "]
	insteadOf = https://
	insteadOf = file://
[submodule]
	recurse = true
[trace2]
	eventTarget = /dev/null
[log]
	showSignature = true
"""
