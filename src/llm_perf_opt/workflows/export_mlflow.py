"""`llm-perf export mlflow`: a run as a run of MLflow, with settings, metrics with their intervals, tags and the report."""

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from llm_perf_opt.analysis.comparison.facts import flatten
from llm_perf_opt.analysis.fleet import FleetRun
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.errors import ConfigError, ResourceError, words_of
from llm_perf_opt.core.records import CleanTimings, Metric, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.secrets import hidden_value
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.fleet_reading import digest, facts_of_run
from llm_perf_opt.workflows.run_reader import RunReader

DATABASE = "mlflow.db"
DEFAULT_URI = f"sqlite:///{DATABASE}"
"""A database in the current folder."""
ARTIFACTS = "mlartifacts"
"""The folder of artifacts next to such a database."""
DEFAULT_EXPERIMENT = "llm-perf"
RUN_TAG, DONE_TAG = "llm_perf.run", "llm_perf.exported"
"""What identifies a run, and whether its export was completed."""
_LONGEST_VALUE = 5_000
"""MLflow rejects parameters and tags that are longer."""
_MOST_IN_BATCH = 100
_FORBIDDEN = re.compile(r"[^\w\-. /:]")


@dataclass(frozen=True)
class ExportedRun:
    """A run in the terms of MLflow."""

    identity: str
    """Equal for copies of a run, and after it was moved or compressed."""
    name: str
    started_ms: int
    ended_ms: int
    status: Literal["FINISHED", "FAILED"]
    parameters: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Exported:
    """What became of one run."""

    path: str
    mlflow_run: str
    done: Literal["exported", "replaced", "already exported"]
    metrics: int
    note: str = ""


def read_exported(path: Path) -> ExportedRun:
    """Return a run as MLflow stores it. Raise ConfigError for a run without metrics of requests, ParseError if it is damaged."""
    run = RunReader.open(path)
    if run.manifest.kind != "run":
        raise ConfigError(
            f"{path} is a run {'under load' if run.manifest.kind == 'serving' else 'of a program'}.", "Export runs of a model."
        )
    found = analyze(run, traces=False)
    if found.damaged:
        raise found.damaged
    row = facts_of_run(run.folder.path)
    started = _milliseconds(run.manifest.created)
    seconds = sum(entry.seconds or 0.0 for entry in run.manifest.passes)
    return ExportedRun(
        identity=row.measurement or digest([run.manifest.created, run.manifest.command, row.host]),
        name=found.run,
        started_ms=started,
        ended_ms=started + round(seconds * 1000),
        status="FINISHED" if run.manifest.status == "complete" else "FAILED",
        parameters={_name(key): _value(hidden_value(key, value)) for key, value in flatten(found.config).items()},
        metrics={} if found.impossible else _metrics(found),
        tags=_tags(row, found),
        files=_files(run.folder),
    )


def _metrics(found: RunAnalysis) -> dict[str, float]:
    """Return the metrics with their intervals, and the peaks of memory. What is missing is left out."""
    values: dict[str, float] = {}
    for metric in found.metrics:
        values.update(_with_interval(metric))
    if not isinstance(found.timings, Missing):
        values.update(_memory(found.timings))
    return values


def _with_interval(metric: Metric) -> dict[str, float]:
    """Return the median, both ends of its 95 % interval (of too few repeats, their range) and their number; times in ms."""
    value = metric.value
    if isinstance(value, Missing):
        return {}
    name, size = (f"{metric.key}_ms", 1e6) if metric.unit == "ns" else (f"{metric.key}_tokens_per_s", 1.0)
    found = {name: value.median / size, f"{metric.key}_repeats": float(value.n)}
    if isinstance(value.ci_low, Missing) or isinstance(value.ci_high, Missing):
        return {**found, f"{name}_min": value.minimum / size, f"{name}_max": value.maximum / size}
    return {**found, f"{name}_ci95_low": value.ci_low / size, f"{name}_ci95_high": value.ci_high / size}


def _memory(timings: CleanTimings) -> dict[str, float]:
    peaks = {
        f"memory_{name}": getattr(timings.memory, name) for name in ("allocated_bytes", "reserved_bytes", "process_rss_bytes")
    }
    return {name: float(value) for name, value in peaks.items() if not isinstance(value, Missing)}


