"""The plan of a sweep from somebody else: what can run code is used only if it is typed again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llm_perf_opt.cli.app import app
from llm_perf_opt.config.composition import Composed
from llm_perf_opt.config.schema import LauncherConfig
from llm_perf_opt.core.errors import ConfigError, LlmPerfError
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.workflows.clusters.job import point_argv
from llm_perf_opt.workflows.sweep import begin_sweep, plan_sweep, run_planned, run_sweep
from llm_perf_opt.workflows.sweep_folder import SweepFolder
from llm_perf_opt.workflows.sweep_plan import code_words, gpus_of_points, launcher_of, with_launcher
from writing import write_record

TRUST = "model.trust_remote_code=true"


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    """A sweep that was started with the code of its model allowed."""
    monkeypatch.chdir(tmp_path)
    planned = plan_sweep(
        ["hydra.run.dir=sweep", "model=hf", "model.path=theirs", TRUST, "runtime.batch_size=1,2"], None, elsewhere=True
    )
    assert planned.code == [TRUST]
    begin_sweep(planned, ["llm-perf", "run", "-m"], None)
    return SweepFolder.open(tmp_path / "sweep")


def not_started(composed: Composed, _: str) -> tuple[RunFolder, LlmPerfError | None]:
    raise AssertionError(f"{composed.run_dir} was started")


class StartedError(LlmPerfError):
    """A point was about to run."""


def with_plan(sweep: SweepFolder, group: str, **changes: Any) -> SweepFolder:
    settings = sweep.settings()
    for point in settings:
        point["model"]["trust_remote_code"] = False
        point[group].update(changes)
    write_record(sweep.plan_file, settings)
    return sweep


def older(sweep: SweepFolder, *overrides: str) -> SweepFolder:
    """Make it a sweep of an older version, whose points are composed from their overrides."""
    read = sweep.read()
    sweep.write_plan(replace(read, project=None, points=tuple(replace(point, overrides=overrides) for point in read.points)))
    return sweep


def test_it_is_refused_with_the_command_to_type(sweep: SweepFolder) -> None:
    with pytest.raises(ConfigError) as caught:
        run_sweep(sweep, not_started)
    assert f"{sweep.path}/plan.json sets {TRUST}" in caught.value.fact
    assert f"`llm-perf run --resume {sweep.path} {TRUST}`" in caught.value.remedy
    assert not list(sweep.path.glob("0*"))


def test_it_runs_when_it_is_typed_again(sweep: SweepFolder) -> None:
    seen: list[Composed] = []

    def run_one(composed: Composed, _: str) -> tuple[RunFolder, LlmPerfError | None]:
        seen.append(composed)
        raise StartedError("It was started.")

    run_sweep(sweep, run_one, code_words(sweep, [TRUST]))
    assert [composed.config.model.trust_remote_code for composed in seen] == [True, True]
    assert [[str(one) for one in composed.code] for composed in seen] == [[TRUST], [TRUST]]


def test_a_point_is_refused_as_well(sweep: SweepFolder) -> None:
    error = run_planned(sweep, 1, not_started)
    assert isinstance(error, ConfigError)
    assert f"llm-perf run --point {sweep.path} 1 {TRUST}" in error.remedy
    started = run_planned(sweep, 1, lambda *_: (_ for _ in ()).throw(StartedError("It was started.")), [TRUST])
    assert isinstance(started, StartedError)
    assert point_argv(sweep.path, 1, [TRUST])[-2:] == ["1", TRUST]


@pytest.mark.parametrize(
    ("group", "changes", "typed"),
    [
        ("runtime", {"type": "tensorrtllm", "engine": {"tokenizer_cls": "evil.T"}}, "runtime.engine.tokenizer_cls=evil.T"),
        ("runtime", {"attn_implementation": "someone/kernels"}, "runtime.attn_implementation=someone/kernels"),
        ("profiling", {"passes": {"mine": {"command": "evil"}}}, "profiling.passes.mine.command=evil"),
    ],
)
def test_so_is_everything_else_that_runs_code(
    sweep: SweepFolder, group: str, changes: dict[str, Any], typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_perf_opt.config.composition.check_sections", lambda config: config)
    with pytest.raises(ConfigError) as caught:
        run_sweep(with_plan(sweep, group, **changes), not_started)
    assert "plan.json" in caught.value.fact
    assert caught.value.remedy.rstrip("`.").endswith(typed)


def test_the_overrides_of_an_older_sweep_were_not_typed_now(sweep: SweepFolder) -> None:
    older(sweep, "model=hf", "model.path=theirs", TRUST)
    with pytest.raises(ConfigError) as caught:
        run_sweep(sweep, not_started)
    assert f"{sweep.path}/sweep.json sets {TRUST}" in caught.value.fact


def test_nor_do_they_read_the_environment(sweep: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "s3cr3t")
    with pytest.raises(ConfigError, match="API_TOKEN") as caught:
        run_sweep(older(sweep, "model.name=${oc.env:API_TOKEN}"), not_started)
    assert "s3cr3t" not in str(caught.value)


def test_a_launcher_is_not_taken_from_a_plan(sweep: SweepFolder) -> None:
    with_plan(sweep, "launcher", type="ray", address="evil:10001")
    with pytest.raises(ConfigError, match=r"plan\.json sets launcher\.address"):
        with_launcher(sweep, launcher_of(sweep), [])
    assert with_launcher(sweep, launcher_of(sweep), ['launcher.address="evil:10001"']).address == "evil:10001"
    assert with_launcher(sweep, LauncherConfig(), []) == LauncherConfig()


def test_points_for_a_cluster_are_checked_before_they_are_submitted(sweep: SweepFolder) -> None:
    with pytest.raises(ConfigError, match="trust_remote_code"):
        gpus_of_points(sweep, LauncherConfig("slurm"))
    assert gpus_of_points(sweep, LauncherConfig("slurm"), [TRUST]) == {0: 0, 1: 0}


@pytest.mark.parametrize("word", ["runtime.batch_size=4", "model.trust_remote_code=false", "runtime.engine.a=b"])
def test_nothing_else_of_a_plan_is_changed(sweep: SweepFolder, word: str) -> None:
    with pytest.raises(ConfigError, match="does not take"):
        code_words(sweep, [word])


def test_the_verb_says_it(sweep: SweepFolder) -> None:
    for words in (["--resume", str(sweep.path)], ["--point", str(sweep.path), "0"]):
        result = CliRunner().invoke(app, ["run", *words])
        assert isinstance(result.exception, ConfigError)
        assert TRUST in result.exception.remedy
    assert json.loads(sweep.plan_file.read_text())[0]["model"]["trust_remote_code"] is True
