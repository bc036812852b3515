"""What lies under third_party/ without being listed."""

from collections.abc import Iterable
from pathlib import PurePosixPath

from llm_perf_opt.externals.entry import External
from llm_perf_opt.externals.places import IGNORE, LICENSES, LISTING, LOCK, THIRD_PARTY, Places

CONTROL_FILES = frozenset({LISTING, LOCK, IGNORE, "README.md"})
"""Files at the top of third_party/ that belong to nobody's code."""


def owner(path: str, entries: Iterable[External]) -> External | None:
    """The entry in whose folder a path below third_party/ lies."""
    asked = PurePosixPath(path)
    for entry in entries:
        into = PurePosixPath(entry.into)
        if asked == into or into in asked.parents:
            return entry
    return None


def strays(places: Places, entries: Iterable[External]) -> list[str]:
    """Paths that belong to no entry: the topmost folder of each, not every file in it."""
    listed = list(entries)
    leading = {parent.as_posix() for entry in listed for parent in PurePosixPath(entry.into).parents}
    names = {entry.name for entry in listed}
    found: list[str] = []
    waiting = ["."] if places.third_party.is_dir() else []
    while waiting:
        here = waiting.pop()
        for path in sorted((places.third_party / here).iterdir()):
            below = path.relative_to(places.third_party).as_posix()
            if owner(below, listed) or (here == "." and (below in CONTROL_FILES or below.startswith("."))):
                continue
            is_folder = path.is_dir() and not path.is_symlink()
            if is_folder and (below in leading or below == LICENSES):
                waiting.append(below)
            elif not (here == LICENSES and path.name in names) and not (is_folder and not any(path.iterdir())):
                found.append(f"{THIRD_PARTY}/{below}")
    return sorted(found)
