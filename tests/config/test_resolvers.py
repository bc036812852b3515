"""Which variables of the environment a file may read, and who may call what."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from llm_perf_opt.config.code_settings import Stored
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.resolvers import READABLE
from llm_perf_opt.core.errors import ConfigError

SECRET = "s3cr3t-of-the-user"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("API_TOKEN", SECRET)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def refused(*overrides: str, config_dir: Path | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, config_dir)
    assert SECRET not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("config.yaml", "experiment: ${oc.env:API_TOKEN}\n", "experiment"),
        ("config.yaml", "model: {name: 'x-${oc.env:API_TOKEN}'}\n", "model.name"),
        ("config.yaml", "experiment: API_TOKEN\nmodel: {name: '${oc.env:${experiment}}'}\n", "model.name"),
        ("config.yaml", "model: {name: '${oc.env:API_${hydra:job.part}}'}\nhydra: {job: {part: TOKEN}}\n", "model.name"),
        ("config.yaml", "model: {name: '${oc.decode:\"${oc.env:API_TOKEN}\"}'}\n", "model.name"),
        ("config.yaml", "experiment: '\\${oc.env:API_TOKEN}'\nmodel: {name: '${oc.decode:${experiment}}'}\n", "model.name"),
        ("config.yaml", "model: {name: '${oc.select:a,${oc.env:API_TOKEN}}'}\n", "model.name"),
        ("config.yaml", "model: {name: '${oc.env:NOT_THERE,${oc.env:API_TOKEN}}'}\n", "model.name"),
        ("config.yaml", "model: {name: '${${experiment}:API_TOKEN}'}\nexperiment: oc.env\n", "model.name"),
        ("config.yaml", "profiling: {nsys: {args: ['${oc.env:API_TOKEN}']}}\n", "profiling.nsys.args"),
        ("hydra/default.yaml", "run: {dir: 'runs/${oc.env:API_TOKEN}'}\n", "hydra.run.dir"),
        ("model/tiny.yaml", "path: ${oc.env:API_TOKEN}\n", "model.path"),
    ],
)
def test_a_file_cannot_read_a_variable(name: str, text: str, key: str, project: Path) -> None:
    write(project / "conf" / name, text)
    error = refused()
    assert f"conf/{name}: {key} reads the environment variable" in error.fact
    assert f"{key}='${{oc.env:" in error.remedy


def test_nor_can_one_of_config_dir(project: Path) -> None:
    write(project / "mine" / "model" / "theirs.yaml", "name: '${oc.env:API_TOKEN}'\n")
    assert "mine/model/theirs.yaml" in refused("model=theirs", config_dir=Path("mine")).fact


def test_nor_can_a_defaults_list(project: Path) -> None:
    write(project / "conf" / "config.yaml", "defaults: [{model: '${oc.env:API_TOKEN}'}, _self_]\n")
    error = refused()
    assert "conf/config.yaml" in error.fact
    assert "API_TOKEN" in error.fact


def test_what_was_typed_does_not_lend_its_right_to_a_file(project: Path) -> None:
    write(project / "conf" / "config.yaml", "experiment: ${oc.env:API_TOKEN}\n")
    assert "experiment reads" in refused("model.name=${experiment}", "model.path=${oc.env:API_TOKEN}").fact
    write(project / "conf" / "config.yaml", "experiment: API_TOKEN\n")
    assert "model.name reads" in refused('model.name="${oc.env:${experiment}}"').fact, "the file chooses the variable"


def test_the_command_line_reads_what_it_names(project: Path) -> None:
    write(project / "conf" / "config.yaml", "model: {name: '${oc.env:API_TOKEN}'}\n")
    made = compose(["model.name=${oc.env:API_TOKEN}", "experiment=${oc.env:NOT_THERE,a}"])
    assert (made.config.model.name, made.config.experiment) == (SECRET, "a")


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "${oc.env:${hydra:job.part}}", "${oc.env:HF_HOME,${oc.env:HOME}}"])
def test_a_file_may_read_the_usual_ones(project: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    write(project / "conf" / "config.yaml", f"dataset: {{text_field: '{text}'}}\nhydra: {{job: {{part: HOME}}}}\n")
    assert compose([]).config.dataset.text_field == str(project)


def test_overrides_that_were_read_from_a_file_are_its_words() -> None:
    stored = Stored(Path("sweep.json"), "llm-perf run --resume x")
    with pytest.raises(ConfigError, match="API_TOKEN"):
        compose(["model.name=${oc.env:API_TOKEN}"], None, stored)


def test_resolvers_of_the_calling_program_are_not_for_files_and_are_kept(project: Path) -> None:
    called: list[str] = []
    OmegaConf.register_new_resolver("of_the_program", called.append)
    try:
        write(project / "conf" / "config.yaml", "experiment: ${of_the_program:x}\n")
        assert "of_the_program" in refused().fact
        assert not called
        assert OmegaConf.has_resolver("of_the_program")
        assert OmegaConf.create({"a": "${oc.env:API_TOKEN}"}).a == SECRET
    finally:
        OmegaConf.clear_resolver("of_the_program")


def test_the_documentation_lists_the_variables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert [name for name in sorted(READABLE) if f"`{name}`" not in page] == []
