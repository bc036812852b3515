"""Plans the passes of a run, launches each in a process of its own, and keeps what they leave."""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from llm_perf_opt import __version__
from llm_perf_opt.ceilings import build_ceilings_argv, run_ceilings
from llm_perf_opt.composition import Composed, config_to_yaml
from llm_perf_opt.config import RunConfig
from llm_perf_opt.errors import CaptureError, Interrupted, LlmPerfError, ResourceError
from llm_perf_opt.listener import Listener
from llm_perf_opt.profiling import nvml
from llm_perf_opt.profiling.gpu import gpu_count
from llm_perf_opt.profiling.vendor import ncu, nsys
from llm_perf_opt.profiling.vendor.child import told_error, verdict
from llm_perf_opt.profiling.vendor.compatibility import check_ranges_visible
from llm_perf_opt.profiling.vendor.launch import Companion, Finished, build_work_argv, run_child
from llm_perf_opt.profiling.vendor.logs import log_error
from llm_perf_opt.profiling.vendor.ncu import build_ncu_cmd
from llm_perf_opt.profiling.vendor.nsys import build_nsys_cmd
from llm_perf_opt.profiling.vendor.permission import counter_permission, permission_error
from llm_perf_opt.profiling.vendor.probe import find_tool, probe_nsys, tool_version
from llm_perf_opt.profiling.vendor.tool_pass import run_tool
from llm_perf_opt.provenance import environment, packages
from llm_perf_opt.records import SCHEMA, Manifest, Missing, PassRecord, PassStatus, RunStatus
from llm_perf_opt.run_folder import RunFolder, read_record, write_record, write_whole
from llm_perf_opt.stages import Stage, ncu_range

LABELS = {
    "clean": "unprofiled reference",
    "nvml": "telemetry",
    "torch": "torch.profiler",
    "nsys": "Nsight Systems",
    "ncu": "Nsight Compute",
}

_WRAPPED = {"nsys": nsys.REPORT_ENDING, "ncu": ncu.REPORT_ENDING}
"""Passes in which an outside tool runs the measured process, with the ending of what it leaves."""


def planned_passes(config: RunConfig) -> tuple[str, ...]:
    """The passes this configuration asks for, in their order."""
    asked = config.profiling
    passes = {
        "nvml": asked.nvml.enable and asked.clean,  # it watches the unprofiled pass
        "clean": asked.clean,
        "ceilings": asked.ceilings and asked.clean,  # a limit is of use only beside a time
        "torch": asked.torch.enable,
        "nsys": asked.nsys.enable,
        "ncu": asked.ncu.enable,
    }
    return tuple(name for name, wanted in passes.items() if wanted)


def _pass_argv(folder: RunFolder, config: RunConfig, name: str) -> list[str]:
    """The whole command of a pass; a ResourceError where its tool is not here."""
    if name not in _WRAPPED:
        return build_work_argv(folder.config_file, name, folder.raw(name))
    tool = find_tool(name)
    if tool is None:
        raise ResourceError(
            f"{LABELS[name]} was asked for, but there is no {name} on the PATH or in the usual folders.",
            f"Install it, name the binary in the variable {name.upper()}, or choose profiling=minimal; see `llm-perf doctor`.",
        )
    gpus = gpu_count()
    if name == "ncu" and (isinstance(gpus, Missing) or gpus == 0 or config.hardware.device == "cpu"):
        raise ResourceError(
            "Nsight Compute counts what GPU kernels do, and this run has no NVIDIA GPU.", "Choose profiling=nsys or minimal."
        )
    allowed = counter_permission()
    if name == "ncu" and allowed.status == "denied":
        raise permission_error(allowed.why)
    work = build_work_argv(folder.config_file, "plain", folder.raw(name))
    if name == "nsys":
        probe = probe_nsys(tool)
        if isinstance(probe, Missing):
            raise ResourceError(f"Nsight Systems cannot be used: {probe.why}.", "See `llm-perf doctor`.")
        check_ranges_visible(probe.version)
        return build_nsys_cmd(tool, folder.tool_report(name), work, probe=probe)
    ranges = [ncu_range(Stage.DECODE_STEP)]
    return build_ncu_cmd(tool, folder.tool_report(name), work, ranges=ranges, launch_count=config.profiling.ncu.launches)


def capture(composed: Composed, command: Sequence[str], listener: Listener) -> tuple[RunFolder, LlmPerfError | None]:
    """Fill a new run folder. Returns it with the error that ended the capture early, if one did."""
    folder = RunFolder.create(composed.run_dir)
    passes = tuple(PassRecord(name) for name in planned_passes(composed.config))
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    folder.write_manifest(Manifest(SCHEMA, __version__, "partial", created, tuple(command), passes, why="The run has not ended."))
    error: LlmPerfError | None = None
    try:
        write_whole(folder.config_file, config_to_yaml(composed.config).encode())
        write_record(folder.env_file, environment(composed.config.hardware.device_index))
        _run_passes(folder, composed.config, listener)
    except LlmPerfError as raised:
        error = raised
    except KeyboardInterrupt:
        error = Interrupted("Interrupted.", "What was captured so far is kept.")
    return folder, _close(folder, error)


