"""Fills a run folder: runs the passes that were asked for, one after the other, and records how the run ended."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Literal

from llm_perf_opt import __version__
from llm_perf_opt.config.composition import Composed, config_to_yaml
from llm_perf_opt.config.passes import known_passes, planned_passes
from llm_perf_opt.config.runtimes import runtime_named
from llm_perf_opt.core.errors import Interrupted, LlmPerfError, ResourceError, interrupted
from llm_perf_opt.core.records import SCHEMA, Manifest, PassRecord, PassStatus, RunStatus
from llm_perf_opt.core.run_folder import RunFolder, write_record, write_whole
from llm_perf_opt.profiling.passes import Capture, Listener, NothingToCountError, closed, left_something
from llm_perf_opt.profiling.preflight import refuse_early
from llm_perf_opt.profiling.provenance import environment
from llm_perf_opt.profiling.requested_metrics import resolve_metrics


def capture(composed: Composed, command: Sequence[str], listener: Listener) -> tuple[RunFolder, LlmPerfError | None]:
    """Fill a new run folder. Return it with the error that ended the capture early, if one did."""
    runtime_named(composed.config.runtime.type)
    refuse_early([composed.config])
    config = resolve_metrics(composed.config)
    folder = RunFolder.create(composed.run_dir)
    names, hardware = planned_passes(config), config.hardware
    asked = Capture(folder, listener, names, config.profiling, config, None, hardware.device, hardware.device_index)

    def prepare() -> None:
        write_whole(folder.config_file, config_to_yaml(config).encode())
        write_record(folder.env_file, environment(hardware.device_index))

    return folder, fill(asked, command, prepare)


def fill(
    asked: Capture, command: Sequence[str], prepare: Callable[[], None], kind: Literal["run", "exec"] = "run"
) -> LlmPerfError | None:
    """Run every pass of a capture, of a model or of a program. Return what went wrong first; the other passes still stand."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    entries = tuple(PassRecord(name) for name in asked.names)
    begun = Manifest(SCHEMA, __version__, "partial", created, tuple(command), entries, why="The run has not ended.", kind=kind)
    asked.folder.write_manifest(begun)
    error: LlmPerfError | None
    try:
        prepare()
        error = _run_passes(asked)
    except LlmPerfError as raised:
        error = raised
    except KeyboardInterrupt as stopped:
        error = interrupted(stopped, "What was captured so far is kept.")
    return _close(asked, error)


def _run_passes(asked: Capture) -> LlmPerfError | None:
    first: LlmPerfError | None = None
    for one in known_passes():
        if one.name not in asked.names or one.launch is None:
            continue
        try:
            one.launch(asked)
        except Interrupted:
            raise
        except LlmPerfError as error:
            status = _status(asked, one.name, error)
            if status == "skipped" and _may_be_left_out(asked, error):
                continue
            first = first or error
            if one.essential and status != "complete":
                break
    return first


def _status(asked: Capture, name: str, error: LlmPerfError) -> PassStatus:
    """Return what became of a pass that raised; one that had not begun is recorded as skipped."""
    entry = asked.folder.manifest().pass_named(name)
    if entry is not None and entry.status != "pending":
        return entry.status
    asked.skip(name, error)
    return "skipped"


def _may_be_left_out(asked: Capture, error: LlmPerfError) -> bool:
    """Whether a pass was not begun for want of what this machine or this program does not have, and nobody named it."""
    available = asked.program is not None and asked.program.as_available
    return available and isinstance(error, (ResourceError, NothingToCountError))


def _close(asked: Capture, error: LlmPerfError | None) -> LlmPerfError | None:
    """Write the final status. On a full disk run.json keeps saying partial, which is true."""
    folder = asked.folder
    try:
        manifest = folder.manifest()
        entries = closed(manifest.passes)
        lost = next((entry for entry in entries if entry.status == "failed" and asked.program is None), None)
        kept = folder.clean_file.exists() or left_something(folder, entries)
        status: RunStatus = "complete"
        if error is not None or lost is not None:
            status = "partial" if kept else "failed"
        if isinstance(error, Interrupted) and not kept:
            error = Interrupted(error.fact, "Nothing had been captured yet.")
        why, remedy = (error.fact, error.remedy) if error else (lost.why, lost.remedy) if lost else ("", "")
        folder.write_manifest(replace(manifest, status=status, passes=entries, why=why, remedy=remedy))
    except LlmPerfError as late:
        return error or late
    return error
