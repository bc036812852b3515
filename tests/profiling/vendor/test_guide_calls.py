"""`build_nsys_cmd`, `build_ncu_cmd` and `build_work_argv`, called as the profiling guides call them."""

import sys
from pathlib import Path

import pytest

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.counters.catalog import chips, problem
from llm_perf_opt.profiling.vendor import guide_calls
from llm_perf_opt.profiling.vendor.launch import build_work_argv
from llm_perf_opt.profiling.vendor.ncu import DEFAULT_METRICS, build_ncu_cmd
from llm_perf_opt.profiling.vendor.nsys import build_nsys_cmd

OUT = Path("tmp/stage2/a")
WORK = build_work_argv("llm_perf_opt.runners.llm_profile_runner", ["model=tiny", "hydra.job.chdir=true"])
OTHER = ["python", "mine.py"]


@pytest.fixture(autouse=True)
def _no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_calls, "find_tool", lambda _: None)


def value_of(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_the_work_is_this_python_with_the_module_and_its_overrides() -> None:
    module = "llm_perf_opt.runners.llm_profile_runner"
    assert list(WORK) == [sys.executable, "-m", module, "model=tiny", "hydra.job.chdir=true"]
    assert build_work_argv(module=module, overrides=["model=tiny", "hydra.job.chdir=true"]) == WORK
    assert build_work_argv(module, overrides=["model=tiny", "hydra.job.chdir=true"]) == WORK


def test_a_timeline_is_gated_on_the_measured_iteration() -> None:
    argv = build_nsys_cmd(OUT / "nsys" / "run", WORK)
    assert argv[:2] == ["nsys", "profile"]
    assert argv[-len(WORK) :] == WORK
    assert {"--trace=cuda,nvtx,osrt", "--sample=none", "--capture-range=nvtx", "--nvtx-capture=profile@LLM"} <= set(argv)
    assert f"--output={OUT}/nsys/run" in argv


@pytest.mark.parametrize(
    ("written", "gate"),
    [
        ("range@LLM", "profile@LLM"),
        ("range", "profile@LLM"),
        ("decode@LLM", "decode@LLM"),
        ("LLM@decode_all", "decode@LLM"),
        ("decode*", "decode@LLM"),
        ("LLM@prefill", "prefill@LLM"),
    ],
)
def test_a_gate_of_the_guides_is_the_stage_that_it_means(written: str, gate: str) -> None:
    assert f"--nvtx-capture={gate}" in build_nsys_cmd(OUT, WORK, nvtx_capture=written)


def test_every_keyword_of_the_guides_is_honored() -> None:
    argv = build_nsys_cmd(out_base=OUT, work_argv=WORK, trace="cuda,nvtx", sample="process-tree", capture="cudaProfilerApi")
    assert {"--trace=cuda,nvtx", "--sample=process-tree", "--capture-range=cudaProfilerApi"} <= set(argv)
    assert not any(word.startswith("--capture-range") for word in build_nsys_cmd(OUT, WORK, capture="none"))
    with pytest.raises(ConfigError, match="capture"):
        build_nsys_cmd(OUT, WORK, capture="hotkey")


def test_a_range_that_never_occurs_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such range"):
        build_nsys_cmd(OUT, WORK, nvtx_capture="sam@LLM")
    for model in ("deepseek_ocr2", "hf"):
        work = [*WORK, f"model={model}"]
        assert "--nvtx-capture=sam@LLM" in build_nsys_cmd(OUT, work, nvtx_capture="sam@LLM")
        assert "LLM@prefill/sam/" in build_ncu_cmd(OUT, work, nvtx_expr="LLM@prefill/sam/")
    with pytest.raises(ConfigError, match="no such range"):
        build_nsys_cmd(OUT, [*WORK, "model=tiny_vlm"], nvtx_capture="sam@LLM")
    with_stage = [*WORK, "model.substages.sam=model.vision"]
    assert "--nvtx-capture=sam@LLM" in build_nsys_cmd(OUT, with_stage, nvtx_capture="sam@LLM")
    with pytest.raises(ConfigError, match="records nothing"):
        build_nsys_cmd(OUT, OTHER)
    assert "--nvtx-capture=mine@LLM" in build_nsys_cmd(OUT, OTHER, nvtx_capture="mine@LLM")


@pytest.mark.parametrize(
    ("written", "range_"),
    [
        ("decode*", "LLM@decode/decode_step/"),
        ("LLM@decode_all/", "LLM@decode/decode_step/"),
        ("LLM@prefill/", "LLM@prefill/"),
        ("LLM@decode/decode_step/", "LLM@decode/decode_step/"),
    ],
)
def test_counters_are_restricted_to_the_stage(written: str, range_: str) -> None:
    argv = build_ncu_cmd(OUT / "ncu" / "decode", WORK, nvtx_expr=written)
    assert argv[:3] == ["ncu", "--target-processes", "all"]
    assert value_of(argv, "--nvtx-include") == range_
    assert value_of(argv, "--set") == "roofline"
    assert value_of(argv, "--section") == "regex:.*SpeedOfLight.*"
    assert value_of(argv, "--metrics").startswith(DEFAULT_METRICS)
    assert argv[-len(WORK) :] == WORK


def test_a_wildcard_around_another_program_is_refused() -> None:
    with pytest.raises(ConfigError, match="asterisk"):
        build_ncu_cmd(OUT, OTHER, nvtx_expr="decode*")
    assert value_of(build_ncu_cmd(OUT, OTHER, nvtx_expr="LLM@decode_all/"), "--nvtx-include") == "LLM@decode_all/"


@pytest.mark.parametrize("chip", chips())
def test_every_chip_has_the_default_counters(chip: str) -> None:
    assert [name for name in DEFAULT_METRICS.split(",") if problem(chip, name)] == []


def test_tensor_counters_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_calls, "gpu_name", lambda: "NVIDIA H200")
    metrics = value_of(build_ncu_cmd(OUT, WORK, nvtx_expr="decode*"), "--metrics").split(",")
    assert "sm__ops_path_tensor_src_bf16_dst_fp32.sum" in metrics
