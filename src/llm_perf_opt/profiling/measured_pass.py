"""The passes without a vendor's tool: telemetry, the unprofiled pass or program, the measured peaks, torch.profiler."""

from llm_perf_opt.config.passes import EVERY_STAGE, Pass, is_there
from llm_perf_opt.traces.pass_records import read_timings, read_torch_pass

PASSES = (
    Pass("nvml", "telemetry", 10, wanted=lambda config: config.profiling.nvml.enable and config.profiling.clean),
    Pass(
        "clean",
        "unprofiled reference",
        20,
        "llm_perf_opt.profiling.measured_process:launch",
        lambda config: config.profiling.clean,
        leaves={"timings.json": read_timings},
        measured=lambda timings: bool(timings.iterations),
        stages=EVERY_STAGE,
        essential=True,
    ),
    Pass(
        "program",
        "the unprofiled program",
        20,
        "llm_perf_opt.profiling.measured_process:launch_program",
        lambda _: False,
        essential=True,
        programs=True,
    ),
    Pass(
        "ceilings",
        "measured peaks",
        25,
        "llm_perf_opt.profiling.ceilings:launch",
        lambda config: config.profiling.ceilings and config.profiling.clean,
    ),
    Pass(
        "torch",
        "torch.profiler",
        30,
        "llm_perf_opt.profiling.measured_process:launch_torch",
        lambda config: config.profiling.torch.enable,
        leaves={"operators.json": read_torch_pass, "trace.json.gz": is_there},
        trace="trace.json.gz",
        tool="torch.profiler",
        stages=EVERY_STAGE,
        programs=True,
    ),
)
