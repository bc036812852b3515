"""Trying findings: the configuration they make, the arithmetic of the verdict, and a whole trial on the CPU."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from builders import MS, clean_timings, default_config, in_a_row, manifest, run_analysis
from command import measured_here
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import Finding, ThroughputLine
from llm_perf_opt.analysis.verification import Trial, Verification, measured, unmeasured
from llm_perf_opt.cli.app import app
from llm_perf_opt.cli.progress import QuietProgress
from llm_perf_opt.config.composition import Composed, compose, config_to_yaml
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import RuntimeFacts
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.profiling.capture import capture
from llm_perf_opt.report.findings import trial_words, trials_table, trials_text, verification_json
from llm_perf_opt.workflows import advise
from llm_perf_opt.workflows.advise import findings_of, overridden, to_try, verify
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.calibration import read_calibration
from llm_perf_opt.workflows.run_reader import RunReader
from markdown_reader import read
from rendered import markdown_of
from writing import write_record


def finding(**changes: Any) -> Finding:
    values: dict[str, Any] = {
        "id": "some_change", "headline": "It is slow.", "claim": "It is slow.",
        "saving_ns": 4 * MS, "evidence": ["a row"], "to_try": "runtime.batch_size=2",
        "kind": "latency", "stage": "decode", "saving_low_ns": 3 * MS, "saving_high_ns": 5 * MS, "saving_per": "token",
        "saving_why": "", "units": 3, "confidence": "high", "because": "it was measured", "overrides": ["runtime.batch_size=2"],
        "change": "Use more.",
    }  # fmt: skip
    return Finding(**{**values, **changes})


def test_overrides_replace_values_of_the_run_and_drop_its_profiling() -> None:
    values = asdict(default_config())
    config = overridden(values, ["runtime.cache=static", "runtime.compile=reduce-overhead"])
    assert (config.runtime.cache, config.runtime.compile) == ("static", "reduce-overhead")
    assert not config.profiling.torch.enable
    assert config.profiling.clean
    assert values["runtime"]["cache"] == "dynamic"  # the run's own is left alone


def test_arguments_of_an_engine_are_added_at_any_depth() -> None:
    values = asdict(compose(["runtime=tensorrtllm", "runtime.engine.max_batch_size=2"]).config)
    config = overridden(values, ["runtime.engine.max_batch_size=4", "runtime.engine.kv_cache_config.dtype=fp8"])
    assert config.runtime.engine == {"max_batch_size": 4, "kv_cache_config": {"dtype": "fp8"}}
    with pytest.raises(ConfigError, match=r"max_batch_size\.more"):
        overridden(values, ["runtime.engine.max_batch_size.more=1"])


@pytest.mark.parametrize("text", ["runtime.nothing=1", "nothing.at.all=1", "runtime.cache", "runtime.cache=sideways"])
def test_what_sets_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        overridden(asdict(default_config()), [text])


MORE = ThroughputLine(1, 8, 10 * MS, 16 * MS, 10 * MS, 40 * MS, 100.0, 500.0, 200.0, 800.0)
"""A step of 10 ms at batch 1; at batch 8 one of 16 ms is predicted."""


def throughput(**changes: Any) -> Finding:
    """A finding that makes no request faster."""
    shares = {"before_ns": 10 * MS, "after_ns": 2 * MS, "after_low_ns": MS, "after_high_ns": 5 * MS, "kept": 1 / 8}
    none = {"saving_ns": None, "saving_low_ns": None, "saving_high_ns": None, "saving_why": "a single request is no faster"}
    return finding(**{"kind": "throughput", "throughput": MORE, **shares, **none, **changes})


def test_only_plain_configuration_that_promises_something_is_tried() -> None:
    good, code, nothing = finding(), finding(id="code", overrides=[]), finding(id="none", saving_high_ns=0)
    assert to_try([code, nothing, good, finding(id="second")], 1) == [good]
    assert to_try([nothing, throughput()], 1) == [throughput()]


def test_a_trial_of_throughput_is_told_in_tokens_per_second() -> None:
    """One token in 10 ms becomes eight in 20: 400 tokens/s where 500 were predicted, and no time is saved."""
    base = clean_timings(in_a_row(10, 50 * MS, [10 * MS] * 3))
    base = replace(base, workload=replace(base.workload, batch_size=1))
    tried = clean_timings(in_a_row(10, 50 * MS, [20 * MS] * 3))
    tried = replace(tried, workload=replace(tried.workload, batch_size=8))
    trial = measured(throughput(), base, tried, "run")
    assert (trial.kind, trial.predicted_ns, trial.after_ns) == ("throughput", 2 * MS, 2_500_000)
    text = trials_text(Verification("base", "", (trial,)))
    assert all(f"{rate} tokens/s" in text for rate in ("100.0", "500.0", "400.0"))
    assert "makes no request faster" in text
    assert "tokens/s +25 %" in text
    assert " ms" not in text
    assert trial_words(trial).startswith(
        "runtime.batch_size=2: predicted 500.0 tokens/s → measured 400.0 tokens/s, before 100.0 tokens/s ("
    )
    fewer = measured(throughput(), tried, replace(base, workload=tried.workload), "run")
    assert "slower" not in trials_text(Verification("base", "", (fewer,)))


def test_decode_is_compared_over_the_steps_that_the_prediction_is_of() -> None:
    base, tried = (clean_timings(in_a_row(10, 50 * MS, [step * MS, step * MS, 30 * MS])) for step in (10, 5))
    trial = measured(finding(counted=2), base, tried, "run")
    assert (trial.before_ns, trial.after_ns) == (10 * MS, 5 * MS)


def test_predicted_against_measured_by_hand() -> None:
    """10 ms a token before, 5 ms after; 4 ms were to be saved: 6 ms predicted, 20 % too slow."""
    base, tried = (clean_timings(in_a_row(10, 50 * MS, [step * MS] * 3)) for step in (10, 5))
    trial = measured(finding(), base, tried, "run")
    assert (trial.before_ns, trial.after_ns, trial.saving_ns, trial.predicted_ns) == (10 * MS, 5 * MS, 5 * MS, 6 * MS)
    assert trial.error == pytest.approx(0.2)
    assert "holds; predicted time +20 %" in trials_text(Verification("base", "", (trial,)))
    prefill = measured(finding(stage="prefill", saving_per="prefill"), base, tried, "run")
    assert prefill.saving_ns == 0
    assert "no difference beyond the spread" in trials_text(Verification("base", "", (prefill,)))
    wrong = measured(finding(saving_ns=1 * MS, saving_low_ns=0), base, tried, "run")
    assert "not as predicted" in trials_text(Verification("base", "", (wrong,)))
    slower = measured(finding(), tried, base, "run")
    assert "slower" in trials_text(Verification("base", "", (slower,)))


@pytest.mark.parametrize("repeats", [(2, 10), (10, 5), (2, 2)])
def test_a_trial_of_few_repeats_tells_nothing(repeats: tuple[int, int]) -> None:
    """`llm-perf compare` has no verdict for such runs, either."""
    base, tried = (clean_timings(in_a_row(count, 50 * MS, [step * MS] * 3)) for count, step in zip(repeats, (10, 6), strict=True))
    text = trials_text(Verification("base", "", (measured(finding(), base, tried, "run"),)))
    assert f"too few repeats for a verdict: {min(repeats)} of 6 (runtime.min_repeats); predicted time +0 %" in text
    assert "holds" not in text


def test_a_predicted_time_stands_however_the_base_moves() -> None:
    """20 ms were to become 2.5; measured again the base is 17, and 2.6 is what was reached: 4 % off, not -80 %."""
    told = {"before_ns": 20 * MS, "after_ns": 2_500_000, "after_low_ns": 2 * MS, "after_high_ns": 3 * MS}
    predicted = finding(saving_ns=17_500_000, saving_low_ns=17 * MS, saving_high_ns=18 * MS, kept=0.0, **told)
    base, tried = (clean_timings(in_a_row(10, 50 * MS, [step] * 3)) for step in (17 * MS, 2_600_000))
    trial = measured(predicted, base, tried, "run")
    assert (trial.before_ns, trial.predicted_ns, trial.predicted_saving_ns) == (17 * MS, 2_500_000, 14_500_000)
    assert (trial.predicted_low_ns, trial.predicted_high_ns) == (14 * MS, 15 * MS)
    assert trial.error == pytest.approx(2.5 / 2.6 - 1)
    assert "holds" in trials_text(Verification("base", "", (trial,)))


@pytest.mark.parametrize(("kept", "after"), [(1.0, 7 * MS), (0.5, 8_500_000), (0.0, 10 * MS)])
def test_what_is_a_share_of_the_base_moves_with_it(kept: float, after: int) -> None:
    """12 ms were to become 10; of the 3 ms that the base is shorter now, the share that is kept is missing after, too."""
    told = {"before_ns": 12 * MS, "after_ns": 10 * MS, "after_low_ns": 9 * MS, "after_high_ns": 11 * MS}
    base = clean_timings(in_a_row(10, 50 * MS, [9 * MS] * 3))
    trial = measured(finding(saving_ns=2 * MS, saving_low_ns=MS, kept=kept, **told), base, base, "run")
    assert (trial.predicted_ns, trial.predicted_saving_ns) == (after, 9 * MS - after)


def test_a_change_of_the_whole_request_is_compared_by_its_total_time() -> None:
    """50 + 3 × 10 ms become 50 + 3 × 5 ms."""
    base, tried = (clean_timings(in_a_row(10, 50 * MS, [step * MS] * 3)) for step in (10, 5))
    trial = measured(finding(stage="request", saving_per="request"), base, tried, "run")
    assert (trial.before_ns, trial.after_ns) == (80 * MS, 65 * MS)


def test_a_change_that_alters_the_tokens_says_so() -> None:
    base, tried = (clean_timings(in_a_row(10, 50 * MS, [step * MS] * 3)) for step in (10, 5))
    other = replace(tried, tokens_sha256="1" * 64)
    trials = [measured(finding(), base, timings, "run") for timings in (tried, other, replace(other, tokens_repeat=False))]
    assert [trial.same_tokens for trial in trials] == [True, False, None]
    assert ["the tokens differ" in trial_words(trial) for trial in trials] == [False, True, False]
    larger = replace(tried, workload=replace(tried.workload, batch_size=8))
    assert measured(finding(), base, larger, "run").same_tokens is None, "other requests"


def test_throughput_counts_a_token_as_its_share_of_the_step() -> None:
    base = clean_timings(in_a_row(10, 50 * MS, [10 * MS] * 3))
    tried = replace(base, workload=replace(base.workload, batch_size=20))
    trial = measured(finding(kind="throughput"), base, tried, "run")
    assert (trial.before_ns, trial.after_ns) == (5 * MS, MS // 2)


def test_steps_that_have_no_times_say_why() -> None:
    base = clean_timings(in_a_row(10, 50 * MS, [10 * MS] * 3))
    at_once = replace(base, runtime=RuntimeFacts("vllm", "1", "by its first token", unstepped="tokens came eight at a time"))
    trial = measured(finding(counted=2), base, at_once, "run")
    assert (trial.why, trial.after_ns) == ("with the change: tokens came eight at a time", None)
    untimed = measured(finding(stage="warmup"), base, base, "run")
    assert untimed.why == "before: warmup was not timed; with the change: warmup was not timed"


def test_a_trial_that_failed_says_why_everywhere() -> None:
    found = Verification("base", "it was asked for", (unmeasured(finding(), "the <b>pass</b> | failed"),))
    assert "n/a: the <b>pass</b> | failed" in trials_text(found)
    assert verification_json(found)["trials"][0]["saving_ns"] is None
    (table,) = read(markdown_of([trials_table(found)])).tables
    assert table[1][1:] == ["4.000 ms"], "what was predicted; nothing else is known"


@pytest.fixture(scope="module", autouse=True)
def _here() -> Iterator[None]:
    with measured_here():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    small = ["runtime.num_new_tokens=4", "runtime.prompt_tokens=8", "runtime.min_repeats=6", "runtime.max_repeats=6"]
    composed = compose([*small, "hardware=cpu", "profiling=none", "runtime.max_warmup=3"])
    folder, error = capture(
        replace(composed, run_dir=tmp_path_factory.mktemp("advice") / "run"), ["llm-perf", "run"], QuietProgress()
    )
    assert error is None
    return folder


def tried_in(folder: RunFolder, chosen: list[Finding], remeasure: bool = False) -> tuple[Verification, LlmPerfError | None]:
    opened = RunReader(folder)
    return verify(opened, analyze(opened), chosen, ["llm-perf", "advise"], QuietProgress(), remeasure=remeasure)


@pytest.mark.slow
def test_a_whole_trial_beside_the_run(run: RunFolder) -> None:
    """Plain configuration is tried in a run of its own, and one that cannot be composed stops nothing."""
    chosen = [finding(id="impossible", overrides=["runtime.batch_size=0"]), finding(kind="throughput", saving_low_ns=0)]
    found, interrupted = tried_in(run, chosen)
    assert interrupted is None
    impossible, tried = found.trials
    assert "batch_size" in impossible.why
    assert impossible.saving_ns is None
    assert tried.why == ""
    assert tried.before_ns
    assert tried.after_ns
    beside = run.path.with_name(tried.run)
    assert json.loads((beside / "raw/clean/timings.json").read_text())["workload"]["batch_size"] == 2
    assert (beside / "report.md").exists()
    kept = json.loads(run.verify_file.read_text())
    assert [trial["id"] for trial in kept["trials"]] == ["impossible", "some_change"]
    assert found.base == run.path.name
    assert found.remeasured == ""


@pytest.mark.slow
def test_a_run_of_another_machine_is_measured_again(run: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(Path(shutil.copytree(run.path, tmp_path / "elsewhere")))
    env = json.loads(copy.env_file.read_text())
    copy.env_file.write_text(json.dumps({**env, "host": "another"}))
    found, _ = tried_in(copy, [finding(overrides=["runtime.batch_size=2"])])
    assert "host differs" in found.remeasured
    assert found.base == "elsewhere-verify-base"
    assert found.trials[0].before_ns


@pytest.mark.parametrize("here", ["n/a: NVML is not there", {"name": "NVIDIA L4"}])
def test_a_run_on_a_gpu_is_not_tried_on_another_device(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: object
) -> None:
    copy = RunFolder(Path(shutil.copytree(run.path, tmp_path / "on_a_gpu")))
    env = json.loads(copy.env_file.read_text())
    copy.env_file.write_text(json.dumps({**env, "gpu": {"name": "NVIDIA H200"}}))
    file = copy.path / "raw/clean/timings.json"
    times = json.loads(file.read_text())
    times["model"].update(device="cuda:0", device_name="NVIDIA H200")
    file.write_text(json.dumps(times))
    monkeypatch.setattr("llm_perf_opt.workflows.advise.environment", lambda _: {**env, "gpu": here})
    with pytest.raises(ResourceError, match="NVIDIA H200, and this machine has"):
        tried_in(copy, [finding()], remeasure=True)
    assert not list(tmp_path.glob("on_a_gpu-verify*"))


def test_a_run_without_a_trace_has_nothing_to_find(run: RunFolder) -> None:
    with pytest.raises(ParseError, match="no trace"):
        findings_of(run.path)


def test_trials_read_back_as_they_were_kept(run: RunFolder) -> None:
    made = Verification("base", "", (Trial("a", ("b=c",), "token", "run", "", 1, 0, 2, 10, 9, 1),))
    write_record(run.path / "copy.json", made)
    assert read_record(run.path / "copy.json", Verification) == made


@pytest.mark.parametrize("tried", [True, False])
def test_advise_alone_shows_what_was_tried_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: bool) -> None:
    trial = Trial("some_change", ("b=c",), "token", "run", "", 8 * MS, 0, 9 * MS, 10 * MS, 7 * MS, 1)
    analysis = run_analysis(verified=Verification("the-base", "", (trial,)) if tried else None)
    monkeypatch.setattr(
        "llm_perf_opt.workflows.advise.findings_of", lambda _: (RunReader(RunFolder(tmp_path)), analysis, [finding()])
    )
    text = CliRunner().invoke(app, ["advise", str(tmp_path)]).stdout
    assert ("Trials, each change alone, against the-base" in text) is tried
    assert ("7.000 ms" in text) is tried
    data = json.loads(CliRunner().invoke(app, ["advise", str(tmp_path), "--json"]).stdout)
    assert [one["id"] for one in data["findings"]] == ["some_change"]
    found = data["verification"]
    assert (found["trials"][0]["after_ns"] if tried else found) == (7 * MS if tried else None)


@pytest.mark.parametrize(("spoiled", "kept"), [("", 1), ("base", 0), ("trial", 0)])
def test_nothing_is_learned_from_a_trial_on_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoiled: str, kept: int
) -> None:
    """The base takes 10 ms per token, the trial 6 ms. Something else uses the machine during one of them."""
    busy = RunWarning(WarningId.SHARED_GPU, "2 processes shared the GPU while measuring.")

    def captured(composed: Composed, *_: Any) -> tuple[RunFolder, LlmPerfError | None]:
        assert composed.config.profiling.nvml.enable, "telemetry shows who used the machine"
        folder = RunFolder.create(composed.run_dir)
        write_record(folder.clean_file, clean_timings(in_a_row(10, 50 * MS, [6 * MS] * 3)))
        folder.write_manifest(manifest())
        return folder, None

    def analyzed(run: RunReader, **more: Any) -> RunAnalysis:
        return replace(analyze(run, **more), warnings=(busy,) if spoiled == "trial" else ())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(advise, "capture", captured)
    monkeypatch.setattr(advise, "analyze", analyzed)
    monkeypatch.setattr(advise, "_other_machine", lambda *_: "")
    folder = RunFolder.create(tmp_path / "run")
    folder.config_file.write_text(config_to_yaml(default_config()))
    folder.write_manifest(manifest())
    timings = clean_timings(in_a_row(10, 50 * MS, [10 * MS] * 3))
    base = replace(run_analysis(), timings=timings, warnings=(busy,) if spoiled == "base" else ())
    found, _ = verify(RunReader(folder), base, [finding()], ["llm-perf", "advise"], QuietProgress())
    assert [(trial.before_ns, trial.after_ns) for trial in found.trials] == [(10 * MS, 6 * MS)]
    points, _ = read_calibration(timings.model.device_name)
    assert len(points) == kept


TRUST = "model.trust_remote_code=true"


def stored(folder: Path, **model: Any) -> RunReader:
    """Return a run with a configuration of somebody else, and complete times."""
    config = default_config()
    config = replace(config, model=replace(config.model, **model))
    made = RunFolder.create(folder)
    made.config_file.write_text(config_to_yaml(config))
    made.write_manifest(manifest())
    return RunReader(made)


def test_the_code_of_a_run_is_not_allowed_by_its_own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored(tmp_path / "run", source="pretrained", path="theirs", architecture={}, trust_remote_code=True)
    started: list[Composed] = []

    def captured(composed: Composed, *_: Any) -> Any:
        started.append(composed)
        raise ResourceError("It was started.", "")

    monkeypatch.setattr(advise, "captured_run", captured)
    analysis = run_analysis()
    with pytest.raises(ConfigError) as caught:
        verify(run, analysis, [finding()], ["llm-perf"], QuietProgress(), remeasure=True)
    assert f"{tmp_path}/run/config.yaml sets {TRUST}" in caught.value.fact
    assert f"`llm-perf advise {tmp_path}/run --verify {TRUST}`" in caught.value.remedy
    assert not started
    monkeypatch.setattr(advise, "require_same_device", lambda *_: None)
    with pytest.raises(ResourceError, match="It was started"):
        verify(run, analysis, [finding()], ["llm-perf"], QuietProgress(), remeasure=True, code=[TRUST])
    assert [str(one) for one in started[0].code] == [TRUST]


@pytest.mark.parametrize("override", [TRUST, "runtime.attn_implementation=someone/kernels"])
def test_nor_by_a_change_that_it_proposes(tmp_path: Path, override: str) -> None:
    run = stored(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        verify(run, run_analysis(), [finding(overrides=[override])], ["llm-perf"], QuietProgress())
    assert override in caught.value.fact
    with pytest.raises(ConfigError, match=r"does not take runtime\.batch_size=2"):
        verify(run, run_analysis(), [finding()], ["llm-perf"], QuietProgress(), code=["runtime.batch_size=2"])


def test_what_is_typed_for_a_verification_needs_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["advise", str(tmp_path), TRUST])
    assert isinstance(result.exception, ConfigError)
    assert "--verify" in result.exception.fact
