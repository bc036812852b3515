"""The counters' self-test: a GEMM and a copy of known size, counted before any other figure is believed."""

from pathlib import Path

from llm_perf_opt.config import RunConfig
from llm_perf_opt.listener import Listener
from llm_perf_opt.run_folder import RunFolder


def run_selftest(folder: RunFolder, config: RunConfig, listener: Listener, ncu: Path, version: str, chip: str) -> None:
    """Count what is known."""
    raise NotImplementedError
