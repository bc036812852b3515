"""The ncu command, and how the real ncu handles it."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command import HANG_S
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.stages import Stage, ncu_range
from llm_perf_opt.profiling.vendor.gates import CUDA_PROFILER_API, on_stage
from llm_perf_opt.profiling.vendor.launch import Callbacks
from llm_perf_opt.profiling.vendor.ncu import NcuRequest, asked_counters, build_ncu_cmd, kernel_filter
from llm_perf_opt.profiling.vendor.probe import probe_ncu
from llm_perf_opt.profiling.vendor.tool_pass import ToolLimits, run_tool

WORK = ["python", "work.py"]
STEP = ncu_range(Stage.DECODE_STEP)


def command(**options: object) -> list[str]:
    return build_ncu_cmd(Path("/opt/ncu"), Path("/runs/a/run"), WORK, NcuRequest(**options))  # type: ignore[arg-type]


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_counters_of_chosen_kernels_of_a_stage() -> None:
    argv = command(
        ranges=[STEP, "LLM@prefill/"], metrics=["gpu__time_duration.sum", "dram__bytes_read.sum"], kernels=["gemm", "gemv<2>"],
        launch_skip=12, launch_count=3,
    )  # fmt: skip
    assert argv[0] == "/opt/ncu"
    assert argv[-2:] == WORK
    assert [argv[i + 1] for i, flag in enumerate(argv) if flag == "--nvtx-include"] == [STEP, "LLM@prefill/"]
    assert "--nvtx" in argv
    assert value(argv, "--metrics") == "gpu__time_duration.sum,dram__bytes_read.sum"
    assert value(argv, "--kernel-name") == "regex:^(gemm|gemv<2>)$"
    assert value(argv, "--kernel-name-base") == "function"
    assert (value(argv, "--launch-skip"), value(argv, "--launch-count")) == ("12", "3")
    assert (value(argv, "--clock-control"), value(argv, "--cache-control")) == ("none", "none")
    assert value(argv, "--target-processes") == "all"
    assert value(argv, "--export") == "/runs/a/run"
    assert "--force-overwrite" in argv
    assert "--set" not in argv, "metrics alone: nothing else is collected"


def test_what_was_not_asked_for_is_not_said() -> None:
    argv = command()
    for flag in ("--nvtx", "--metrics", "--section", "--kernel-name", "--launch-skip", "--launch-count", "--profile-from-start"):
        assert flag not in argv


def test_sections_sets_and_the_profiler_api() -> None:
    argv = command(sections=["SpeedOfLight", "Occupancy"], section_set="basic", gate=CUDA_PROFILER_API, replay="application")
    assert [argv[i + 1] for i, flag in enumerate(argv) if flag == "--section"] == ["SpeedOfLight", "Occupancy"]
    assert value(argv, "--set") == "basic"
    assert value(argv, "--profile-from-start") == "off"
    assert value(argv, "--replay-mode") == "application"


@pytest.mark.parametrize(
    "options",
    [
        {"ranges": ["decode*"]},
        {"ranges": ["decode@LLM"]},
        {"gate": on_stage()},
        {"metrics": ["a,b"]},
        {"metrics": [""]},
        {"launch_skip": -1},
        {"launch_count": 0},
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        command(**options)


@given(st.lists(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), min_size=1), min_size=1))
def test_the_filter_matches_exactly_the_names(names: list[str]) -> None:
    pattern = re.compile(kernel_filter(names).removeprefix("regex:"))
    assert all(pattern.search(name) for name in names)
    for name in names:
        assert (name + "x" in names) == bool(pattern.search(name + "x"))


# --- the real tool ------------------------------------------------------------------------------------------------------


def test_the_real_ncu_takes_every_flag_and_a_program_without_kernels_is_named(real_ncu: Path, tmp_path: Path) -> None:
    probe = probe_ncu(real_ncu)
    assert not isinstance(probe, Missing)
    argv = build_ncu_cmd(
        real_ncu,
        tmp_path / "run",
        [sys.executable, "-c", "print('ran')"],
        NcuRequest(
            ranges=[STEP],
            metrics=["gpu__time_duration.sum"],
            sections=["SpeedOfLight"],
            section_set="basic",
            kernels=["gemm.*"],
            launch_skip=2,
            launch_count=1,
            gate=CUDA_PROFILER_API,
        ),
    )
    assert {flag for flag in argv if flag.startswith("--")} <= set(probe.flags)
    run = run_tool(
        "ncu",
        argv,
        tmp_path / "run",
        log=tmp_path / "log.txt",
        limits=ToolLimits(timeout_s=HANG_S, max_trace_gb=1),
        callbacks=Callbacks(on_message=lambda _: None),
    )
    found = {problem.id for problem in run.problems}
    assert "no_kernels" in found, (tmp_path / "log.txt").read_text()
    assert not found & {"unknown_option", "unknown_section", "unknown_metric"}
    assert isinstance(run.report, Missing)


def test_the_real_ncu_refuses_a_bare_pattern_and_we_say_why(real_ncu: Path, tmp_path: Path) -> None:
    argv = build_ncu_cmd(real_ncu, tmp_path / "run", ["/bin/true"], NcuRequest(sections=[".*SpeedOfLight.*"]))
    run = run_tool(
        "ncu",
        argv,
        tmp_path / "run",
        log=tmp_path / "log.txt",
        limits=ToolLimits(timeout_s=HANG_S, max_trace_gb=1),
        callbacks=Callbacks(on_message=lambda _: None),
    )
    assert run.finished.exit_code == 1
    assert [problem.id for problem in run.problems] == ["unknown_section"]
    assert "regex:" in run.problems[0].remedy


def test_what_was_asked_for_is_read_back_and_a_programs_own_words_are_not() -> None:
    program = ["prog", "--section", "mine", "--metrics", "mine.sum", "--set", "full"]
    asked = asked_counters(build_ncu_cmd(Path("ncu"), Path("x"), program, NcuRequest(metrics=["a__b.sum", "c__d.avg"])))
    assert (asked.metrics, asked.whole_groups) == (("a__b.sum", "c__d.avg"), False)
    for collect in ({"sections": ["SpeedOfLight"]}, {"section_set": "basic"}, {"metrics": ["breakdown:a__throughput.avg"]}, {}):
        asked = asked_counters(build_ncu_cmd(Path("ncu"), Path("x"), program, NcuRequest(**collect)))
        assert (asked.metrics, asked.whole_groups) == ((), True), "only the tool knows what is in these"