def _close(folder: RunFolder, error: LlmPerfError | None) -> LlmPerfError | None:
    """Write the final status. On a full disk run.json keeps saying partial, which is true."""
    try:
        manifest = folder.manifest()
        entries = tuple(
            replace(entry, status="skipped", why="The run ended before this pass.") if entry.status == "pending" else entry
            for entry in manifest.passes
        )
        lost = next((entry for entry in entries if entry.status == "failed"), None)
        kept = folder.clean_file.exists() or any(entry.status == "complete" and entry.name != "nvml" for entry in entries)
        status: RunStatus = "complete"
        if error is not None or lost is not None:
            status = "partial" if kept else "failed"
        if isinstance(error, Interrupted) and not kept:
            error = Interrupted("Interrupted.", "Nothing had been captured yet.")
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
    for name in wanted:
        if name not in ("clean", "nvml", "ceilings"):
            try:
                _run_pass(folder, config, name, listener)
            except (CaptureError, ResourceError) as error:  # the other passes still stand
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
    _prepare(folder, "ceilings", argv)
    entry = PassRecord("ceilings", "started", tuple(argv), tool_version=_tool_version("ceilings", argv))
    folder.update_pass(entry)
    begun = time.monotonic()
    try:
        found = run_ceilings(argv, listener, out=out, log=log)
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
        _run_pass(folder, config, "clean", listener, on_start)
    finally:
        if watcher is not None:
            lost = _stop_sampler(folder, watcher, listener)
        if folder.clean_inputs_file.exists():  # also of a pass that was interrupted
            inputs = read_record(folder.clean_inputs_file, dict)
            write_whole(folder.inputs_file, yaml.safe_dump(inputs, sort_keys=False, default_flow_style=None).encode())
    return lost


def _run_pass(
    folder: RunFolder,
    config: RunConfig,
    name: str,
    listener: Listener,
    on_start: Callable[[int], None] = lambda _: None,
) -> None:
    listener.pass_started(name, LABELS[name])
    try:
        argv = _pass_argv(folder, config, name)
    except ResourceError as absent:
        entry = PassRecord(name, "skipped", why=absent.fact, remedy=absent.remedy)
        folder.update_pass(entry)
        listener.pass_ended(entry)
        raise
    _prepare(folder, name, argv)
    entry = PassRecord(name, "started", tuple(argv), tool_version=_tool_version(name, argv))
    folder.update_pass(entry)
    said: list[LlmPerfError] = []

    def hear(message: dict[str, Any]) -> None:
        error = told_error(message)
        if error is not None:
            said.append(error)
        listener.pass_message(name, message)

    try:
        log, timeout_s, complaint = folder.log_file(name), config.profiling.pass_timeout_s, None
        if name in _WRAPPED:
            run = run_tool(
                "nsys" if name == "nsys" else "ncu",
                argv,
                folder.tool_report(name),
                log=log,
                timeout_s=timeout_s,
                max_trace_gb=config.profiling.max_trace_gb,
                on_message=hear,
                on_start=on_start,
            )
            finished, complaint = run.finished, log_error(run.problems)
        else:
            finished = run_child(argv, log=log, timeout_s=timeout_s, on_message=hear, on_start=on_start)
        error = _verdict(name, finished, said, folder, complaint)
    except LlmPerfError as raised:
        finished, error = None, raised
    entry = replace(
        entry,
        status="complete" if error is None else "failed",
        exit_code=finished.exit_code if finished else None,
        seconds=round(finished.seconds, 3) if finished else None,
        why=error.fact if error else "",
        remedy=error.remedy if error else "",
    )
    folder.update_pass(entry)
    listener.pass_ended(entry)
    if error is not None:
        raise error


def _verdict(
    name: str, finished: Finished, said: list[LlmPerfError], folder: RunFolder, complaint: LlmPerfError | None
) -> LlmPerfError | None:
    """What a pass's end means."""
    error = verdict(
        f"The {LABELS[name]} pass",
        finished,
        said,
        folder.log_file(name),
        limit="profiling.pass_timeout_s",
        longer="Raise profiling.pass_timeout_s, or measure less.",
        smaller="try a smaller model, batch or prompt.",
    )
    if error is not None and (said or finished.stopped or finished.timed_out):
        return error
    return complaint or error or _missing_report(name, folder)  # a tool's own words say more than its exit code


def _tool_version(name: str, argv: Sequence[str]) -> str:
    """Of the outside tool, or of the framework that the measured process uses."""
    return tool_version(Path(argv[0])) or "" if name in _WRAPPED else f"torch {packages().get('torch', 'not installed')}"


def _missing_report(name: str, folder: RunFolder) -> LlmPerfError | None:
    """The Nsight tools can end well and leave nothing: a range that never came, a counter that may not be read."""
    if name not in _WRAPPED or folder.tool_report(name).with_suffix(_WRAPPED[name]).exists():
        return None
    return CaptureError(f"{LABELS[name]} ended without an error and wrote no report.", f"See {folder.log_file(name)}.")


def _start_sampler(folder: RunFolder, config: RunConfig, listener: Listener) -> Companion | LlmPerfError:
    """Telemetry is a help, not the measurement: where it cannot start, the run goes on and says so at its end."""
    gpus = Missing("asked for the CPU") if config.hardware.device == "cpu" else gpu_count()
    gpu = "none" if isinstance(gpus, Missing) or gpus == 0 else str(config.hardware.device_index)
    argv = [sys.executable, "-m", nvml.__name__, "--out", str(folder.telemetry_file)]
    argv += ["--interval", str(config.profiling.nvml.interval_s), "--gpu", gpu]
    _prepare(folder, "nvml", argv)
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


def _prepare(folder: RunFolder, name: str, argv: Sequence[str]) -> None:
    write_whole(folder.command_file(name), (shlex.join(argv) + "\n").encode())
