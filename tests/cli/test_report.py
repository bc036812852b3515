"""`llm-perf report`: the page of a run or of a sweep, made anew from its folder."""

import json
import struct
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from builders import clean_timings, default_config, iteration, manifest, model_facts, torch_pass, workload
from chromium import Chromium, find_chromium
from llm_perf_opt.analysis.stability import Movement
from llm_perf_opt.cli.app import app
from llm_perf_opt.core.errors import CaptureError, ConfigError, ParseError
from llm_perf_opt.core.records import SCHEMA, CleanTimings, Missing, TextUse
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.core.warnings import WarningId
from llm_perf_opt.core.weight_records import WeightFacts
from llm_perf_opt.report.html import _environment
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.images import CHROMIUM_VARIABLE, draw_images
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.sweep_folder import PlannedPoint, Sweep, SweepFolder
from whole_runs import whole_run
from writing import write_record, write_whole


def a_run(path: Path, name: str = "tiny") -> RunFolder:
    """A run as its passes leave it, on a device whose limits are in the table."""
    folder = RunFolder.create(path)
    folder.write_manifest(manifest())
    facts = model_facts(name=name, device_name="NVIDIA H200", dtype="bf16", architecture=default_config().model.architecture)
    write_record(folder.clean_file, clean_timings(model=facts))
    write_record(folder.torch_file, torch_pass())
    return folder


def a_sweep(path: Path) -> SweepFolder:
    folder = SweepFolder.create(path)
    a_run(folder.point_folder(0))
    refused = RunFolder.create(folder.point_folder(1))
    refused.write_manifest(manifest(status="failed", why="No <memory>."))
    folder.point_folder(2).mkdir()
    points = tuple(PlannedPoint((words := f"runtime.batch_size={size}",), (words,)) for size in (1, 2, 4))
    folder.write_plan(Sweep(SCHEMA, "0.1.0", "2026-01-02", ("llm-perf", "run", "-m"), None, points))
    return folder


