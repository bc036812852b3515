"""The measured process on its own: where its files go."""

from pathlib import Path

import pytest

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.alone import requested

ALONE = Path("runs/alone")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_the_folder_is_the_one_named(plus: str) -> None:
    assert requested(["model=tiny"], None).out == ALONE
    assert requested(["model=tiny", f"{plus}hydra.run.dir=here"], None).out == Path("here")
    assert requested(["model=tiny", f"{plus}hydra.run.dir=here"], Path("there")).out == Path("there")


def test_a_pattern_in_the_projects_files_is_not_used_and_that_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "conf" / "hydra").mkdir(parents=True)
    (place / "conf" / "hydra" / "default.yaml").write_text("run: {dir: 'out/${experiment}'}\n")
    assert requested([], None).out == ALONE
    assert "hydra.run.dir in the project's files is for `llm-perf run`" in capsys.readouterr().err
    for overrides, out in ((["hydra.run.dir=here"], None), ([], Path("here"))):
        assert requested(overrides, out).out == Path("here")
        assert "project's files" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "inputs.yaml"])
def test_files_of_others_are_not_overwritten(place: Path, name: str) -> None:
    (place / "mine").mkdir()
    (place / "mine" / name).write_text("{}")
    with pytest.raises(ConfigError, match="mine"):
        requested(["hydra.run.dir=mine"], None)


@pytest.mark.parametrize("written", ["stages.json", "timings.json", "operators.json"])
def test_a_folder_of_an_earlier_pass_is_used_again(place: Path, written: str) -> None:
    for folder, names in ((place / "mine", ("config.yaml", written)), (place / ALONE, ("config.yaml",))):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("{}")
    assert requested(["hydra.run.dir=mine"], None).out == Path("mine")
    assert requested([], None).out == ALONE, "also after an interruption"
