"""The torch.profiler pass: operators, their device time, and a timeline, recorded by the measured process itself."""

from pathlib import Path

from llm_perf_opt.config.passes import EVERY_STAGE, Pass, is_there
from llm_perf_opt.core.records import TorchPass
from llm_perf_opt.core.run_folder import read_record
from llm_perf_opt.profiling.passes import Capture, framework, measured_argv, run_alone


def _launch(capture: Capture) -> None:
    run_alone(capture, "torch", measured_argv(capture, "torch"), framework())


def _operators(path: Path) -> TorchPass:
    return read_record(path, TorchPass)


PASSES = (
    Pass(
        "torch",
        "torch.profiler",
        30,
        _launch,
        lambda config: config.profiling.torch.enable,
        leaves={"operators.json": _operators, "trace.json.gz": is_there},
        trace="trace.json.gz",
        tool="torch.profiler",
        stages=EVERY_STAGE,
    ),
)
