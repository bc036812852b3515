"""A project with its own configuration files, laid out as the guides do."""

import dataclasses
import os
import re
import threading
from pathlib import Path

import pytest
import yaml

from command import HANG_S
from llm_perf_opt.config.composition import Composed, compose, config_from_mapping, config_to_yaml
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.workflows.sweep import plan_sweep

FILES = {
    "config.yaml": """\
# Compose from config groups (swap via CLI)
defaults:
  - hydra: default
  - model: mine
  - runtime: pytorch
  - profiling: minimal
  - _self_
experiment: first
""",
    "hydra/default.yaml": """\
hydra:
  run:
    dir: out/${experiment}/${model.name}/${now:%Y-%m-%d_%H-%M-%S}
  job:
    name: ${experiment}
    chdir: true
""",
    "model/mine.yaml": "name: mine\npath: ${hydra:runtime.cwd}/models/mine\ndtype: bf16\n",
    "model/qwen2_5_7b.yaml": "name: qwen2_5_7b\npath: ${hydra:runtime.cwd}/models/qwen2_5_7b\ndtype: bf16\n",
    "dataset/openwebtext.yaml": "name: openwebtext\nroot: ${hydra:runtime.cwd}/datasets/openwebtext\nvariant: null\n",
    "runtime/pytorch.yaml": "type: pytorch\nbatch_size: 2\nnum_new_tokens: 48\ntorch_profiler: { enabled: false }\n",
    "hardware/single_gpu.yaml": "device_index: 1\n",
    "profiling/minimal.yaml": "nsys: { enable: false }\nncu:  { enable: false }\nnvml: { enable: true }\n",
    "profiling/full.yaml": "nsys: { enable: true }\nncu:  { enable: true }\nnvml: { enable: true }\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        write(tmp_path / "conf" / name, text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert "Traceback" not in str(caught.value)
    return caught.value


def notes(composed: Composed) -> str:
    return "\n".join(composed.config.project.notes)


# --- what is merged ---------------------------------------------------------------------------------------------------


def test_partial_files_are_merged_over_the_packages_defaults(project: Path) -> None:
    composed = compose([])
    config = composed.config
    assert (config.experiment, config.model.name, config.model.dtype) == ("first", "mine", "bf16")
    assert (config.model.source, config.model.path) == ("pretrained", str(project / "models" / "mine"))
    assert (config.runtime.batch_size, config.runtime.num_new_tokens) == (2, 48)
    assert (config.runtime.prompt_tokens, config.runtime.min_repeats) == (128, 10), "the package's"
    assert (config.dataset.kind, config.hardware.device) == ("synthetic", "auto"), "groups that config.yaml does not name"
    assert config.profiling.ncu.top == 10
    assert config_from_mapping(yaml.safe_load(config_to_yaml(config))) == config


def test_a_file_with_the_name_of_a_packaged_option_overrides_it(project: Path) -> None:
    config = compose(["hardware=single_gpu", "profiling=full"]).config
    assert (config.hardware.device, config.hardware.device_index) == ("cuda", 1)
    assert (config.profiling.pass_timeout_s, config.profiling.nsys.enable) == (3600, True), "the rest is the packaged full"
    assert config.project.files["hardware"] == "conf/hardware/single_gpu.yaml"
    assert config.project.notes[0].endswith("options runtime=pytorch, hardware=single_gpu, profiling=full.")


def test_a_dataset_of_the_project_has_its_root_and_takes_texts(project: Path) -> None:
    dataset = compose(["dataset=openwebtext"]).config.dataset
    assert (dataset.root, dataset.kind, dataset.variant) == (str(project / "datasets" / "openwebtext"), "prompts", None)
    assert compose(["dataset=openwebtext", "dataset.variant=subset-1k"]).config.dataset.variant == "subset-1k"


def test_the_files_used_are_recorded(project: Path) -> None:
    assert compose(["dataset=openwebtext"]).config.project.files == {
        "config": "conf/config.yaml",
        "hydra": "conf/hydra/default.yaml",
        "model": "conf/model/mine.yaml",
        "dataset": "conf/dataset/openwebtext.yaml",
        "runtime": "conf/runtime/pytorch.yaml",
        "profiling": "conf/profiling/minimal.yaml",
    }


def test_the_command_line_wins_over_the_files(project: Path) -> None:
    config = compose(["experiment=other", "model=tiny", "runtime.batch_size=8"]).config
    assert (config.experiment, config.model.name, config.runtime.batch_size) == ("other", "tiny", 8)
    assert "model" not in config.project.files


def test_values_of_config_yaml_win_over_its_options(project: Path) -> None:
    write(project / "conf" / "config.yaml", FILES["config.yaml"] + "runtime:\n  batch_size: 16\n")
    assert compose([]).config.runtime.batch_size == 16


@pytest.mark.parametrize("text", ["experiment: alone\n", "experiment: alone\ndefaults: []\n", "defaults:\nexperiment: alone\n"])
def test_a_config_yaml_without_defaults_keeps_the_packages(project: Path, text: str) -> None:
    write(project / "conf" / "config.yaml", text)
    config = compose([]).config
    assert (config.experiment, config.model.name, config.runtime.batch_size) == ("alone", "tiny", 2)


def test_an_option_may_start_from_others_and_from_the_packaged_one_of_its_name(project: Path) -> None:
    write(project / "conf" / "model" / "small.yaml", "defaults: [gpt2, _self_]\nname: small\narchitecture: {n_layer: 2}\n")
    write(project / "conf" / "model" / "gpt2.yaml", "defaults: [gpt2, _self_]\narchitecture: {n_layer: 3, n_embd: 96}\n")
    gpt2, small = compose(["model=gpt2"]).config, compose(["model=small"]).config
    assert (gpt2.model.architecture["n_layer"], gpt2.model.architecture["n_head"]) == (3, 12)
    assert (small.model.architecture["n_layer"], small.model.architecture["n_embd"]) == (2, 96)
    assert small.project.files["model"] == "conf/model/small.yaml"
    assert small.project.files["model/gpt2"] == "conf/model/gpt2.yaml"


def test_an_architecture_of_another_family_replaces_the_packaged_one(project: Path) -> None:
    write(project / "conf" / "model" / "gpt2.yaml", "architecture: {model_type: llama, hidden_size: 64}\n")
    assert compose(["model=gpt2"]).config.model.architecture == {"model_type": "llama", "hidden_size": 64}


def test_a_name_that_is_not_given_is_that_of_the_file(project: Path) -> None:
    write(project / "conf" / "model" / "own.yaml", "architecture: {model_type: gpt2}\n")
    assert compose(["model=own"]).config.model.name == "own"


@pytest.mark.parametrize(
    "text", ["device_index: 2\n", "hardware: {device_index: 2}\n", "# @package _global_\nhardware: {device_index: 2}\n"]
)
def test_a_file_may_name_its_group(project: Path, text: str) -> None:
    write(project / "conf" / "hardware" / "other.yaml", text)
    assert compose(["hardware=other"]).config.hardware.device_index == 2


def test_a_folder_given_is_searched_before_the_project(project: Path, tmp_path: Path) -> None:
    write(tmp_path / "given" / "runtime" / "pytorch.yaml", "batch_size: 5\n")
    config = compose([], tmp_path / "given").config
    assert (config.runtime.batch_size, config.runtime.num_new_tokens) == (5, 64), "one file, not both"
    assert config.project.files["runtime"] == str(tmp_path / "given" / "runtime" / "pytorch.yaml")


def test_without_a_project_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert dataclasses.asdict(compose([]).config.project) == {"files": {}, "notes": (), "contradictions": ()}


# --- hydra/default.yaml -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["wrapped", "plain", "global"])
def test_the_pattern_of_the_run_folder_is_used(project: Path, form: str) -> None:
    nested = "  run:\n    dir: out/${experiment}/${model.name}\n"
    plain = "run:\n  dir: out/${experiment}/${model.name}\n"
    text = {"wrapped": f"hydra:\n{nested}", "plain": plain, "global": f"# @package _global_\nhydra:\n{nested}"}[form]
    write(project / "conf" / "hydra" / "default.yaml", text)
    assert compose([]).run_dir == Path("out/first/mine")
    assert (compose([]).run_dir_file, compose([]).run_dir_given) == ("conf/hydra/default.yaml", False)
    given = compose(["++hydra.run.dir=here"])
    assert given.run_dir == Path("here")
    assert (given.run_dir_file, given.run_dir_given) == ("", True)


@pytest.mark.parametrize(
    "folder", ["{tmp}/outside/run", "../outside/run", "out/../../outside/run", "link/run", "'${oc.env:HOME}/run'"]
)
@pytest.mark.parametrize(
    ("name", "before"),
    [("hydra/default.yaml", "run: "), ("hydra/default.yaml", "# @package hydra.run\n"), ("config.yaml", "hydra: {run: ")],
)
def test_a_file_does_not_choose_a_run_folder_outside_of_the_project(
    project: Path, tmp_path: Path, name: str, before: str, folder: str
) -> None:
    here = project / "here"
    here.mkdir()
    (project / "conf").rename(here / "conf")
    (tmp_path / "outside").mkdir()
    (here / "link").symlink_to(tmp_path / "outside")
    os.chdir(here)
    text = f"dir: {folder.replace('{tmp}', str(tmp_path))}"
    write(here / "conf" / name, before + (text if before.endswith("\n") else f"{{{text}}}") + "}" * before.count("{"))
    with pytest.raises(ConfigError) as caught:
        compose([]).checked_run_dir()
    assert "hydra.run.dir=" in caught.value.fact
    assert "hydra.run.dir=DIR" in caught.value.remedy
    typed = folder.replace("{tmp}", str(tmp_path)).strip("'")
    assert compose([f"hydra.run.dir={typed}"]).checked_run_dir().name == "run"
    assert plan_sweep(["runtime.batch_size=1,2", f"hydra.run.dir={typed}"], None, elsewhere=True).folder.name == "run"
    assert not plan_sweep(["runtime.batch_size=1,2"], None, elsewhere=True).folder.is_absolute()


def test_a_link_that_leads_runs_out_is_named(project: Path, tmp_path: Path) -> None:
    """No file sets the folder: `runs` is a link to a larger disk."""
    here = project / "here"
    here.mkdir()
    (tmp_path / "disk").mkdir()
    (here / "runs").symlink_to(tmp_path / "disk")
    os.chdir(here)
    with pytest.raises(ConfigError) as caught:
        compose([]).checked_run_dir()
    assert caught.value.fact.startswith(f"{here}/runs is a link: it puts hydra.run.dir=runs/")
    assert "project file" not in caught.value.fact
    assert compose([f"hydra.run.dir={here}/runs/one"]).checked_run_dir() == here / "runs" / "one"


def test_settings_of_hydra_that_have_no_effect_are_answered(project: Path) -> None:
    said = notes(compose([]))
    assert "hydra.job.chdir (conf/hydra/default.yaml) has no effect" in said
    assert "hydra.job.name (conf/hydra/default.yaml) has no effect" in said
    assert "hydra.run.dir" not in said


def test_the_cwd_of_hydra_is_that_of_the_user(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "sub dir").mkdir()
    monkeypatch.chdir(project / "sub dir")
    assert compose(["model=mine"], project / "conf").config.model.path == str(project / "sub dir" / "models" / "mine")


# --- keys of the guides -----------------------------------------------------------------------------------------------


def test_the_switch_of_torch_profiler_is_moved_and_that_is_said(project: Path) -> None:
    composed = compose([])
    assert composed.config.profiling.torch.enable is False
    moved = "runtime.torch_profiler.enabled=false (conf/runtime/pytorch.yaml) was translated to profiling.torch.enable=false"
    assert moved in notes(composed)
    write(project / "conf" / "runtime" / "pytorch.yaml", "torch_profiler: {enabled: true, steps: 3, warmup: 1}\n")
    composed = compose([])
    assert composed.config.profiling.torch.enable is True
    assert "runtime.torch_profiler.steps=3 (conf/runtime/pytorch.yaml) has no effect" in notes(composed)


def test_the_key_itself_wins_over_a_moved_one(project: Path) -> None:
    composed = compose(["profiling.torch.enable=true"])
    assert composed.config.profiling.torch.enable is True
    assert "is not used: the command line sets profiling.torch.enable" in notes(composed)
    write(project / "conf" / "profiling" / "minimal.yaml", "torch: {enable: true}\n")
    composed = compose([])
    assert composed.config.profiling.torch.enable is True
    assert "is not used: a project file sets profiling.torch.enable" in notes(composed)


@pytest.mark.parametrize("option", ["minimal", "full", "stage2", "ncu", "roofline-only"])
def test_the_passes_of_the_command_line_are_not_switched_off_by_a_file(project: Path, option: str) -> None:
    composed = compose([f"profiling={option}"])
    assert composed.config.profiling.torch.enable is True
    assert "runtime.torch_profiler.enabled=false (conf/runtime/pytorch.yaml) is not used: profiling=" in notes(composed)


def test_a_preset_of_torch_profiler_that_is_unknown_is_refused(project: Path) -> None:
    text = "defaults:\n  - /profiling/torch@profiling: torch-profiler.{}\n  - _self_\n"
    write(project / "conf" / "profiling" / "minimal.yaml", text.format("max"))
    assert compose([]).config.profiling.torch.preset == "max"
    write(project / "conf" / "profiling" / "minimal.yaml", text.format("maxi"))
    error = refusal()
    assert "conf/profiling/minimal.yaml" in error.fact
    assert "torch-profiler.max" in error.fact
    assert "profiling.torch.preset" in error.remedy


def test_files_in_folders_that_are_not_groups_are_named(project: Path) -> None:
    assert "Not read" not in notes(compose([]))
    write(project / "conf" / "metrics" / "mine.yaml", "ncu: [lts__t_bytes.sum]\n")
    write(project / "conf" / "parts" / "used.yaml", "part: model.layers.0\n")
    write(project / "conf" / "config.yaml", "defaults:\n  - parts/used@model.substages\nexperiment: second\n")
    assert "Not read" not in notes(compose([]))
    write(project / "conf" / "runner" / "stage2.yaml", "mode: deep\n")
    write(project / "conf" / "profiling" / "torch" / "torch-profiler.min.yaml", "activities: [cpu]\n")
    (note,) = [line for line in notes(compose([])).splitlines() if line.startswith("Not read")]
    assert "conf/runner/stage2.yaml" in note
    assert "conf/profiling/torch/torch-profiler.min.yaml" in note
    assert "used.yaml" not in note
    assert "profiling/" in note.partition(". ")[2]
    for number in range(3):
        write(project / "conf" / "runner" / f"{number}.yaml", "")
    assert "and 2 more" in notes(compose([]))


def test_the_stage2_file_of_the_guides_works(project: Path) -> None:
    text = """\
defaults:
  - /profiling/torch@profiling: torch-profiler.min
  - _self_

run:
  mode: deep          # deep|light
  top_n_kernels: 30   # used by ncu selection

artifacts:
  stage2_dir: ${hydra:runtime.cwd}/tmp/stage2/now

hydra:
  run:
    dir: ${artifacts.stage2_dir}
  output_subdir: null
  job:
    chdir: true
"""
    write(project / "conf" / "profiling" / "stage2.yaml", text)
    composed = compose(["profiling=stage2", "runtime=vllm"])
    profiling = composed.config.profiling
    assert (profiling.nsys.enable, profiling.ncu.enable, profiling.ncu.top) == (True, True, 30)
    assert (profiling.torch.enable, profiling.torch.preset) == (True, "minimal")
    assert composed.run_dir == project / "tmp" / "stage2" / "now"
    assert f"artifacts.stage2_dir={composed.run_dir} (conf/profiling/stage2.yaml) is used as the run folder" in notes(composed)
    elsewhere = compose(["profiling=stage2", "runtime=vllm", "hydra.run.dir=here"])
    assert "(conf/profiling/stage2.yaml) has no effect: hydra.run.dir sets the folder" in notes(elsewhere)
    assert "run.top_n_kernels=30 (conf/profiling/stage2.yaml) was translated to profiling.ncu.top=30" in notes(composed)
    assert "run.mode=deep (conf/profiling/stage2.yaml) has no effect" in notes(composed)


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("model/mine.yaml", "nam: x\n", "There is no key 'model.nam': 'nam' is not known in model. Did you mean 'name'?"),
        ("runtime/pytorch.yaml", "batchsize: 2\n", "There is no key 'runtime.batchsize'"),
        ("runtime/pytorch.yaml", "torch_profiler: {active: 3}\n", "There is no key 'runtime.torch_profiler.active'"),
        ("config.yaml", "seed: 3\n", "There is no key 'seed'"),
        ("config.yaml", "project: {files: {}}\nproject.notes: [x]\n", "There is no key 'project.notes'"),
        ("config.yaml", "defaults:\n  - optimizer: adam\n", "there is no group 'optimizer'"),
        ("config.yaml", "defaults: 3\n", "defaults is not a list"),
        ("config.yaml", "- a\n- b\n", "is not a mapping of settings"),
        ("config.yaml", "hydra: {searchpath: [file:///]}\n", "hydra.searchpath is not supported"),
        ("hydra/default.yaml", "hydra: 3\n", "hydra=3 is not a mapping"),
        ("profiling/minimal.yaml", "torch: true\n", "'profiling.torch' is a group of settings"),
        ("model/mine.yaml", "a: &a [1, *a]\n", "line 1: a value contains itself"),
        ("model/mine.yaml", "# @package a b\nname: x\n", "Too many components"),
    ],
)
def test_a_wrong_file_is_answered_with_its_name_and_the_fact(project: Path, name: str, text: str, fact: str) -> None:
    write(project / "conf" / name, text)
    error = refusal()
    assert f"conf/{name}" in error.fact
    assert fact in error.fact


