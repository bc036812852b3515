"""The nsys command, and how the real nsys handles it."""

import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from command import HANG_S
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.profiling.vendor.gates import CUDA_PROFILER_API, WHOLE_PROGRAM, on_range
from llm_perf_opt.profiling.vendor.launch import Callbacks
from llm_perf_opt.profiling.vendor.nsys import NsysRequest, build_nsys_cmd
from llm_perf_opt.profiling.vendor.probe import NsysProbe, probe_nsys
from llm_perf_opt.profiling.vendor.tool_pass import STARTS, ToolLimits, ToolRun, export_nsys, run_tool

WORK = ["python", "work.py"]
PROBE = NsysProbe(
    "nsys", "2023.4.4.54", flags=("--trace-fork-before-exec", "--gpu-metrics-device"), trace_modules=("cuda", "nvtx", "osrt")
)


def command(**options: object) -> list[str]:
    return build_nsys_cmd(Path("/opt/nsys"), Path("/runs/a/run"), WORK, NsysRequest(**options))  # type: ignore[arg-type]


def test_the_measured_iteration_is_recorded_and_the_program_runs_on() -> None:
    argv = command()
    assert argv[:2] == ["/opt/nsys", "profile"]
    assert argv[-2:] == WORK
    for flag in (
        "--capture-range=nvtx", "--nvtx-capture=profile@LLM", "--capture-range-end=stop", "--cuda-graph-trace=node",
        "--sample=none", "--cpuctxsw=none", "--force-overwrite=true", "--output=/runs/a/run", "--trace=cuda,nvtx,osrt",
    ):  # fmt: skip
        assert flag in argv


def test_the_other_gates() -> None:
    assert "--capture-range=cudaProfilerApi" in command(gate=CUDA_PROFILER_API)
    assert "--capture-range-end=stop" in command(gate=CUDA_PROFILER_API)
    assert not any(flag.startswith("--capture-range") for flag in command(gate=WHOLE_PROGRAM))
    own = command(gate=on_range("step@App"))
    assert "--nvtx-capture=step@App" in own
    assert any("NSYS_NVTX_PROFILER_REGISTER_ONLY=0" in flag for flag in own), "torch.cuda.nvtx does not register its names"


def test_a_gate_gets_what_it_needs_traced() -> None:
    assert "--trace=osrt,nvtx" in command(trace=["osrt", "osrt"])
    assert "--trace=nvtx,cuda" in command(trace=["nvtx"], gate=CUDA_PROFILER_API)


def test_flags_are_spelled_as_the_tool_spells_them() -> None:
    assert "--trace-fork-before-exec=true" in command(probe=PROBE)
    assert "--trace-fork-before-exec=true" not in command(probe=PROBE, follow_forks=False)
    assert "--trace-fork-before-exec=true" not in command(probe=replace(PROBE, flags=()))
    assert "--gpu-metrics-device=all" in command(probe=PROBE, gpu_metrics=True)
    newer = replace(PROBE, flags=("--gpu-metrics-devices", "--gpu-metrics-device"))
    assert "--gpu-metrics-devices=all" in command(probe=newer, gpu_metrics=True)
    with pytest.raises(ConfigError, match="cannot sample GPU metrics"):
        command(probe=replace(PROBE, flags=()), gpu_metrics=True)


def test_what_cannot_be_traced_is_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match="cannot trace 'nvlink'") as refused:
        command(probe=PROBE, trace=["cuda", "nvlink"])
    assert "cuda, nvtx, osrt" in refused.value.remedy
    with pytest.raises(ConfigError, match="nothing to trace"):
        command(trace=[], gate=WHOLE_PROGRAM)


def test_a_percent_sign_in_a_folder_is_no_macro() -> None:
    argv = build_nsys_cmd(Path("nsys"), Path("/runs/50%h/run"), WORK)
    assert "--output=/runs/50%%h/run" in argv


def test_a_variable_that_nsys_cannot_hand_over_is_refused() -> None:
    with pytest.raises(ConfigError, match="comma"):
        command(app_environment={"TMPDIR": "/a,b"})


