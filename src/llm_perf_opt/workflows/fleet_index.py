"""The facts of every run in a folder, from an index in the user's cache. Only new and changed runs are read."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llm_perf_opt import __version__
from llm_perf_opt.analysis.fleet import CommitChange, FleetRun
from llm_perf_opt.analysis.metrics import METRICS
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError
from llm_perf_opt.core.host import user_cache_folder
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, write_whole
from llm_perf_opt.core.run_status import UNREADABLE
from llm_perf_opt.core.user_files import COMPRESSED, DEEPEST_RUN, read_bytes

_FORMAT = 2
"""Incremented when the content of an index changes its meaning."""
VERSION = f"{_FORMAT} {__version__} {' '.join(metric.key for metric in METRICS)}"
_NOWHERE = Path(os.devnull)
"""No file can be under it, so none is taken for the compressed form of another."""
_KEPT_EVERY = 1_000
"""Runs that are read before the index is written."""
_MOST_CHANGES = 20_000
"""Comparisons that an index keeps."""


def _relative(run: RunFolder) -> tuple[str, ...]:
    """Return the files that the facts of a run come from; the first is run.json, the last its page."""
    files = (
        run.manifest_file, run.config_file, run.env_file, run.clean_file, run.clean_inputs_file, run.ceilings_file,
        run.torch_file, run.telemetry_file, run.page_file,
    )  # fmt: skip
    return tuple(str(file.relative_to(run.path)) for file in files)


_FILES = _relative(RunFolder(_NOWHERE))
_MANIFEST = _FILES[0]
Stamp = tuple[int, ...]
"""Times of content and of permissions, and size, of each of the files; zeros for one that is not there."""


class IndexedRun(msgspec.Struct, frozen=True, gc=False):
    """A run in the index."""

    stamp: Stamp
    run: FleetRun


class _File(msgspec.Struct, frozen=True):
    version: str
    runs: dict[str, IndexedRun]
    settings: dict[str, dict[str, str]]
    changes: dict[str, CommitChange]


@dataclass
class FleetIndex:
    """The runs of a folder."""

    folder: Path
    runs: dict[str, IndexedRun] = field(default_factory=dict)
    """By path relative to the folder."""
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    """The settings of runs, by `FleetRun.settings`."""
    changes: dict[str, CommitChange] = field(default_factory=dict)
    """Comparisons of commits, by the runs and their stamps."""
    read: int = 0
    """How many runs were new or had changed, and so were read."""
    unkept: str = ""
    """Why the index could not be kept; empty if it was."""

    def keep(self) -> None:
        """Write the index for the next command. Without a place for it, the next command reads every run again."""
        file = _index_file(self.folder)
        if isinstance(file, Missing):
            self.unkept = file.why
            return
        kept = dict(list(self.changes.items())[-_MOST_CHANGES:])
        try:
            write_whole(file.parent, file, msgspec.msgpack.encode(_File(VERSION, self._storable(), self.settings, kept)))
        except LlmPerfError as error:
            self.unkept = error.fact

    def _storable(self) -> dict[str, IndexedRun]:
        """Return the runs whose paths can be stored: a name that is not UTF-8 cannot."""
        return {path: run for path, run in self.runs.items() if path.isascii() or _is_utf8(path)}

    def change_key(self, base: tuple[FleetRun, ...], new: tuple[FleetRun, ...]) -> str:
        """Return the key of a comparison: it changes when a file of a run changes."""
        sides = [[(run.path, self.runs[run.path].stamp) for run in side] for side in (base, new)]
        return hashlib.blake2b(repr(sides).encode(errors="surrogateescape"), digest_size=12).hexdigest()


def open_index(folder: Path, note: Callable[[int], None] = lambda _: None) -> FleetIndex:
    """Return the runs under a folder, at any depth and including the points of sweeps. Raise ConfigError if it is no folder.

    `note` is called with the number of runs that must be read, if there are any.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder.", "Run `llm-perf run` first, or give the folder with the runs.")
    known, root = _kept(folder), os.fspath(folder)
    found = FleetIndex(folder, settings=known.settings, changes=known.changes)
    changed: list[tuple[str, str, Stamp]] = []
    for path in sorted(_find(root, 0)):
        stamp, relative = _stamp(path), path[len(root) :].lstrip(os.sep) or "."
        entry = known.runs.get(relative)
        if entry is None or entry.stamp != stamp or entry.run.status == UNREADABLE:  # permissions are not in the stamp
            changed.append((path, relative, stamp))
        else:
            found.runs[relative] = entry
    if changed:
        note(len(changed))
        _read_changed(found, changed)
    if changed or len(found.runs) != len(known.runs):
        used = {entry.run.settings for entry in found.runs.values()}
        found.settings = {key: value for key, value in found.settings.items() if key in used}
        found.keep()
    return found


def _read_changed(found: FleetIndex, changed: list[tuple[str, str, Stamp]]) -> None:
    """Read runs into the index. It is kept now and then, so that little is lost if the command is interrupted."""
    from llm_perf_opt.workflows.fleet_reading import FactReader  # loads the analysis of runs, which an index makes unnecessary

    reader = FactReader(found.settings)
    for path, relative, stamp in changed:
        found.runs[relative] = IndexedRun(stamp, reader.facts(Path(path), relative))
        found.read += 1
        if found.read % _KEPT_EVERY == 0:
            found.keep()


def _find(folder: str, depth: int) -> Iterator[str]:
    """Yield the folders of runs, without searching inside them, and those that cannot be read. Links are not followed."""
    try:
        os.stat(f"{folder}/{_MANIFEST}")  # noqa: PTH116 - fast, as below
    except PermissionError:
        if not depth:
            raise
        yield folder
        return
    except OSError:
        pass
    else:
        yield folder
        return
    if depth >= DEEPEST_RUN:
        return
    try:
        with os.scandir(folder) as entries:
            inside = [entry.path for entry in entries if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:  # removed in the meantime
        return
    except OSError:
        if not depth:
            raise
        yield folder
        return
    for path in inside:
        yield from _find(path, depth + 1)


def _stamp(folder: str) -> Stamp:
    found: list[int] = []
    for name in _FILES:
        for path in (f"{folder}/{name}", f"{folder}/{name}{COMPRESSED}"):
            try:
                stat = os.stat(path)  # noqa: PTH116 - a Path for each of 100,000 files takes longer than the rest
            except OSError:
                continue
            found += (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
            break
        else:
            found += (0, 0, 0)
    return tuple(found)


# --- the file ---------------------------------------------------------------------------------------------------------


def _index_file(folder: Path) -> Maybe[Path]:
    cache = user_cache_folder("fleet")
    if isinstance(cache, Missing):
        return cache
    return cache / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:24]}.msgpack"


def _kept(folder: Path) -> _File:
    """Return the index of an earlier command; an empty one if there is none, or another version wrote it."""
    none = _File(VERSION, {}, {}, {})
    file = _index_file(folder)
    if isinstance(file, Missing):
        return none
    try:
        found = msgspec.msgpack.decode(read_bytes(file), type=_File)
    except (OSError, ValueError, RecursionError, ParseError):  # not there, or damaged: every run is read again
        return none
    return found if found.version == VERSION else none


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