def test_broken_yaml_is_answered_with_its_line(project: Path) -> None:
    write(project / "conf" / "model" / "mine.yaml", "name: a\npath: [b\n")
    assert re.search(r"conf/model/mine\.yaml, line \d", refusal().fact)


def test_an_option_that_is_missing_is_answered_with_those_there_are(project: Path) -> None:
    write(project / "conf" / "config.yaml", "defaults:\n  - model: min\n")
    error = refusal()
    assert "model=min is not known. Did you mean 'mine'?" in error.fact
    assert "conf/config.yaml" in error.remedy
    assert compose(["model=tiny"]).config.model.name == "tiny", "what the command line replaces need not exist"


@pytest.mark.parametrize(
    "files",
    [
        {"model/a.yaml": "defaults: [b]\n", "model/b.yaml": "defaults: [a]\n"},
        {"model/a.yaml": "dtype: ${model.name}\nname: ${model.dtype}\n"},
    ],
)
def test_files_that_refer_to_each_other_are_refused(project: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        write(project / "conf" / name, text)
    refusal("model=a")


def test_aliases_that_expand_to_millions_of_values_are_refused(project: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    write(project / "conf" / "model" / "mine.yaml", "\n".join(lines))
    assert "more than 20,000 values" in refusal().fact


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"name: \xff\xfe\x00", "UTF-8"),
        (b"a: 1\n" * 300_000, "is too large"),
        (b"a: " + b"[" * 1200, "nested more than 64 levels deep"),
    ],
)
def test_a_file_that_is_no_text_or_huge_is_refused(project: Path, content: bytes, fact: str) -> None:
    (project / "conf" / "model" / "mine.yaml").write_bytes(content)
    error = refusal()
    assert "conf/model/mine.yaml" in error.fact
    assert fact in error.fact


