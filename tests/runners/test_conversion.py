"""Conversion of a model into the format of an engine: once, into the user's cache, before anything is measured."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.errors import LlmPerfError, ResourceError
from llm_perf_opt.runners import models
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.conversion import Converter, converted_model, run_module
from llm_perf_opt.workspace.data.prompts import synthetic_prompts

SMALL = ["model.architecture.vocab_size=64", "model.architecture.hidden_size=16", "model.architecture.num_hidden_layers=1"]
SHAPE = ["model.architecture.num_attention_heads=2", "model.architecture.num_key_value_heads=1"]


def request(*words: str) -> RunnerRequest:
    config = compose(list(words)).config
    prompts = synthetic_prompts(1, 4, 64, 0)
    return RunnerRequest(config, models.load_config(config.model), prompts, torch.device("cpu"), torch.float32, None)


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Converter:
    """Writes down what it was given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def convert(source: Path, target: Path, dtype: torch.dtype) -> None:
        target.mkdir()
        names = sorted(path.name for path in source.iterdir())
        (target / "engine.json").write_text(f"{dtype} {' '.join(names)}")

    return Converter("echo", "echo.convert", ("json",), ("torch",), "engine.json", "python -m echo.convert", convert)


@pytest.mark.slow
def test_random_weights_are_converted_once(converter: Converter) -> None:
    wanted = request("model=tiny", *SMALL, *SHAPE)
    first = converted_model(wanted, torch.float32, converter)
    assert first.conversion is not None
    assert (first.conversion.reused, first.conversion.by, first.conversion.source) == (False, "echo.convert", "")
    assert first.seconds == first.conversion.seconds > 0
    said = (first.folder / "engine.json").read_text()
    assert said.startswith("torch.float32 config.json")
    assert "model.safetensors" in said
    assert "tokenizer.json" in said
    assert (first.folder / "config.json").exists()
    again = converted_model(wanted, torch.float32, converter)
    assert again.conversion is not None
    assert (again.folder, again.seconds, again.conversion.reused) == (first.folder, 0.0, True)
    assert again.conversion.seconds == first.seconds, "what it took is still known"
    assert sorted(path.name for path in first.folder.parent.iterdir()) == [first.folder.name], "nothing else is left"


@pytest.mark.parametrize("damage", ["a file is gone", "a file is cut off", "the record is no record", "a link leads nowhere"])
def test_a_damaged_conversion_is_replaced(converter: Converter, damage: str) -> None:
    wanted = request("model=tiny", *SMALL, *SHAPE)
    folder = converted_model(wanted, torch.float32, converter).folder
    whole = (folder / "engine.json").read_text()
    if damage == "a file is gone":
        (folder / "engine.json").unlink()
    elif damage == "a file is cut off":
        (folder / "engine.json").write_text(whole[:5])
    elif damage == "the record is no record":
        (folder / "conversion.json").write_text("{")
    else:
        shutil.rmtree(folder)
        folder.symlink_to("nowhere")
    again = converted_model(wanted, torch.float32, converter)
    assert again.conversion is not None
    assert (again.folder, again.conversion.reused) == (folder, False)
    assert (folder / "engine.json").read_text() == whole
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
    third = converted_model(wanted, torch.float32, converter)
    assert third.conversion is not None
    assert third.conversion.reused


def test_a_link_that_leads_nowhere_in_the_models_folder_is_left_out(converter: Converter, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "config.json").write_text('{"model_type": "qwen2"}')
    (given / "model.safetensors").symlink_to(tmp_path / "gone")
    found = converted_model(request("model=hf", f"model.path={given}"), torch.float32, converter)
    assert "model.safetensors" not in (found.folder / "engine.json").read_text()


def test_other_weights_and_dtypes_are_converted_separately(converter: Converter) -> None:
    folders = {
        converted_model(request("model=tiny", *SMALL, *SHAPE, *more), dtype, converter).folder
        for more, dtype in [((), torch.float32), (("model.seed=1",), torch.float32), ((), torch.float16)]
    }
    assert len(folders) == 3


def test_a_converted_folder_is_used_as_it_is(converter: Converter, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "given" / "engine.json").write_text("")
    found = converted_model(request("model=hf", f"model.path={tmp_path / 'given'}"), torch.float32, converter)
    assert (found.folder, found.conversion) == (tmp_path / "given", None)


def test_without_its_packages_the_error_says_how_to_convert(converter: Converter, tmp_path: Path) -> None:
    lacking = replace(converter, modules=("json", "no_such_package"))
    with pytest.raises(ResourceError) as caught:
        converted_model(request("model=tiny"), torch.float32, lacking)
    assert "no_such_package" in caught.value.fact
    assert "python -m echo.convert" in caught.value.remedy
    assert "config.json" in caught.value.remedy


def test_a_failed_conversion_is_an_error_and_leaves_nothing(converter: Converter, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("the model is not\nsupported")

    with pytest.raises(LlmPerfError, match="cannot convert this model: the model is not supported"):
        converted_model(request("model=tiny", *SMALL, *SHAPE), torch.float32, replace(converter, convert=fail))
    assert list((tmp_path / "cache").rglob("*.json")) == []
    with pytest.raises(LlmPerfError, match=r"wrote no engine\.json"):
        converted_model(request("model=tiny", *SMALL, *SHAPE), torch.float32, replace(converter, convert=lambda *_: None))


def test_a_module_is_run_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "said.py").write_text("import sys; open(sys.argv[1], 'w').write(__name__); sys.exit(int(sys.argv[2]))")
    monkeypatch.syspath_prepend(str(tmp_path))
    run_module("said", [str(tmp_path / "out"), "0"])
    assert (tmp_path / "out").read_text() == "__main__"
    with pytest.raises(RuntimeError, match="said exited with 3"):
        run_module("said", [str(tmp_path / "out"), "3"])
