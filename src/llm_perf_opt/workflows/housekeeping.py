"""Remove or compress runs. A plan says what would happen and changes nothing; each of its steps is done whole or not at all."""

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError, ResourceError, file_error, interrupted
from llm_perf_opt.core.file_lock import folder_lock
from llm_perf_opt.core.inside import inside, move, remove, remove_empty, remove_if_possible, root_of
from llm_perf_opt.core.records import SCHEMA
from llm_perf_opt.core.run_folder import RunFolder, read_mapping
from llm_perf_opt.core.run_status import DAMAGED, UNREADABLE
from llm_perf_opt.core.user_files import DEEPEST_RUN
from llm_perf_opt.traces.trace_mark import kept_bytes
from llm_perf_opt.workflows.compare import Baselines
from llm_perf_opt.workflows.compressing import compress_file, compressible
from llm_perf_opt.workflows.run_listing import Listed
from llm_perf_opt.workflows.sweep_folder import SweepFolder, is_sweep

Action = Literal["remove", "compress", "keep"]
_AGE = re.compile(r"(\d{1,5})([hdw])")
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_REMOVED = ".llm-perf-removed"
"""The ending of a folder that is being removed; its name also starts with a dot, so that no list shows it."""
_NOT_ENDED = ("pending", "started")
_STILL_CHANGING = timedelta(hours=1)
"""A run that has not ended and changed within this time may still be running on another machine, where its lock is not seen."""


@dataclass(frozen=True)
class Cleanup:
    """The request. `keep` and `older_than` both restrict what is removed, or compressed with `compress`."""

    keep: int | None = None
    """How many of the newest runs stay as they are. Runs and sweeps that stay for another reason do not count."""
    older_than: timedelta | None = None
    compress: bool = False
    sweeps: bool = False
    """Whether sweeps may be removed, each with all of its runs."""


@dataclass(frozen=True)
class Step:
    """What happens to a run or a sweep."""

    action: Action
    kind: Literal["run", "sweep", "leftover"]
    path: str
    created: str
    why: str
    """Why it is kept, or what to know about it before it is removed or compressed."""
    bytes: int = 0
    """Its size on disk."""
    frees: int = 0
    """Bytes that the step frees; for `compress`, an estimate."""


@dataclass(frozen=True)
class Done:
    """A finished plan."""

    steps: tuple[Step, ...]
    """Those that were done, with the bytes that they freed."""
    failed: tuple[str, ...]


def parse_age(text: str) -> timedelta:
    """Return the age in `12h`, `30d` or `8w`, or raise a ConfigError."""
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(f"--older-than {text}: not an age.", "Give hours, days or weeks: 12h, 30d, 8w.")
    return int(match[1]) * _UNITS[match[2]]


def plan_cleanup(folder: Path, rows: Sequence[Listed], request: Cleanup, now: datetime | None = None) -> tuple[Step, ...]:
    """Return a step for every run and sweep in `rows` (newest first) that the request selects, kept ones with the reason."""
    baselines = _baselines(folder, rows)
    limit = None if request.older_than is None else (now or datetime.now(timezone.utc)) - request.older_than
    steps = [] if request.compress else list(_leftovers(folder, 0))
    spared = request.keep or 0
    for row in rows:
        if row.status == UNREADABLE:
            steps.append(Step("keep", row.kind, row.path, row.created, row.why))
            continue
        if not spared and limit is not None and not _is_older(row, limit):
            continue
        why = _why_stays(folder, row, baselines, request)
        if spared:
            spared -= not why
        else:
            steps += _compress_steps(row, baselines) if request.compress else [_removal(row, why)]
    return tuple(steps)


def carry_out(folder: Path, steps: Sequence[Step], report: Callable[[Step], None] = lambda _: None) -> Done:
    """Do the steps that are not `keep`. A step that fails does not stop the others; an interrupt leaves the rest undone."""
    done: list[Step] = []
    failed: list[str] = []
    try:
        for step in steps:
            if step.action == "keep":
                continue
            try:
                path = inside(root_of(folder), Path(step.path))
                freed = _remove(folder, path, step) if step.action == "remove" else _compress(path)
            except (LlmPerfError, OSError) as error:
                failed.append(f"{step.path}: {_fact(error)}")
                continue
            done.append(Step(step.action, step.kind, step.path, step.created, step.why, step.bytes, freed))
            report(done[-1])
    except KeyboardInterrupt as error:
        count = f"{len(done)} run{' was' if len(done) == 1 else 's were'} processed"
        raise interrupted(error, f"{count}; the others are unchanged. Rerun the command to continue.") from None
    return Done(tuple(done), tuple(failed))


