"""Fill a run folder: run the requested passes one after the other and record how the run ended."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Literal

from llm_perf_opt import __version__
from llm_perf_opt.config.code_settings import refuse_code
from llm_perf_opt.config.composition import Composed, config_to_yaml
from llm_perf_opt.config.parallel import ranks_of
from llm_perf_opt.config.passes import known_passes, planned_passes
from llm_perf_opt.config.runtimes import runtime_named
from llm_perf_opt.core.errors import Interrupted, LlmPerfError, ResourceError, interrupted, unexpected
from llm_perf_opt.core.processes import uninterrupted
from llm_perf_opt.core.records import SCHEMA, Manifest, PassRecord, PassStatus, RunStatus
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.passes import Capture, Listener, NothingToCountError, closed, left_something
from llm_perf_opt.profiling.preflight import refuse_early
from llm_perf_opt.profiling.provenance import environment
from llm_perf_opt.profiling.requested_metrics import resolve_metrics
from llm_perf_opt.profiling.wait_policy import decide


def capture(composed: Composed, command: Sequence[str], listener: Listener) -> tuple[RunFolder, LlmPerfError | None]:
    """Fill a new run folder. Return it with the error that ended the capture early, if one did."""
    refuse_code(composed.config, composed.code)
    runtime_named(composed.config.runtime.type)
    refuse_early([composed.config])
    config = resolve_metrics(composed.config)
    folder = RunFolder.create(composed.checked_run_dir())
    names, hardware = planned_passes(config), config.hardware
    plan = Capture(folder, listener, names, config.profiling, config, None, hardware.device, hardware.device_index)
    plan = replace(plan, code=tuple(map(str, composed.code)))
    waiting = decide(hardware, gpu=plan.gpu, ranks=ranks_of(config))
    plan = replace(plan, variables=waiting.variables)

    def prepare() -> None:
        folder.write(folder.config_file, config_to_yaml(config).encode())
        folder.write_record(folder.env_file, {**environment(hardware.device_index), "waiting": waiting.to_env()})

    return folder, fill(plan, command, prepare)


def fill(
    plan: Capture, command: Sequence[str], prepare: Callable[[], None], kind: Literal["run", "exec"] = "run"
) -> LlmPerfError | None:
    """Run every pass of a capture and return the first error. A failed pass does not stop the others."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    entries = tuple(PassRecord(name) for name in plan.names)
    begun = Manifest(SCHEMA, __version__, "partial", created, tuple(command), entries, why="The run has not ended.", kind=kind)
    plan.folder.write_manifest(begun)
    error: LlmPerfError | None
    try:
        prepare()
        error = _run_passes(plan)
    except LlmPerfError as raised:
        error = raised
    except KeyboardInterrupt as stopped:
        error = interrupted(stopped, "What was captured so far is kept.")
    except Exception as defect:
        _close(plan, unexpected(defect))  # the run has ended, whatever happened
        raise
    try:
        with uninterrupted():
            error = _close(plan, error)
    except KeyboardInterrupt as stopped:
        error = error or interrupted(stopped, "What was captured is kept.")
    return error


def _run_passes(plan: Capture) -> LlmPerfError | None:
    first: LlmPerfError | None = None
    for entry in known_passes():
        if entry.name not in plan.names or entry.launch is None:
            continue
        try:
            entry.start(plan)
        except Interrupted:
            raise
        except LlmPerfError as error:
            status = _status(plan, entry.name, error)
            if status == "skipped" and _is_optional(plan, error):
                continue
            first = first or error
            if entry.essential and status != "complete":
                break
    return first


def _status(plan: Capture, name: str, error: LlmPerfError) -> PassStatus:
    """Return the status of a pass that raised; record one that had not started as skipped."""
    entry = plan.folder.manifest().pass_named(name)
    if entry is not None and entry.status != "pending":
        return entry.status
    plan.skip(name, error)
    return "skipped"


def _is_optional(plan: Capture, error: LlmPerfError) -> bool:
    """Return whether a skipped pass is no error: the user did not name it, and its tool or its kernels are missing."""
    available = plan.program is not None and plan.program.as_available
    return available and isinstance(error, (ResourceError, NothingToCountError))


def _close(plan: Capture, error: LlmPerfError | None) -> LlmPerfError | None:
    """Write the final status. On a full disk run.json still says partial, which is correct."""
    folder = plan.folder
    try:
        manifest = folder.manifest()
        entries = closed(manifest.passes)
        failed = next((entry for entry in entries if entry.status == "failed" and plan.program is None), None)
        has_results = folder.clean_file.exists() or left_something(folder, entries)
        status: RunStatus = "complete"
        if error is not None or failed is not None:
            status = "partial" if has_results else "failed"
        if isinstance(error, Interrupted) and not has_results:
            error = Interrupted(error.fact, "Nothing had been captured yet.")
        why, remedy = (error.fact, error.remedy) if error else (failed.why, failed.remedy) if failed else ("", "")
        folder.write_manifest(replace(manifest, status=status, passes=entries, why=why, remedy=remedy))
    except LlmPerfError as late:
        return error or late
    return error
