"""The check of a linked model, from the headers of its files."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from builders import HOSTILE_NAMES
from dataset_builders import write_jsonl
from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.workspace.data.model_tree import check_model, link_model, linked_models, model_folder, model_named, read_header


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model, saved by transformers in several shards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("weights")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
    config = AutoConfig.for_model("qwen2", **sizes, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "parameters").write_text(str(sum(tensor.numel() for tensor in model.parameters())))
    return folder


@pytest.fixture
def model(weights: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(weights, tmp_path / "model"))


def problems(folder: Path) -> list[str]:
    return check_model(folder).problems


def test_a_sound_model_is_told_as_it_is(model: Path) -> None:
    found = check_model(model)
    assert found.problems == []
    assert found.model_type == "qwen2"
    assert found.parameters == int((model / "parameters").read_text())
    assert found.bytes == 4 * found.parameters
    assert found.dtypes == {"F32": found.bytes}
    assert found.files == len(list(model.glob("*.safetensors"))) > 1
    assert isinstance(found.tokenizer, Missing)
    assert found.notes == ["no tokenizer: texts are fed byte by byte"]
    (model / "tokenizer.json").touch()
    assert check_model(model).tokenizer == "tokenizer.json"


def test_a_missing_shard_is_named(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    shard.unlink()
    assert problems(model) == [f"the shard {shard.name} is missing"]
    found = check_model(model)
    assert isinstance(found.parameters, Missing), "a part of the weights is not the model's size"
    assert isinstance(found.bytes, Missing)
    assert found.dtypes == {}
    shard.symlink_to(model / "nowhere")
    assert problems(model) == [f"the shard {shard.name} is a dangling link"]


def test_a_shard_cut_short_is_named(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert problems(model) == [m for m in problems(model) if m.startswith(f"{shard.name} is damaged: it is truncated")] != []


def test_an_index_that_promises_too_much_is_named(model: Path) -> None:
    (index,) = model.glob("*.index.json")
    values = json.loads(index.read_text())
    values["weight_map"]["extra"] = next(iter(values["weight_map"].values()))
    values["weight_map"]["evil"] = "../../x.safetensors"
    index.write_text(json.dumps(values))
    assert any("'extra'" in problem for problem in problems(model))
    assert any("not a file in this folder" in problem for problem in problems(model))
    index.write_text("{}")
    assert any("cannot be read" in problem for problem in problems(model))
    index.unlink()
    assert any("no *.safetensors.index.json" in problem for problem in problems(model))


def test_shards_without_an_index_are_counted_against_their_names(model: Path) -> None:
    (index,) = model.glob("*.index.json")
    index.unlink()
    shards = sorted(model.glob("*.safetensors"))
    count = len(shards)
    assert problems(model) == [f"{count} shards, but no *.safetensors.index.json that lists them"]
    for shard in shards[1:]:
        shard.unlink()
    lost = ", ".join(str(number) for number in range(2, count + 1))
    assert problems(model) == [
        f"model is missing the shards {lost} of {count}", "1 shard, but no *.safetensors.index.json that lists them",
    ]  # fmt: skip
    shards[0].rename(model / "model-00007-of-00002.safetensors")
    assert problems(model)[:2] == ["model has a shard 7 of 2", "model is missing the shards 1, 2 of 2"]
    (model / "model-00007-of-00002.safetensors").rename(model / "model-00001-of-999999999.safetensors")
    assert "and 999999988 more of 999999999" in problems(model)[0]
    (model / "model-00001-of-999999999.safetensors").rename(model / "model.safetensors")
    assert problems(model) == []


def test_an_index_that_lists_nothing_is_named(model: Path) -> None:
    (index,) = model.glob("*.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": {}}))
    assert problems(model) == [f"{index.name} lists no tensor"]


def test_a_configuration_that_is_a_link_to_nothing_is_called_that(model: Path, tmp_path: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(tmp_path / "blob")
    assert f"config.json is a dangling link: {tmp_path / 'blob'} does not exist" in problems(model)
    with pytest.raises(ResourceError, match=r"config\.json is a link to .*blob, which does not exist"):
        link_model(tmp_path / "models", "m", model)
    with pytest.raises(ResourceError, match=r"config\.json is a link to .*blob, which does not exist"):
        model_folder(str(model))


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "is missing"), ("{", "is not a JSON object"), ("[]", "is not a JSON object"), ("{}", "has no model_type")],
)
def test_a_configuration_that_cannot_be_used_is_named(model: Path, content: str | None, said: str) -> None:
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_text(content)
    assert [problem for problem in problems(model) if said in problem]


def test_pickled_weights_are_no_weights(model: Path) -> None:
    for path in [*model.glob("*.safetensors"), *model.glob("*.index.json")]:
        path.unlink()
    assert problems(model) == ["no *.safetensors"]
    (model / "pytorch_model.bin").touch()
    assert problems(model) == ["no *.safetensors; pickled weights are not read: convert them"]


def test_quantized_weights_have_no_honest_count(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    assert isinstance(check_model(model).parameters, Missing)


def header(tensors: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"short", (2**60).to_bytes(8, "little") + b"{}", (5).to_bytes(8, "little") + b"{}", header({}) + b"x",
        header({"a": 1}), header({"a": tensor("F32", [2], 0, 8)}), header({"a": tensor("F32", [2], 0, 4)}, b"x" * 4),
        header({"a": tensor("F32", [1], 4, 8)}, b"x" * 8), header({"a": tensor("F32", [-1], 0, -4)}),
        header({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 2, 6)}, b"x" * 6),
    ],
)  # fmt: skip
def test_a_damaged_file_is_called_that(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ParseError, match="is damaged"):
        read_header(tmp_path / "a.safetensors")


def test_small_and_unknown_dtypes_are_read(tmp_path: Path) -> None:
    content = header({"__metadata__": {"format": "pt"}, "a": tensor("F4", [2, 3], 0, 3), "b": tensor("NEW", [7], 3, 5)}, b"x" * 5)
    (tmp_path / "a.safetensors").write_bytes(content)
    assert [(found.dtype, found.elements, found.bytes) for found in read_header(tmp_path / "a.safetensors").values()] == [
        ("F4", 6, 3),
        ("NEW", 7, 2),
    ]


def test_any_damage_is_an_error_of_ours_or_harmless(model: Path) -> None:
    draw = random.Random(3)
    path = sorted(model.glob("*.safetensors"))[0]
    good = path.read_bytes()
    refused = 0
    for _ in range(200):
        damaged = bytearray(good)
        for _ in range(3):
            damaged[draw.randrange(600)] = draw.randrange(256)
        path.write_bytes(damaged)
        refused += bool(problems(model))
    assert refused > 100


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_link_is_made_once_and_found(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "models"
    place = link_model(root, "mine", model)
    assert place.readlink() == model
    with pytest.raises(ConfigError, match="already exists"):
        link_model(root, "mine", model)
    assert linked_models(root) == [place]
    assert model_named(root, "mine") == place
    with pytest.raises(ConfigError, match="Did you mean 'mine'"):
        model_named(root, "mind")


def test_a_dangling_link_is_named_as_such(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "models"
    place = link_model(root, "mine", model)
    model.rename(tmp_path / "moved")
    assert check_model(place).problems == [f"a dangling link: {model} does not exist"]
    assert linked_models(root) == [place]
    (root / "loop").symlink_to(root / "loop")
    assert "dangling" in check_model(root / "loop").problems[0]


@pytest.mark.parametrize("name", [*HOSTILE_NAMES, "../x", "/abs", ".hidden", "a/b"])
def test_hostile_names_are_refused(model: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a model"):
        link_model(tmp_path / "models", name, model)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", ["hf", "random"])
def test_the_name_of_an_option_that_is_no_model_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is an option"):
        link_model(tmp_path / "models", name, model)
    assert not (tmp_path / "models").exists()


def test_what_is_no_model_is_not_linked(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for target, said, code in (("nowhere", "not a folder", 2), ("gone", "a dangling link", 2), (".", "has no config.json", 3)):
        with pytest.raises(LlmPerfError, match=said) as caught:
            link_model(tmp_path / "models", "m", tmp_path / target)
        assert caught.value.exit_code == code


def test_weights_without_a_tensor_are_a_problem(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "m" / "config.json", [{"model_type": "qwen2"}])
    (tmp_path / "m" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert check_model(tmp_path / "m").problems == ["the *.safetensors contain no tensor"]