# --- the real tool ------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, tempfile, time, nvtx
print("temporary files in", tempfile.gettempdir(), flush=True)
with nvtx.annotate("warmup", domain="LLM"):
    time.sleep(0.05)
with nvtx.annotate("profile", domain="LLM"):
    with nvtx.annotate("decode", domain="LLM"):
        time.sleep(0.2)
with nvtx.annotate("profile", domain="LLM"):
    time.sleep(0.05)
print("ended by itself", flush=True)
"""


def run_real(nsys: Path, folder: Path, argv: list[str]) -> ToolRun:
    return run_tool(
        "nsys",
        argv,
        folder / "run",
        log=folder / "log.txt",
        limits=ToolLimits(timeout_s=HANG_S, max_trace_gb=1, starts=STARTS),
        callbacks=Callbacks(on_message=lambda _: None),
    )


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    return [sys.executable, str(tmp_path / "program.py")]


def test_the_real_nsys_records_the_first_measured_iteration(real_nsys: Path, tmp_path: Path, program: list[str]) -> None:
    folder = tmp_path / "50%h of it"
    folder.mkdir()
    probe = probe_nsys(real_nsys)
    assert not isinstance(probe, Missing)
    run = run_real(
        real_nsys, folder, build_nsys_cmd(real_nsys, folder / "run", program, NsysRequest(probe=probe, trace=["nvtx", "osrt"]))
    )
    log = (folder / "log.txt").read_text()
    assert (run.finished.exit_code, run.problems) == (0, ()), log
    assert run.report == folder / "run.nsys-rep"
    assert "ended by itself" in log, "the program goes on after its range"
    assert f"temporary files in {tmp_path.anchor}" in log
    assert "llm-perf-" not in log.split("temporary files in")[1].splitlines()[0], "the program keeps its own folder for those"

    assert export_nsys(real_nsys, run.report, folder / "run.sqlite", log=folder / "log.txt") == ()
    with sqlite3.connect(folder / "run.sqlite") as database:
        rows = database.execute(
            "SELECT coalesce(text, value), end - start FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId WHERE eventType = 59"
        ).fetchall()
    durations = dict(rows)
    assert set(durations) == {"profile", "decode"}, "what came before is not in it"
    assert len(rows) == 2, "nor the second iteration"
    assert 150e6 < durations["decode"] <= durations["profile"]


def test_a_range_that_never_comes_leaves_no_report_and_exit_code_0(real_nsys: Path, tmp_path: Path, program: list[str]) -> None:
    with pytest.raises(ConfigError, match="range@LLM"):
        build_nsys_cmd(real_nsys, tmp_path / "run", program, NsysRequest(gate=replace(on_range("range@LLM"), ours=True)))
    run = run_real(
        real_nsys, tmp_path, build_nsys_cmd(real_nsys, tmp_path / "run", program, NsysRequest(gate=on_range("range@LLM")))
    )
    assert run.finished.exit_code == 0, "which is why it is refused beforehand"
    assert isinstance(run.report, Missing)
    assert [problem.id for problem in run.problems] == ["no_report"]


def test_the_real_nsys_takes_every_flag(real_nsys: Path, tmp_path: Path) -> None:
    probe = probe_nsys(real_nsys)
    assert not isinstance(probe, Missing)
    for gate in (CUDA_PROFILER_API, WHOLE_PROGRAM, on_range("a@b")):
        argv = build_nsys_cmd(real_nsys, tmp_path / "run", [], NsysRequest(probe=probe, gate=gate))
        for flag in argv[2:]:
            assert flag.partition("=")[0] in probe.flags
    argv = [str(real_nsys), "profile", "--trace=nvlink", f"--output={tmp_path / 'run'}", "true"]
    refused = run_real(real_nsys, tmp_path, argv)
    assert [problem.id for problem in refused.problems] == ["unknown_option"], "NVLink is not among what it traces"
