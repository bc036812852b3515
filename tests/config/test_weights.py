"""Real weights under a model's name, and random ones that never look like them."""

import json
from pathlib import Path

import pytest

from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.weights import shape_differences
from llm_perf_opt.core.errors import ConfigError

SHAPE = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "vocab_size": 1}


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folder(path: Path, **fields: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**SHAPE, **fields}))
    return path


def linked(name: str, target: Path) -> None:
    Path("models").mkdir(exist_ok=True)
    (Path("models") / name).symlink_to(target)


def test_a_linked_model_is_used_under_its_name(tmp_path: Path) -> None:
    before = compose(["model=qwen2_5_7b"])
    linked("qwen2_5_7b", folder(tmp_path / "weights"))
    after = compose(["model=qwen2_5_7b"])
    assert (before.config.model.source, after.config.model.source) == ("random", "pretrained")
    assert (after.config.model.path, after.config.model.name) == ("models/qwen2_5_7b", "qwen2_5_7b")
    assert after.config.model.architecture == {}
    assert any(str(tmp_path / "weights") in note for note in after.config.project.notes)
    assert after.config.project.contradictions == (), "another vocabulary is no other model"


def test_folders_of_runs_with_random_weights_say_so(tmp_path: Path) -> None:
    assert compose(["model=qwen2_5_7b"]).run_dir.name.endswith("_random")
    linked("qwen2_5_7b", folder(tmp_path / "weights"))
    assert not compose(["model=qwen2_5_7b"]).run_dir.name.endswith("_random")
    random = compose(["model=qwen2_5_7b", "model.source=random"])
    assert random.run_dir.name.endswith("_random")
    assert compose(["model.source=random", "hydra.run.dir=here"]).run_dir == Path("here"), "a folder that the user names"


def test_random_weights_stay_available(tmp_path: Path) -> None:
    linked("qwen2_5_7b", folder(tmp_path / "weights"))
    model = compose(["model=qwen2_5_7b", "model.source=random", "model.architecture.num_hidden_layers=4"]).config.model
    assert (model.source, model.path, model.architecture["num_hidden_layers"]) == ("random", None, 4)
    with pytest.raises(ConfigError, match=r"model\.architecture\.num_hidden_layers has no effect") as caught:
        compose(["model=qwen2_5_7b", "model.architecture.num_hidden_layers=4"])
    assert "model.source=random" in caught.value.remedy


def test_a_path_selects_the_weights_of_a_named_model(tmp_path: Path) -> None:
    weights = folder(tmp_path / "somewhere")
    model = compose(["model=qwen2_5_7b", f"model.path={weights}"]).config.model
    assert (model.source, model.path, model.name) == ("pretrained", str(weights), "qwen2_5_7b")
    linked("qwen2_5_7b", folder(tmp_path / "linked"))
    assert compose(["model=qwen2_5_7b", f"model.path={weights}"]).config.model.path == str(weights)
    with pytest.raises(ConfigError, match="has no effect on model=tiny") as caught:
        compose([f"model.path={weights}"])
    assert "model=hf" in caught.value.remedy, "weights without a name are not called tiny"
    with pytest.raises(ConfigError, match="has no effect"):
        compose(["model=qwen2_5_7b", f"model.path={weights}", "model.source=random"])


def test_a_linked_name_without_an_option_is_a_model(tmp_path: Path) -> None:
    linked("ours", folder(tmp_path / "weights"))
    composed = compose(["model=ours"])
    assert (composed.config.model.source, composed.config.model.path) == ("pretrained", "models/ours")
    assert composed.run_dir.parts[:3] == ("runs", "baseline", "ours")


def test_a_dangling_link_is_not_replaced_by_random_weights(tmp_path: Path) -> None:
    from llm_perf_opt.profiling.preflight import refuse_early

    linked("qwen2_5_7b", tmp_path / "gone")
    config = compose(["model=qwen2_5_7b"]).config
    assert config.model.source == "pretrained"
    with pytest.raises(ConfigError, match="gone, which does not exist"):
        refuse_early([config])


def test_a_projects_file_with_a_folder_that_is_not_there_is_answered(tmp_path: Path) -> None:
    from llm_perf_opt.profiling.preflight import refuse_early

    (tmp_path / "conf" / "model").mkdir(parents=True)
    option = tmp_path / "conf" / "model" / "qwen2_5_7b.yaml"
    option.write_text("name: qwen2_5_7b\npath: ${hydra:runtime.cwd}/models/qwen2_5_7b\ndtype: bf16\n")
    with pytest.raises(ConfigError, match="no such folder") as caught:
        refuse_early([compose(["model=qwen2_5_7b"]).config])
    assert "llm-perf model link qwen2_5_7b DIR" in caught.value.remedy
    assert "model.source=random" in caught.value.remedy
    random = compose(["model=qwen2_5_7b", "model.source=random"]).config
    assert (random.model.source, random.model.architecture["hidden_size"]) == ("random", 3584)
    assert any("is not used" in note for note in random.project.notes)


def test_a_folder_that_is_another_model_is_recorded(tmp_path: Path) -> None:
    linked("qwen2_5_7b", folder(tmp_path / "weights", hidden_size=896, num_hidden_layers=24, model_type="llama"))
    found = compose(["model=qwen2_5_7b"]).config.project.contradictions
    assert found == ("model_type is llama, not qwen2", "hidden_size is 896, not 3584", "num_hidden_layers is 24, not 28")


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "{}", "[" * 5000])
def test_a_configuration_that_cannot_be_read_is_left_to_what_loads_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert shape_differences(SHAPE, tmp_path) == []
    assert shape_differences(SHAPE, tmp_path / "nowhere") == []


def test_the_text_model_of_a_larger_one_is_compared(tmp_path: Path) -> None:
    inner = {"model_type": "gemma3_text", "hidden_size": 5}
    weights = folder(tmp_path / "weights", model_type="gemma3", hidden_size=None, text_config=inner)
    assert shape_differences({"model_type": "gemma3_text", "hidden_size": 5}, weights) == []
    assert shape_differences({"model_type": "gemma3_text", "hidden_size": 6}, weights) == ["hidden_size is 5, not 6"]
