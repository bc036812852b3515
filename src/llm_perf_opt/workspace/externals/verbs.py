"""The verbs of `llm-perf externals`: fetch, update, snapshot, status."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal, cast

from llm_perf_opt.core.errors import ConfigError, Interrupted, LlmPerfError, ResourceError, nearest
from llm_perf_opt.core.git import GitError
from llm_perf_opt.core.inside import OutsideError, remove
from llm_perf_opt.core.run_folder import write_whole
from llm_perf_opt.workspace.externals import hub, link, sparse, submodule, subtree
from llm_perf_opt.workspace.externals.git import FETCH_S, checkout_standing, command, remote_git
from llm_perf_opt.workspace.externals.guard import strays
from llm_perf_opt.workspace.externals.listing import (
    External,
    Standing,
    State,
    Way,
    check_commit,
    check_name,
    check_repository,
    read_listing,
    template,
    with_commit,
    with_hub_entry,
)
from llm_perf_opt.workspace.externals.places import LISTING, THIRD_PARTY, Locked, Places, blob_id, write_lock

_MODULES: Mapping[Way, ModuleType] = {"submodule": submodule, "subtree": subtree, "sparse": sparse, "symlink": link, "hub": hub}
Action = Literal["made", "moved", "there", "failed"]


@dataclass(frozen=True)
class Done:
    """The result for one entry."""

    name: str
    action: Action
    path: str
    commit: str
    note: str = ""
    error: LlmPerfError | None = None


@dataclass(frozen=True)
class Row:
    """The state of one entry; for something unlisted, only the path is known."""

    name: str
    way: str
    path: str
    pinned: str
    state: State
    detail: str = ""
    commit: str | None = None
    warnings: tuple[str, ...] = ()


def write_template(places: Places) -> Path:
    """Write the template of externals.yaml; an existing file is never overwritten."""
    places.check_plain(places.listing_file)
    if places.listing_file.exists():
        raise ConfigError(f"{places.listing_file} already exists.", "Edit it; without --template, init fetches what it lists.")
    write_whole(places.root, places.listing_file, template().encode())
    return places.listing_file


def init(places: Places, names: Sequence[str] = (), tell: Callable[[str], None] = lambda _: None) -> list[Done]:
    """Fetch missing entries at their pins. Existing entries are verified and never moved."""
    entries = chosen(places.listing(), names)
    with places.alone():
        _prune_lock(places)
        return [_attempt(places, entry, _init_one, tell) for entry in entries]


def update(
    places: Places, names: Sequence[str] = (), to: str | None = None, tell: Callable[[str], None] = lambda _: None
) -> list[Done]:
    """Move entries to their pins in externals.yaml; with `to`, move one entry to that commit, which becomes its pin."""
    entries = chosen(places.listing(), names)
    if to is None:
        with places.alone():
            return [_attempt(places, entry, _update_one, tell) for entry in entries]
    if len(names) != 1:
        raise ConfigError("--to moves one entry.", "Name it: llm-perf externals update NAME --to COMMIT.")
    entry = replace(entries[0], commit=check_commit("--to", to))
    with places.alone():
        where = f"{THIRD_PARTY}/{LISTING}"
        text = with_commit(places.listing_text(), where, entry.name, entry.commit)  # raises before anything is moved
        done = _attempt(places, entry, lambda here, moved: _update_one(here, moved, entries[0]), tell)
        if done.error is None:
            write_whole(places.root, places.listing_file, text.encode())
    return [done]


def snapshot(
    places: Places, names: Sequence[str] = (), commit: str | None = None, tell: Callable[[str], None] = lambda _: None
) -> list[Done]:
    """Download the listed Hub snapshots; with `commit`, add OWNER/NAME to the list if needed."""
    if commit is None:
        listed = [entry for entry in chosen(places.listing(), names) if entry.way == "hub" or names]
        for entry in listed:
            if entry.way != "hub":
                raise ConfigError(f"{entry.name} is a {entry.way}, not a Hub snapshot.", "Use `llm-perf externals init`.")
        with places.alone():
            return [_attempt(places, entry, _update_one, tell) for entry in listed]
    if len(names) != 1:
        raise ConfigError("--commit takes one repository.", "llm-perf externals snapshot OWNER/NAME --commit COMMIT")
    with places.alone():
        entry, text = _snapshot_entry(places, names[0], check_commit("--commit", commit))
        done = _attempt(places, entry, _update_one, tell)
        if done.error is None:
            write_whole(places.root, places.listing_file, text.encode())
    return [done]


def status(places: Places, names: Sequence[str] = ()) -> list[Row]:
    """Return the state of every entry, and unlisted paths under third_party/."""
    listing, locked = places.listing(), places.locked()
    rows = []
    for entry in chosen(listing, names):
        found = standing(places, entry, locked.get(entry.name))
        there = found.state not in ("missing", "dangling", "foreign", "unregistered")
        warnings = license_warnings(places, entry, locked.get(entry.name)) if there else ()
        rows.append(
            Row(entry.name, entry.way, places.shown(entry), entry.commit, found.state, found.detail, found.commit, warnings)
        )
    if not names:
        detail = f"not in {THIRD_PARTY}/{LISTING}"
        rows += [Row("", "", path, "", "unlisted", detail) for path in strays(places, listing.values())]
    return rows


def standing(places: Places, entry: External, locked: Locked | None) -> Standing:
    """Return the state of one entry."""
    if entry.way in ("submodule", "subtree") and not places.in_git:
        raise ConfigError(
            f"{entry.name}: way {entry.way} needs a git repository, but {places.root} is not the top of one.",
            "Run `git init` there, or use way: sparse.",
        )
    try:
        places.check_plain(places.folder(entry).parent)
    except OutsideError as error:
        return Standing("foreign", error.fact.rstrip("."))
    return cast(Standing, _MODULES[entry.way].standing(places, entry, locked))


def chosen(listing: Mapping[str, External], names: Sequence[str]) -> list[External]:
    """Return the entries of these names, or all."""
    for name in names:
        if name not in listing:
            raise ConfigError(
                f"{THIRD_PARTY}/{LISTING} lists no {name!r:.100}.{nearest(name, listing)}",
                f"Listed: {', '.join(listing) or 'nothing yet'}.",
            )
    return [listing[name] for name in dict.fromkeys(names)] if names else list(listing.values())


def _attempt(
    places: Places,
    entry: External,
    work: Callable[[Places, External], tuple[Action, str]],
    tell: Callable[[str], None],
) -> Done:
    """Process every entry; the failure of one does not stop the others."""
    tell(f"{entry.name}: {entry.way} of {entry.source} at {entry.commit[:12]}")
    shown = places.shown(entry)
    try:
        action, note = work(places, entry)
    except Interrupted:
        raise
    except LlmPerfError as error:
        return Done(entry.name, "failed", shown, entry.commit, error=error)
    except OSError as error:
        reported = ResourceError(
            f"{entry.name}: {error.filename or shown}: {error.strerror or error}.", "Check disk space and permissions."
        )
        return Done(entry.name, "failed", shown, entry.commit, error=reported)
    return Done(entry.name, action, shown, entry.commit, note)


def _init_one(places: Places, entry: External) -> tuple[Action, str]:
    found = standing(places, entry, places.locked().get(entry.name))
    if found.state in ("missing", "unregistered", "unverified"):
        return _make(places, entry, "make", before=found)
    if found.state != "ok":
        raise _in_the_way(places, entry, found)
    _lock(places, entry, places.locked().get(entry.name) or Locked(entry.commit))
    return "there", found.detail


def _update_one(places: Places, entry: External, before: External | None = None) -> tuple[Action, str]:
    """Move an existing, unedited entry; fetch a missing one."""
    found = standing(places, before or entry, places.locked().get(entry.name))
    if found.state in ("missing", "unregistered", "unverified"):
        return _make(places, entry, "make", before=found)
    moved = found.state == "ok" and before is not None and before.commit != entry.commit
    if found.state == "other commit" and _edited_too(places, entry, found):
        raise _in_the_way(places, entry, Standing("edited", "and not at its pinned commit"))
    if moved or found.state == "other commit" or (found.state == "edited" and _only_paths_differ(places, entry, found)):
        return _make(places, entry, "move", before=found)
    if found.state == "dangling" or (found.state == "foreign" and places.folder(entry).is_symlink() and entry.way == "symlink"):
        return _make(places, entry, "make", before=found)
    if found.state != "ok":
        raise _in_the_way(places, entry, found)
    _lock(places, entry, places.locked().get(entry.name) or Locked(entry.commit))
    return "there", found.detail


def _edited_too(places: Places, entry: External, found: Standing) -> bool:
    """Return whether an entry at another commit also has edits, which moving would lose."""
    there = replace(entry, commit=found.commit or entry.commit)
    if entry.way == "sparse":  # other folders than the requested ones are not an edit
        return checkout_standing(places.folder(entry), there).state == "edited"
    return standing(places, there, places.locked().get(entry.name)).state == "edited"


def _only_paths_differ(places: Places, entry: External, found: Standing) -> bool:
    """Return whether a sparse clone is unedited and only its requested folders changed."""
    if entry.way != "sparse":
        return False
    return not checkout_standing(places.folder(entry), replace(entry, commit=found.commit or entry.commit)).differs


def _make(places: Places, entry: External, how: Literal["make", "move"], before: Standing) -> tuple[Action, str]:
    module = _MODULES[entry.way]
    try:
        locked = cast(Locked, module.make(places, entry) if how == "make" else module.move(places, entry))
    except BaseException:
        places.drop_empty_room(entry)
        raise
    _lock(places, entry, locked, replaced=True)
    found = standing(places, entry, places.locked()[entry.name])
    if found.differs:
        raise ResourceError(f"{entry.name}: fetched, but {found.state}: {found.detail}.", "See `llm-perf externals status`.")
    note = "staged; `git add third_party`, then commit" if entry.way in ("submodule", "subtree") else ""
    if how == "make":
        return "made", note
    return "moved", f"from {before.commit or 'another commit'}" + (f"; {note}" if note else "")


def _lock(places: Places, entry: External, made: Locked, replaced: bool = False) -> None:
    """Copy missing licenses, and lock what was fetched."""
    locked = places.locked()
    if replaced or entry.name not in locked or license_warnings(places, entry, locked[entry.name]):
        full = replace(made, commit=entry.commit, licenses=copy_licenses(places, entry))
        if locked.get(entry.name) != full:
            write_lock(places, {**locked, entry.name: full})


def _prune_lock(places: Places) -> None:
    """Remove entries that are no longer listed from the lock file."""
    locked, listing = places.locked(), places.listing()
    kept = {name: value for name, value in locked.items() if name in listing}
    if kept != locked:
        write_lock(places, kept)


def _in_the_way(places: Places, entry: External, found: Standing) -> LlmPerfError:
    shown = places.shown(entry)
    what = f"{entry.name}: {shown} is {found.state}" + (f": {found.detail}" if found.detail else "")
    remedies: dict[State, str] = {
        "other commit": f"`llm-perf externals update {entry.name}` moves it to its pin {entry.commit}.",
        "edited": _restore_hint(entry, shown),
        "dangling": f"Put the folder there, or change path and run `llm-perf externals update {entry.name}`.",
        "foreign": "Move it away, or give the entry another folder with into.",
    }
    if found.state in ("foreign", "edited", "other commit", "dangling"):
        return ResourceError(f"{what}.", remedies[found.state])
    return ResourceError(f"{what}.", "See `llm-perf externals status`.")


def _restore_hint(entry: External, shown: str) -> str:
    if entry.way == "subtree":
        return f"Restore it: `{command('.', 'restore', '--staged', '--worktree', shown)}`; reference code is read-only."
    if entry.way == "hub":
        return f"Delete {shown} and run `llm-perf externals snapshot {entry.name}`; reference code is read-only."
    return f"Save your edits elsewhere: `{command(shown, 'stash', '--include-untracked')}`; reference code is read-only."


def _snapshot_entry(places: Places, requested: str, commit: str) -> tuple[External, str]:
    """Return the entry for a name or OWNER/NAME at this commit, and externals.yaml with it."""
    text = places.listing_text() if places.listing_file.exists() else template()
    where = f"{THIRD_PARTY}/{LISTING}"
    listing = read_listing(text, where)
    for entry in listing.values():
        if entry.way == "hub" and requested in (entry.name, entry.source):
            return replace(entry, commit=commit), with_commit(text, where, entry.name, commit)
    source = check_repository("repository", requested)
    name = check_name("repository", source.split("/")[1])
    if name in listing:
        name = check_name("repository", source.replace("/", "-"))
    if name in listing:
        raise ConfigError(f"{where} has another entry called {name}.", "Rename it.")
    entry = External(name, "hub", source, commit, f"hf/{source}")
    return entry, with_hub_entry(text, where, entry)


LICENSE_PATTERNS = ("licen[cs]e*", "copying*", "notice*", "unlicense*")
LARGEST_LICENSE = 1_000_000


def copy_licenses(places: Places, entry: External) -> dict[str, str]:
    """Copy existing licenses and return blob id by path; missing ones are reported by `warnings`."""
    folder, copies = places.folder(entry), places.licenses(entry.name)
    wanted = entry.licenses or _license_files(folder)
    found = {path: content for path in wanted if (content := _read(entry, folder, path)) is not None}
    remove(places.third_party, copies)
    for path, content in found.items():
        write_whole(copies, copies / path, content)
    return {path: blob_id(content) for path, content in found.items()}


def license_warnings(places: Places, entry: External, locked: Locked | None) -> tuple[str, ...]:
    """Return the problems of an existing entry's licenses."""
    if locked is None:
        return ("licenses not copied: run `llm-perf externals init`",)
    found = []
    for path in entry.licenses:
        if path not in locked.licenses:
            found.append(f"license {path} is listed, but the commit has no such file")
    if not locked.licenses and not entry.licenses:
        found.append("no license found; name it with licenses: [FILE], or ask whether the code may be used")
    for path, blob in locked.licenses.items():
        copy = places.licenses(entry.name) / path
        if not copy.is_file():
            found.append(f"license copy {path} is gone: run `llm-perf externals init`")
        elif blob_id(copy.read_bytes()) != blob:
            found.append(f"license copy {path} was edited: run `llm-perf externals init`")
    return tuple(found)


def _license_files(folder: Path) -> tuple[str, ...]:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return tuple(name for name in names if any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in LICENSE_PATTERNS))


def _read(entry: External, folder: Path, path: str) -> bytes | None:
    """Return the file, which must be inside the repository: links out of it are not followed."""
    file = folder / path
    if file.is_file() and file.resolve().is_relative_to(folder.resolve()) and file.stat().st_size <= LARGEST_LICENSE:
        return file.read_bytes()
    if entry.way == "sparse":  # it may be in a folder that is not checked out
        try:
            return remote_git(entry, folder).content("cat-file", "blob", f"{entry.commit}:{path}", timeout_s=FETCH_S)
        except GitError:
            return None
    return None
