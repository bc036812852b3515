"""Plans the passes of a run, launches each in a process of its own, and keeps what they leave."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

import yaml

from llm_perf_opt import __version__
from llm_perf_opt.config.composition import Composed, config_to_yaml
from llm_perf_opt.config.runtimes import runtime_named
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, ParseError, interrupted
from llm_perf_opt.core.records import SCHEMA, Manifest, Missing, PassRecord, PassStatus, RunStatus
from llm_perf_opt.core.run_folder import RunFolder, read_mapping, write_record, write_whole
from llm_perf_opt.core.stored_ceilings import read_ceilings
from llm_perf_opt.profiling.ceilings import build_ceilings_argv, run_ceilings
from llm_perf_opt.profiling.nsight import run_ncu, run_nsys
from llm_perf_opt.profiling.passes import (
    LABELS,
    Listener,
    PassOutcome,
    PassPlan,
    begin_pass,
    closed,
    left_something,
    plain_run,
    run_pass,
)
from llm_perf_opt.profiling.preflight import refuse_early
from llm_perf_opt.profiling.provenance import environment, packages
from llm_perf_opt.profiling.requested_metrics import resolve_metrics
from llm_perf_opt.profiling.vendor.launch import Companion, build_work_argv
from llm_perf_opt.runners.measure import nvml
from llm_perf_opt.runners.measure.gpu import gpu_count
from llm_perf_opt.traces.timings import read_timings, read_torch_pass


def planned_passes(config: RunConfig) -> tuple[str, ...]:
    """The passes this configuration asks for, in their order."""
    asked = config.profiling
    passes = {
        "nvml": asked.nvml.enable and asked.clean,  # it watches the unprofiled pass
        "clean": asked.clean,
        "ceilings": asked.ceilings and asked.clean,  # a limit is of use only beside a time
        "torch": asked.torch.enable,
        "nsys": asked.nsys.enable,
        "ncu_selftest": asked.ncu.enable,
        "ncu_prefill": asked.ncu.enable,
        "ncu_decode": asked.ncu.enable and config.runtime.num_new_tokens > 1,
    }
    return tuple(name for name, wanted in passes.items() if wanted)


def capture(composed: Composed, command: Sequence[str], listener: Listener) -> tuple[RunFolder, LlmPerfError | None]:
    """Fill a new run folder. Returns it with the error that ended the capture early, if one did."""
    runtime_named(composed.config.runtime.type)
    refuse_early([composed.config])
    config = resolve_metrics(composed.config)
    folder = RunFolder.create(composed.run_dir)
    passes = tuple(PassRecord(name) for name in planned_passes(config))
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    folder.write_manifest(Manifest(SCHEMA, __version__, "partial", created, tuple(command), passes, why="The run has not ended."))
    error: LlmPerfError | None = None
    try:
        write_whole(folder.config_file, config_to_yaml(config).encode())
        write_record(folder.env_file, environment(config.hardware.device_index))
        _run_passes(folder, config, listener)
    except LlmPerfError as raised:
        error = raised
    except KeyboardInterrupt as stopped:
        error = interrupted(stopped, "What was captured so far is kept.")
    return folder, _close(folder, error)


def _close(folder: RunFolder, error: LlmPerfError | None) -> LlmPerfError | None:
    """Write the final status. On a full disk run.json keeps saying partial, which is true."""
    try:
        manifest = folder.manifest()
        entries = closed(manifest.passes)
        lost = next((entry for entry in entries if entry.status == "failed"), None)
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


def _run_passes(folder: RunFolder, config: RunConfig, listener: Listener) -> None:
    wanted = planned_passes(config)
    failed: LlmPerfError | None = None
    if "clean" in wanted:
        failed = _run_clean(folder, config, listener, sampled="nvml" in wanted)
    if "ceilings" in wanted:
        failed = _run_ceilings(folder, config, listener) or failed
    steps: dict[str, Callable[[], None]] = {
        "torch": lambda: _run_measured(folder, config, "torch", listener),
        "nsys": lambda: run_nsys(folder, config, listener),
        "ncu_selftest": lambda: run_ncu(folder, config, listener, [name for name in wanted if name.startswith("ncu_")]),
    }
    for name, step in steps.items():
        if name in wanted:
            try:
                step()
            except Interrupted:
                raise
            except LlmPerfError as error:  # the other passes still stand
                failed = failed or error
    if failed is not None:
        raise failed


def _run_ceilings(folder: RunFolder, config: RunConfig, listener: Listener) -> LlmPerfError | None:
    """Like telemetry, a help: where the limits cannot be measured, the run goes on and says so at its end."""
    hardware = config.hardware
    out, log = folder.ceilings_file, folder.log_file("ceilings")
    argv = build_ceilings_argv(
        hardware.device, hardware.device_index, out, refresh=False, threads=hardware.cpu_threads, budget_s=None
    )
    begin_pass(folder, "ceilings", argv)
    entry = PassRecord("ceilings", "started", tuple(argv), tool_version=_framework())
    folder.update_pass(entry)
    begun = time.monotonic()
    try:
        run_ceilings(argv, listener, out=out, log=log)
        found = folder.parsed(out, read_ceilings)
        entry = replace(entry, status="complete", exit_code=0, why="measured before, kept" if found.cached else "")
    except LlmPerfError as error:
        entry = replace(entry, status="failed", why=error.fact, remedy=error.remedy)
        if isinstance(error, Interrupted):
            raise
        return error
    finally:
        folder.update_pass(replace(entry, seconds=round(time.monotonic() - begun, 3)))
    return None


def _run_clean(folder: RunFolder, config: RunConfig, listener: Listener, sampled: bool) -> LlmPerfError | None:
    """The unprofiled pass; its own failure is raised, that of the sampler beside it returned."""
    sampler = _start_sampler(folder, config, listener) if sampled else None
    watcher = sampler if isinstance(sampler, Companion) else None
    lost = sampler if isinstance(sampler, LlmPerfError) else None
    try:
        on_start: Callable[[int], None] = (lambda pid: watcher.tell(str(pid))) if watcher else (lambda _: None)
        _run_measured(folder, config, "clean", listener, on_start)
    finally:
        if watcher is not None:
            lost = _stop_sampler(folder, watcher, listener)
        if folder.clean_inputs_file.exists():  # also of a pass that was interrupted
            inputs = folder.parsed(folder.clean_inputs_file, read_mapping)
            write_whole(folder.inputs_file, yaml.safe_dump(inputs, sort_keys=False, default_flow_style=None).encode())
    return lost


def _run_measured(
    folder: RunFolder,
    config: RunConfig,
    name: str,
    listener: Listener,
    on_start: Callable[[int], None] = lambda _: None,
) -> None:
    """A pass in which the measured process runs by itself."""
    listener.pass_started(name, LABELS[name])
    argv = build_work_argv(folder.config_file, name, folder.raw(name))
    plan = PassPlan(name, argv, config.profiling.pass_timeout_s, _framework())
    run_pass(
        folder, plan, listener, run=plain_run(on_start), check=lambda error: PassOutcome(error or _result_flaw(folder, name))
    )


def _result_flaw(folder: RunFolder, name: str) -> CaptureError | None:
    """What is wrong with the result of a pass that ended well: a runner may leave none, or times that cannot be."""
    try:
        if name == "torch":
            folder.parsed(folder.torch_file, read_torch_pass)
            found = folder.torch_trace_file.is_file()
        else:
            found = bool(folder.parsed(folder.clean_file, read_timings).iterations)
    except ParseError as error:
        why = error.fact
    else:
        if found:
            return None
        why = "It has no trace." if name == "torch" else "It has no measured iteration."
    return CaptureError(
        f"The pass {name} ({LABELS[name]}) ended, but left no result that can be used: {why}",
        f"See {folder.log_file(name)}; a runner of your own must hold to what docs/runtimes.md asks of it.",
    )


def _framework() -> str:
    return f"torch {packages().get('torch', 'not installed')}"


def _start_sampler(folder: RunFolder, config: RunConfig, listener: Listener) -> Companion | LlmPerfError:
    """Telemetry is a help, not the measurement: where it cannot start, the run goes on and says so at its end."""
    gpus = Missing("asked for the CPU") if config.hardware.device == "cpu" else gpu_count()
    gpu = "none" if isinstance(gpus, Missing) or gpus == 0 else str(config.hardware.device_index)
    argv = [sys.executable, "-m", nvml.__name__, "--out", str(folder.telemetry_file)]
    argv += ["--interval", str(config.profiling.nvml.interval_s), "--gpu", gpu]
    begin_pass(folder, "nvml", argv)
    entry = PassRecord("nvml", "started", tuple(argv))
    folder.update_pass(entry)
    try:
        return Companion(argv, folder.log_file("nvml"), nvml.READY)
    except CaptureError as error:
        entry = replace(entry, status="failed", why=error.fact, remedy=error.remedy)
        folder.update_pass(entry)
        listener.pass_ended(entry)
        return error


def _stop_sampler(folder: RunFolder, sampler: Companion, listener: Listener) -> LlmPerfError | None:
    finished = sampler.stop()
    error: LlmPerfError | None = None
    if finished.exit_code != 0:
        error = CaptureError(f"The sampler ended with exit code {finished.exit_code}.", f"See {folder.log_file('nvml')}.")
    status: PassStatus = "complete" if error is None else "failed"
    why, remedy = (error.fact, error.remedy) if error else ("", "")
    seconds = round(finished.seconds, 3)
    entry = PassRecord("nvml", status, sampler.argv, finished.exit_code, seconds, why=why, remedy=remedy)
    folder.update_pass(entry)
    listener.pass_ended(entry)
    return error
