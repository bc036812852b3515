"""Configurations of vision-language models: sizes of images, defaults, errors."""

from typing import Any

import pytest

from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.cost_model.vision_inputs import ImageRequest
from llm_perf_opt.analysis.cost_model.vision_models import Vision, vision_of
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.core.errors import ConfigError

TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llava": {"vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "internvl": {"vision_config": {}},
    "got_ocr2": {"vision_config": {}},
    "deepseek_ocr2": {"vision_config": {"sam_config": {}, "encoder_config": {"hidden_size": 896, "num_attention_heads": 14}}},
    "deepseek_vl_hybrid": {"vision_config": {"image_size": 384}, "high_res_vision_config": {}},
    "qwen2_5_vl": {"vision_config": {}},
    "qwen3_vl": {"vision_config": {}},
}
"""Sizes of images as published, or the defaults."""


def vision(model_type: str, **changes: Any) -> Vision:
    text = {**TEXT, **({"mlp_layer_types": ["dense", "dense"]} if model_type == "deepseek_ocr2" else {})}
    found = vision_of({"model_type": model_type, "text_config": text, **PUBLISHED[model_type], **changes})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("model_type", "request_", "tokens"),
    [
        ("llava", ImageRequest(1), 576),
        ("gemma3", ImageRequest(2), 2 * 256),
        ("internvl", ImageRequest(1), 256),
        ("internvl", ImageRequest(1, None, 6), 7 * 256),
        ("got_ocr2", ImageRequest(1), 256),
        ("deepseek_ocr2", ImageRequest(1), 257),
        ("deepseek_ocr2", ImageRequest(1, None, 6), 257 + 6 * 144),
        ("deepseek_ocr2", ImageRequest(1, (768, 768)), 145),
        ("deepseek_vl_hybrid", ImageRequest(1), 576),
        ("qwen2_5_vl", ImageRequest(1, (1036, 812)), 37 * 29),
        ("qwen2_5_vl", ImageRequest(1), 256),
        ("qwen3_vl", ImageRequest(3, (320, 64)), 3 * 20),
    ],
)
def test_image_tokens_as_published(model_type: str, request_: ImageRequest, tokens: int) -> None:
    assert vision(model_type).input(request_, 2).image_tokens == (tokens, tokens)


def test_tensors_of_a_batch() -> None:
    hybrid = vision("deepseek_vl_hybrid").input(ImageRequest(2), 3)
    assert hybrid.pixel_shapes == {"pixel_values": (6, 3, 384, 384), "high_res_pixel_values": (6, 3, 1024, 1024)}
    tiles = vision("deepseek_ocr2").input(ImageRequest(1, None, 4), 2)
    assert tiles.pixel_shapes == {"pixel_values": (2, 3, 1024, 1024), "pixel_values_local": (8, 3, 768, 768)}
    assert tiles.tiles == (4, 4)
    qwen = vision("qwen2_5_vl").input(ImageRequest(2, (56, 84)), 1)
    assert (qwen.grids, qwen.pixel_shapes) == (((1, 4, 6),) * 2, {"pixel_values": (48, 3 * 2 * 14 * 14)})
    assert qwen.patches == 48


def test_tokens_of_an_image_attend_to_each_other_in_gemma3_only() -> None:
    step = Step(1, 2 * 256 + 10)
    for model_type, pairs in (("gemma3", 2 * 256 * 255 // 2), ("internvl", 0)):
        images = vision(model_type).input(ImageRequest(2), 1)
        found = vision(model_type).step(images, step)
        assert (found.image_tokens, found.block_pairs) == (512, pairs)


def test_published_qwen_config_has_its_text_fields_at_the_top() -> None:
    flat = {"model_type": "qwen2_5_vl", **TEXT, "num_key_value_heads": 2, "vision_config": {"in_chans": 3}}
    nested = {"model_type": "qwen2_5_vl", "text_config": {**TEXT, "num_key_value_heads": 2}, "vision_config": {}}
    assert architecture_of(flat) == architecture_of(nested)


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("llava", {"vision_config": None}, "vision_config"),
        ("llava", {"vision_config": 3}, "vision_config"),
        ("llava", {"vision_config": {"model_type": "pixtral"}}, "pixtral"),
        ("llava", {"vision_config": {"patch_size": [14, 14, 14]}}, "vision_config.patch_size"),
        ("llava", {"vision_config": {"num_attention_heads": 7}}, "vision_config.num_attention_heads"),
        ("llava", {"vision_feature_select_strategy": "some"}, "vision_feature_select_strategy"),
        ("gemma3", {"mm_tokens_per_image": 10**6}, "mm_tokens_per_image"),
        ("internvl", {"downsample_ratio": 0}, "downsample_ratio"),
        ("internvl", {"vision_config": {"norm_type": "none"}}, "norm_type"),
        ("deepseek_ocr2", {"vision_config": {"sam_config": {}}}, "encoder_config"),
        ("deepseek_ocr2", {"vision_config": {"sam_config": {"downsample_channels": [1]}}}, "downsample_channels"),
        ("qwen2_5_vl", {"vision_config": {"window_size": 8}}, "window_size"),
    ],
)
def test_a_bad_config_names_the_field(model_type: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assert vision(model_type, **changes).params
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "request_", "named"),
    [
        ("got_ocr2", ImageRequest(1, (512, 512)), "1024 × 1024"),
        ("internvl", ImageRequest(1, (450, 448)), "448 × 448"),
        ("qwen3_vl", ImageRequest(1, (100, 64)), "96 × 64"),
        ("qwen3_vl", ImageRequest(1, None, 2), "tiles"),
    ],
)
def test_an_image_that_the_model_does_not_take_is_refused(model_type: str, request_: ImageRequest, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        vision(model_type).input(request_, 1)
    assert named in str(caught.value)


def test_a_text_model_has_no_vision() -> None:
    assert vision_of({"model_type": "llama", **TEXT}) is None
    assert vision_of(None) is None
