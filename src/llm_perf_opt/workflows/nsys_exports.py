"""The SQLite export of an nsys report, which is made once and kept."""

from pathlib import Path
from typing import TYPE_CHECKING

from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.inside import make_folder, remove
from llm_perf_opt.core.records import Missing
from llm_perf_opt.traces.trace_mark import kept_for, note_use, seen_of

if TYPE_CHECKING:
    from llm_perf_opt.core.records import Maybe

_REPORTS = (".nsys-rep", ".qdrep")


def readable_file(source: Path, use_cache: bool) -> tuple[Path, tuple[str, ...]]:
    """Return the file itself, or the SQLite export of an nsys report, and notes for the user."""
    return _export(source, use_cache) if source.suffix in _REPORTS else (source, ())


def _export(report: Path, use_cache: bool) -> tuple[Path, tuple[str, ...]]:
    """Return the SQLite export of an nsys report: a newer one next to it, or one in the cache or a temporary folder."""
    from llm_perf_opt.profiling.vendor.probe import find_tool
    from llm_perf_opt.profiling.vendor.tool_pass import export_nsys

    sqlite = report.with_suffix(".sqlite")
    if sqlite.is_file() and sqlite.stat().st_mtime_ns >= report.stat().st_mtime_ns:
        return sqlite, (f"read {sqlite.name} next to the report.",)
    kept = _cached_export(report) if use_cache else Missing("the cache is not used")
    if not isinstance(kept, Missing) and kept.is_file():
        note_use(kept.parent)
        return kept, ()
    nsys = find_tool("nsys")
    if nsys is None:
        raise ResourceError(
            f"{report} must be exported by nsys, and nsys is not installed.",
            f"On a machine with nsys: nsys export --type sqlite -o {report.stem}.sqlite {report.name}; then analyze the .sqlite.",
        )
    notes: tuple[str, ...] = ()
    try:
        if not isinstance(kept, Missing):
            make_folder(kept.parent, kept.parent, 0o700)
    except OSError as error:
        kept = Missing(f"{error.filename}: {error.strerror}")
    if isinstance(kept, Missing):
        notes = (f"the export is not cached: {kept.why}",) if use_cache else ()
        kept = _scratch() / sqlite.name
    complaints = export_nsys(nsys, report, kept, log=kept.with_suffix(".export.log"))
    if not notes and use_cache:
        _remove_other_exports(kept)
    return kept, (*notes, *(problem.what for problem in complaints))


def _cached_export(report: Path) -> "Maybe[Path]":
    """Return the cache file of an export, in a folder of the report's path, named after its size and times."""
    folder, seen = kept_for(report), seen_of(report)
    if isinstance(folder, Missing):
        return folder
    return folder / f"export-{seen}.sqlite" if seen else Missing("the report was written only moments ago")


def _remove_other_exports(kept: Path) -> None:
    from llm_perf_opt.traces.trace_cache import make_room

    for old in kept.parent.glob("export-*"):
        if old.stem.removesuffix(".export") != kept.stem:
            remove(kept.parent, old)
    make_room(kept.parent)


def _scratch() -> Path:
    """Return a temporary folder that is removed at exit."""
    import atexit
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="llm-perf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
