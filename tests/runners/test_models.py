"""Models: every preset builds, what does not fit is rejected, errors name a bad folder."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_perf_opt.config.choices import group_options
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.schema import HardwareConfig, RunConfig
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.runners import models

# Parameter counts as the models' own cards give them, in billions to three digits.
PUBLISHED = {
    "qwen2_5_0_5b": "0.494", "qwen2_5_1_5b": "1.54", "qwen2_5_7b": "7.62", "qwen3_0_6b": "0.596", "llama3_8b": "8.03",
    "llama3_70b": "70.6", "mixtral_8x7b": "46.7", "qwen3_30b_a3b": "30.5", "gemma3_4b": "3.88", "deepseek_v2_lite": "15.7",
    "gpt2": "0.124", "deepseek_ocr2": "3.39",
}  # fmt: skip


def config(*overrides: str) -> RunConfig:
    return compose(overrides).config


def saved_model(folder: Path, overrides: Sequence[str] = ()) -> Path:
    """The tiny model written as a Hugging Face folder."""
    run = config("model.architecture.num_hidden_layers=1", "model.architecture.vocab_size=300", *overrides)
    architecture = models.load_config(run.model)
    built = models.build_model(architecture, run.model, run.runtime, torch.device("cpu"), torch.float32)
    built.save_pretrained(folder)
    return folder


def test_presets_with_a_published_size_are_all_the_named_ones() -> None:
    named = {name for name in group_options()["model"] if not name.startswith("tiny")}
    assert set(PUBLISHED) == named - {"hf"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    run = config(f"model={name}")
    need = models.memory_need(models.load_config(run.model), run.model, torch.bfloat16, 2, 128)
    assert f"{need.parameters / 1e9:.3g}" == PUBLISHED[name]
    assert need.weight_bytes == pytest.approx(2 * need.parameters, rel=0.01)
    assert need.cache_bytes > 0


def test_cache_of_a_grouped_query_model_is_counted_exactly() -> None:
    run = config("model=llama3_8b")
    need = models.memory_need(models.load_config(run.model), run.model, torch.bfloat16, 2, 128)
    layers, key_value_heads, head_dim, bytes_each = 32, 8, 128, 2
    batch, tokens = 2, 128
    assert need.cache_bytes == batch * tokens * layers * key_value_heads * 2 * head_dim * bytes_each


def test_a_model_with_experts_is_counted_in_every_dtype() -> None:
    run = config("model=tiny_deepseek_ocr2")
    architecture = models.load_config(run.model)
    half, whole = (models.memory_need(architecture, run.model, dtype, 2, 128) for dtype in (torch.bfloat16, torch.float32))
    assert whole.weight_bytes == pytest.approx(2 * half.weight_bytes, rel=0.01)
    assert whole.cache_bytes == 2 * half.cache_bytes


def test_what_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "available_memory_bytes", lambda: 10 * 2**30)
    run = config("model=llama3_70b")
    need = models.memory_need(models.load_config(run.model), run.model, torch.bfloat16, 2, 128)
    with pytest.raises(ResourceError, match=r"needs 131\.\d+ GiB .*10\.00 GiB are free"):
        models.check_fits(need, torch.device("cpu"))


def test_weights_are_made_in_the_dtype_asked_for() -> None:
    run = config()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        built = models.build_model(models.load_config(run.model), run.model, run.runtime, torch.device("cpu"), dtype)
        assert {tensor.dtype for tensor in built.parameters()} == {dtype}


@pytest.mark.parametrize("spelling", ["fp32", "float32", "torch.float32"])
def test_a_dtype_in_the_architecture_is_read_in_every_spelling(spelling: str) -> None:
    assert models.load_config(config(f"++model.architecture.dtype={spelling}").model).dtype is torch.float32


def test_random_weights_repeat_with_the_seed_and_are_not_zero() -> None:
    run = config()

    def weights(seed: int) -> torch.Tensor:
        model = replace(run.model, seed=seed)
        built = models.build_model(models.load_config(model), model, run.runtime, torch.device("cpu"), torch.float32)
        first: torch.Tensor = next(built.parameters()).detach()
        return first

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
    assert float(weights(0).abs().min(dim=1).values.max()) > 0


def test_a_saved_folder_loads_with_the_same_weights(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "mine")
    run = config("model=hf", f"model.path={folder}")
    assert run.model.name == "mine"
    architecture = models.load_config(run.model)
    loaded = models.build_model(architecture, run.model, run.runtime, torch.device("cpu"), torch.float32)
    again = models.build_model(architecture, run.model, run.runtime, torch.device("cpu"), torch.float32)
    assert torch.equal(next(loaded.parameters()), next(again.parameters()))
    assert models.load_tokenizer(run.model) is None


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        ("no folder", ConfigError, "no such folder"),
        ("dangling link", ConfigError, "is a link to"),
        ("no config", ConfigError, r"no config\.json"),
        ("config is not JSON", ResourceError, "cannot be loaded"),
        ("no weights", ResourceError, "safetensors"),
        ("pickled weights", ResourceError, "safetensors"),
        ("cut weights", ResourceError, r"damaged weights: .*model\.safetensors"),
        ("own code", ConfigError, "contains its own Python code"),
        ("unknown type", ResourceError, "cannot be loaded"),
    ],
)
def test_a_bad_folder_is_named(tmp_path: Path, damage: str, error: type[Exception], words: str) -> None:
    folder = tmp_path / "model"
    if damage == "dangling link":
        folder.symlink_to(tmp_path / "gone")
    elif damage != "no folder":
        saved_model(folder)
    settings = folder / "config.json"
    if damage == "no config":
        settings.unlink()
    elif damage == "config is not JSON":
        settings.write_text("{")
    elif damage == "no weights":
        (folder / "model.safetensors").unlink()
    elif damage == "pickled weights":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif damage == "cut weights":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5])
    elif damage in ("own code", "unknown type"):
        fields = json.loads(settings.read_text())
        fields["model_type"] = "not_a_model"
        if damage == "own code":
            fields["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
            (folder / "code.py").write_text("raise SystemExit('this must never run')")
        settings.write_text(json.dumps(fields))
    run = config("model=hf", f"model.path={folder}")
    with pytest.raises(error, match=words):
        models.build_model(models.load_config(run.model), run.model, run.runtime, torch.device("cpu"), torch.float32)


def partly_stored(folder: Path, damage: str) -> None:
    """Take something from a saved folder that transformers would fill with random numbers."""
    weights, settings = folder / "model.safetensors", folder / "config.json"
    if damage == "tensors":
        kept = {name: tensor for name, tensor in load_file(weights).items() if ".mlp." not in name}
        save_file(kept, weights, metadata={"format": "pt"})
    elif damage == "embedding":
        kept = {name: tensor for name, tensor in load_file(weights).items() if "embed_tokens" not in name}
        save_file(kept, weights, metadata={"format": "pt"})
    else:
        fields = json.loads(settings.read_text())
        fields |= {"num_hidden_layers": 3}
        fields.pop("layer_types", None)
        settings.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("damage", "tied", "words"),
    [
        ("tensors", "true", r"3 tensors .* are missing: model\.layers\.0\.mlp\.\w+\.weight, "),
        ("layers", "true", r"are missing: model\.layers\.1\..* and \d+ more\."),
        ("layers", "false", r"are missing: model\.layers\.1\."),
        ("embedding", "true", r"model\.embed_tokens\.weight"),
        ("embedding", "false", r"1 tensors .*: model\.embed_tokens\.weight\."),
    ],
)
def test_a_folder_that_does_not_store_the_whole_model_is_refused(tmp_path: Path, damage: str, tied: str, words: str) -> None:
    folder = saved_model(tmp_path / "model", [f"model.architecture.tie_word_embeddings={tied}"])
    run = config("model=hf", f"model.path={folder}")
    models.build_model(models.load_config(run.model), run.model, run.runtime, torch.device("cpu"), torch.float32)
    partly_stored(folder, damage)
    with pytest.raises(ResourceError, match=words):
        models.build_model(models.load_config(run.model), run.model, run.runtime, torch.device("cpu"), torch.float32)


def test_more_tokens_than_positions_is_refused() -> None:
    run = config("model=gpt2")
    models.check_positions(models.load_config(run.model), 1000, 25)
    with pytest.raises(
        ConfigError, match="1000 prompt tokens and 26 new tokens need 1025 positions; the model has 1024 positions"
    ):
        models.check_positions(models.load_config(run.model), 1000, 26)


def test_a_field_the_architecture_does_not_have_is_refused() -> None:
    run = config("model.architecture.num_hiden_layers=2")
    with pytest.raises(ConfigError, match="Did you mean 'num_hidden_layers'"):
        models.load_config(run.model)


def test_sizes_that_do_not_go_together_are_a_wrong_request() -> None:
    run = config("model.architecture.hidden_size=255")
    with pytest.raises(ConfigError, match="cannot be"):
        models.memory_need(models.load_config(run.model), run.model, torch.float32, 1, 8)


def test_unknown_architecture_names_the_nearest() -> None:
    run = config("model.architecture.model_type=lama")
    with pytest.raises(ConfigError, match="Did you mean 'llama'"):
        models.load_config(run.model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_cuda_where_there_is_none_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"hardware\.device=cuda"):
        models.choose_device(HardwareConfig("cuda", 0, None, None, None))
    assert models.choose_device(HardwareConfig("auto", 0, None, None, None)).type == "cpu"


def test_dtype_auto_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(models, "cpu_has_native_bf16", lambda native=native: native)
        assert models.choose_dtype("auto", torch.device("cpu")) is expected
    assert models.choose_dtype("fp16", torch.device("cpu")) is torch.float16