# --- the plan ---------------------------------------------------------------------------------------------------------


def _baselines(folder: Path, rows: Sequence[Listed]) -> dict[Path, list[str]]:
    """Return the runs that are baselines, with their names: of every folder above a run, and of runs/.

    Raise ParseError if such a file is damaged: nobody could say which runs it protects.
    """
    found: dict[Path, list[str]] = {}
    home = folder.resolve()
    inside = (place for row in rows for place in Path(row.path).resolve().parents if place.is_relative_to(home))
    places = dict.fromkeys((Path("runs").resolve(), home, *list(home.parents)[:DEEPEST_RUN], *inside))
    for place in places:
        kept = Baselines(place)
        for name, baseline in kept.read().items():
            for text in baseline.runs:
                found.setdefault(kept.place(text), []).append(name)
    return found


def _is_older(row: Listed, limit: datetime) -> bool:
    """Return whether a run is older. One without a valid time is not: its age is unknown."""
    try:
        created = datetime.fromisoformat(row.created)
    except ValueError:
        return False
    return (created if created.tzinfo else created.replace(tzinfo=timezone.utc)) < limit


def _fact(error: LlmPerfError | OSError) -> str:
    return (file_error(error) if isinstance(error, OSError) else error).fact


def _removal(row: Listed, why: str) -> Step:
    size = kept_bytes(Path(row.path))
    if why:
        return Step("keep", row.kind, row.path, row.created, why, size)
    note = row.workload if row.kind == "sweep" else DAMAGED if row.status == DAMAGED else ""
    return Step("remove", row.kind, row.path, row.created, note, size, size)


def _why_stays(folder: Path, row: Listed, baselines: dict[Path, list[str]], request: Cleanup) -> str:
    """Return why the request leaves a run or a sweep as it is, whatever its age; empty if it does not."""
    try:
        if request.compress:
            return "" if row.kind == "sweep" else _why_untouched(Path(row.path))
        return _why_kept(folder, row, baselines, request.sweeps)
    except (LlmPerfError, OSError) as error:
        return _fact(error)


def _why_kept(folder: Path, row: Listed, baselines: dict[Path, list[str]], sweeps: bool) -> str:
    path = Path(row.path)
    real = path.resolve()
    names = sorted({name for run, known in baselines.items() if run.is_relative_to(real) for name in known})
    if names:
        return f"the baseline {', '.join(names)}"
    if is_sweep(path.parent):
        return f"a point of the sweep {path.parent}: sweeps are removed as a whole, with --sweeps"
    if real == folder.resolve():
        return f"it is {folder} itself; pass its parent folder"
    if row.kind == "sweep" and not sweeps:
        return "a sweep: --sweeps also removes sweeps, each with all of its runs"
    return next((why for run in (path, *_points(path)) if (why := _why_untouched(run))), "") or _why_not_alone(path)


def _why_not_alone(path: Path) -> str:
    """Return which other run is inside a run or a sweep, apart from the points of the sweep; empty if there is none."""
    expected = (path, *_points(path))
    for place, folders, _ in os.walk(path):
        folders[:] = [name for name in folders if not name.endswith(_REMOVED)]
        if Path(place) not in expected and RunFolder(Path(place)).manifest_file.exists():
            return f"another run is inside it: {place}"
    return ""


def _points(path: Path) -> list[Path]:
    """Return the runs inside a sweep; none for a run."""
    if not is_sweep(path):
        return []
    return sorted(child for child in path.iterdir() if RunFolder(child).manifest_file.is_file())


def _why_untouched(path: Path) -> str:
    """Return why a run is neither removed nor compressed: a newer version wrote it, or it counts as running; empty if not."""
    if any(_is_newer(file) for file in (RunFolder(path).manifest_file, SweepFolder(path).sweep_file)):
        return "written by a newer version of llm-perf-opt"
    try:
        with _locked(path):
            pass
    except ResourceError:
        return "it is running"
    if _has_ended(path):
        return ""
    age = max(timedelta(), datetime.now(timezone.utc) - _last_change(path))  # a clock may be ahead of this one
    if age > _STILL_CHANGING:
        return ""
    return f"it changed {age.seconds // 60} minutes ago and may still be running on another machine"


