"""The metrics that profilers collect: errors are raised before anything starts, and nothing is dropped silently."""

from pathlib import Path

import pytest
import yaml

from llm_perf_opt.config.composition import compose, config_from_mapping, config_to_yaml
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.counters.manifest import resolve
from llm_perf_opt.counters.set_file import shipped_sets
from llm_perf_opt.profiling import requested_metrics as asked_metrics
from llm_perf_opt.profiling.requested_metrics import dropped_notes, metrics_on, nsys_traces, resolve_metrics, sections_of
from llm_perf_opt.profiling.vendor.compatibility import Permission
from llm_perf_opt.profiling.vendor.probe import NcuProbe, NsysProbe
from llm_perf_opt.workflows.sweep import plan_sweep

PROBE = NsysProbe("nsys", "2023.4.4", flags=("--gpu-metrics-device",), trace_modules=("cuda", "nvtx", "osrt", "cudnn"))


@pytest.mark.parametrize(
    ("overrides", "preset"),
    [
        ([], "minimal"),
        (["profiling.metrics.sets=[ch13]"], "full"),
        (["profiling.metrics.sets=[ch1]"], "full"),
        (["profiling.metrics.sets=[ch13]", "profiling.torch.preset=max"], "max"),
        (["profiling=ncu", "profiling.metrics.sets=[ch09]", "profiling.torch.preset=default"], "default"),
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


@pytest.mark.parametrize(
    ("profiling", "asked", "collected"),
    [
        ("minimal", "profiling.metrics.sets=[roofline]", False),
        ("minimal", "profiling.metrics.sets=[occupancy]", False),
        ("minimal", "profiling.metrics.sets=[ch12]", False),
        ("none", "profiling.metrics.sets=[ch01]", False),
        ("minimal", "profiling.metrics.sets=[ch02,ch01]", True),
        ("nsys", "profiling.metrics.sets=[ch04]", True),
        ("nsys", "profiling.metrics.sets=[roofline]", False),
        ("ncu", "profiling.metrics.sets=[roofline,ch9]", True),
        ("ncu", "profiling.metrics.sets=[ch12]", False),
    ],
)
def test_a_set_that_nothing_collects_is_an_error(
    profiling: str, asked: str, collected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_metrics, "find_tool", lambda _: None)
    config = compose([f"profiling={profiling}", asked]).config
    if collected:
        resolve_metrics(config)
    else:
        with pytest.raises(ConfigError, match="Nothing collects the metric set"):
            resolve_metrics(config)


@pytest.mark.parametrize(("profiling", "sets"), [("minimal", ()), ("nsys", ()), ("ncu", ("roofline",))])
def test_the_default_set_is_that_of_the_counters(profiling: str, sets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_metrics, "find_tool", lambda _: None)
    assert resolve_metrics(compose([f"profiling={profiling}"]).config).profiling.metrics.sets == sets


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (['profiling.nsys.args="--output=x"'], "names the report"),
        (["profiling.nsys.trace=[nvlink]"], "not a trace module"),
        (["profiling.ncu.set=rooflin"], "Did you mean 'roofline'"),
        (['profiling.ncu.args="--no-such-thing"'], "no such option"),
    ],
)
def test_options_are_checked_before_anything_starts(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = NcuProbe("ncu", "2025.3.1", flags=("--set",), sets=("basic", "roofline", "full"))
    monkeypatch.setattr(asked_metrics, "find_tool", lambda name: Path(name))
    monkeypatch.setattr(asked_metrics, "probe_nsys", lambda _: PROBE)
    monkeypatch.setattr(asked_metrics, "probe_ncu", lambda _: probe)
    with pytest.raises(ConfigError, match=said):
        resolve_metrics(compose(["profiling=full", *words]).config)


def test_a_users_set_is_taken_from_conf_and_kept_in_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asked_metrics, "find_tool", lambda _: None)
    (tmp_path / "conf/metrics").mkdir(parents=True)
    (tmp_path / "conf/metrics/mine.yaml").write_text("ncu: [lts__t_bytes.sum]\ntorch: max\n")
    config = resolve_metrics(compose(["profiling=ncu", "profiling.metrics.sets=[mine]"]).config)
    assert config.profiling.metrics.defined == {
        "mine": {"ncu": ["lts__t_bytes.sum"], "torch": "max", "file": "conf/metrics/mine.yaml"}
    }
    assert config.profiling.torch.preset == "max"
    assert "lts__t_bytes.sum" in metrics_on(config.profiling.metrics, "gh100").names
    (tmp_path / "conf/metrics/mine.yaml").unlink()
    again = resolve_metrics(config_from_mapping(yaml.safe_load(config_to_yaml(config))))
    assert again.profiling.metrics == config.profiling.metrics, "the run can be repeated without the file"


@pytest.mark.parametrize("text", ["[", "- a", "ncu: {a: {b: c}}", "ncu: [[a]]", "\xff"])
def test_a_file_that_is_no_set_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/metrics").mkdir(parents=True)
    (tmp_path / "conf/metrics/mine.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        compose(["profiling=ncu", "profiling.metrics.sets=[mine]"])


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
    assert nsys_traces(metrics, PROBE, gpu=True, own=["cuda"]).modules == ("cuda",)