def report(*words: str) -> str:
    done = CliRunner().invoke(app, ["report", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def report_lacking(*words: str) -> str:
    """The page is made, and the verb ends with that not all is well."""
    done = CliRunner().invoke(app, ["report", *words])
    assert isinstance(done.exception, CaptureError), done.output
    assert done.exception.exit_code == 4
    assert done.exception.fact.startswith("2 of 3 points")
    assert done.exception.fact.endswith(": failed (1), damaged (1).")
    return done.stdout


def test_every_page_of_a_run_is_made(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", "<b>tiny</b>")
    said = report(str(folder.path))
    assert f"report: {folder.page_file}" in said
    assert "images: SVG only, PNG n/a: LLM_PERF_CHROMIUM=none" in said
    assert "&lt;b&gt;tiny&lt;/b&gt;" in folder.page_file.read_text()
    assert "![Where the time goes](waterfall.svg)" in folder.report_file.read_text()
    assert "![Roofline](roofline.svg)" in folder.summary_file.read_text()
    assert folder.waterfall_file.read_text().startswith("<svg")
    assert folder.roofline_file.read_text().startswith("<svg")


def test_it_ends_with_where_the_time_goes_and_what_to_do(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run")
    last = report(str(folder.path)).splitlines()[-24:]
    assert last[-2:] == [f"report: {folder.page_file}", f"next:   llm-perf advise {folder.path} --verify"]
    begin = next(place for place, line in enumerate(last) if line.startswith("tiny ("))
    places = [next(n for n, line in enumerate(last) if line.startswith(words)) for words in ("Where the time", "What to change")]
    assert begin < places[0] < places[1]
    assert len(last[places[0] : places[1]]) <= 8, "two lines of heading, five rows and an empty line"


@pytest.mark.parametrize("text", ["model: 3", "- x", ""])
def test_settings_that_are_none_are_told(tmp_path: Path, text: str) -> None:
    folder = a_run(tmp_path / "run")
    folder.config_file.write_text(text)
    assert "warning: The settings are unknown: config.yaml" in report(str(folder.path))
    assert "The settings are unknown" in folder.report_file.read_text()


def test_few_repeats_have_their_range_on_every_page(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    kept = json.loads(folder.clean_file.read_text())
    folder.clean_file.write_text(json.dumps({**kept, "iterations": kept["iterations"][:2]}))
    assert "range: " in report(str(folder.path))
    for page in (folder.report_file, folder.page_file, folder.summary_file):
        assert "range: " in page.read_text(), page


def test_damaged_times_end_the_verb_after_the_pages_are_made(tmp_path: Path) -> None:
    """One step of one repeat is gone: no page calls the run complete, or says that nothing was measured."""
    folder = a_run(tmp_path / "run")
    kept = json.loads(folder.clean_file.read_text())
    kept["iterations"][1]["steps_ns"].pop()
    folder.clean_file.write_text(json.dumps(kept))
    why = "repeat 2 has 2 decode steps, but the request has 3"
    done = CliRunner().invoke(app, ["report", str(folder.path)])
    assert isinstance(done.exception, ParseError), done.output
    assert done.exception.exit_code == 5
    assert f"report: {folder.page_file}" in done.stdout
    for page in (folder.report_file, folder.page_file):
        text = page.read_text().replace("\\", "")
        assert why in text.partition("This run is damaged")[2]
        assert "Every pass is complete" not in text
        assert "no iteration was measured" not in text
    stages = folder.report_file.read_text().partition("## Stages and steps")[2]
    assert why in stages[: stages.index("\n## ")]
    said = CliRunner().invoke(app, ["report", str(folder.path), "--json"])
    assert isinstance(said.exception, ParseError)
    found = json.loads(said.stdout)
    assert found["status"] == "damaged"
    assert why in found["why"]


@pytest.mark.parametrize("text", [None, "", "{"])
def test_times_that_are_gone_or_no_json_are_damage(tmp_path: Path, text: str | None) -> None:
    folder = a_run(tmp_path / "run")
    folder.clean_file.unlink() if text is None else folder.clean_file.write_text(text)
    done = CliRunner().invoke(app, ["report", str(folder.path)])
    assert isinstance(done.exception, ParseError), done.output
    assert "This run is damaged" in folder.report_file.read_text()


def test_no_image_is_named_that_is_not_there(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest(manifest(status="failed", why="Killed."))
    said = report(str(folder.path))
    assert "images" not in said
    assert not folder.waterfall_file.exists()
    assert "![" not in folder.report_file.read_text()
    assert "Killed." in folder.page_file.read_text()


def test_without_its_packages_the_markdown_pages_are_still_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    _environment.cache_clear()
    assert f"report: {folder.report_file}" in report(str(folder.path))
    assert "No report.html: jinja2 is not installed" in folder.report_file.read_text()


def test_open_shows_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run(tmp_path / "run")
    shown: list[str] = []

    def show(url: str) -> bool:
        shown.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", show)
    report(str(folder.path), "--open")
    assert shown == [folder.page_file.as_uri()]


def test_open_without_a_browser_says_where_the_page_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run(tmp_path / "run")
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    done = CliRunner().invoke(app, ["report", str(folder.path), "--open"])
    assert done.exit_code == 0
    assert str(folder.page_file) in done.stderr


def test_a_sweep_is_one_page_with_its_failed_points(tmp_path: Path) -> None:
    folder = a_sweep(tmp_path / "sweep")
    (folder.path / "000" / "report.md").write_text("made by an older version")
    said = report_lacking(str(folder.path))
    assert "1 of 3 points are complete" in said
    assert "batch_size 2: failed: No <memory>." in said
    page = folder.page_file.read_text()
    assert "is failed and not ranked:</strong> No &lt;memory&gt;." in page
    assert 'href="./000/report.md"' in page, "it leads to what is there"
    assert "./002/" not in page.replace(str(folder.path), ""), "and to nothing that is not"
    assert f"is damaged and not ranked:</strong> {folder.path / '002' / 'run.json'} is missing." in page, (
        "a point whose run.json was removed says so"
    )
    report(str(folder.path / "000"))
    report_lacking(str(folder.path))
    assert 'href="./000/report.html"' in folder.page_file.read_text()
    assert "No \\<memory\\>." in folder.report_file.read_text()


def test_a_sweep_as_data(tmp_path: Path) -> None:
    folder = a_sweep(tmp_path / "sweep")
    found = json.loads(report_lacking(str(folder.path), "--json"))
    assert found["page"] == str(folder.page_file)
    assert [point["status"] for point in found["points"]] == ["complete", "failed", "damaged"]


def two_points(path: Path) -> tuple[SweepFolder, RunFolder]:
    """A sweep that went well, and the run of its second point."""
    folder = SweepFolder.create(path)
    runs = [a_run(folder.point_folder(number)) for number in range(2)]
    swept = [(f"runtime.batch_size={2**number}",) for number in range(2)]
    points = tuple(PlannedPoint(words, words) for words in swept)
    folder.write_plan(Sweep(SCHEMA, "0.1.0", "2026-01-02", ("llm-perf", "run", "-m"), None, points))
    return folder, runs[1]


def test_the_page_of_a_sweep_begins_with_what_ran_on_what(tmp_path: Path) -> None:
    folder, _ = two_points(tmp_path / "sweep")
    report(str(folder.path))
    for text in (folder.page_file.read_text(), folder.report_file.read_text()):
        first = text[: text.index("points are complete")]
        for words in ("NVIDIA H200", "tiny", "5 M parameters, bf16", "torch 2.13.0", "new tokens"):
            assert words in first


def test_a_point_that_cannot_be_ends_the_report_of_its_sweep_as_of_itself(tmp_path: Path) -> None:
    folder, run = two_points(tmp_path / "sweep")
    timings = read_record(run.clean_file, CleanTimings)
    fast = tuple(replace(one, steps_ns=(1, 1, 1)) for one in timings.iterations)
    write_record(run.clean_file, replace(timings, iterations=fast))
    done = CliRunner().invoke(app, ["report", str(folder.path)])
    assert isinstance(done.exception, CaptureError)
    assert done.exception.fact.startswith("1 of 2 points")
    assert "impossible (1)" in done.exception.fact
    assert "1 of 2 points are complete" in done.stdout
    assert "batch_size 2: impossible: " in done.stdout
    assert "The shortest TPOT is 20.00 ms, at batch_size 1." in folder.report_file.read_text()


def test_limits_are_not_of_a_sweep(tmp_path: Path) -> None:
    folder = a_sweep(tmp_path / "sweep")
    with pytest.raises(ConfigError, match="do not apply to a sweep"):
        CliRunner().invoke(
            app,
            ["report", str(folder.path), "--peak-tflops=1", "--bandwidth-gbs=1"],
            catch_exceptions=False,
            standalone_mode=False,
        )


def test_images_are_drawn_where_there_is_a_browser(chromium: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = find_chromium()
    assert program is not None
    monkeypatch.setenv(CHROMIUM_VARIABLE, program)
    folder = a_run(tmp_path / "run")
    report(str(folder.path))
    for image in (folder.waterfall_file, folder.roofline_file):
        data = image.with_suffix(".png").read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert f'width="{width}" height="{height}"' in image.read_text()
        assert 3_000 < len(data) < 300_000, "an empty image is smaller"


def test_a_browser_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_run(tmp_path / "run")
    report(str(folder.path))
    monkeypatch.setenv(CHROMIUM_VARIABLE, "no-such-browser")
    assert draw_images(folder) == Missing("LLM_PERF_CHROMIUM=no-such-browser is not a program")
    monkeypatch.setenv(CHROMIUM_VARIABLE, "true")
    found = draw_images(folder)
    assert isinstance(found, Missing)
    assert "could not draw waterfall.svg" in found.why
    write_whole(folder.waterfall_file, b"<svg/>")
    assert draw_images(folder) == Missing("waterfall.svg has no size")


def test_what_was_measured_stands_wherever_the_times_do(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    timings = clean_timings(
        model=model_facts(dtype="bf16", weights=WeightFacts("stored", {"fp32": 100})),
        workload=workload(texts=TextUse(used=2, cut=1, longest=4321, limit=10, unused=77)),
    )
    write_record(folder.clean_file, timings)
    facts = ("synthetic ids, seed 0", "were cast to bf16", "the longest had 4,321", "77 further records")
    shown = report(str(folder.path))
    pages = [file.read_text() for file in (folder.report_file, folder.summary_file, folder.page_file)]
    for text in (shown, *pages):
        assert all(fact in text for fact in facts)
    found = json.loads(report("--json", str(folder.path)))["inputs"]
    assert [note["kind"] for note in found] == ["prompts", "cut_prompts", "unused_records", "real_weights", "cast_weights"]
    assert "tiny (5 M parameters, bf16, real weights)" in shown, "what ran is named before its times"
    write_record(folder.clean_file, replace(timings, model=model_facts(weights=WeightFacts("random"))))
    shown = report(str(folder.path))
    for text in (shown, *(file.read_text() for file in (folder.report_file, folder.summary_file, folder.page_file))):
        assert "The weights are random" in text


def test_a_run_whose_machine_changed_its_speed_says_so(tmp_path: Path) -> None:
    """In the terminal, on the pages and as data; a steady run says nothing of it."""
    folder = a_run(tmp_path / "run")
    times = [(1.06 if index >= 18 else 1.0) * (1 + index % 3 * 0.001) for index in range(30)]
    repeats = [iteration(round(100e6 * time), [round(10e6 * time)] * 3) for time in times]
    write_record(folder.clean_file, clean_timings(repeats, model=read_record(folder.clean_file, CleanTimings).model))
    said = "End to end: repeats shift by +6.0 % at repeat 19."
    assert f"warning: {said}" in report(str(folder.path))
    for page in (folder.report_file, folder.page_file, folder.summary_file):
        assert said in page.read_text()
    told = json.loads(report(str(folder.path), "--json"))
    assert {key: (one["movement"], one["at"]) for key, one in told["stability"].items()} == dict.fromkeys(
        ("e2e", "prefill", "decode"), ("level shift", 19)
    )
    steady = analyze(RunReader(a_run(tmp_path / "steady")), traces=False)
    assert steady.stability["e2e"].movement is Movement.STEADY
    assert not any(warning.id is WarningId.SPEED_CHANGED for warning in steady.warnings)
