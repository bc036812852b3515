"""Make a run folder from output files of load generators, as if this tool had put the load on the server."""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import yaml

from llm_perf_opt import __version__
from llm_perf_opt.analysis.serving.generator import issued_rate
from llm_perf_opt.analysis.serving.slo import parse_slo
from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.core.inside import copy, disk_error, make_folder, remove_if_possible, share
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.core.records import SCHEMA, Manifest, PassRecord, load_name
from llm_perf_opt.core.run_folder import RunFolder, there
from llm_perf_opt.core.secrets import hidden_json, without_password
from llm_perf_opt.core.serving_records import (
    METRICS_FILE,
    POINT_FILE,
    LoadPoint,
    LoadRecords,
    MetricsSample,
    ServerFacts,
)
from llm_perf_opt.core.user_files import read_unpacked
from llm_perf_opt.traces.packed import is_gzip
from llm_perf_opt.traces.serving.aiperf import summary_of
from llm_perf_opt.traces.serving.json_files import MOST_BYTES, head_of
from llm_perf_opt.traces.serving.load_file import AIPERF_SUMMARY, read_load
from llm_perf_opt.traces.serving.server_files import read_scrape

EXPERIMENT = "import"
IMPORTED = Missing("imported: the files do not say which machine the server ran on")
_AROUND_NS = 5_000_000_000
"""Samples this long before and after a load are kept with it."""
_LONGEST_NAME = 100
_MOST_POINTS = 100


@dataclass(frozen=True)
class ImportRequest:
    """The files to import."""

    files: tuple[Path, ...]
    out: Path | None = None
    metrics: Path | None = None
    slo: str = ""


@dataclass(frozen=True)
class _Load:
    """One load in one of the files."""

    file: Path
    part: int
    records: LoadRecords
    samples: tuple[MetricsSample, ...] = field(default_factory=tuple)


def import_loads(request: ImportRequest, command: Sequence[str]) -> RunFolder:
    """Return a new run folder. Everything is read before the folder is made."""
    limits = parse_slo(request.slo).limits if request.slo else {}
    loads = _loads(request)
    facts = replace(_server(loads), slo_ns=limits)
    name = safe_name(facts.model)
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    points = [point_of(number, load.records, load.file.name, load.part, bool(load.samples)) for number, load in enumerate(loads)]
    folder = RunFolder.create(request.out or Path("runs") / EXPERIMENT / name / time)
    entries = tuple(
        PassRecord(load_name(number), "complete", tool_version=_version(load.records)) for number, load in enumerate(loads)
    )
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        _fill(folder, loads, points, facts)
        folder.write_manifest(Manifest(SCHEMA, __version__, "complete", created, tuple(command), entries, kind="serving"))
    except BaseException as error:
        remove_if_possible(folder.path.parent, folder.path)  # a part of a run says nothing, and its name is taken
        if isinstance(error, OSError):
            raise disk_error(error, folder.path) from error
        raise
    return folder


def safe_name(text: str) -> str:
    """Return a name from a file as the name of a folder."""
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in text)
    return kept.lstrip("._-")[:_LONGEST_NAME] or "server"


def _loads(request: ImportRequest) -> list[_Load]:
    files = [there(path, "Check the path.") for path in dict.fromkeys(request.files)]
    given = [path for path in files if not _is_summary_of_another(path, files)]
    found = [_Load(path, part, records) for path in given for part, records in enumerate(read_load(path))]
    found = [load for load in found if load.records.requests]
    if len(found) > _MOST_POINTS:
        raise ConfigError(f"The files have {len(found)} loads; at most {_MOST_POINTS} fit one run.", "Import them in parts.")
    if request.metrics is None:
        return found
    samples = read_scrape(request.metrics, request.metrics.stat().st_mtime_ns)
    return [_Load(load.file, load.part, load.records, _around(samples, load.records)) for load in found]


def _is_summary_of_another(path: Path, files: Sequence[Path]) -> bool:
    """Return whether this is AIPerf's summary of records that are given too; it is read with them."""
    head = head_of(path)
    return all(mark in head for mark in AIPERF_SUMMARY) and any(summary_of(other) == path for other in files)


