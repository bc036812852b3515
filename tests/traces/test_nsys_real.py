"""The real nsys records a small script with our ranges, and its export is read."""

import json
import sys
import time
from pathlib import Path

import pytest

from command import HANG_S
from llm_perf_opt.analysis.regions.regions import regions
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.profiling.vendor.launch import Callbacks
from llm_perf_opt.profiling.vendor.nsys import build_nsys_cmd
from llm_perf_opt.profiling.vendor.tool_pass import STARTS, ToolLimits, export_nsys, run_tool
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.health import Expected, examined
from llm_perf_opt.traces.nsys_sqlite import read_nsys
from llm_perf_opt.traces.projection import project
from rendered import regions_page

SCRIPT = """
import json, sys, threading, time
import nvtx

times = {"inner": [], "outer": []}

def timed(name, work):
    outer = time.perf_counter_ns()
    with nvtx.annotate(name, domain="LLM"):
        inner = time.perf_counter_ns()
        work()
        inner = time.perf_counter_ns() - inner
    times["inner"].append([name, inner])
    times["outer"].append([name, time.perf_counter_ns() - outer])

def steps():
    for _ in range(4):
        timed("decode_step", lambda: time.sleep(0.02))

def iteration():
    timed("prefill", lambda: time.sleep(0.05))
    free = nvtx.start_range("request", domain="LLM")
    with nvtx.annotate("unnamed domain"):
        timed("decode", steps)
    nvtx.end_range(free)

for number in range(2):
    times = {"inner": [], "outer": []}
    timed("profile", iteration)
    if number == 0:
        json.dump(times, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def recorded(real_nsys: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[tuple[str, int]]], float]:
    """Return the export, the times that the script measured, and when it was started."""
    folder = tmp_path_factory.mktemp("nsys")
    (folder / "tiny.py").write_text(SCRIPT)
    began = time.time()
    program = [sys.executable, str(folder / "tiny.py"), str(folder / "times.json")]
    log = folder / "log.txt"
    run = run_tool(
        "nsys",
        build_nsys_cmd(real_nsys, folder / "run", program),
        folder / "run",
        log=log,
        limits=ToolLimits(timeout_s=HANG_S, max_trace_gb=1, starts=STARTS),
        callbacks=Callbacks(on_message=lambda _: None),
    )
    assert (run.finished.exit_code, run.problems) == (0, ()), log.read_text()
    assert isinstance(run.report, Path)
    export_nsys(real_nsys, run.report, folder / "run.sqlite", log=log)
    return folder / "run.sqlite", json.loads((folder / "times.json").read_text()), began


@pytest.fixture(scope="module")
def trace(recorded: tuple[Path, dict[str, list[tuple[str, int]]], float]) -> Trace:
    expected = Expected(
        ranges=("profile", "prefill", "decode", "decode_step"),
        command="tiny.py",
        started_after_utc_ns=int((recorded[2] - 60) * 1e9),
        started_before_utc_ns=int((time.time() + 60) * 1e9),
    )
    return examined(read_nsys(recorded[0]), expected)


def test_the_recorded_iteration_is_there_with_its_nesting(trace: Trace) -> None:
    assert trace.problems == ()
    projection = project(trace)
    paths = ["/".join(projection.path_names(int(path))) for path in projection.path]
    decode = "LLM@profile/unnamed domain/LLM@decode"
    outer = ["LLM@profile", "LLM@profile/LLM@prefill", "LLM@profile/unnamed domain", "LLM@request", decode]
    assert sorted(paths) == sorted([*outer, *[f"{decode}/LLM@decode_step"] * 4])
    assert trace.facts["tool_version"].split(".")[0].isdigit()
    assert "tiny.py" in trace.facts["command"]


def test_range_times_lie_between_what_the_script_measured_inside_and_around_them(
    trace: Trace, recorded: tuple[Path, dict[str, list[tuple[str, int]]], float]
) -> None:
    measured = recorded[1]
    for name in ("profile", "prefill", "decode", "decode_step"):
        found = [
            int(end - start)
            for start, end, label in zip(trace.ranges.start_ns, trace.ranges.end_ns, trace.ranges.name, strict=True)
            if trace.name_of(label) == name
        ]
        inner = [ns for label, ns in measured["inner"] if label == name]
        outer = [ns for label, ns in measured["outer"] if label == name]
        assert len(found) == len(inner)
        for ns, least, most in zip(found, inner, outer, strict=True):
            assert least * 0.99 <= ns <= most * 1.01  # two clocks; nsys counts with the processor's


def test_its_regions_page_has_every_region(trace: Trace) -> None:
    page = regions_page(regions(trace))
    assert "no device work" in page
    assert "| profile/unnamed domain/decode/decode_step | 4 |" in page
    assert "| LLM@request | 1 |" in page


def test_the_report_itself_is_refused_with_the_way_to_export_it(
    recorded: tuple[Path, dict[str, list[tuple[str, int]]], float],
) -> None:
    with pytest.raises(ParseError, match="not exported") as refused:
        read_nsys(recorded[0].with_suffix(".nsys-rep"))
    assert "nsys export --type sqlite" in refused.value.remedy
