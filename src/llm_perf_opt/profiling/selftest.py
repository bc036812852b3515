"""The counters' self-test: products and a copy of known size, counted before any other figure is believed."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llm_perf_opt.analysis.kernels.counter_selftest import judge, told_work
from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.core.records import Missing, PassRecord
from llm_perf_opt.core.run_folder import RunFolder, write_record
from llm_perf_opt.counters.roles import roles
from llm_perf_opt.profiling.nsight_passes import NcuAsked, ncu_pass
from llm_perf_opt.profiling.passes import LABELS, Listener, PassPlan
from llm_perf_opt.profiling.vendor.ncu import NcuRequest, build_ncu_cmd
from llm_perf_opt.runners.measure import counter_selftest
from llm_perf_opt.traces.ncu_csv import read_ncu

NAME = "ncu_selftest"


class _Heard:
    """Passes messages on and keeps the one that says what was run."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.ran: dict[str, Any] = {}

    def pass_started(self, name: str, label: str) -> None:
        self._listener.pass_started(name, label)

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        if message.get("event") == counter_selftest.EVENT:
            self.ran = {key: value for key, value in message.items() if key != "event"}
        self._listener.pass_message(name, message)

    def pass_ended(self, entry: PassRecord) -> None:
        self._listener.pass_ended(entry)


@dataclass(frozen=True)
class Tested:
    """Whose counters are tested, and within what."""

    ncu: Path
    version: str
    chip: str
    device_index: int
    timeout_s: float
    max_trace_gb: float


def run_selftest(folder: RunFolder, listener: Listener, tested: Tested) -> None:
    """Count work of known size; a CaptureError where the counts are wrong. Leaves the verdict in the run folder."""
    asked, ncu = roles(tested.chip), tested.ncu
    argv = build_ncu_cmd(
        ncu,
        folder.tool_report(NAME),
        [sys.executable, "-m", counter_selftest.__name__, "--device-index", str(tested.device_index)],
        NcuRequest(
            ranges=[counter_selftest.SELFTEST_RANGE],
            metrics=[*asked.tensor_flops, asked.dram_read_bytes, asked.dram_write_bytes, asked.time_ns],
            ours=False,
        ),
    )
    heard = _Heard(listener)
    heard.pass_started(NAME, LABELS[NAME])
    plan = PassPlan(NAME, argv, tested.timeout_s, tested.version)
    ncu_pass(folder, plan, heard, NcuAsked(ncu, tested.max_trace_gb))
    found = judge(folder.parsed(folder.counters_file(NAME), read_ncu), told_work(heard.ran), asked)
    if isinstance(found, Missing):
        _mark_failed(folder, found.why)
        raise CaptureError(f"The counter self-test tells nothing: {found.why}.", f"See {folder.log_file(NAME)}.")
    write_record(folder.selftest_file, found)
    if not found.passed:
        _mark_failed(folder, found.why)
        raise CaptureError(
            f"The counter self-test failed: {found.why}.",
            "kernels.md shows what was counted. Let nothing else use the GPU and its counters, or try another Nsight Compute.",
        )


def _mark_failed(folder: RunFolder, why: str) -> None:
    entry = folder.manifest().pass_named(NAME)
    if entry is not None:
        folder.update_pass(replace(entry, status="failed", why=why))
