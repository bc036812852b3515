"""Read the facts of one run for the index."""

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from llm_perf_opt.analysis.comparison.differences import invalid_run, settings_of_repeats
from llm_perf_opt.analysis.comparison.facts import facts_of
from llm_perf_opt.analysis.fleet import FleetRun, Reading
from llm_perf_opt.analysis.limits.hardware import devices_of
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.stats import ends
from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.errors import ParseError, file_error
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.run_status import DAMAGED, UNREADABLE, is_denied, status_of
from llm_perf_opt.core.user_files import read_bytes
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.run_listing import file_time
from llm_perf_opt.workflows.run_reader import RunReader


def digest(value: Any) -> str:
    """Return a short key that is equal for equal values."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class _SharingReader(RunReader):
    """A run whose settings are parsed only if no other run has the same: YAML takes nine tenths of the time."""

    def __init__(self, folder: RunFolder, shared: dict[bytes, dict[str, Any]]) -> None:
        super().__init__(folder)
        self._shared = shared

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings in config.yaml."""
        try:
            key = hashlib.sha256(read_bytes(self.folder.config_file)).digest()
        except OSError:
            return super().settings
        if key not in self._shared:
            self._shared[key] = super().settings
        return self._shared[key]


def _unread(relative: str, dated: Path, status: str, why: str) -> FleetRun:
    """Return the row of a run without facts, with the time of a file or folder."""
    return FleetRun(relative, file_time(dated), status, why, unranked=f"{status}: {why}")


def _with_damage(row: FleetRun, error: ParseError, path: Path) -> FleetRun:
    """Return the row of a run with a file that cannot be read."""
    status, why = status_of(error), _one_path(error.fact, path)
    return msgspec.structs.replace(row, status=status, why=why, unranked=f"{status}: {why}")


class FactReader:
    """Reads runs."""

    def __init__(self, settings: dict[str, dict[str, str]]) -> None:
        self._settings = settings
        self._parsed: dict[bytes, dict[str, Any]] = {}
        self._keys: dict[int, tuple[str, dict[str, Any]]] = {}

    def facts(self, path: Path, relative: str) -> FleetRun:
        """Return the facts of a run; of one that is damaged or not readable, the reason."""
        try:
            return self._facts(path, relative)
        except OSError as error:
            return _unread(relative, path, UNREADABLE, _one_path(file_error(error).fact, path))

    def _facts(self, path: Path, relative: str) -> FleetRun:
        folder = RunFolder(path)
        run = _SharingReader(folder, self._parsed)
        try:
            manifest = run.manifest
        except ParseError as error:
            why = _one_path(error.fact, path)
            if is_denied(error):
                return _unread(relative, path, UNREADABLE, why)
            return _unread(relative, folder.manifest_file, DAMAGED, why)
        experiment, model = run.names
        row = FleetRun(
            relative, manifest.created, manifest.status, manifest.why, manifest.kind, experiment, model, run.weights,
            page=folder.page_file.is_file(),
        )  # fmt: skip
        try:
            if manifest.kind != "run":
                words = "a run under load" if manifest.kind == "serving" else "a run of a program"
                return msgspec.structs.replace(row, unranked=f"{words}, which has no metrics of single requests")
            return self._with_analysis(row, analyze(run, traces=False), path)
        except ParseError as error:
            return _with_damage(row, error, path)

    def _with_analysis(self, row: FleetRun, found: RunAnalysis, path: Path) -> FleetRun:
        row = msgspec.structs.replace(row, warnings=len(found.warnings), **_origin(found))
        if found.damaged is not None:
            return _with_damage(row, found.damaged, path)
        timings = found.timings
        unranked = _unranked(row, found)
        if isinstance(timings, Missing) or not timings.iterations:
            runtime = found.config.get("runtime")
            named = runtime.get("type") if isinstance(runtime, dict) else None
            return msgspec.structs.replace(row, unranked=unranked, runtime=named if isinstance(named, str) else "")
        return msgspec.structs.replace(
            row, unranked=unranked, **_measured(row, timings), **_readings(found), **self._same(row, found)
        )

    def _same(self, row: FleetRun, found: RunAnalysis) -> dict[str, str]:
        """Return the keys by which runs are pooled. What is unknown is equal to nothing else."""
        facts = facts_of(found)
        known = {"cpu", "gpu"} & found.env.keys()
        return {
            "same_model": digest(facts["model"]),
            "same_work": digest(facts["workload"]),
            "same_hardware": digest(facts["hardware"]) if known else f"unknown: {row.path}",
            "settings": self._settings_key(found.config) or f"unknown: {row.path}",
        }

    def _settings_key(self, config: dict[str, Any]) -> str:
        """Return the key of these settings; empty if there are none. Runs with equal files share one object."""
        if id(config) not in self._keys:
            settings = settings_of_repeats(config)
            key = digest(settings) if settings else ""
            if settings:
                self._settings[key] = settings
            self._keys[id(config)] = key, config
        return self._keys[id(config)][0]


def _one_path(text: str, path: Path) -> str:
    """Return a reason that names files relative to the run."""
    return text.replace(f"{path}{os.sep}", "")


def _origin(found: RunAnalysis) -> dict[str, Any]:
    """Return host and commit."""
    folder, host = found.env.get("working_folder"), found.env.get("host")
    commit, dirty = (folder.get("commit"), folder.get("dirty")) if isinstance(folder, dict) else (None, None)
    return {
        "host": host if isinstance(host, str) else "",
        "commit": commit if isinstance(commit, str) else "",
        "dirty": dirty if isinstance(dirty, bool) else None,
    }


def _unranked(row: FleetRun, found: RunAnalysis) -> str:
    """Return why a run is not to be ranked or compared; empty if it may be."""
    if row.status != "complete":
        return f"{row.status}: {row.why}" if row.why else row.status
    if isinstance(found.timings, Missing) or not found.timings.iterations:
        return "no times: " + (found.timings.why if isinstance(found.timings, Missing) else "no iteration was measured")
    invalid = invalid_run([found])
    if invalid is None:
        return ""
    return f"{'impossible figure' if invalid.impossible else 'incomplete'}: {invalid.why}"


def _measured(row: FleetRun, timings: CleanTimings) -> dict[str, Any]:
    model, work = timings.model, timings.workload
    return {
        "model": row.model or model.name,
        "weights": row.weights if model.weights is None else model.weights.kind,
        "dtype": model.dtype,
        "runtime": timings.runtime.type if timings.runtime else PYTORCH,
        "hardware": model.device_name,
        "devices": devices_of(timings),
        "batch": work.batch_size,
        "prompt_tokens": work.padded_tokens,
        "new_tokens": work.new_tokens,
        "measurement": digest([(repeat.started_ns, repeat.wall_ns, repeat.prefill_ns) for repeat in timings.iterations]),
    }


def _readings(found: RunAnalysis) -> dict[str, Any]:
    readings, missing = {}, {}
    for metric in found.metrics:
        value = metric.value
        if isinstance(value, Missing):
            missing[metric.key] = value.why
            continue
        low, high = ends(value)
        readings[metric.key] = Reading(value.median, low, high, value.n, not isinstance(value.ci_low, Missing))
    return {"readings": readings, "missing": missing}


def facts_of_run(path: Path) -> FleetRun:
    """Return the facts of one run."""
    return FactReader({}).facts(path, path.name)
