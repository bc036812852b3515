"""The run folder: the names of its files, and how they are read and written. No other module knows these names."""

import fcntl
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from llm_perf_opt.core.errors import ParseError, ResourceError, file_error, words_of
from llm_perf_opt.core.file_lock import folder_lock
from llm_perf_opt.core.inside import PRIVATE, SHARED, check_links, disk_error, make_folder, new_folder, restrict, root_of, write
from llm_perf_opt.core.records import LOAD_PREFIX, SCHEMA, SERVER, Manifest, PassRecord
from llm_perf_opt.core.secrets import hidden_argv
from llm_perf_opt.core.user_files import COMPRESSED, TooLargeError, check_folder, is_file_name, present, read_text, read_unpacked
from llm_perf_opt.core.value_limits import MOST_JSON_BYTES, check_json, check_json_memory, check_plain
from llm_perf_opt.core.yaml_text import invalid_yaml, load_yaml

R = TypeVar("R")

LEAST_FREE_BYTES = 64 * 1024 * 1024
"""Disk space that a new run needs at least."""
UNUSABLE = "n/a: the file is damaged here: "
"""The start of the text that replaces a value beyond the limits."""
_COMPRESSIBLE = (
    "timings.json",
    "inputs.json",
    "ceilings.json",
    "operators.json",
    "samples.jsonl",
    "stages.json",
    "selection.json",
    "selftest.json",
    "run.sqlite",
    "counters.csv",
    "log.txt",
)
_PRIVATE_FILES = frozenset(
    {
        *("run.json", "config.yaml", "env.json", "inputs.yaml", "report.md", "report.html", "cmd.txt", "log.txt"),
        *("inputs.json", "tokens.json", "logits.npz", "server.json", "program.json", "run.sqlite"),
        *("sweep.json", "plan.json", "sweep.md", "sweep.html", "tune.json", "tune.md", "tune.html", "result.json"),
    }
)
_PRIVATE_ENDINGS = (".log", ".nsys-rep", ".ncu-rep", ".qdstrm")
"""Files with prompts, outputs, arguments or logs: only their owner may read them. So it is for all files of a load generator."""
_ELSEWHERE = ", or choose another folder: hydra.run.dir=DIR for a run or a sweep, --out DIR for exec, serve and import"
_TOOL_REPORTS = (".nsys-rep", ".ncu-rep")


class _RunFile:
    """The path of a file of a run, relative to its folder. A raw file may be compressed."""

    def __init__(self, relative: str) -> None:
        self._relative = relative

    def __get__(self, run: "RunFolder", owner: "type[RunFolder]") -> Path:
        path = run.path / self._relative
        return present(path) if self._relative.startswith("raw/") else path


