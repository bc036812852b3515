"""The torch.profiler pass: operators, their device time and a timeline, recorded in the measured process."""

from llm_perf_opt.config.passes import EVERY_STAGE, Pass, is_there
from llm_perf_opt.profiling.passes import run_measured
from llm_perf_opt.traces.pass_records import read_torch_pass

PASSES = (
    Pass(
        "torch",
        "torch.profiler",
        30,
        lambda capture: run_measured(capture, "torch"),
        lambda config: config.profiling.torch.enable,
        leaves={"operators.json": read_torch_pass, "trace.json.gz": is_there},
        trace="trace.json.gz",
        tool="torch.profiler",
        stages=EVERY_STAGE,
    ),
)
