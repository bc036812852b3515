"""Find the Nsight tools of this machine and query what they support; answers are cached per binary."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from llm_perf_opt.core.errors import LlmPerfError, ParseError
from llm_perf_opt.core.host import user_cache_folder
from llm_perf_opt.core.processes import ask
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.run_folder import read_record, write_record

METHOD = 2
"""Increased when the queries change, so that older answers are not found."""
ASKING_S = 60.0
"""Timeout of a query. A program that starts slowly on a busy machine is not missing."""

_INSTALL_FOLDERS = {
    "nsys": (
        "/opt/nvidia/nsight-systems/*/bin/nsys",
        "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
        "/usr/local/cuda*/bin/nsys",
    ),
    "ncu": ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu"),
}
_IMPORTERS = (
    "/opt/nvidia/nsight-systems/*/host-linux-*/QdstrmImporter",
    "/usr/local/cuda*/nsight-systems-*/host-linux-*/QdstrmImporter",
    "/usr/lib/nsight-systems/host-linux-*/QdstrmImporter",
)
_silent: set[Path] = set()
"""Tools that did not report a version; one that hangs is queried only once."""
_VERSION = re.compile(r"\d{4}\.\d+\.\d+[\w.-]*")


@dataclass(frozen=True)
class Located:
    """The path of a tool, and a warning about the search."""

    path: Path | None
    warning: str = ""


@dataclass(frozen=True)
class NsysProbe:
    """What an nsys supports."""

    path: str
    version: str
    flags: tuple[str, ...] = ()
    """Long options of `nsys profile`."""
    trace_modules: tuple[str, ...] = ()
    """Values of `--trace`."""
    reports: tuple[str, ...] = ()
    """Names for `nsys stats --report`; empty if the scripts are not installed."""
    export_types: tuple[str, ...] = ()
    importer: str | None = None
    """QdstrmImporter, which converts a .qdstrm into a report."""
    notes: tuple[str, ...] = ()

    @property
    def release(self) -> tuple[int, ...]:
        """Year, number and patch."""
        return release_of(self.version)

    @property
    def report_style(self) -> str:
        """The generation of its report names; empty if it has no reports."""
        if "cuda_gpu_kern_sum" in self.reports:
            return "cuda_gpu_kern_sum"
        return "gpukernsum" if "gpukernsum" in self.reports else ""


@dataclass(frozen=True)
class NcuProbe:
    """What an ncu supports."""

    path: str
    version: str
    flags: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()
    """Chips whose metrics it can list without a GPU (`--query-metrics --chips`)."""
    notes: tuple[str, ...] = ()
    set_sections: dict[str, int] = field(default_factory=dict)
    """Number of sections of each set."""

    @property
    def release(self) -> tuple[int, ...]:
        """Year, number and patch."""
        return release_of(self.version)


P = TypeVar("P", NsysProbe, NcuProbe)


# --- finding ------------------------------------------------------------------------------------------------------------


def locate(name: str) -> Located:
    """Return the path of a tool: from its variable (NSYS, NCU), the PATH, or its usual folders, newest first."""
    named = os.environ.get(name.upper(), "")
    if named and Path(named).is_file() and os.access(named, os.X_OK):
        return Located(Path(named))
    found = _on_path_or_installed(name)
    if not named:
        return Located(found)
    problem = "is not executable" if Path(named).is_file() else "is not a file"
    instead = f"{found} is used instead" if found else f"there is no other {name}"
    return Located(found, f"the variable {name.upper()} is {named}, which {problem}; {instead}")


def find_tool(name: str) -> Path | None:
    """Return the path of nsys or ncu, or None."""
    return locate(name).path


def _on_path_or_installed(name: str) -> Path | None:
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    return next((path for pattern in _INSTALL_FOLDERS.get(name, ()) for path in newest_first(pattern)), None)


def newest_first(pattern: str) -> list[Path]:
    """Return the matching files, highest version first: 2023.10 comes before 2023.4."""
    return sorted(Path("/").glob(pattern.lstrip("/")), key=lambda path: (numbers(str(path)), str(path)), reverse=True)


def numbers(text: str) -> tuple[int, ...]:
    """Return all numbers in a text."""
    return tuple(int(digits) for digits in re.findall(r"\d+", text))


def release_of(version: str) -> tuple[int, ...]:
    """Return year, number and patch of a version such as 2023.4.4.54-234433681190v0."""
    return numbers(version)[:3]


def find_importer(nsys: Path, version: str = "") -> Path | None:
    """Return the QdstrmImporter of the same installation, searched upward from the real path of the binary.

    Otherwise that of another installation of the same release, or the newest, which reads older files.
    """
    real = nsys.resolve()
    for folder in list(real.parents)[:4]:
        for pattern in ("host-linux-*/QdstrmImporter", "nsight-systems-*/host-linux-*/QdstrmImporter"):
            found = [path for path in sorted(folder.glob(pattern), reverse=True) if os.access(path, os.X_OK)]
            if found:
                return found[0]
    elsewhere = [path for pattern in _IMPORTERS for path in newest_first(pattern) if os.access(path, os.X_OK)]
    release = ".".join(str(part) for part in release_of(version))
    same = [path for path in elsewhere if release and release in str(path)]
    return next(iter(same + elsewhere), None)


# --- asking -------------------------------------------------------------------------------------------------------------


def tool_version(path: Path) -> str | None:
    """Return the version of nsys or ncu; None if it does not report one."""
    if path in _silent:
        return None
    version = _VERSION.search(ask([str(path), "--version"], timeout_s=ASKING_S) or "")
    if version is None:
        _silent.add(path)
    return version.group() if version else None


def probe_nsys(path: Path) -> NsysProbe | Missing:
    """Return what this nsys supports, or Missing if it does not report its version."""
    return _cached_or_queried(path, NsysProbe, _ask_nsys)


def probe_ncu(path: Path) -> NcuProbe | Missing:
    """Return what this ncu supports, or Missing if it does not report its version."""
    return _cached_or_queried(path, NcuProbe, _ask_ncu)


def _ask_nsys(path: Path, version: str) -> NsysProbe:
    usage = _answer(path, "profile", "--help")
    export = _answer(path, "export", "--help")
    importer = find_importer(path, version)
    return NsysProbe(
        path=str(path),
        version=version,
        flags=long_options(usage),
        trace_modules=_trace_modules(usage),
        reports=tuple(re.findall(r"^\s*([a-z0-9_]+)(?:\[.*?\])* -- ", _answer(path, "stats", "--help-reports"), re.MULTILINE)),
        export_types=tuple(re.findall(r"^\s+([a-z]+) \([._]\S+\) -- ", export, re.MULTILINE)),
        importer=str(importer) if importer else None,
    )


def _ask_ncu(path: Path, version: str) -> NcuProbe:
    sets = _answer(path, "--list-sets")
    return NcuProbe(
        path=str(path),
        version=version,
        flags=long_options(_answer(path, "--help")),
        sets=_first_column(sets),
        set_sections=_entries_per_row(sets),
        sections=_first_column(_answer(path, "--list-sections")),
        chips=tuple(re.findall(r"\b[a-z]{2}\d{2}[0-9a-z]\b", _answer(path, "--list-chips"))),
    )


def _answer(path: Path, *argv: str) -> str:
    return ask([str(path), *argv], timeout_s=ASKING_S, whatever_code=True) or ""


def long_options(usage: str) -> tuple[str, ...]:
    """Return every `--option` of a help text, in order."""
    introduced = re.findall(r"^\s*(?:\([A-Z]\w+\) )?(?:-\w(?:,| \[) )?(--[a-z0-9][a-z0-9-]*[a-z0-9])", usage, re.MULTILINE)
    return tuple(dict.fromkeys(introduced))


def _trace_modules(usage: str) -> tuple[str, ...]:
    """Return the quoted words in the first sentence about `--trace`."""
    paragraph = re.search(r"^\s*(?:-t, )?--trace=.*?\n\s*\n(.*?)Select the API", usage, re.MULTILINE | re.DOTALL)
    return tuple(dict.fromkeys(re.findall(r"'([a-z0-9-]+)'", paragraph.group(1)))) if paragraph else ()


def _first_column(table: str) -> tuple[str, ...]:
    """Return the identifiers of a table with a ruler, a heading, a ruler and rows; continuation lines begin with a space."""
    _, _, rows = table.rpartition("\n---")
    return tuple(line.split()[0] for line in rows.splitlines()[1:] if line and not line[0].isspace())


def _entries_per_row(table: str) -> dict[str, int]:
    """Return identifier → number of comma-separated entries in the second column of such a table."""
    ruler = next((line for line in table.splitlines() if line.startswith("---")), "")
    first, _, rest = ruler.partition(" ")
    start, end = len(first) + 1, len(first) + 1 + len(rest.partition(" ")[0])
    found: dict[str, int] = {}
    name = ""
    for line in table.rpartition("\n---")[2].splitlines()[1:]:
        name = line.split()[0] if line and not line[0].isspace() else name
        if name:
            found[name] = found.get(name, 1) + line[start:end].count(",")
    return found


# --- keeping ------------------------------------------------------------------------------------------------------------


def _cached_or_queried(path: Path, kind: type[P], query: Callable[[Path, str], P]) -> P | Missing:
    """Return the cached answers of this binary, or new ones. The version is queried every time, because of wrapper scripts."""
    version = tool_version(path)
    if version is None:
        return Missing(f"{path} does not report its version")
    file = _file_for(path, version)
    note = ""
    if isinstance(file, Path) and file.exists():
        try:
            cached = read_record(file, kind)
            if (cached.path, cached.version) != (str(path), version) or not cached.flags:
                raise ParseError(f"{file} belongs to another tool.")
            if not isinstance(cached, NsysProbe) or cached.importer is None or Path(cached.importer).exists():
                return cached
        except ParseError as error:
            note = f"its cached options could not be used and were queried again: {error.fact}"
    found = query(path, version)
    if isinstance(file, Path) and found.flags:
        try:
            write_record(file.parent, file, found)
        except LlmPerfError as error:
            note = f"its options are not cached: {error.fact}"
    return replace(found, notes=(note,)) if note else found


def _file_for(path: Path, version: str) -> Path | Missing:
    folder = user_cache_folder("tools")
    if isinstance(folder, Missing):
        return folder
    state = path.stat()
    key = [METHOD, str(path.resolve()), state.st_size, state.st_mtime_ns, version]
    return folder / f"{path.name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
