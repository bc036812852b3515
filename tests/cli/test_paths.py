"""A path that nobody can mean: exit code 2 and one message, whichever verb is given it."""

import os
import subprocess
from pathlib import Path

import pytest

from command import clean_end, llm_perf
from whole_runs import whole_run

TOO_LONG = "x" * 300
"""One name: no file system takes more than 255 bytes."""
FAR_TOO_LONG = "/".join(["y" * 200] * 30)
"""A whole path: no system call takes more than 4,096."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("runs") / "run", traces=False).path


VERBS = (
    "report PATH",
    "analyze PATH",
    "analyze RUN --modules-from PATH",
    "advise PATH",
    "advise PATH --verify",
    "tune PATH",
    "tune PATH --resume",
    "export mlflow PATH",
    "compare PATH RUN",
    "compare RUN PATH",
    "compare RUN RUN --runs-dir PATH",
    "runs PATH",
    "import PATH",
    "sql PATH",
    "sql PATH select",
    "baseline set mine PATH",
    "baseline list --runs-dir PATH",
    "baseline remove mine --runs-dir PATH",
    "dataset add mine --source PATH",
    "dataset list --root PATH",
    "dataset check --root PATH",
    "dataset prepare mine --variant v --root PATH",
    "model link mine PATH",
    "model list --root PATH",
    "model check --root PATH",
    "exec --passes program -- PATH",
    "metrics show PATH --chip gh100",
    "metrics check PATH --chip gh100",
    "run --dry-run --config-dir PATH",
    "run --dry-run model=hf model.path=PATH",
    "run --resume PATH",
    "options --config-dir PATH",
    "cost model=tiny --config-dir PATH",
    "cost --model-config PATH",
    "cost model=tiny --peaks PATH",
    "externals status --root PATH",
)


def given(words: str, path: object, run: Path) -> subprocess.CompletedProcess[str]:
    return llm_perf(*[word.replace("PATH", str(path)).replace("RUN", str(run)) for word in words.split()])


@pytest.mark.parametrize("words", VERBS)
def test_a_path_that_is_not_there(words: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("missing", tmp_path / "no" / "where", run / "run.json" / "below"):
        done = given(words, path, run)
        assert done.returncode == 2, (path, done.stderr)
        assert clean_end(done)
        assert "error: " in done.stderr or "unknown" in done.stdout
    assert list(tmp_path.iterdir()) == [], "nothing is made for what cannot be"


@pytest.mark.parametrize("words", VERBS)
def test_a_path_that_is_too_long(words: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (TOO_LONG, FAR_TOO_LONG):
        done = given(words, path, run)
        assert done.returncode == 2, (path[:20], done.stderr)
        assert clean_end(done)
        assert max(map(len, done.stderr.splitlines()), default=0) < 1000, "it is not quoted whole"


@pytest.mark.parametrize("words", ["exec --passes program --out PATH/run -- true", "baseline set mine RUN --runs-dir PATH"])
def test_a_place_that_cannot_be_made(words: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (TOO_LONG, FAR_TOO_LONG, run / "run.json"):
        done = given(words, path, run)
        assert done.returncode in (2, 3)
        assert clean_end(done)


def test_a_file_for_a_folder_and_a_folder_for_a_file(run: Path, tmp_path: Path) -> None:
    for words in (
        ["report", run / "run.json"],
        ["advise", run / "run.json"],
        ["runs", run / "run.json"],
        ["baseline", "set", "mine", run / "run.json"],
        ["model", "link", "mine", run / "run.json", "--root", tmp_path],
        ["run", "--dry-run", "--config-dir", run / "run.json"],
        ["run", "--resume", run / "run.json"],
        ["cost", "--model-config", run],
        ["analyze", tmp_path],
        ["sql", tmp_path],
        ["exec", "--passes", "program", "--", tmp_path],
    ):
        done = llm_perf(*words)
        assert done.returncode in (2, 3, 5), (words, done.stderr)
        assert clean_end(done), (words, done.stderr)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("gone")
    for name in ("loop", "dangling"):
        for verb in ("report", "analyze", "sql", "runs", "advise"):
            done = llm_perf(verb, tmp_path / name)
            assert done.returncode == 2, (verb, name, done.stderr)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_may_not_be_looked_into(run: Path, tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0)
    for verb in ("report", "analyze", "sql", "advise"):
        done = llm_perf(verb, tmp_path / "shut" / "run")
        assert done.returncode == 3
        assert clean_end(done)


# --- numbers that no machine holds ------------------------------------------------------------------------------------

DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "words",
    [
        "run --dry-run runtime.batch_size=DIGITS",
        "run --dry-run hardware.peak_tflops=DIGITS",
        "run --dry-run model.architecture.hidden_size=DIGITS",
        "run --dry-run model.architecture={a:DIGITS}",
        "run --dry-run DIGITS=1",
        "run --dry-run -m runtime.batch_size=1,DIGITS",
        "run --dry-run -m runtime.batch_size=range(1,DIGITS)",
        "cost model=tiny --batch DIGITS",
        "cost model.architecture.hidden_size=DIGITS",
        "compare RUN RUN --gate tpot=DIGITS%",
        "analyze RUN --top DIGITS",
        "sql RUN select --limit DIGITS",
        "exec --timeout-s inf -- true",
        "exec --timeout-s 1e300 -- true",
    ],
)
def test_a_number_of_five_thousand_digits(words: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = llm_perf(*[word.replace("DIGITS", DIGITS).replace("RUN", str(run)) for word in words.split()])
    assert done.returncode == 2
    assert clean_end(done)
    assert max(map(len, done.stderr.splitlines()), default=0) < 1000, "it is not quoted whole"
    assert "set_int_max_str_digits" not in done.stderr, "that is advice for programmers"


def test_such_a_number_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"model_type": "qwen2", "hidden_size": {DIGITS}}}')
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "mine.yaml").write_text(f"batch_size: {DIGITS}\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "baselines.json").write_text(f'{{"baselines": {DIGITS}}}')
    for words, code in (
        (["cost", "--model-config", "config.json"], 2),
        (["run", "--dry-run", "--config-dir", tmp_path, "runtime=mine"], 2),
        (["baseline", "list"], 5),
    ):
        done = llm_perf(*words)
        assert done.returncode == code, done.stderr
        assert clean_end(done)
        assert "set_int_max_str_digits" not in done.stderr