@pytest.mark.parametrize("name", ["config.yaml", "model/mine.yaml", "hydra/default.yaml"])
def test_a_named_pipe_is_refused_and_not_waited_for(project: Path, name: str) -> None:
    (project / "conf" / name).unlink()
    os.mkfifo(project / "conf" / name)
    found: list[ConfigError] = []
    thread = threading.Thread(target=lambda: found.append(refusal()), daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert "is a named pipe" in found[0].fact


@pytest.mark.parametrize("name", ["config.yaml", "model/mine.yaml", "runtime/pytorch.yaml"])
def test_a_dangling_link_is_refused_and_not_skipped(project: Path, name: str) -> None:
    (project / "conf" / name).unlink()
    (project / "conf" / name).symlink_to("/nowhere/x.yaml")
    assert f"conf/{name} is a link to /nowhere/x.yaml" in refusal().fact


def test_a_defaults_list_does_not_lead_out_of_the_folder(project: Path) -> None:
    write(project / "secret.yaml", "name: leaked\n")
    for entry in ("- ../secret", "- /../secret@model", "- model: ../../secret"):
        write(project / "conf" / "config.yaml", f"defaults:\n  {entry}\n")
        assert "leaked" not in str(refusal())


def test_an_option_may_have_spaces_in_its_name(project: Path) -> None:
    write(project / "conf" / "model" / "my own.yaml", "name: mine\narchitecture: {model_type: gpt2}\n")
    assert compose(["model=my own"]).config.project.files["model"] == "conf/model/my own.yaml"
    write(project / "conf" / "model" / "my own.yaml", "architecture: {model_type: gpt2}\n")
    assert "model.name='my own'" in refusal("model=my own").fact


def test_plugins_of_hydra_in_the_defaults_list_are_answered(project: Path) -> None:
    write(project / "conf" / "config.yaml", "defaults:\n  - override hydra/launcher: submitit_slurm\n")
    assert "hydra/launcher: submitit_slurm (conf/config.yaml) has no effect" in notes(compose([]))


def test_a_file_that_config_yaml_includes_is_read_and_checked(project: Path) -> None:
    write(project / "conf" / "config.yaml", "defaults:\n  - extra\n")
    write(project / "conf" / "extra.yaml", "experiment: from_extra\n")
    assert compose([]).config.experiment == "from_extra"
    write(project / "conf" / "extra.yaml", "experiment: x\nfoo: 1\n")
    assert "conf/extra.yaml: There is no key 'foo'" in refusal().fact


def test_an_unknown_setting_of_hydra_is_named(project: Path) -> None:
    write(project / "conf" / "hydra" / "default.yaml", "hydra: {foo: 1}\n")
    assert "'foo'" in refusal().fact


def test_a_file_may_refer_to_what_hydra_knows(project: Path) -> None:
    write(project / "conf" / "hydra" / "default.yaml", "run:\n  dir: out/${hydra:runtime.choices.model}/${hydra.job.name}\n")
    assert compose(["model=gpt2"]).run_dir == Path("out/gpt2/llm-perf_random")
    write(project / "conf" / "hydra" / "default.yaml", "run:\n  dir: out/${hydra:job.nothing}\n")
    assert "hydra.run.dir" in refusal().fact
    write(project / "conf" / "hydra" / "default.yaml", "run: 5\n")
    refusal()


def test_what_looks_like_an_option_and_is_none_is_said(project: Path) -> None:
    write(project / "conf" / "model" / "other.yml", "name: x\n")
    assert "conf/model/other.yml is not read" in refusal("model=other").fact
    (project / "conf" / "config.yaml").unlink()
    (project / "conf" / "config.yaml").mkdir()
    assert "conf/config.yaml" in refusal().fact


def test_a_project_whose_link_dangles_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").symlink_to("/nowhere")
    assert "is a link to /nowhere" in refusal().fact


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model/mine.yaml", "name: mine\npath: models/mine\ntrust_remote_code: true\n"),
        ("config.yaml", "defaults: [{model: mine}, _self_]\nmodel: {trust_remote_code: true}\n"),
    ],
)
def test_a_file_cannot_allow_the_code_of_a_model_to_run(project: Path, name: str, text: str) -> None:
    write(project / "models" / "mine" / "config.json", "{}")
    write(project / "conf" / name, text)
    error = refusal()
    assert str(Path("conf") / name) in error.fact
    assert "model.trust_remote_code=true" in error.remedy
    assert compose(["model.trust_remote_code=true"]).config.model.trust_remote_code
    assert not compose(["model.trust_remote_code=false"]).config.model.trust_remote_code


