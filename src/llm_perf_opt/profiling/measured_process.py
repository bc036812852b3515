"""Launch the measured process: unprofiled with the telemetry sampler next to it, or under torch.profiler; or a user's program."""

from dataclasses import replace
from typing import Any

import yaml

from llm_perf_opt.config.parallel import devices_used
from llm_perf_opt.core.errors import CaptureError, LlmPerfError
from llm_perf_opt.core.processes import module_argv
from llm_perf_opt.core.records import Missing, PassRecord
from llm_perf_opt.core.run_folder import RunFolder, read_mapping
from llm_perf_opt.profiling import python_program
from llm_perf_opt.profiling.passes import Capture, PassPlan, Run, begin_pass, plain_run, run_alone, run_measured
from llm_perf_opt.profiling.vendor.child import OnMessage
from llm_perf_opt.profiling.vendor.launch import Companion, Finished
from llm_perf_opt.runners.measure import nvml
from llm_perf_opt.runners.measure.gpu import gpu_count


def launch(capture: Capture) -> None:
    """Run the pass; raise its error, or the sampler's if the pass succeeded."""
    folder = capture.folder
    sampler = _start_sampler(capture) if "nvml" in capture.names else None
    sampler_error = sampler if isinstance(sampler, LlmPerfError) else None
    try:
        run = plain_run(lambda pid: sampler.tell(str(pid)) if isinstance(sampler, Companion) else None)
        told = _telling(run, sampler) if isinstance(sampler, Companion) else run
        run_measured(capture, "clean", run=told)
    finally:
        if isinstance(sampler, Companion):
            sampler_error = _stop_sampler(capture, sampler)
        if folder.clean_inputs_file.exists():  # also after an interruption
            inputs = folder.parsed(folder.clean_inputs_file, read_mapping)
            folder.write(folder.inputs_file, yaml.safe_dump(inputs, sort_keys=False, default_flow_style=None).encode())
    if sampler_error is not None:
        raise sampler_error


def _telling(run: Run, sampler: Companion) -> Run:
    """Return a `Run` that tells the sampler which processes the child has started: ranks, or workers of an engine."""

    def told(plan: PassPlan, folder: RunFolder, on_message: OnMessage) -> Finished:
        def listen(message: dict[str, Any]) -> None:
            if message.get("event") == "workers":
                sampler.tell(" ".join(f"+{pid}" for pid in message.get("pids", ()) if isinstance(pid, int)))
            on_message(message)

        return run(plan, folder, listen)

    return told


def launch_program(capture: Capture) -> None:
    """Run the user's program unprofiled."""
    run_alone(capture, "program", capture.work("program"))


def launch_torch(capture: Capture) -> None:
    """Run the torch.profiler pass, which the measured process records itself; a user's program is wrapped."""
    if capture.program:
        python_program.launch(capture)
    else:
        run_measured(capture, "torch")


def _start_sampler(capture: Capture) -> Companion | LlmPerfError:
    """Start the sampler. Telemetry is optional: if it cannot start, the run continues and reports the error at its end."""
    folder = capture.folder
    gpus = Missing("the run is on the CPU") if capture.device == "cpu" else gpu_count()
    used = devices_used(capture.config) if capture.config else 1
    wanted = range(capture.device_index, capture.device_index + used)
    gpu = "none" if isinstance(gpus, Missing) or gpus == 0 else ",".join(map(str, wanted))
    argv = module_argv(nvml.__name__, "--out", str(folder.telemetry_file))
    argv += ["--interval", str(capture.profiling.nvml.interval_s), "--gpu", gpu]
    argv += ["--prometheus", capture.profiling.nvml.prometheus] if capture.profiling.nvml.prometheus else []
    begin_pass(folder, "nvml", argv)
    entry = PassRecord("nvml", "started", tuple(argv))
    folder.update_pass(entry)
    try:
        return Companion(argv, folder.log_file("nvml"), nvml.READY)
    except CaptureError as error:
        _end(capture, replace(entry, status="failed", why=error.fact, remedy=error.remedy))
        return error


def _stop_sampler(capture: Capture, sampler: Companion) -> LlmPerfError | None:
    finished = sampler.stop()
    entry = PassRecord("nvml", "complete", sampler.argv, finished.exit_code, round(finished.seconds, 3))
    if finished.exit_code == 0:
        _end(capture, entry)
        return None
    log = capture.folder.log_file("nvml")
    error = CaptureError(f"The sampler ended with exit code {finished.exit_code}.", f"See {log}.")
    _end(capture, replace(entry, status="failed", why=error.fact, remedy=error.remedy))
    return error


def _end(capture: Capture, entry: PassRecord) -> None:
    capture.folder.update_pass(entry)
    capture.listener.pass_ended(entry)
