"""Many runs: what may be pooled, the best, the order of commits, verdicts that are those of `compare`, and the index."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from command import llm_perf
from fleets import ENVIRONMENT, Made, made_run, timings_of
from llm_perf_opt.analysis.fleet import Fleet, FleetRun
from llm_perf_opt.cli.runs import runs
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.workflows import fleet_index, fleet_reading
from llm_perf_opt.workflows.compare import compare_runs
from llm_perf_opt.workflows.fleet import Filters, find_fleet, parse_since, view_fleet
from unreadable import locked
from writing import write_record

OLD, NEW = "b" * 40, "a" * 40
"""By name, the new commit comes first."""


def view(folder: Path, key: str = "tpot", **filters: Any) -> Fleet:
    asked = Filters(**filters)
    index, runs = find_fleet(folder, asked)
    return view_fleet(index, runs, key, asked)


def write(folder: Path, runs: Sequence[Made]) -> None:
    for number, made in enumerate(runs):
        made_run(folder / f"{number:02d}", replace(made, minute=made.minute or number))


def paths(folder: Path, **filters: Any) -> list[str]:
    return [run.path for run in view(folder, **filters).runs]


# --- filters ----------------------------------------------------------------------------------------------------------


def test_filters(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            Made(tpot_ms=10, minute=1),
            Made(tpot_ms=20, model="other", hardware="NVIDIA B300", minute=2000),
            Made(tpot_ms=30, runtime="engine", status="partial", why="nsys failed", minute=3000),
        ],
    )
    assert paths(tmp_path) == ["02", "01", "00"]
    assert paths(tmp_path, model="other") == ["01"]
    assert paths(tmp_path, hardware="h200") == ["02", "00"]
    assert paths(tmp_path, runtime="engine") == ["02"]
    assert paths(tmp_path, status="partial") == ["02"]
    assert paths(tmp_path, since="2026-01-02") == ["02", "01"]
    assert paths(tmp_path, since="2026-01-02T09:20:00+00:00") == ["02", "01"]
    assert paths(tmp_path, since="2026-01-02T09:21") == ["02"]
    assert paths(tmp_path, where=("tpot<25ms",)) == ["01", "00"]
    assert paths(tmp_path, where=("tpot>=0.02s", "ttft < 300ms")) == ["01"]
    assert paths(tmp_path, where=("decode_rate>60",)) == ["00"]


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"status": "done"}, "unknown status"),
        ({"since": "yesterday"}, "neither a date nor an age"),
        ({"where": ("tpot=3ms",)}, "not METRIC<VALUE"),
        ({"where": ("tpt<3ms",)}, "tpot"),
        ({"where": ("tpot<3",)}, "needs a unit"),
        ({"where": ("decode_rate<3ms",)}, "tokens/s"),
    ],
)
def test_an_invalid_filter_is_refused(tmp_path: Path, filters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_fleet(tmp_path, Filters(**filters))
    assert words in f"{error.value.fact} {error.value.remedy}"


def test_since_takes_an_age() -> None:
    now = datetime(2026, 1, 31, tzinfo=timezone.utc)
    assert parse_since("30d", now) == datetime(2026, 1, 1, tzinfo=timezone.utc)


# --- facts of a run ---------------------------------------------------------------------------------------------------


def test_devices_are_those_that_shared_the_work_and_not_those_of_the_machine(tmp_path: Path) -> None:
    write(tmp_path, [Made(devices=1), Made(devices=4)])
    assert ENVIRONMENT["gpu_count"] == 8
    assert [(run.devices, run.on) for run in view(tmp_path).runs] == [(4, "4 × NVIDIA H200"), (1, "NVIDIA H200")]
    assert len(view(tmp_path).best) == 2


def test_points_of_sweeps_are_runs_and_other_kinds_are_not_ranked(tmp_path: Path) -> None:
    made_run(tmp_path / "sweep" / "000")
    folder = made_run(tmp_path / "served", Made(minute=1))
    folder.write_manifest(replace(folder.manifest(), kind="serving"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    found = {run.path: run for run in view(tmp_path).runs}
    assert found["sweep/000"].is_ranked
    assert not found["served"].is_ranked
    assert found["broken"].status == "damaged"
    assert str(tmp_path) not in found["broken"].why


# --- the best -----------------------------------------------------------------------------------------------------------


def test_partial_failed_damaged_and_impossible_runs_are_never_the_best(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            Made(tpot_ms=10),
            Made(tpot_ms=1, status="partial", why="nsys failed"),
            Made(tpot_ms=1, status="failed", why="killed"),
            Made(tpot_ms=1e-6),  # faster than any memory can be read
            Made(tpot_ms=1),
        ],
    )
    (tmp_path / "04" / "raw" / "clean" / "timings.json").write_text("{}")
    ended = RunFolder(tmp_path / "05")
    made_run(ended.path, Made(tpot_ms=1, minute=50))
    ended.update_pass(PassRecord("clean", "failed", why="killed"))
    found = view(tmp_path)
    assert [row.run.path for row in found.best] == ["00"]
    reasons = {run.path: run.unranked.partition(":")[0] for run in found.runs}
    assert reasons == {
        "00": "", "01": "partial", "02": "failed", "03": "impossible figure", "04": "damaged", "05": "incomplete",
    }  # fmt: skip


def test_random_and_real_weights_batches_and_prompts_are_apart(tmp_path: Path) -> None:
    write(tmp_path, [Made(), Made(weights="real"), Made(batch=8), Made(prompt_tokens=64), Made(tpot_ms=9)])
    found = view(tmp_path)
    assert sorted(row.run.path for row in found.best) == ["01", "02", "03", "04"]
    assert {row.runs for row in found.best} == {1, 2}
    assert len(found.series) == 4


def test_the_best_run_shows_the_settings_in_which_the_others_differ(tmp_path: Path) -> None:
    compiled = {"  compile: none\n": "  compile: default\n"}
    write(tmp_path, [Made(tpot_ms=10, settings=compiled), Made(tpot_ms=20), Made(tpot_ms=30, batch=2)])
    alone, chosen = sorted(view(tmp_path).best, key=lambda row: row.runs)
    assert (alone.settings, chosen.settings) == ({}, {"runtime.compile": "default"})
    assert json.loads(llm_perf("runs", tmp_path, "--best", "--json").stdout)["best"][0]["settings"] == {
        "runtime.compile": "default"
    }
    assert llm_perf("runs", tmp_path, "--best", "--html").returncode == 0
    for text in (llm_perf("runs", tmp_path, "--best").stdout, (tmp_path / "index.html").read_text()):
        assert "runtime.compile=default" in text
        assert "runtime.cache=" not in text, "it is the same in all"


def test_a_best_run_without_settings_says_so(tmp_path: Path) -> None:
    write(tmp_path, [Made(tpot_ms=10), Made(tpot_ms=20)])
    RunFolder(tmp_path / "00").config_file.unlink()
    (best,) = view(tmp_path).best
    assert (best.run.path, best.runs, best.settings) == ("00", 2, None)


def test_the_best_of_a_rate_is_the_highest_and_close_runs_are_counted(tmp_path: Path) -> None:
    write(tmp_path, [Made(tpot_ms=10), Made(tpot_ms=10.005), Made(tpot_ms=12)])
    (best,) = view(tmp_path, "decode_rate").best
    assert (best.run.path, best.runs, best.close) == ("00", 3, 1)


def test_a_copy_that_may_not_be_ranked_does_not_hide_the_run(tmp_path: Path) -> None:
    made_run(tmp_path / "a-copy", Made(status="partial", why="cut off"))
    made_run(tmp_path / "run")
    assert [(row.run.path, row.runs) for row in view(tmp_path).best] == [("run", 1)]


def test_a_copy_of_a_run_is_not_a_repeat(tmp_path: Path) -> None:
    made_run(tmp_path / "a")
    made_run(tmp_path / "b")
    made_run(tmp_path / "c", Made(minute=1))
    (series,) = view(tmp_path).series
    assert [run.path for run in series.points[0].runs] == ["a", "c"]


# --- commits ------------------------------------------------------------------------------------------------------------


def test_commits_are_ordered_by_when_they_were_first_measured(tmp_path: Path) -> None:
    write(tmp_path, [Made(commit=OLD), Made(commit=NEW), Made(commit=OLD)])
    (series,) = view(tmp_path).series
    assert [point.commit for point in series.points] == [OLD, NEW]
    assert [len(point.runs) for point in series.points] == [2, 1]


def test_uncommitted_changes_are_pooled_with_nothing(tmp_path: Path) -> None:
    write(tmp_path, [Made(), Made(), Made(dirty=True, tpot_ms=5), Made(dirty=True, tpot_ms=7), Made(dirty=None), Made(commit="")])
    found = view(tmp_path)
    (series,) = found.series
    assert [(point.is_clean, len(point.runs)) for point in series.points] == [(True, 2), (False, 1), (False, 1), (False, 1)]
    assert found.changes == ()


def test_other_settings_are_another_series_with_a_name_that_says_so(tmp_path: Path) -> None:
    write(tmp_path, [Made(), Made(settings={"  compile: none\n": "  compile: default\n"})])
    names = [series.name for series in view(tmp_path).series]
    assert len(set(names)) == 2
    assert any("runtime.compile=default" in name for name in names)


def test_the_value_of_a_commit_is_the_geometric_mean_of_its_runs(tmp_path: Path) -> None:
    write(tmp_path, [Made(tpot_ms=10, noise=(0,)), Made(tpot_ms=40, noise=(0,))])
    ((point,),) = [series.points for series in view(tmp_path).series]
    assert point.value == pytest.approx(20e6)
    assert (point.low, point.high) == (10e6, 40e6)


# --- regressions --------------------------------------------------------------------------------------------------------


def test_a_verdict_is_that_of_compare_with_all_its_cautions(tmp_path: Path) -> None:
    write(tmp_path, [Made(commit=OLD), Made(commit=NEW, tpot_ms=11, env={"gpu_driver": "581", "host": "node2"})])
    (row,) = view(tmp_path).changes
    known = compare_runs([str(tmp_path / "00")], [str(tmp_path / "01")], tmp_path)
    assert row.change.cautions == known.cautions
    assert len(row.change.cautions) >= 2  # one run a side, two machines
    effect = known.row("tpot").effect  # type: ignore[union-attr]
    change = row.change.metric("tpot")
    assert (change.verdict, change.change) == (effect.verdict, effect.change)  # type: ignore[union-attr]
    assert change.verdict == "slower"
    assert row.change.environment == ("gpu_driver: 580 → 581", "host: node1 → node2")


def test_equal_commits_are_not_a_regression(tmp_path: Path) -> None:
    write(tmp_path, [Made(commit=OLD), Made(commit=OLD), Made(commit=NEW, tpot_ms=10.02), Made(commit=NEW)])
    (row,) = view(tmp_path).changes
    assert row.change.metric("tpot").verdict == "not distinguishable"


def test_a_drift_of_the_machine_gets_no_verdict(tmp_path: Path) -> None:
    rising = [0.02 * number / 30 for number in range(30)]
    write(tmp_path, [Made(commit=OLD, noise=rising), Made(commit=NEW, noise=[0.02 + one for one in rising])])
    change = view(tmp_path).changes[0].change.metric("tpot")
    assert change.verdict == "not distinguishable"
    assert "the machine's speed changed" in change.words


def test_only_the_last_two_clean_commits_are_compared(tmp_path: Path) -> None:
    third = "c" * 40
    write(tmp_path, [Made(commit=OLD), Made(commit=NEW), Made(commit=third), Made(commit="d" * 40, dirty=True)])
    (row,) = view(tmp_path).changes
    assert (row.change.base_commit, row.change.new_commit) == (NEW, third)


# --- the index ----------------------------------------------------------------------------------------------------------


def test_a_run_is_read_again_after_its_permissions_have_changed(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "00")
    view(tmp_path)
    folder.env_file.chmod(0o600)
    assert find_fleet(tmp_path, Filters())[0].read == 1
    assert find_fleet(tmp_path, Filters())[0].read == 0


def test_only_changed_runs_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [Made(commit=OLD), Made(commit=NEW)])
    assert find_fleet(tmp_path, Filters())[0].read == 2
    first = view(tmp_path)
    read: list[str] = []
    facts = fleet_reading.FactReader.facts

    def noted(self: fleet_reading.FactReader, path: Path, relative: str) -> FleetRun:
        read.append(relative)
        return facts(self, path, relative)

    monkeypatch.setattr(fleet_reading.FactReader, "facts", noted)
    assert view(tmp_path) == first
    write_record(tmp_path / "01" / "raw" / "clean" / "timings.json", timings_of(Made(minute=1, tpot_ms=20)))
    changed = view(tmp_path)
    assert read == ["01"]
    assert changed.changes[0].change.metric("tpot").new == pytest.approx(20e6, rel=0.01)
    (tmp_path / "00" / "run.json").unlink()
    assert [run.path for run in view(tmp_path).runs] == ["01"]


def test_a_verdict_is_kept_until_a_run_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llm_perf_opt.workflows import fleet_changes

    write(tmp_path, [Made(commit=OLD), Made(commit=NEW, tpot_ms=11)])
    first = view(tmp_path).changes
    with monkeypatch.context() as patched:
        patched.setattr(fleet_changes, "compare_commits", None)
        assert view(tmp_path).changes == first


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x84" + b"a" * 20])
def test_a_damaged_index_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    made_run(tmp_path / "00")
    first = view(tmp_path)
    file = fleet_index._index_file(tmp_path)
    assert isinstance(file, Path)
    assert file.is_file()
    file.write_bytes(content)
    assert view(tmp_path) == first


def test_an_index_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path / "00")
    view(tmp_path)
    monkeypatch.setattr(fleet_index, "VERSION", "another")
    assert find_fleet(tmp_path, Filters())[0].read == 1


def test_without_a_place_for_the_index_the_view_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path / "runs" / "00")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = llm_perf("runs", tmp_path / "runs", "--best", "--json")
    assert done.returncode == 0
    assert "could not be kept" in done.stderr
    assert json.loads(done.stdout)["best"][0]["run"]["path"] == "00"


def test_odd_names_and_links(tmp_path: Path) -> None:
    (made_run(tmp_path / "a\udcff").path / "report.html").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert llm_perf("runs", tmp_path, "--html").returncode == 0
    assert (tmp_path / "index.html").read_text().count("./a%FF/report.html") == 3, (
        "of the best and of all runs, and in the data of the script"
    )
    assert len(view(tmp_path).runs) == 1
    assert len(view(tmp_path).runs) == 1


@pytest.mark.parametrize("place", ["bad", "bad/raw", "bad/run.json", "bad/config.yaml", "bad/raw/clean/timings.json"])
def test_a_run_that_is_not_readable_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    for name in ("bad", "good"):
        made_run(tmp_path / name)
    with monkeypatch.context() as during:
        locked(during, tmp_path / place)
        (bad,) = view(tmp_path, status="not readable").runs
        assert bad.path == "bad"
        assert "Permission denied" in bad.why
        assert bad.unranked.startswith("not readable: ")
        runs(tmp_path, best=True)
        assert "warning: bad is not readable: " in capsys.readouterr().err
        runs(tmp_path, html="")
        assert "not readable" in (tmp_path / "index.html").read_text()
    assert {run.status for run in view(tmp_path).runs} == {"complete"}, "read again when it can be"


@pytest.mark.parametrize(("locked_runs", "said"), [(11, "1 more run is not readable"), (12, "2 more runs are not readable")])
def test_more_runs_that_are_not_readable_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], locked_runs: int, said: str
) -> None:
    for number in range(locked_runs):
        made_run(tmp_path / "mine" / f"{number:02d}")
        locked(monkeypatch, tmp_path / "mine" / f"{number:02d}")
    runs(tmp_path, best=True)
    assert said in capsys.readouterr().err


def test_one_run_is_not_called_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path / "00")
    runs(tmp_path, html="")
    assert capsys.readouterr().out.startswith("1 run: ")
    assert f">1 run in the folder {tmp_path}.<" in (tmp_path / "index.html").read_text()


# --- the command --------------------------------------------------------------------------------------------------------


def test_the_command_prints_lists_and_views(tmp_path: Path) -> None:
    write(tmp_path, [Made(commit=OLD), Made(commit=NEW, tpot_ms=11)])
    listed = llm_perf("runs", tmp_path, "--hardware", "h200", "--limit", 1)
    assert "1 of 2 shown" in listed.stderr
    assert "11.00 ms" in listed.stdout
    views = llm_perf("runs", tmp_path, "--best", "--trend", "--regressions")
    for words in ("Best runs", "Over commits", "slower", "Too few runs", "first measured"):
        assert words in views.stdout
    data = json.loads(llm_perf("runs", tmp_path, "--trend", "--regressions", "--json").stdout)
    assert [point["commit"] for point in data["trend"][0]["points"]] == [OLD, NEW]
    assert data["regressions"][0]["verdict"] == "slower"
    assert data["regressions"][0]["comparison"]["cautions"]
    rows = json.loads(llm_perf("runs", tmp_path, "--since", "2026-01-01", "--json").stdout)
    assert [row["devices"] for row in rows] == [1, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--keep", "1", "--hardware", "h200"), "--hardware does not select"),
        (("--older-than", "1d", "--html"), "--html does not select"),
        (("--metric", "tpot"), "--metric alone"),
        (("--best", "--metric", "speed"), "no such metric"),
        (("--best", "--status", "done"), "unknown status"),
        (("--best", "--status", "planned"), "a status of sweeps, which these views do not show"),
        (("--hardware", "h200", "--status", "planned"), "a status of sweeps, which these views do not show"),
        (("--best", "--limit", "3"), "--limit restricts the list only"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    made_run(tmp_path / "00")
    done = llm_perf("runs", tmp_path, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert (tmp_path / "00" / "run.json").exists()


def test_the_page_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "runs", [Made(commit=OLD), Made(commit=NEW)])
    (tmp_path / "runs" / "00" / "report.html").write_text("x")
    assert llm_perf("runs", "--html", tmp_path / "runs").returncode == 0
    assert 'href="./00/report.html"' in (tmp_path / "runs" / "index.html").read_text()
    (tmp_path / "pages").mkdir()
    assert llm_perf("runs", tmp_path / "runs", "--html", tmp_path / "pages" / "p.html").returncode == 0
    assert 'href="./../runs/00/report.html"' in (tmp_path / "pages" / "p.html").read_text()
    foreign = tmp_path / "mine.html"
    foreign.write_text("<p>mine</p>")
    refused = llm_perf("runs", tmp_path / "runs", "--html", foreign)
    assert (refused.returncode, foreign.read_text()) == (2, "<p>mine</p>")