def _tags(row: FleetRun, found: RunAnalysis) -> dict[str, str]:
    changes = {True: "yes", False: "no", None: "unknown"}[row.dirty]
    tags = {
        "status": row.status,
        "status.why": row.why,
        "model": row.model,
        "weights": row.weights,
        "dtype": row.dtype,
        "runtime": row.runtime,
        "hardware": row.hardware,
        "devices": "" if row.devices is None else str(row.devices),
        "workload": row.workload,
        "host": row.host,
        "commit": row.commit,
        "uncommitted_changes": changes if row.commit else "",
        "not_ranked": row.unranked,
        "warnings": str(len(found.warnings)),
        "llm_perf.version": found.manifest.tool_version,
        "llm_perf.created": found.manifest.created,
        "mlflow.source.git.commit": row.commit,
    }
    return {key: _value(value) for key, value in tags.items() if value}


def _files(folder: RunFolder) -> tuple[Path, ...]:
    """Return the reports and run.json. A link is left out: it may lead to any file."""
    files = (folder.page_file, folder.report_file, folder.manifest_file)
    return tuple(file for file in files if file.is_file() and not file.is_symlink())


def _milliseconds(created: str) -> int:
    try:
        found = datetime.fromisoformat(created)
    except ValueError:
        return 0
    return round((found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp() * 1000)


def _name(key: str) -> str:
    return _FORBIDDEN.sub("_", key)[:250] or "_"


def _value(text: str) -> str:
    plain = text.encode("utf-8", "backslashreplace").decode()
    return plain if len(plain) <= _LONGEST_VALUE else f"{plain[: _LONGEST_VALUE - 1]}…"


# --- MLflow -------------------------------------------------------------------------------------------------------------


def export_runs(
    paths: Sequence[Path],
    uri: str,
    experiment: str,
    *,
    replace: bool = False,
    report: Callable[[Exported], None] = lambda _: None,
) -> list[Exported]:
    """Export runs. One that was exported before is left as it is, unless `replace`. Every run is read before any is exported."""
    read = [(path, read_exported(path)) for path in paths]
    client, failures = _client(uri)
    done: list[Exported] = []
    with _reported(failures, uri):
        place = _experiment(client, experiment, uri)
        for path, run in read:
            done.append(_export(client, place, path, run, replace))
            report(done[-1])
    return done


def _client(uri: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return an MLflow client that sends no usage data, and the errors that it raises."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError as error:
        raise ResourceError(
            f"MLflow cannot be used: {words_of(error)}", "Install it: pip install 'llm-perf-opt[mlflow]'."
        ) from error
    failures = (MlflowException, SQLAlchemyError, OSError)
    with _reported(failures, uri):
        return MlflowClient(tracking_uri=uri), failures


@contextmanager
def _reported(failures: tuple[type[Exception], ...], uri: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # of our own output
        raise
    except failures as error:
        raise ResourceError(f"MLflow at {uri}: {words_of(error)}", "Check --tracking-uri and its permissions.") from error


def _experiment(client: Any, name: str, uri: str) -> str:
    """Return the id of the experiment, which is created if needed. Artifacts of a local database are in the current folder."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    local = {"artifact_location": (Path.cwd() / ARTIFACTS).as_uri()} if uri.startswith("sqlite:") else {}
    return str(client.create_experiment(name, **local))


def _export(client: Any, place: str, path: Path, run: ExportedRun, replace: bool) -> Exported:
    before = client.search_runs([place], filter_string=f"tags.`{RUN_TAG}` = '{run.identity}'")
    complete = [found for found in before if found.data.tags.get(DONE_TAG) == "yes"]
    if complete and not replace:
        return Exported(str(path), complete[0].info.run_id, "already exported", 0)
    made = client.create_run(place, start_time=run.started_ms, run_name=run.name, tags={**run.tags, RUN_TAG: run.identity})
    number = made.info.run_id
    _write(client, number, run)
    client.set_terminated(number, run.status, end_time=run.ended_ms)
    client.set_tag(number, DONE_TAG, "yes")
    for found in before:  # replaced, or left incomplete by an interrupted export
        client.delete_run(found.info.run_id)
    note = (
        "" if any(file.suffix == ".html" for file in run.files) else f"it has no report.html; `llm-perf report {path}` writes it"
    )
    if not run.metrics:
        note = f"no metrics: {run.tags.get('not_ranked', 'the run has no times')}"
    return Exported(str(path), number, "replaced" if complete else "exported", len(run.metrics), note)


def _write(client: Any, number: str, run: ExportedRun) -> None:
    from mlflow.entities import Metric as MlflowMetric
    from mlflow.entities import Param

    parameters = [Param(key, value) for key, value in run.parameters.items()]
    for first in range(0, len(parameters), _MOST_IN_BATCH):
        client.log_batch(number, params=parameters[first : first + _MOST_IN_BATCH])
    client.log_batch(number, metrics=[MlflowMetric(key, value, run.started_ms, 0) for key, value in run.metrics.items()])
    for file in run.files:
        client.log_artifact(number, str(file))
