"""A link to a checkout on this machine, which is never changed."""

import os
from pathlib import Path

from llm_perf_opt.core import inside
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.workspace.externals.git import checkout_standing, command, is_empty_or_missing
from llm_perf_opt.workspace.externals.listing import External, Standing
from llm_perf_opt.workspace.externals.places import Locked, Places


def target_of(places: Places, entry: External) -> Path:
    """Return the target of the link: absolute, in the home folder, or relative to the project."""
    return places.root / Path(entry.source).expanduser()


def standing(places: Places, entry: External, locked: Locked | None) -> Standing:
    """Return the state of the link: its target, and the commit there compared with the pin."""
    folder, target = places.folder(entry), target_of(places, entry)
    if not folder.is_symlink():
        empty = is_empty_or_missing(folder)
        return Standing("missing") if empty else Standing("foreign", "a folder or file that is not a link")
    if not folder.exists():
        return Standing("dangling", f"points to {folder.readlink()}, which does not exist")
    if not target.exists() or not folder.samefile(target):
        return Standing("foreign", f"points to {folder.readlink()}, not to {entry.source}")
    return checkout_standing(folder, entry, only_below=True)


def make(places: Places, entry: External) -> Locked:
    """Check the target, then create the link."""
    folder, target = places.make_room(entry), target_of(places, entry)
    if not target.is_dir():
        raise ResourceError(f"{entry.name}: {target} is not a folder.", "Put a checkout there, or change path.")
    if target.resolve().is_relative_to(places.third_party.resolve()) or places.root.resolve().is_relative_to(target.resolve()):
        raise ConfigError(
            f"{entry.name}: {target} contains {folder}, or is inside third_party/.", "Link a checkout outside third_party/."
        )
    found = checkout_standing(target, entry, only_below=True)
    if found.differs:
        raise ResourceError(
            f"{entry.name}: {target} is not at its pin {entry.commit}: {found.state}, {found.detail}.",
            f"`{command(str(target), 'checkout', entry.commit)}`, or pin what is there with `llm-perf externals update`.",
        )
    if places.in_git:
        places.ignore(entry)
    with places.staging() as staging:
        made = staging / "link"
        pointee = target if Path(entry.source).expanduser().is_absolute() else Path(os.path.relpath(target, folder.parent))
        inside.link(staging, made, pointee)
        if not folder.is_symlink() and folder.exists():
            inside.remove_empty(places.third_party, folder)  # always empty: `make` is not called for anything else
        inside.move(places.third_party, made, folder)
    return Locked(entry.commit)


move = make
"""The same for an update: the checkout is verified, and only its owner moves it."""
