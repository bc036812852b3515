"""Sweeps: expansion, one folder per point, failures kept apart, going on."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import clean_timings, manifest, model_facts
from llm_perf_opt.config.composition import Composed, config_to_yaml, expand_sweep
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError, ParseError
from llm_perf_opt.core.records import SCHEMA, CleanTimings, Manifest, RunStatus
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.workflows.sweep import begin_sweep, plan_sweep, report_sweep, run_sweep
from llm_perf_opt.workflows.sweep_folder import SweepFolder
from writing import write_record


def test_every_combination_in_reading_order() -> None:
    assert expand_sweep(["a=1,2", "x=5", "b=p,q"]) == [
        ["a=1", "x=5", "b=p"],
        ["a=1", "x=5", "b=q"],
        ["a=2", "x=5", "b=p"],
        ["a=2", "x=5", "b=q"],
    ]
    assert expand_sweep(["a=range(1,4)"]) == [["a=1"], ["a=2"], ["a=3"]]
    assert expand_sweep(["a=[1,2]"]) == [["a=[1,2]"]]
    assert expand_sweep([]) == [[]]


@pytest.mark.parametrize("text", ["a=range(0,1000000000)", "a=interval(0,1)", "a=1,"])
def test_what_is_no_sweep_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        expand_sweep([text])


def test_a_wrong_point_is_told_before_the_first_one_runs() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        plan_sweep(["runtime.batch_size=1,0"], None)


def test_the_folder_of_a_sweep_is_that_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "hydra").mkdir(parents=True)
    (tmp_path / "conf" / "hydra" / "default.yaml").write_text("run: {dir: 'out/${experiment}/here'}\n")
    planned = plan_sweep(["+runtime.batch_size=1,2", "experiment=e"], None)
    assert planned.folder == Path("runs/e/sweeps/here")
    assert [point.swept for point in planned.points] == [("runtime.batch_size=1",), ("runtime.batch_size=2",)]
    assert "runs/e/sweeps/here" in planned.notes[0]
    given = plan_sweep(["runtime.batch_size=1,2", "++hydra.run.dir=there"], None)
    assert (given.folder, given.notes) == (Path("there"), ())


def finished(composed: Composed, status: RunStatus = "complete") -> RunFolder:
    folder = RunFolder.create(composed.run_dir)
    folder.write_manifest(Manifest(SCHEMA, "0", status, "now", ("x",)))
    return folder


def begun(tmp_path: Path) -> SweepFolder:
    planned = plan_sweep(["runtime.batch_size=1,2,4", f"hydra.run.dir={tmp_path / 'sweep'}"], None)
    assert [point.swept for point in planned.points] == [(f"runtime.batch_size={size}",) for size in (1, 2, 4)]
    return begin_sweep(planned, ["llm-perf", "run", "-m"], None)


def test_a_failing_point_stops_nobody_else_and_is_tried_again(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    ran: list[int] = []

    def run_one(composed: Composed, _: str) -> tuple[RunFolder, LlmPerfError | None]:
        size = composed.config.runtime.batch_size
        ran.append(size)
        if size == 2 and ran.count(2) == 1:
            return finished(composed, "failed"), CaptureError("It broke.", "")
        return finished(composed), None

    error = run_sweep(folder, run_one)
    assert error is not None
    assert "1 of 3" in error.fact
    assert [(point.status, point.why) for point in folder.points()] == [
        ("complete", ""), ("failed", "It broke."), ("complete", ""),
    ]  # fmt: skip
    assert run_sweep(folder, run_one) is None
    assert ran == [1, 2, 4, 2]
    again = folder.points()[1]
    assert (again.status, again.folder) == ("complete", "001-2")


def measured(composed: Composed, _: str) -> tuple[RunFolder, LlmPerfError | None]:
    """A point that left its times."""
    run = RunFolder.create(composed.run_dir)
    run.write_manifest(manifest())
    write_record(run.clean_file, clean_timings())
    return run, None


@pytest.mark.slow
@pytest.mark.parametrize("what", ["its folder", "its manifest", "its times", "its times' end"])
def test_a_complete_point_that_was_lost_or_damaged_is_run_again(tmp_path: Path, what: str) -> None:
    folder = begun(tmp_path)
    ran: list[int] = []

    def run_one(composed: Composed, _: str) -> tuple[RunFolder, LlmPerfError | None]:
        ran.append(composed.config.runtime.batch_size)
        return measured(composed, _)

    assert run_sweep(folder, run_one) is None
    assert run_sweep(folder, run_one) is None
    assert ran == [1, 2, 4], "what is complete is left alone"
    lost = RunFolder(folder.point_folder(1))
    if what == "its folder":
        shutil.rmtree(lost.path)
    elif what == "its manifest":
        lost.manifest_file.unlink()
    elif what == "its times":
        lost.clean_file.unlink()
    else:
        lost.clean_file.write_bytes(lost.clean_file.read_bytes()[:-20])
    _, found = report_sweep(folder.path)
    assert found.complete == 2
    gone = what == "its folder"
    assert [row.status for row in found.rows] == ["complete", "pending" if gone else "damaged", "complete"]
    assert gone or str(lost.path) in found.rows[1].why
    assert run_sweep(folder, run_one) is None
    assert ran == [1, 2, 4, 2]
    assert report_sweep(folder.path)[1].complete == 3


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda good: replace(good, iterations=(*good.iterations, replace(good.iterations[0], steps_ns=(1,)))), "1 decode steps"),
        (lambda good: replace(good, workload=replace(good.workload, batch_size=0)), "the batch is 0"),
    ],
)
def test_one_odd_point_is_a_row_and_no_end_of_the_report(
    tmp_path: Path, spoil: Callable[[CleanTimings], CleanTimings], words: str
) -> None:
    folder = begun(tmp_path)
    assert run_sweep(folder, measured) is None
    odd = RunFolder(folder.point_folder(1))
    write_record(odd.clean_file, spoil(clean_timings()))
    _, found = report_sweep(folder.path)
    assert [row.status for row in found.rows] == ["complete", "damaged", "complete"]
    assert words in found.rows[1].why
    odd.config_file.write_text("hardware: {peak_tflops: much, bandwidth_gbs: 1}")
    write_record(odd.clean_file, clean_timings())
    assert len(report_sweep(folder.path)[1].rows) == 3, "nor is a configuration that is no configuration"


def test_a_failed_point_keeps_what_to_do_about_it(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    run_sweep(folder, lambda composed, _: (finished(composed, "failed"), CaptureError("It broke.", "Mend it.")))
    assert {point.why for point in folder.points()} == {"It broke. Mend it."}


H200 = {"cpu": {"name": "a processor", "usable": 16}, "gpu": {"name": "NVIDIA H200"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "words"),
    [
        (H200, ""),
        ({**H200, "gpu": {"name": "NVIDIA A100"}}, "gpu.name is NVIDIA A100 (the sweep: NVIDIA H200)"),
        ({**H200, "gpu": "n/a: no driver"}, "no GPU is available (the sweep: NVIDIA H200)"),
        ({**H200, "cpu": {"name": "another", "usable": 16}}, "cpu.name is another (the sweep: a processor)"),
    ],
)
def test_a_sweep_goes_on_where_it_was_begun_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("llm_perf_opt.workflows.sweep.environment", lambda device_index: here)
    folder = begun(tmp_path)

    def on_h200(composed: Composed, _: str) -> tuple[RunFolder, LlmPerfError | None]:
        if composed.config.runtime.batch_size == 4:
            return finished(composed, "failed"), Interrupted("Interrupted.", "")
        run = RunFolder.create(composed.run_dir)
        run.write_manifest(manifest())
        write_record(run.clean_file, clean_timings(model=model_facts(device="cuda:0", device_name="NVIDIA H200")))
        write_record(run.env_file, H200)
        return run, None

    assert isinstance(run_sweep(folder, on_h200), Interrupted)
    if not words:
        assert run_sweep(folder, measured) is None
        return
    ran: list[Composed] = []
    with pytest.raises(ConfigError, match="point 0 of the sweep") as caught:
        run_sweep(folder, lambda composed, _: (ran.append(composed), measured(composed, _))[1])  # type: ignore[func-returns-value]
    assert words in caught.value.fact
    assert ran == []


def of_an_older_version(folder: SweepFolder) -> None:
    """Without the project and the resolved points."""
    folder.write_plan(replace(folder.read(), project=None))


def test_a_sweep_does_not_go_on_with_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = begun(tmp_path)
    sources: list[str] = []

    def run_one(composed: Composed, _: str) -> tuple[RunFolder, LlmPerfError | None]:
        last = composed.config.runtime.batch_size == 4
        run = finished(composed, "failed" if last else "complete")
        run.config_file.write_text(config_to_yaml(composed.config))
        sources.append(composed.config.model.source)
        return run, Interrupted("Interrupted.", "") if last else None

    assert isinstance(run_sweep(folder, run_one), Interrupted)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert isinstance(run_sweep(folder, run_one), Interrupted)
    assert sources == ["random"] * 4, "the plan says what is run, whatever the project has become"
    of_an_older_version(folder)
    with pytest.raises(ConfigError, match="Point 0 of the sweep had random weights"):
        run_sweep(folder, run_one)


def test_an_interruption_ends_the_sweep_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    error = run_sweep(folder, lambda composed, _: (finished(composed, "failed"), Interrupted("Interrupted.", "")))
    assert isinstance(error, Interrupted)
    assert "--resume" in error.remedy
    assert [point.status for point in folder.points()] == ["failed", "pending", "pending"]


def test_a_folder_without_a_plan_is_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match=r"sweep\.json"):
        SweepFolder.open(tmp_path)
