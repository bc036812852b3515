"""`llm-perf cost` as typed by a user."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from command import llm_perf
from llm_perf_opt.report.definitions import metrics_page

ROOT = Path(__file__).parents[2]
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def cost(*words: str) -> subprocess.CompletedProcess[str]:
    return llm_perf("cost", *words)


def cost_json(*words: str) -> dict[str, Any]:
    done = cost(*words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_llama_3_8b_by_hand() -> None:
    found = cost_json("model=llama3_8b", "--batch", "1", "--prompt", "2048", "--context", "2048")
    assert found["params"] == 8_030_261_248
    assert found["kv_bytes_per_token"] == 32 * 8 * (128 + 128) * 2
    projections = 32 * 2 * 4096 * (4096 + 1024 + 1024 + 4096)
    mlp, logits = 32 * 2 * 3 * 4096 * 14336, 2 * 4096 * 128256
    core = 32 * 2 * 32 * 2049 * (128 + 128)
    assert found["decode"]["flops"] == projections + mlp + logits + core
    pairs = 2048 * 2049 // 2
    assert found["prefill"]["flops"] == 2048 * (projections + mlp) + logits + 32 * 2 * 32 * pairs * 256
    for stage in ("prefill", "decode"):
        assert sum(part["flops"] for part in found[stage]["parts"]) == found[stage]["flops"]
        assert sum(part["bytes"] for part in found[stage]["parts"]) == found[stage]["bytes"]
        assert found[stage]["flops_full_attention"] >= found[stage]["flops"]


def test_a_config_json_costs_what_the_preset_costs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}))
    sizes = ("--batch", "8", "--prompt", "1024", "--context", "4096")
    assert cost_json("--model-config", str(tmp_path / "config.json"), *sizes) == cost_json("model=llama3_8b", *sizes)
    assert cost_json("model=hf", f"model.path={tmp_path}", *sizes) == cost_json("model=llama3_8b", *sizes)


@pytest.mark.parametrize(
    ("words", "context"),
    [
        (("model=tiny",), 2048),
        (("model=tiny", "--prompt", "100"), 100),
        (("model=tiny_vlm", "--prompt", "100"), 100 + (112 // 14) ** 2),
        (("model=tiny_vlm", "--prompt", "100", "--images", "2"), 100 + 2 * (112 // 14) ** 2),
        (("model=tiny_vlm", "--prompt", "100", "--decoder-only"), 100),
        (("model=tiny_vlm", "--prompt", "100", "--context", "7"), 7),
    ],
)
def test_a_decode_step_is_on_the_whole_prompt_by_default(words: tuple[str, ...], context: int) -> None:
    found = cost_json(*words, "--hardware", "h100_sxm")
    assert found["assumptions"]["context"] == context
    assert [row["context"] for row in found["floors"]] == [context]
    assert found["assumptions"]["prompt"] == context or "--context" in words


def test_images_are_counted_with_their_encoder_and_projector() -> None:
    found, text = cost_json("model=tiny_vlm", "--prompt", "100"), cost_json("model=tiny", "--prompt", "164")
    tokens = (112 // 14) ** 2
    assert (found["images"]["images"], found["images"]["image_tokens"]) == (1, tokens)
    assert found["images"]["pixel_shapes"] == {"pixel_values": [1, 3, 112, 112]}
    modules = {entry["module"]: entry for entry in found["images"]["modules"]}
    width, layers = 128, 4
    per_token = layers * 2 * (4 * width * width + 2 * width * 512)
    core = layers * 4 * width * (tokens + 1) ** 2
    patches = 2 * tokens * 3 * 14 * 14 * width
    assert modules["model.vision_tower"]["flops"] == (tokens + 1) * per_token + core + patches
    assert modules["model.multi_modal_projector"]["flops"] == 2 * tokens * (width * 256 + 256 * 256)
    assert found["prefill"]["flops"] == text["prefill"]["flops"] + sum(entry["flops"] for entry in modules.values())
    assert found["decode"] == text["decode"]
    assert found["params"] > text["params"]
    assert sum(part["bytes"] for part in found["prefill"]["parts"]) == found["prefill"]["bytes"]


def test_images_grow_with_their_number_and_with_the_batch() -> None:
    one, four = cost_json("model=tiny_vlm"), cost_json("model=tiny_vlm", "--images", "2", "--batch", "2")
    assert four["images"]["image_tokens"] == 4 * one["images"]["image_tokens"]
    for module, more in zip(one["images"]["modules"], four["images"]["modules"], strict=True):
        assert more["flops"] == 4 * module["flops"]
        pixels = 3 * 3 * 112 * 112 * 2 if module["module"] == "model.vision_tower" else 0
        assert more["bytes"] == module["bytes"] + pixels, "weights are read once"


def test_images_are_part_of_the_roofline_time_and_of_the_cache() -> None:
    words = ("--hardware", "h200", "--batch", "1,8", "--prompt", "64", "--context", "8")
    whole, text = (cost_json("model=tiny_vlm", *words, *more)["floors"][1] for more in ([], ["--decoder-only"]))
    assert whole["prompt"] == text["prompt"] + 64
    assert whole["kv_cache_bytes"] == 2 * text["kv_cache_bytes"]
    assert whole["prefill"]["seconds"] > text["prefill"]["seconds"]
    assert whole["decode"] == text["decode"]
    row = cost_json("model=tiny_vlm", *words, "--memory-share", "1e-9")["floors"][0]
    assert (row["fits"], row["memory_share"]) == (False, 1e-9)
    assert "vision_mlp" in [part["name"] for part in whole["prefill"]["parts"]]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model=tiny", "--images", "1"], "--images has no effect"),
        (["model=tiny_vlm", "--decoder-only", "--image-tiles", "1"], "--image-tiles has no effect"),
        (["model=tiny_vlm", "--image-tiles", "2"], "tiles"),
        (["model=tiny_vlm", "--images", "0"], "images"),
        (["model=tiny_vlm", "--image-height", "112"], "--image-width"),
        (["model=tiny_vlm", "--image-height", "224", "--image-width", "224"], "112 × 112"),
        (["model=tiny_vlm", "--images", "2000000"], "images"),
        (["model=tiny_vlm", "model.architecture.vision_config.model_type=pixtral"], "pixtral"),
    ],
)
def test_images_that_the_model_does_not_take_are_refused(words: list[str], named: str) -> None:
    done = cost(*words)
    assert done.returncode == 2
    assert named in done.stderr


def test_the_decoder_of_a_model_with_an_encoder_is_counted_alone_when_asked() -> None:
    assert "(the text decoder of llava; the rest is not counted)" in cost("model=tiny_vlm", "--decoder-only").stdout
    decoder, alike = cost_json("model=tiny_vlm", "--decoder-only"), cost_json("model=tiny")
    assert decoder.pop("text_decoder_of") == decoder["assumptions"].pop("part_of") == "llava"
    assert alike["assumptions"].pop("part_of") is None
    assert decoder == alike, "the same decoder"
    floors = cost("model=tiny_vlm", "--decoder-only", "--hardware", "h200", "--batch", "1,8").stdout
    assert "Roofline times of the text decoder of llava; the rest is not counted." in floors
    done = cost("model=tiny", "--decoder-only")
    assert done.returncode == 2
    assert "has no effect" in done.stderr


def test_more_tokens_than_learned_positions_are_pointed_out() -> None:
    assert "1,024 learned positions" in cost("model=gpt2").stdout
    assert "learned positions" not in cost("model=gpt2", "--prompt", "512", "--context", "512").stdout


def test_dtypes_of_weights_and_cache_are_separate() -> None:
    base, small = cost_json("model=llama3_8b"), cost_json("model=llama3_8b", "--kv-dtype", "fp8")
    assert small["kv_bytes_per_token"] * 2 == base["kv_bytes_per_token"]
    assert small["params"] == base["params"]
    fp8 = cost_json("model=llama3_8b", "--dtype", "fp8")
    assert fp8["kv_bytes_per_token"] == base["kv_bytes_per_token"]
    assert fp8["decode"]["bytes"] < 0.6 * base["decode"]["bytes"]


def test_what_if_table_names_floor_and_turning_point() -> None:
    words = ("model=llama3_8b", "--hardware", "h100_sxm", "--batch", "1,8,512", "--context", "2048,32768", "--dtype", "bf16,fp8")
    found = cost_json(*words)
    assert len(found["floors"]) == 12
    first = found["floors"][0]
    weights_alone_s = first["weight_bytes"] / 3.35e12
    assert first["decode"]["bound"] == "memory"
    assert weights_alone_s * 0.9 < first["decode"]["seconds"] < weights_alone_s * 1.1
    assert any(row["fits"] is False for row in found["floors"])
    plain = cost(*words)
    assert plain.returncode == 0
    assert "becomes compute-bound" in plain.stdout


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": -3}, "num_hidden_layers"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"model_type": "llamma"}, "llama"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_a_bad_config_names_the_field(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    fields = {key: value for key, value in {**LLAMA, **change}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    done = cost("--model-config", str(tmp_path / "config.json"))
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--batch", "0"], "batch"),
        (["--batch", "x"], "--batch"),
        (["--prompt", "0"], "prompt"),
        (["--context", "-1"], "context"),
        (["--dtype", "bf17"], "bf16"),
        (["--hardware", "h1000"], "h100"),
        (["--batch", "1,2"], "--hardware"),
        (["runtime.batch_size=3"], "runtime.batch_size"),
        (["model=deepseek_v2_lite", "--mla", "often"], "mla"),
        (["--mla", "absorb"], "no latent attention"),
    ],
)
def test_a_bad_size_is_refused(words: list[str], named: str) -> None:
    done = cost(*words)
    assert done.returncode == 2
    assert named in done.stderr


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\x00\xff"])
def test_what_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    done = cost("--model-config", str(tmp_path / "config.json"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_folder_in_place_of_a_config_is_said_so(tmp_path: Path) -> None:
    done = llm_perf("cost", "--model-config", tmp_path)
    assert done.returncode == 2
    assert "Is a directory" in done.stderr
    assert "Errno" not in done.stderr


def test_the_page_of_metrics_is_what_the_code_says() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text()
    assert written == metrics_page(), "stale: python -m llm_perf_opt.report.definitions > docs/metrics.md"
