"""Options that a user adds to the commands of nsys and ncu."""

from pathlib import Path

import pytest

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.profiling.vendor.gates import CUDA_PROFILER_API, on_stage
from llm_perf_opt.profiling.vendor.ncu import NcuRequest, build_ncu_cmd
from llm_perf_opt.profiling.vendor.nsys import NsysRequest, build_nsys_cmd
from llm_perf_opt.profiling.vendor.own_options import RESERVED, own_options
from llm_perf_opt.profiling.vendor.probe import NsysProbe, probe_ncu, probe_nsys

EVERYTHING = NcuRequest(
    ranges=["LLM@prefill/"], metrics=["a__b.sum"], sections=["SpeedOfLight"], section_set="full", kernels=["gemm"],
    launch_skip=1, launch_count=2, gate=CUDA_PROFILER_API,
)  # fmt: skip
PROBE = NsysProbe("nsys", "2025.1.1", flags=("--gpu-metrics-devices", "--trace-fork-before-exec"), trace_modules=())


def test_a_value_is_attached_so_that_no_word_can_be_the_program() -> None:
    assert own_options("nsys", ["--gpuctxsw", "true", "--nic-metrics=true"]) == ["--gpuctxsw=true", "--nic-metrics=true"]
    assert own_options("ncu", []) == []


@pytest.mark.parametrize(
    "words",
    [
        ["python", "x.py"],
        ["--gpuctxsw=true", "rm"],
        ["--gpuctxsw", "true", "rm"],
        ["<nsys", "args>"],
        ["-t", "cuda"],
        ["-"],
        ["--"],
    ],
)
def test_what_is_no_long_option_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"profiling\.nsys\.args"):
        own_options("nsys", words)


@pytest.mark.parametrize(
    ("tool", "word", "said"),
    [
        ("nsys", "--output=x", "names the report"),
        ("nsys", "--nvtx-capture=range@LLM", "starts and stops"),
        ("nsys", "--trace=cuda", "profiling.nsys.trace"),
        ("ncu", "--metrics=a", "profiling.metrics.add"),
        ("ncu", "--set=full", "profiling.ncu.set"),
        ("ncu", "--nvtx-include=x", "timeline"),
        ("ncu", "--log-file=x", "log"),
        ("nsys", "--enable=network_interface", "loads code"),
        ("nsys", "--command-file=x", "more options"),
        *(
            ("ncu", f"--{name}=x", "loads code, or more options")
            for name in (
                *("preload-library", "injection-path-32", "injection-path-64", "config-file", "config-file-path"),
                *("section-folder", "section-folder-recursive", "section-folder-restore"),
            )
        ),
    ],
)
def test_options_that_the_tool_needs_are_refused_with_the_reason(tool: str, word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        own_options(tool, [word])  # type: ignore[arg-type]


def test_every_option_of_the_own_commands_is_reserved() -> None:
    nsys = build_nsys_cmd(Path("nsys"), Path("x"), [], NsysRequest(probe=PROBE, gate=on_stage(), gpu_metrics=True))
    for argv, tool in ((nsys, "nsys"), (build_ncu_cmd(Path("ncu"), Path("x"), [], EVERYTHING), "ncu")):
        flags = {word.partition("=")[0] for word in argv if word.startswith("--")}
        assert flags <= RESERVED[tool].keys(), "else an option could be given twice"  # type: ignore[index]


def test_own_options_come_before_the_program() -> None:
    nsys = build_nsys_cmd(Path("nsys"), Path("x"), ["prog"], NsysRequest(args=("--gpuctxsw=true",), sample="process-tree"))
    assert nsys.index("--gpuctxsw=true") < nsys.index("prog")
    assert {"--sample=process-tree", "--cpuctxsw=process-tree"} <= set(nsys)
    asked = NcuRequest(args=("--import-source=yes",), clock_control="base", cache_control="all")
    ncu = build_ncu_cmd(Path("ncu"), Path("x"), ["prog"], asked)
    assert ncu.index("--import-source=yes") < ncu.index("--export")
    assert ncu[ncu.index("--clock-control") + 1] == "base"
    assert ncu[ncu.index("--cache-control") + 1] == "all"


def test_an_option_that_the_tool_does_not_have_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean '--import-source'"):
        own_options("ncu", ["--import-sources=yes"], ("--import-source", "--export"))


def test_most_reserved_options_are_options_of_the_real_tools(real_nsys: Path, real_ncu: Path) -> None:
    for tool, probe in (("nsys", probe_nsys(real_nsys)), ("ncu", probe_ncu(real_ncu))):
        assert not isinstance(probe, Missing)
        known = RESERVED[tool].keys() & set(probe.flags)  # type: ignore[index]
        assert len(known) > 0.6 * len(RESERVED[tool])  # type: ignore[index]


def test_sections_of_each_set_of_the_real_ncu(real_ncu: Path) -> None:
    probe = probe_ncu(real_ncu)
    assert not isinstance(probe, Missing)
    assert probe.set_sections.keys() == set(probe.sets)
    assert 3 <= probe.set_sections["basic"] < probe.set_sections["full"] <= len(probe.sections)
