"""The metrics that profilers collect: errors are raised before anything starts, and nothing is dropped silently."""

from pathlib import Path

import pytest

from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.counters.manifest import resolve
from llm_perf_opt.counters.set_file import shipped_sets
from llm_perf_opt.profiling import requested_metrics as asked_metrics
from llm_perf_opt.profiling.requested_metrics import dropped_notes, nsys_traces, resolve_metrics, sections_of
from llm_perf_opt.profiling.vendor.compatibility import Permission
from llm_perf_opt.profiling.vendor.probe import NsysProbe
from llm_perf_opt.workflows.sweep import plan_sweep

PROBE = NsysProbe("nsys", "2023.4.4", flags=("--gpu-metrics-device",), trace_modules=("cuda", "nvtx", "osrt", "cudnn"))


@pytest.mark.parametrize(
    ("overrides", "preset"),
    [
        ([], "minimal"),
        (["profiling.metrics.sets=[ch13]"], "default"),
        (["profiling.metrics.sets=[ch13]", "profiling.torch.preset=max"], "max"),
        (["profiling.metrics.sets=[ch09]", "profiling.torch.preset=default"], "default"),
    ],
)
def test_the_richest_torch_preset_asked_for_is_recorded(overrides: list[str], preset: str) -> None:
    assert resolve_metrics(compose(overrides).config).profiling.torch.preset == preset


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("profiling.metrics.sets=[rooflin]", "Did you mean 'roofline'"),
        ("profiling.regions.include=['regex:(']", "regular expression"),
        ("profiling.regions.kernels_exclude=['regex:[']", "regular expression"),
    ],
)
def test_a_wrong_set_or_pattern_is_refused_whatever_passes_are_asked_for(asked: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        resolve_metrics(compose([asked, "profiling=minimal"]).config)


def test_a_wrong_counter_of_the_last_point_of_a_sweep_is_told_before_the_first_runs() -> None:
    with pytest.raises(ConfigError, match="flop_count_xx"):
        plan_sweep(["profiling=full", "profiling.metrics.add=[],[flop_count_xx]"], None)


def test_a_section_the_tool_lacks_is_dropped_and_told(real_ncu: Path) -> None:
    assert dropped_notes(resolve(["ch09"], chip="gh100", known_sections=("SpeedOfLight",))) == (
        "Not collected: section SpeedOfLight_RooflineChart (ch09): the installed Nsight Compute has no section of that name.",
    )
    for name in shipped_sets():
        assert not any(
            "section" in sentence
            for sentence in dropped_notes(resolve([name], chip="gh100", known_sections=sections_of(real_ncu)))
        )


def test_traces_that_cannot_be_had_cost_themselves_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = resolve(["ch13"], chip="gh100")
    monkeypatch.setattr(asked_metrics, "counter_permission", lambda: Permission("ok", ""))
    found = nsys_traces(metrics, PROBE, gpu=True)
    assert (found.modules, found.gpu_metrics) == (("cuda", "nvtx", "osrt", "cudnn"), True)
    assert found.note == "nsys 2023.4.4 cannot trace cublas."
    assert "on the CPU" in nsys_traces(metrics, PROBE, gpu=False).note
    assert "no option" in nsys_traces(metrics, NsysProbe("nsys", "2021.1.1"), gpu=True).note
    monkeypatch.setattr(asked_metrics, "counter_permission", lambda: Permission("denied", "administrators only"))
    refused = nsys_traces(metrics, PROBE, gpu=True)
    assert not refused.gpu_metrics
    assert "administrators only" in refused.note
    assert nsys_traces(resolve([], chip="gh100"), PROBE, gpu=True).note == ""