def _around(samples: Sequence[MetricsSample], records: LoadRecords) -> tuple[MetricsSample, ...]:
    if records.clock != "unix":
        raise ConfigError(
            f"--metrics cannot be used with {records.generator}: its file does not say when requests were sent.",
            "Import it without --metrics.",
        )
    start = min(request.sent_ns for request in records.requests) - _AROUND_NS
    end = max(request.end_ns for request in records.requests) + _AROUND_NS
    return tuple(sample for sample in samples if start <= sample.at_ns <= end)


def _server(loads: Sequence[_Load]) -> ServerFacts:
    """Return what the files say about the server. Raise a ConfigError if they are about different models."""
    models, urls = (
        list(dict.fromkeys(value for load in loads if not isinstance(value := getattr(load.records, name), Missing)))
        for name in ("model", "url")
    )
    if len(models) > 1:
        raise ConfigError(f"The files are about different models: {', '.join(models[:5])}.", "Import each model on its own.")
    if len(urls) > 1:
        raise ConfigError(f"The files are about different servers: {', '.join(urls[:5])}.", "Import each server on its own.")
    notes = ("imported: what is known about the server comes from the files of the load generator",)
    return ServerFacts(without_password("".join(urls)), "".join(models) or "server", notes=notes)


def _fill(folder: RunFolder, loads: Sequence[_Load], points: Sequence[LoadPoint], facts: ServerFacts) -> None:
    values = {"experiment": EXPERIMENT, "model": {"name": safe_name(facts.model)}}
    folder.write(folder.config_file, yaml.safe_dump(values, sort_keys=False).encode())
    folder.write_record(folder.env_file, {"machine": str(IMPORTED)})
    folder.write_record(folder.server_file, facts)
    kept: dict[Path, Path] = {}
    for load, point in zip(loads, points, strict=True):
        place = folder.raw(load_name(point.number))
        make_folder(folder.path, place)
        _keep(folder, load.file, place, kept)
        if load.samples:
            folder.write(place / METRICS_FILE, b"".join(msgspec.json.encode(sample) + b"\n" for sample in load.samples))
        folder.write_record(place / POINT_FILE, point)


def _keep(folder: RunFolder, file: Path, place: Path, kept: dict[Path, Path]) -> None:
    """Copy a file, and AIPerf's summary next to it. A file with several loads is stored once and linked."""
    for source in (file, summary_of(file)):
        if not source.is_file():
            continue
        target = place / source.name
        if source not in kept or not _linked(folder, kept[source], target):
            _copy(folder, source, target)
        kept.setdefault(source, target)


def _copy(folder: RunFolder, source: Path, target: Path) -> None:
    """Copy a file; one with the generator's settings without the credentials in them."""
    if source.name.removesuffix(".gz").endswith(".json"):
        text = read_unpacked(source, MOST_BYTES).decode(errors="surrogateescape")
        shown = hidden_json(text)
        if shown != text:
            content = shown.encode(errors="surrogateescape")
            folder.write(target, gzip.compress(content, mtime=0) if is_gzip(source) else content)
            return
    copy(folder.path, source, target)


def _linked(folder: RunFolder, source: Path, target: Path) -> bool:
    """Return whether a hard link could be made; some file systems have none."""
    try:
        share(folder.path, source, target)
    except OSError:
        return False
    return True


def point_of(number: int, records: LoadRecords, file: str, part: int, sampled: bool) -> LoadPoint:
    """Return the point of an imported load. Its rate is the issued one if the file does not name the asked one."""
    asked, arrival, issued = records.asked, records.arrival, issued_rate(records)
    if isinstance(asked, Missing) and isinstance(issued, Missing):
        raise ParseError(f"{file} has no load: {asked.why}, and {issued.why}.", "Give the generator's summary next to it.")
    unix = records.clock == "unix"
    return LoadPoint(
        number=number,
        kind=records.kind,
        asked=next(value for value in (asked, issued) if not isinstance(value, Missing)),
        arrival="poisson" if isinstance(arrival, Missing) else arrival,
        generator=records.generator,
        file=file,
        requests=len(records.requests),
        started_ns=min(request.sent_ns for request in records.requests) if unix else 0,
        ended_ns=max(request.end_ns for request in records.requests) if unix else 0,
        status="complete",
        metrics=METRICS_FILE if sampled else "",
        part=part,
        unrecorded=(*(("asked",) if isinstance(asked, Missing) else ()), *(("arrival",) if isinstance(arrival, Missing) else ())),
    )


def _version(records: LoadRecords) -> str:
    return records.generator if isinstance(records.version, Missing) else f"{records.generator} {records.version}"