class OwnFolder:
    """A folder of a run, a sweep or a search on disk. Files are written completely or not at all, and only inside it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, path: Path, content: bytes) -> None:
        """Write a file of this folder."""
        write_whole(self.path, path, content)

    def write_record(self, path: Path, record: Any) -> None:
        """Write a record as indented JSON to a file of this folder."""
        write_record(self.path, path, record)


class RunFolder(OwnFolder):
    """A run on disk."""

    manifest_file = _RunFile("run.json")
    """The passes and their states."""
    config_file = _RunFile("config.yaml")
    """The resolved configuration."""
    env_file = _RunFile("env.json")
    """The machine and the software."""
    inputs_file = _RunFile("inputs.yaml")
    """The prompts of the run."""
    clean_file = _RunFile("raw/clean/timings.json")
    """The times of the unprofiled pass."""
    clean_inputs_file = _RunFile("raw/clean/inputs.json")
    """The prompts as the measured process wrote them."""
    clean_tokens_file = _RunFile("raw/clean/tokens.json")
    """The new tokens of the first request, per sequence."""
    clean_logits_file = _RunFile("raw/clean/logits.json")
    """What logits were recorded; the values are in logits.npz next to it."""
    ceilings_file = _RunFile("raw/ceilings/ceilings.json")
    """The measured peaks of the device."""
    torch_file = _RunFile("raw/torch/operators.json")
    """The operators and stages of the torch pass."""
    telemetry_file = _RunFile("raw/nvml/samples.jsonl")
    """The samples of the telemetry, one JSON object per line."""
    report_file = _RunFile("report.md")
    """The report in Markdown."""
    page_file = _RunFile("report.html")
    """The report as one HTML file."""
    waterfall_file = _RunFile("waterfall.svg")
    """The waterfall chart; a PNG is next to it if a browser was available."""
    roofline_file = _RunFile("roofline.svg")
    """The roofline chart; a PNG is next to it if a browser was available."""
    summary_file = _RunFile("stakeholder_summary.md")
    """The summary for stakeholders."""
    operators_file = _RunFile("operators.md")
    """Operators as a Markdown table."""
    ops_csv_file = _RunFile("ops.csv")
    """Operators as CSV."""
    nvml_csv_file = _RunFile("nvml.csv")
    """Telemetry as CSV."""
    findings_file = _RunFile("findings.json")
    """The findings of the run as JSON."""
    verify_file = _RunFile("verify.json")
    """The results of the findings that were tried."""
    derived_tables = _RunFile("tables")
    """The folder of tables that combine several passes, as Parquet files."""
    kernels_file = _RunFile("kernels.md")
    """Kernels and their counters as a Markdown table."""
    regions_file = _RunFile("regions.md")
    """The NVTX regions as Markdown."""
    regions_json_file = _RunFile("regions.json")
    """The NVTX regions as JSON."""
    selftest_file = _RunFile("raw/ncu_selftest/selftest.json")
    """The workload of the counter self-test."""
    torch_trace_file = _RunFile("raw/torch/trace.json.gz")
    """The trace of the torch pass; of several ranks, that of the first."""
    ranks_file = _RunFile("ranks.json")
    """The analysis of the traces of all ranks."""
    program_profile_file = _RunFile("raw/torch/program.json")
    """What torch.profiler recorded of a user's program, apart from the trace."""
    server_file = _RunFile(f"raw/{SERVER}/server.json")
    """The server that a load was put on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parsed: dict[tuple[Path, Any], tuple[tuple[int, int, int], Any]] = {}

    @classmethod
    def create(cls, wanted: Path) -> "RunFolder":
        """Create a new folder at `wanted`, or with a number appended if it exists: a run never writes into another run."""
        try:
            root = root_of(wanted)
            make_folder(root if root != wanted else wanted.parent, wanted.parent)
            free = os.statvfs(wanted.parent)
            if free.f_bavail * free.f_frsize < LEAST_FREE_BYTES:
                raise ResourceError(
                    f"{wanted.parent} has {free.f_bavail * free.f_frsize / 1e6:.0f} MB of disk space left; "
                    f"a run needs at least {LEAST_FREE_BYTES / 1e6:.0f} MB.",
                    f"Free some space{_ELSEWHERE}.",
                )
            for number in range(1, 1000):
                path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
                try:
                    made = cls(new_folder(path.parent, path))
                except FileExistsError:
                    continue
                made.hold()
                return made
        except OSError as error:
            raise disk_error(error, wanted, _ELSEWHERE) from error
        raise ResourceError(f"{wanted} and 998 numbered names next to it are taken.", f"Remove some of them{_ELSEWHERE}.")

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open an existing run, or raise a ParseError that names what is missing."""
        if not there(path, "Give the folder that `llm-perf run` printed.").is_dir():
            raise ParseError(f"{path} is not a folder.", "Give the folder that `llm-perf run` printed.")
        check_folder(path)
        check_links(path)
        if not (path / "run.json").is_file():
            raise ParseError(f"{path} is not a run: it has no run.json.", "Give the folder that `llm-perf run` printed.")
        folder = cls(path.resolve())
        folder.manifest()
        return folder

    def hold(self) -> None:
        """Mark the folder as in use, as long as this object lives: `llm-perf runs` removes or compresses no such run."""
        with suppress(BlockingIOError):  # another process removes or compresses it
            lock = folder_lock(self.path, fcntl.LOCK_SH)
            if lock is not None:
                weakref.finalize(self, os.close, lock)

    # --- files of a pass ------------------------------------------------------------------------------------------

    def wrapped_file(self, name: str) -> Path:
        """Return the file of times that the measured process recorded under nsys or ncu."""
        return present(self.raw(name) / "stages.json")

    def timeline_file(self, name: str) -> Path:
        """Return the timeline of an nsys pass, an SQLite database."""
        return present(self.raw(name) / "run.sqlite")

    def counters_file(self, name: str) -> Path:
        """Return the counters of an ncu pass, a CSV file."""
        return present(self.raw(name) / "counters.csv")

    def selection_file(self, name: str) -> Path:
        """Return the file that lists the launches selected for an ncu pass, with reasons."""
        return present(self.raw(name) / "selection.json")

    def load_folders(self) -> list[Path]:
        """Return the folders of the loads that were put on a server, in order."""
        return sorted(path for path in (self.path / "raw").glob(f"{LOAD_PREFIX}*") if path.is_dir())

    def tables(self, name: str) -> Path:
        """Return the folder of a pass's tables, as Parquet files."""
        return self.path / "tables" / name

    def compressible(self) -> list[Path]:
        """Return the raw files that readers also open when they are compressed. Links are not followed."""
        found = []
        for place, folders, names in os.walk(self.path / "raw"):
            folders.sort()
            found += [Path(place, name) for name in sorted(names) if name in _COMPRESSIBLE or name.endswith(_TOOL_REPORTS)]
        return [path for path in found if path.is_file() and not path.is_symlink()]

    def raw(self, name: str) -> Path:
        """Return the folder of a pass's output, which is never edited afterwards."""
        return self.path / "raw" / name

    def tool_report(self, name: str) -> Path:
        """Return the base name of an nsys or ncu report; the tool adds its extension."""
        return self.raw(name) / "run"

    def log_file(self, name: str) -> Path:
        """Return the file of everything that a pass printed."""
        return present(self.raw(name) / "log.txt")

    def command_file(self, name: str) -> Path:
        """Return the file of the exact command of a pass."""
        return self.raw(name) / "cmd.txt"

    # --- reading and writing --------------------------------------------------------------------------------------

    def parsed(self, path: Path, read: Callable[[Path], R]) -> R:
        """Return the result of `read` for a file. A file is parsed again only after it has changed."""
        stamp = _stamp(path)
        known = self._parsed.get((path, read))
        if known is not None and stamp == known[0]:
            return known[1]  # type: ignore[no-any-return]
        found = read(path)
        if stamp is not None:
            self._parsed[path, read] = (stamp, found)
        return found

    def manifest(self) -> Manifest:
        """Return run.json, or raise a ParseError."""
        manifest = read_record(self.manifest_file, Manifest)
        if manifest.schema > SCHEMA:
            raise ParseError(
                f"{self.manifest_file} was written by a newer version (schema {manifest.schema}; this version reads {SCHEMA}).",
                "Upgrade llm-perf-opt.",
            )
        for entry in manifest.passes:
            if not is_file_name(entry.name):
                raise ParseError(
                    f"{self.manifest_file} names a pass outside of the run: {entry.name!r}.", "It was edited, or is damaged."
                )
        return manifest

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace run.json. Credentials in its commands are hidden."""
        passes = tuple(replace(entry, argv=tuple(hidden_argv(entry.argv))) for entry in manifest.passes)
        self.write_record(self.manifest_file, replace(manifest, command=tuple(hidden_argv(manifest.command)), passes=passes))

    def update_pass(self, entry: PassRecord) -> None:
        """Replace or add the entry of a pass in run.json."""
        manifest = self.manifest()
        others = [known if known.name != entry.name else entry for known in manifest.passes]
        if manifest.pass_named(entry.name) is None:
            others.append(entry)
        self.write_manifest(replace(manifest, passes=tuple(others)))
        if entry.status not in ("pending", "started"):  # tools and generators create files as they like
            restrict(self.path, self.raw(entry.name), lambda path: mode_of(path) == PRIVATE)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None  # the reader reports the error
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def there(path: Path, remedy: str) -> Path:
    """Return a path that the user gave, or raise if it does not exist."""
    try:
        path.stat()
    except OSError as error:
        raise file_error(error, remedy) from error
    return path


def write_whole(root: Path, path: Path, content: bytes) -> None:
    """Write a file below `root` completely or not at all, with the permissions that its name asks for."""
    write(root, path, content, mode_of(path))


def mode_of(path: Path) -> int:
    """Return the permissions of a new file of a run."""
    name = path.name.removesuffix(COMPRESSED)
    private = name in _PRIVATE_FILES or name.endswith(_PRIVATE_ENDINGS) or path.parent.name.startswith(LOAD_PREFIX)
    return PRIVATE if private else SHARED


def write_record(root: Path, path: Path, record: Any) -> None:
    """Write a record as indented JSON below `root`."""
    write_whole(root, path, msgspec.json.format(encoded(record), indent=1) + b"\n")


def encoded(record: Any) -> bytes:
    """Return a record as JSON. Bytes of a name that are not UTF-8 become escapes: JSON cannot contain single surrogates."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escaped(msgspec.to_builtins(record)))


