"""The licences of reference code, copied beside it, where they stay when the code itself is not checked out."""

import fnmatch
import shutil
from pathlib import Path

from llm_perf_opt.externals.entry import External
from llm_perf_opt.externals.fetching import remote_git
from llm_perf_opt.externals.git import FETCH_S, GitError
from llm_perf_opt.externals.lock import Locked, blob_id
from llm_perf_opt.externals.places import Places
from llm_perf_opt.run_folder import write_whole

LICENCE_PATTERNS = ("licen[cs]e*", "copying*", "notice*", "unlicense*")
LARGEST_LICENCE = 1_000_000


def copy_licences(places: Places, entry: External) -> dict[str, str]:
    """Copy what there is and say what came: blob id by path. What is listed and not there is left to `warnings`."""
    folder, beside = places.folder(entry), places.licenses(entry.name)
    wanted = entry.licenses or _called_so(folder)
    found = {path: content for path in wanted if (content := _read(entry, folder, path)) is not None}
    if beside.is_dir() and not beside.is_symlink():
        shutil.rmtree(beside)
    for path, content in found.items():
        write_whole(beside / path, content)
    return {path: blob_id(content) for path, content in found.items()}


def licence_warnings(places: Places, entry: External, locked: Locked | None) -> tuple[str, ...]:
    """What is wrong with an entry's licences, in words; only asked of an entry that is there."""
    if locked is None:
        return ("licences not copied: run `llm-perf externals init`",)
    found = []
    for path in entry.licenses:
        if path not in locked.licenses:
            found.append(f"licence {path} is listed, and the commit has no such file")
    if not locked.licenses and not entry.licenses:
        found.append("no licence found; name it with licenses: [FILE], or ask whether the code may be used")
    for path, blob in locked.licenses.items():
        copy = places.licenses(entry.name) / path
        if not copy.is_file():
            found.append(f"licence copy {path} is gone: run `llm-perf externals init`")
        elif blob_id(copy.read_bytes()) != blob:
            found.append(f"licence copy {path} was edited: run `llm-perf externals init`")
    return tuple(found)


def _called_so(folder: Path) -> tuple[str, ...]:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return tuple(name for name in names if any(fnmatch.fnmatchcase(name.lower(), one) for one in LICENCE_PATTERNS))


def _read(entry: External, folder: Path, path: str) -> bytes | None:
    """The file, which must lie inside: a link out of the repository is not followed."""
    file = folder / path
    if file.is_file() and file.resolve().is_relative_to(folder.resolve()) and file.stat().st_size <= LARGEST_LICENCE:
        return file.read_bytes()
    if entry.way == "sparse":  # it may lie in a folder that is not checked out
        try:
            return remote_git(entry, folder).content("cat-file", "blob", f"{entry.commit}:{path}", timeout_s=FETCH_S)
        except GitError:
            return None
    return None
