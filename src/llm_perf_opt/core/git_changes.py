"""What differs between a checkout and its commit, found without running filters.

A file is unchanged if the size and times in the index match, or its bytes after git's own conversion of line ends. Filters do not
run: whether a file that passes through one is changed is then unknown. Of git-lfs it is known, as its pointers contain a hash.
"""

import hashlib
import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.core.git import Git, GitError, read_settings
from llm_perf_opt.core.user_files import SpecialFileError, open_ordinary

GITLINK = "160000"
"""The mode of a submodule in the index."""
_DEEPEST = 8
"""How deep submodules of submodules are compared."""
_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize (\d+)\n?")
_LARGEST_POINTER = 1024
_MOST_HASHED = 2 << 30
"""Bytes of files of git-lfs that are read to compare them: seconds."""
_RECORDED = re.compile(r"([^\0]+)\0  ctime: .*\n  mtime: .*\n  dev: .*\n  uid: .*\n  size: (\d+)\t.*\n?")
_AT_ONCE = 500
"""Paths per command line."""
_MODULE = re.compile(r"submodule\.(.+)\.(path|ignore)", re.DOTALL)


@dataclass(frozen=True)
class Changes:
    """Paths relative to the top of the checkout."""

    changed: tuple[str, ...] = ()
    """Differ from the commit, or are not tracked."""
    unknown: tuple[str, ...] = ()
    """Could not be compared; each with the reason."""


def changes(git: Git, *pathspec: str, untracked: str = "", depth: int = 0) -> Changes:
    """Compare the files with the index and the commit. `untracked`: normal, all or no; by default as the user configured."""
    until = time.monotonic() + git.limit_s
    how = [f"--untracked-files={untracked}"] if untracked else []
    words = [*how, *(["--", *pathspec] if pathspec else [])]
    text = git.text("status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=dirty", *words)
    states = {entry[3:]: entry[:2] for entry in text.split("\0") if entry}
    sure, unknown = _compared(git, states)
    modules = _modules(git, pathspec)
    ignored = _ignored(git) if modules else {}
    changed = [path for path in states if path in sure and not (path in modules and ignored.get(path) == "all")]
    for path in modules:
        if ignored.get(path) not in ("all", "dirty"):
            left = max(1.0, until - time.monotonic())
            inner = _of_submodule(git, path, "no" if ignored.get(path) == "untracked" else untracked, depth, left)
            changed += [f"{path}/{name}" for name in inner.changed]
            unknown += [f"{path}/{name}" for name in inner.unknown]
    return Changes(tuple(changed), tuple(unknown))


def _compared(git: Git, states: dict[str, str]) -> tuple[set[str], list[str]]:
    """Return the paths that differ for certain, and those that cannot be compared, each with the reason."""
    sure, unknown, budget = set(states), [], _MOST_HASHED
    filtered = _filtered(git, [path for path, state in states.items() if state == " M"])
    for path in _of_recorded_size(git, list(filtered)):  # git says that others are changed before it runs a filter
        pointer = _pointer(git, path) if filtered[path] == "lfs" else None
        if pointer is None or pointer.size > budget:
            sure.remove(path)
            unknown.append(f"{path} passes through the filter {filtered[path]}, which is not run")
        elif _has_content(git.repository.top / path, pointer):
            budget -= pointer.size
            sure.remove(path)
    return sure, unknown


def _of_recorded_size(git: Git, paths: list[str]) -> list[str]:
    """Return those of the paths whose file has the size that git recorded when it last compared it, or may have it."""
    top, different = git.repository.top, set()
    for start in range(0, len(paths), _AT_ONCE):
        text = git.at(top).text("ls-files", "--debug", "-z", "--", *paths[start : start + _AT_ONCE])
        for path, size in _RECORDED.findall(text):
            with suppress(OSError):
                if int(size) not in (0, (top / path).lstat().st_size):  # 0: it is to be compared by its content
                    different.add(path)
    return [path for path in paths if path not in different]


def _filtered(git: Git, paths: list[str]) -> dict[str, str]:
    """Return those of these paths that pass through a configured filter, with its name."""
    drivers = git.drivers() if paths else frozenset()
    if not drivers:
        return {}
    with tempfile.NamedTemporaryFile() as asked:
        asked.write(b"".join(os.fsencode(path) + b"\0" for path in paths))
        asked.flush()
        top = git.at(git.repository.top)  # it reads paths relative to its folder
        answers = top.text("check-attr", "-z", "--stdin", "filter", stdin=Path(asked.name)).split("\0")
    return {path: name for path, name in zip(answers[::3], answers[2::3], strict=False) if name in drivers}


@dataclass(frozen=True)
class _Pointer:
    sha256: str
    size: int


def _pointer(git: Git, path: str) -> _Pointer | None:
    """Return what git-lfs recorded of a file; None if the index has another content."""
    staged = f":{path}"
    if int(git.try_text("cat-file", "-s", staged) or _LARGEST_POINTER) >= _LARGEST_POINTER:
        return None
    found = _POINTER.fullmatch(git.content("cat-file", "blob", staged))
    return _Pointer(found[1].decode(), int(found[2])) if found else None


def _has_content(file: Path, pointer: _Pointer) -> bool:
    try:
        if file.lstat().st_size != pointer.size:
            return False
        found = hashlib.sha256()
        with open_ordinary(file) as content:
            while piece := content.read(1 << 20):
                found.update(piece)
    except (OSError, SpecialFileError):  # removed or replaced in the meantime
        return False
    return found.hexdigest() == pointer.sha256


def _modules(git: Git, pathspec: tuple[str, ...]) -> list[str]:
    """Return the submodules of the index that are checked out."""
    lines = git.text("ls-files", "--stage", "-z", "--full-name", "--", *pathspec).split("\0")
    paths = [line.partition("\t")[2] for line in lines if line.startswith(GITLINK)]
    return [path for path in paths if _is_checkout(git.repository.top, path)]


def _is_checkout(top: Path, path: str) -> bool:
    folder = top / path
    return os.path.realpath(folder) == str(folder) and os.path.lexists(folder / ".git")


def _ignored(git: Git) -> dict[str, str]:
    """Return which changes of submodules are not to be shown, by path: untracked, dirty or all."""
    found: dict[str, dict[str, str]] = {}
    for key, value in (*read_settings(git.repository.top / ".gitmodules"), *git.given):
        if match := _MODULE.fullmatch(key):
            found.setdefault(match[1], {})[match[2]] = value or ""
    return {module["path"]: module.get("ignore", "none") for module in found.values() if "path" in module}


def _of_submodule(git: Git, path: str, untracked: str, depth: int, limit_s: float) -> Changes:
    folder = git.repository.top / path
    if depth == _DEEPEST:
        return Changes(unknown=("is nested too deep to be compared",))
    inner = git.at(folder, limit_s)
    if inner.repository.top != folder:
        return Changes(unknown=("is not a readable repository",))
    try:
        return changes(inner, untracked=untracked, depth=depth + 1)
    except GitError as error:
        return Changes(unknown=(f"cannot be compared: {error.fact.rstrip('.')}",))