def test_nor_can_a_file_of_another_group(project: Path) -> None:
    write(project / "conf" / "runtime" / "other.yaml", "# @package model\ntrust_remote_code: true\n")
    assert "model.trust_remote_code=true" in refusal("runtime=other").remedy


def test_a_file_may_keep_settings_of_a_tool_that_is_off(project: Path) -> None:
    write(project / "conf" / "profiling" / "minimal.yaml", "nsys: {args: [--gpuctxsw=true]}\nncu: {launch_count: 3}\n")
    notes = " ".join(compose([]).config.project.notes)
    assert "profiling.nsys.args=--gpuctxsw=true has no effect" in notes
    assert "profiling.ncu.launch_count=3 has no effect" in notes


@pytest.mark.parametrize("name", ["ch9", "ch09"])
def test_a_chapter_is_the_own_set_of_that_chapter_in_either_spelling(project: Path, name: str) -> None:
    write(project / "conf" / "metrics" / "ch09.yaml", "ncu: [lts__t_bytes.sum]\n")
    words = ["profiling=full", f"profiling.metrics.sets=[{name}]"]
    assert compose(words).config.profiling.metrics.defined["ch09"]["ncu"] == ["lts__t_bytes.sum"]


@pytest.mark.parametrize("date", ["2024-13-45", "!!timestamp x"])
def test_a_date_that_does_not_exist_in_a_metric_set_is_an_error(project: Path, date: str) -> None:
    write(project / "conf" / "metrics" / "mine.yaml", f"description: {date}\n")
    assert "mine.yaml" in refusal("profiling=full", "profiling.metrics.sets=[mine]").fact


@pytest.mark.parametrize("first", ["x", "x" * 50_000], ids=["references", "characters"])
def test_values_that_double_each_other_are_refused(project: Path, first: str) -> None:
    """A kilobyte took minutes and gigabytes."""
    lines = [f"    a{n}: ${{.a{n - 1}}}${{.a{n - 1}}}" for n in range(1, 40)]
    write(project / "conf" / "config.yaml", "\n".join(["runtime:", "  engine:", f"    a0: {first}", *lines]))
    with pytest.raises(ConfigError, match="refer to each other too often"):
        compose(["model=tiny"])
