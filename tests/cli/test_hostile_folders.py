"""A folder of someone else with links in it: nothing outside is changed, and what is refused is named in one sentence."""

import shutil
from pathlib import Path

import pytest

from builders import manifest
from command import clean_end, llm_perf
from llm_perf_opt.core.records import SCHEMA
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.workflows.sweep_folder import PlannedPoint, Sweep, SweepFolder
from whole_runs import whole_run

LINKS = (
    "tables", "tables/torch", "tables/nsys", "raw", "raw/clean", "raw/torch", "raw/nsys", "raw/torch/trace.json.gz", "run.json",
    "config.yaml", "report.html", "report.md", "findings.json", "tables/stages.parquet", "raw/ncu_decode/counters.csv",
)  # fmt: skip
"""What a run contains, each a link to something of the same name outside."""
READ = ("report", "analyze", "sql", "compare", "baseline", "advise")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its reports and tables."""
    folder = whole_run(tmp_path_factory.mktemp("whole") / "run")
    assert llm_perf("report", folder.path).returncode == 0
    assert (folder.path / "tables" / "torch").is_dir()
    return folder.path


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file below a folder with its time and its content, and every folder and link."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def linked(whole: Path, tmp_path: Path, place: str) -> Path:
    """Return a copy of the run in which one path is a link to the same in another copy, outside."""
    outside = Path(shutil.copytree(whole, tmp_path / "outside"))
    (outside / "torch").mkdir()
    (outside / "torch" / "precious.py").write_text("mine")
    run = Path(shutil.copytree(whole, tmp_path / "runs" / "exp" / "run"))
    path = run / place
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(outside / place if (outside / place).exists() else outside)
    return run


@pytest.mark.parametrize("place", LINKS)
def test_a_link_in_a_run_changes_nothing_outside(whole: Path, tmp_path: Path, place: str) -> None:
    run = linked(whole, tmp_path, place)
    outside = run.parents[2] / "outside"
    before = everything(outside)
    words = {
        "report": ["report", run],
        "analyze": ["analyze", run],
        "sql": ["sql", run, "select 1"],
        "compare": ["compare", whole, run],
        "baseline": ["baseline", "set", "x", run, "--runs-dir", tmp_path / "kept"],
        "advise": ["advise", run],
    }
    for verb in READ:
        done = llm_perf(*words[verb])
        assert done.returncode == 2, (verb, done.stderr)
        assert str(run / place) in done.stderr.replace("\n", " "), verb
        assert clean_end(done)
    for asked in (["--compress"], ["--keep", "0"]):
        assert clean_end(llm_perf("runs", run.parents[1], *asked, "--yes"))
    assert everything(outside) == before


@pytest.mark.parametrize("name", ["runs", "runs/exp", "runs/baselines.json", "runs/.baselines.json.lock"])
def test_a_link_among_the_runs_of_a_project_changes_nothing_outside(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside"
    shutil.copytree(whole, outside / "exp" / "run")
    (outside / "baselines.json").write_text('{"baselines": {}}')
    (project / name).parent.mkdir(parents=True)
    target = outside / Path(name).relative_to("runs")
    target = target if target.exists() else outside / "baselines.json"
    (project / name).symlink_to(target)
    before = everything(outside)
    monkeypatch.chdir(project)
    for words in (["baseline", "set", "x", whole], ["runs", "--keep", "0", "--yes"], ["runs", "--compress", "--yes"]):
        assert clean_end(llm_perf(*words)), words
        assert everything(outside) == before, words
    done = llm_perf("exec", "--passes", "", "--", "true") if name == "runs" else None
    assert everything(outside) == before
    assert done is None or done.returncode == 2


def test_runs_that_are_named_by_an_absolute_path_may_lie_behind_a_link(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "disk" / "exp" / "run")
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    assert llm_perf("baseline", "set", "x", whole, "--runs-dir", tmp_path / "runs").returncode == 0
    assert llm_perf("runs", tmp_path / "runs", "--keep", "0", "--yes").returncode == 0
    assert not (tmp_path / "disk" / "exp").exists()


@pytest.mark.parametrize("place", ["sweep.json", "sweep.html", "plan.json", "jobs", "000", "001"])
def test_a_link_in_a_sweep_changes_nothing_outside(whole: Path, tmp_path: Path, place: str) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(whole, outside / "000")
    (outside / "jobs").mkdir()
    sweep = SweepFolder.create(tmp_path / "sweep")
    points = (PlannedPoint((), ("runtime.batch_size=1",)), PlannedPoint((), ("runtime.batch_size=2",)))
    sweep.write_plan(Sweep(SCHEMA, "0", "2026-01-01T00:00:00+00:00", ("x",), None, points), [{}, {}])
    RunFolder.create(sweep.point_folder(0)).write_manifest(manifest())
    path = sweep.path / place
    if path.is_dir():
        shutil.rmtree(path)
    if path.exists():
        path.replace(outside / place)
    path.symlink_to(outside / place if (outside / place).exists() else outside)
    before = everything(outside)
    for words in (["report", sweep.path], ["run", "--resume", sweep.path], ["runs", tmp_path / "sweep", "--compress", "--yes"]):
        done = llm_perf(*words)
        assert clean_end(done), words
        assert everything(outside) == before, words
    assert llm_perf("report", sweep.path).returncode == 2


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("datasets", ["dataset", "add", "mine", "--source"]),
        ("datasets/mine", ["dataset", "add", "mine", "--source"]),
        ("datasets/.mine.part", ["dataset", "add", "mine", "--source"]),
        ("conf", ["dataset", "add", "mine", "--source"]),
        ("conf/dataset", ["dataset", "add", "mine", "--source"]),
        ("conf/dataset/mine.yaml", ["dataset", "add", "mine", "--source"]),
        ("models", ["model", "link", "mine"]),
        ("models/mine", ["model", "link", "mine"]),
    ],
)
def test_a_link_in_a_project_changes_nothing_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, words: list[str]
) -> None:
    data, outside, project = tmp_path / "data", tmp_path / "outside", tmp_path / "project"
    for folder in (data, outside, (project / place).parent):
        folder.mkdir(parents=True)
    (data / "a.jsonl").write_text('{"text": "one"}\n')
    (data / "config.json").write_text("{}")
    (outside / "precious").write_text("mine")
    (project / place).symlink_to(outside)
    before = everything(outside)
    monkeypatch.chdir(project)
    done = llm_perf(*words, data)
    assert done.returncode in (2, 3), done.stderr
    assert Path(place).parts[0] in done.stderr
    assert everything(outside) == before
    assert (project / place).readlink() == outside