def _is_newer(file: Path) -> bool:
    try:
        schema = read_mapping(file).get("schema")
    except ParseError:
        return False  # it does not exist, or is damaged
    return isinstance(schema, int) and schema > SCHEMA


def _has_ended(path: Path) -> bool:
    try:
        manifest = RunFolder(path).manifest()
    except ParseError:
        return is_sweep(path)  # its runs are checked; a damaged run may be one that is being written
    return manifest.status != "partial" or not any(entry.status in _NOT_ENDED for entry in manifest.passes)


def _last_change(path: Path) -> datetime:
    newest = 0.0
    for place, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                newest = max(newest, Path(place, name).lstat().st_mtime)
    return datetime.fromtimestamp(newest, timezone.utc)


def _compress_steps(row: Listed, baselines: dict[Path, list[str]]) -> Iterator[Step]:
    """Yield a step for a run, or for every run of a sweep."""
    path = Path(row.path)
    try:
        runs = _points(path) if row.kind == "sweep" else [path]
    except OSError as error:
        yield Step("keep", row.kind, row.path, row.created, _fact(error), kept_bytes(path))
        return
    for run in runs:
        notes = [f"the baseline {', '.join(sorted(names))}"] if (names := baselines.get(run.resolve())) else []
        try:
            notes += [f"a point of the sweep {run.parent}"] if is_sweep(run.parent) else []
            why = _why_untouched(run)
            frees = 0 if why else compressible(RunFolder(run)).frees
        except (LlmPerfError, OSError) as error:
            why, frees = _fact(error), 0
        if frees:
            yield Step("compress", "run", str(run), row.created, ", ".join(notes), kept_bytes(run), frees)
        else:
            yield Step("keep", "run", str(run), row.created, why or "nothing to compress", kept_bytes(run))


def _leftovers(folder: Path, depth: int) -> Iterator[Step]:
    """Yield folders that an interrupted removal left."""
    try:
        if depth > DEEPEST_RUN or RunFolder(folder).manifest_file.exists():
            return
        with os.scandir(folder) as entries:
            inside = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inside:
        path = folder / name
        if name.startswith(".") and name.endswith(_REMOVED):
            size = kept_bytes(path)
            yield Step("remove", "leftover", str(path), "", "left by an interrupted removal", size, size)
        elif not name.startswith("."):
            yield from _leftovers(path, depth + 1)


# --- its steps --------------------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a run so that no other process uses it. Raise ResourceError if one does."""
    try:
        lock = folder_lock(path, fcntl.LOCK_EX)
    except BlockingIOError as error:
        raise ResourceError("it is running.") from error
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _remove(folder: Path, path: Path, step: Step) -> int:
    """Rename a run in the folder, so that it disappears at once, then remove it. Return the bytes that this freed."""
    root = root_of(folder)
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, and no longer a run.")
    size = kept_bytes(path)
    try:
        if step.kind == "leftover":
            remove(root, path)
            return size
        with _all_locked(path):
            if not (RunFolder(path).manifest_file.exists() or is_sweep(path)):
                raise ConfigError(f"{path} is no longer a run.")
            hidden = path.with_name(f".{path.name}{_REMOVED}")
            move(root, path, hidden)
            remove(root, hidden)
        _remove_empty_parents(path.parent, folder.resolve())
    except OSError as error:
        raise file_error(error) from error
    return size


@contextmanager
def _all_locked(path: Path) -> Iterator[None]:
    """Hold a run, or a sweep and all of its runs."""
    with ExitStack() as held:
        for run in (path, *_points(path)):
            held.enter_context(_locked(run))
        yield


def _remove_empty_parents(folder: Path, root: Path) -> None:
    while folder != root and folder.is_relative_to(root):
        if not remove_empty(root, folder):
            return  # other runs are in it
        folder = folder.parent


def _compress(path: Path) -> int:
    """Compress the files of a run one after the other, and remove the tables that are regenerated from them."""
    run = RunFolder(path)
    with _locked(path):
        found = compressible(run)
        freed = 0
        for partial in found.partial:
            freed += partial.lstat().st_size
            remove(path, partial)
        for file in found.files:
            freed += compress_file(run, file)
        for tables in found.tables:
            freed += kept_bytes(tables)
            remove_if_possible(path, tables)
    return freed