def _escaped(values: Any) -> Any:
    if isinstance(values, dict):
        return {_escaped(key): _escaped(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_escaped(value) for value in values]
    return values.encode("utf-8", "backslashreplace").decode() if isinstance(values, str) else values


def read_record(path: Path, kind: type[R], *, checked: bool = True) -> R:
    """Return a JSON file as `kind`, or raise a ParseError that names the file and the position. `checked`: also its numbers."""
    try:
        content = read_unpacked(path, MOST_JSON_BYTES)
        (check_json if checked else check_json_memory)(content)
        return msgspec.json.decode(content, type=kind)
    except FileNotFoundError as error:
        raise ParseError(f"{path} is missing.", "The pass that writes it did not finish; run.json has the reason.") from error
    except (ValueError, OSError, RecursionError) as error:  # errors of msgspec and of UTF-8 are ValueErrors
        remedy = _remedy(error, "The file is damaged, or was written by another version.")
        raise ParseError(f"{path} cannot be read: {words_of(error)}", remedy) from error


def _remedy(error: Exception, otherwise: str) -> str:
    """Return what to do about a file that cannot be read."""
    if isinstance(error, TooLargeError):
        return "Use fewer or shorter prompts, fewer new tokens or fewer repeats; other files of this size are damaged."
    return "Check its permissions." if isinstance(error, PermissionError) else otherwise


def read_mapping(path: Path) -> dict[str, Any]:
    """Return a JSON file that contains an object, or raise a ParseError."""
    return read_record(path, dict[str, Any])


def read_fields(path: Path) -> dict[str, Any]:
    """Return a JSON file that contains an object. A value beyond the limits is lost alone: it becomes UNUSABLE and why."""

    def plain(content: bytes) -> Any:
        try:
            check_json(content)
            value = msgspec.json.decode(content)
            check_plain(value)
        except (ValueError, RecursionError) as error:
            return f"{UNUSABLE}{words_of(error)}"
        return value

    found = read_record(path, dict[str, msgspec.Raw], checked=False)
    return {name: plain(bytes(value)) for name, value in found.items()}


def read_values(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file of a run; empty if the file is missing or contains something else."""
    if not path.exists():
        return {}
    try:
        values = load_yaml(read_text(path))
    except invalid_yaml() as error:
        remedy = _remedy(error, "The file is damaged, or was edited.")
        raise ParseError(f"{path} cannot be read as YAML: {words_of(error)}", remedy) from error
    return values if isinstance(values, dict) else {}
