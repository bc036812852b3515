"""The cost of image encoders, projectors and prefill with images against torch's own counter.

Small models of every family run in eager attention on the CPU. Zero difference is asked for: in total, and for every
sub-stage.
"""

from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText, vision_utils

from builders import MS, clean_timings, iteration
from llm_perf_opt.analysis.cost_model.cost import BF16, step_cost
from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.cost_model.vision_families import FAMILIES
from llm_perf_opt.analysis.cost_model.vision_inputs import ImageRequest
from llm_perf_opt.analysis.cost_model.vision_models import Vision, prefill_cost, submodule_cost, vision_of
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.limits.efficiency import request_cost
from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.core.vision_records import VisionInput
from llm_perf_opt.runners.measure.components import part_of
from llm_perf_opt.runners.pytorch_runner import PyTorchRunner
from llm_perf_opt.runners.session import open_session
from llm_perf_opt.runners.vision_families import FAMILIES as RUN_FAMILIES
from llm_perf_opt.runners.vision_families import default_substages, layout_of

IMAGE_TOKEN = 500
TEXT_TOKENS = 7
SEQUENCES = 2

_TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model"}
_SAM = {
    "hidden_size": 32,
    "output_channels": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 128,
    "mlp_dim": 80,
    "window_size": 3,
    "global_attn_indexes": [1],
}
_INTERNVL = {**_CLIP, "model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]}
_QWEN = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}


class Case(NamedTuple):
    """A small model and the images of each prompt."""

    fields: dict[str, Any]
    request: ImageRequest = ImageRequest(1)


def _ocr2(**changes: Any) -> dict[str, Any]:
    encoder = {**_TEXT, "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    sam = {**_SAM, "downsample_channels": [28, 40], **changes}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "mlp_layer_types": ["dense", "sparse"],
    }
    return {
        "model_type": "deepseek_ocr2",
        "image_token_id": IMAGE_TOKEN,
        "vision_config": {"sam_config": sam, "encoder_config": encoder},
        "text_config": {**_TEXT, **experts},
    }


CASES = {
    "llava": Case(
        {
            "model_type": "llava",
            "image_token_index": IMAGE_TOKEN,
            "vision_config": _CLIP,
            "text_config": {"model_type": "llama", **_TEXT},
        },
        ImageRequest(2),
    ),
    "llava_siglip": Case(
        {
            "model_type": "llava",
            "image_token_index": IMAGE_TOKEN,
            "vision_config": _SIGLIP,
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": [-2, -1],
            "multimodal_projector_bias": False,
            "text_config": {"model_type": "qwen2", **_TEXT, "tie_word_embeddings": True},
        }
    ),
    "gemma3": Case(
        {
            "model_type": "gemma3",
            "image_token_index": IMAGE_TOKEN,
            "mm_tokens_per_image": 4,
            "vision_config": {**_SIGLIP, "vision_use_head": False},
            "text_config": {"model_type": "gemma3_text", **_TEXT, "head_dim": 24, "sliding_window": 16},
        },
        ImageRequest(2),
    ),
    "internvl": Case(
        {
            "model_type": "internvl",
            "image_token_id": IMAGE_TOKEN,
            "vision_config": _INTERNVL,
            "text_config": {"model_type": "qwen2", **_TEXT},
        },
        ImageRequest(1, None, 2),
    ),
    "internvl_norms_and_biases": Case(
        {
            "model_type": "internvl",
            "image_token_id": IMAGE_TOKEN,
            "vision_config": {
                **_INTERNVL,
                "norm_type": "rms_norm",
                "image_size": [84, 84],
                "use_qk_norm": True,
                "attention_bias": True,
                "use_mask_token": True,
                "use_mean_pooling": False,
            },
            "tie_word_embeddings": False,
            "text_config": {"model_type": "llama", **_TEXT},
        },
        ImageRequest(2),
    ),
    "got_ocr2": Case(
        {
            "model_type": "got_ocr2",
            "image_token_index": IMAGE_TOKEN,
            "vision_config": _SAM,
            "text_config": {"model_type": "qwen2", **_TEXT},
        },
        ImageRequest(1, None, 1),
    ),
    "got_ocr2_plain": Case(
        {
            "model_type": "got_ocr2",
            "image_token_index": IMAGE_TOKEN,
            "vision_config": {**_SAM, "use_rel_pos": False, "use_abs_pos": False, "qkv_bias": False, "image_size": 96},
            "text_config": {"model_type": "qwen2", **_TEXT},
        }
    ),
    "deepseek_ocr2": Case(_ocr2()),
    "deepseek_ocr2_tiles": Case(_ocr2(image_size=832, patch_size=16, num_hidden_layers=2), ImageRequest(1, None, 1)),
    "deepseek_vl_hybrid": Case(
        {
            "model_type": "deepseek_vl_hybrid",
            "image_token_id": IMAGE_TOKEN,
            "vision_config": _SIGLIP,
            "high_res_vision_config": {"model_type": "sam_vision_model", **_SAM},
            "text_config": {"model_type": "llama", **_TEXT},
        }
    ),
    "qwen2_5_vl": Case(
        {
            "model_type": "qwen2_5_vl",
            "image_token_id": IMAGE_TOKEN,
            "vision_config": {**_QWEN, "window_size": 56, "fullatt_block_indexes": [1]},
            "text_config": {**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        },
        ImageRequest(2, (84, 140)),
    ),
    "qwen3_vl": Case(
        {
            "model_type": "qwen3_vl",
            "image_token_id": IMAGE_TOKEN,
            "vision_config": {**_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
            "text_config": {
                **_TEXT,
                "head_dim": 24,
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4]},
            },
        },
        ImageRequest(1, (112, 56)),
    ),
}


def _vision(case: str) -> Vision:
    found = vision_of(CASES[case].fields)
    assert found is not None
    return found


def _images(case: str) -> VisionInput:
    return _vision(case).input(CASES[case].request, SEQUENCES)


@cache
def _model(case: str) -> Any:
    fields = dict(CASES[case].fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    build: Any = AutoModelForImageTextToText.from_config
    # Every model has eager attention. Of the ways to run experts, the counter sees only batched products.
    return build(config, attn_implementation="eager", experts_implementation="batched_mm").eval()


def _inputs(case: str) -> dict[str, Any]:
    images = _images(case)
    row = [1, *[IMAGE_TOKEN] * images.image_tokens[0], *range(2, 1 + TEXT_TOKENS)]
    ids = torch.tensor([row] * SEQUENCES)
    found: dict[str, Any] = {name: torch.randn(shape) for name, shape in images.pixel_shapes.items()}
    model_type = CASES[case].fields["model_type"]
    if model_type.startswith("qwen"):
        found["image_grid_thw"] = torch.tensor(images.grids)
        found["position_ids"] = torch.arange(len(row)).expand(3, SEQUENCES, -1)
    if model_type == "gemma3":
        found["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    if images.tiles and "pixel_values_local" in images.pixel_shapes:
        found["num_local_patches"] = list(images.tiles)
    return {"input_ids": ids, **found}


class Run:
    """A prefill with images and a decode step; what the framework counted in total and for each module."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(0)
        model, inputs = _model(case), _inputs(case)
        self.tokens = inputs["input_ids"].shape[1]
        with torch.no_grad():
            with FlopCounterMode(display=False) as counter:
                past = model(**inputs, use_cache=True).past_key_values
            self.prefill = counter.get_total_flops()
            self.modules = {
                name.partition(".")[2]: sum(flops.values()) for name, flops in counter.get_flop_counts().items() if "." in name
            }
            positions = {"position_ids": torch.full((3, SEQUENCES, 1), self.tokens)} if "image_grid_thw" in inputs else {}
            with FlopCounterMode(display=False) as counter:
                model(input_ids=torch.ones((SEQUENCES, 1), dtype=torch.long), past_key_values=past, use_cache=True, **positions)
            self.decode = counter.get_total_flops()


_run = cache(Run)

_SLOW = {"deepseek_ocr2_tiles"}
QUICK = [pytest.param(case, marks=pytest.mark.slow) if case in _SLOW else case for case in CASES]


@pytest.mark.parametrize("case", QUICK)
def test_flops_of_prefill_and_decode_equal_the_frameworks(case: str) -> None:
    run, architecture, images = _run(case), architecture_of(CASES[case].fields), _images(case)
    prefill = prefill_cost(architecture, Step(SEQUENCES, run.tokens, 0, "all"), BF16, _vision(case), images)
    decode = step_cost(architecture, Step(SEQUENCES, 1, run.tokens, "all"))
    assert prefill.flops_full_attention - run.prefill == 0
    assert decode.flops_full_attention - run.decode == 0
    assert prefill.flops <= prefill.flops_full_attention


@pytest.mark.parametrize("case", QUICK)
def test_flops_of_every_sub_stage_equal_the_frameworks(case: str) -> None:
    run, architecture, images = _run(case), architecture_of(CASES[case].fields), _images(case)
    modules = _vision(case).work(images)
    prefill = prefill_cost(architecture, Step(SEQUENCES, run.tokens, 0, "all"), BF16, _vision(case), images)
    for path in (*default_substages(CASES[case].fields["model_type"]).values(), "lm_head"):
        cost = submodule_cost(path, modules, prefill, BF16)
        assert not isinstance(cost, Missing)
        inside = path.removesuffix(".*")
        counted = run.modules.get(path) or sum(
            flops for name, flops in run.modules.items() if name.rpartition(".")[0] == inside
        )  # a list of modules has no forward of its own
        assert cost.flops_full_attention - counted == 0, path


@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_the_frameworks(case: str) -> None:
    assert architecture_of(CASES[case].fields).params == sum(weight.numel() for weight in _model(case).parameters())


@pytest.mark.parametrize("case", CASES)
def test_frameworks_own_config_reads_the_same(case: str) -> None:
    fields = dict(CASES[case].fields)
    written = AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
    other = vision_of(written)
    assert other is not None
    assert architecture_of(written) == architecture_of(CASES[case].fields)
    assert other.work(_images(case)) == _vision(case).work(_images(case))
    assert other.input(CASES[case].request, SEQUENCES) == _images(case)


@pytest.mark.parametrize("case", CASES)
def test_components_of_the_cost_model_are_those_that_modules_are_labeled_with(case: str) -> None:
    labels = set()
    for path, module in _model(case).named_modules():
        weight = getattr(module, "weight", None)
        dimensions = 0 if weight is None else weight.dim()
        labels.add(part_of(path, dimensions == 2, dimensions > 2))
    counted = {entry.component for entry in _vision(case).work(_images(case))}
    assert counted == {label for label in labels if label and (label == "projector" or label.startswith("vision_"))}


@pytest.mark.parametrize("case", CASES)
def test_the_runner_makes_the_same_tensors_and_tokens_of_an_image(case: str) -> None:
    request = CASES[case].request
    layout = layout_of(_model(case).config, request.size, request.tiles)
    one = _vision(case).input(replace(request, images=1), 1)
    assert (layout.shapes, layout.grids, layout.tokens) == (one.pixel_shapes, one.grids, one.image_tokens[0])
    assert layout_of(_model(case).config, None, 0).shapes == _vision(case).input(ImageRequest(1), 1).pixel_shapes


def test_every_family_is_proved() -> None:
    assert {case.fields["model_type"] for case in CASES.values()} == set(FAMILIES) == set(RUN_FAMILIES)


@pytest.mark.parametrize("case", ["llava", "deepseek_ocr2", "qwen2_5_vl"])
def test_the_text_decoder_alone_is_what_runs_on_text(case: str) -> None:
    tokens = torch.ones((SEQUENCES, TEXT_TOKENS), dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        _model(case)(input_ids=tokens)
    decoder = architecture_of(CASES[case].fields, decoder_only=True)
    assert decoder == replace(architecture_of(CASES[case].fields), vision_params=0)
    assert step_cost(decoder, Step(SEQUENCES, TEXT_TOKENS, 0, "all")).flops_full_attention == counter.get_total_flops()


_SIGLIP_LARGE = {**_SIGLIP, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
FULL_SIZE: dict[str, tuple[dict[str, Any], ImageRequest]] = {
    "llava": ({}, ImageRequest(1)),
    "gemma3": (
        {
            "vision_config": {
                **_SIGLIP_LARGE,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "image_size": 896,
                "vision_use_head": False,
            },
            "text_config": {**_TEXT, "hidden_size": 2560, "head_dim": 256},
        },
        ImageRequest(2),
    ),
    "internvl": ({}, ImageRequest(1, None, 6)),
    "got_ocr2": ({}, ImageRequest(1, None, 2)),
    "deepseek_vl_hybrid": ({"vision_config": {**_SIGLIP_LARGE, "image_size": 384, "patch_size": 16}}, ImageRequest(1)),
    "deepseek_ocr2": (
        {
            "vision_config": {
                "sam_config": {},
                "encoder_config": {
                    **_TEXT,
                    "hidden_size": 896,
                    "intermediate_size": 4864,
                    "num_hidden_layers": 24,
                    "num_attention_heads": 14,
                },
            },
            "text_config": {**_TEXT, "hidden_size": 1280, "num_attention_heads": 10, "mlp_layer_types": ["dense", "dense"]},
        },
        ImageRequest(1, None, 6),
    ),
    "qwen2_5_vl": ({"vision_config": {"hidden_size": 1280}}, ImageRequest(1, (1036, 812))),
    "qwen3_vl": ({}, ImageRequest(2, (1024, 768))),
}
"""Image encoders in published sizes, most of them the defaults of transformers."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FULL_SIZE)
def test_encoders_of_full_size_equal_the_frameworks(model_type: str) -> None:
    fields, request = FULL_SIZE[model_type]
    config = AutoConfig.for_model(model_type, **fields)
    vision = vision_of(config.to_dict())
    assert vision is not None
    images = vision.input(request, 1)
    with torch.device("meta"):
        build: Any = AutoModelForImageTextToText.from_config
        model = build(config, attn_implementation="eager").eval().model
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        _encode(model, images)
    modules = vision.work(images)
    assert sum(entry.work.flops + entry.work.full_attention_extra_flops for entry in modules) == counter.get_total_flops()


def _encode(model: Any, images: VisionInput) -> None:
    """Run encoders and projector without memory. What depends on the grids is computed on the CPU first."""
    pixels = {name: torch.empty(shape, device="meta") for name, shape in images.pixel_shapes.items()}
    visual = getattr(model, "visual", None)
    if visual is None:
        tiles = {"num_local_patches": list(images.tiles)} if "pixel_values_local" in pixels else {}
        model.get_image_features(**pixels, **tiles)
        return
    grid = torch.tensor(images.grids)
    known = {
        "position_ids": vision_utils.get_vision_position_ids(grid, visual.spatial_merge_size).to("meta"),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
    }
    if hasattr(visual, "window_size"):
        sizes = {name: getattr(visual, name) for name in ("spatial_merge_size", "window_size", "patch_size")}
        known["window_index"], known["cu_window_seqlens"] = vision_utils.get_vision_window_index(grid, **sizes)
    else:
        known["interp_indices"] = torch.zeros((images.patches, 4), dtype=torch.long, device="meta")
        known["interp_weights"] = torch.zeros((images.patches, 4), device="meta")
    visual(pixels["pixel_values"], grid_thw=grid, **known)


@pytest.mark.parametrize("model_type", FULL_SIZE)
def test_the_documented_flops_are_those_of_the_cost_model(model_type: str) -> None:
    fields, request = FULL_SIZE[model_type]
    vision = vision_of(AutoConfig.for_model(model_type, **fields).to_dict())
    assert vision is not None
    images = vision.input(request, 1)
    flops = sum(entry.work.flops + entry.work.full_attention_extra_flops for entry in vision.work(images))
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{model_type}` |"))
    assert f"| {images.image_tokens[0]:,} | {flops:,} | 0 |" in row


_PACKAGED = {
    name: fields
    for file in resources.files("llm_perf_opt.config.conf").joinpath("model").iterdir()
    if (name := file.name.removesuffix(".yaml")).startswith("tiny")
    and (fields := yaml.safe_load(file.read_text(encoding="utf-8")).get("architecture", {})).get("model_type") in FAMILIES
}
RUNS = [name if name == "tiny_vlm" else pytest.param(name, marks=pytest.mark.slow) for name in _PACKAGED]


def test_every_family_has_a_small_packaged_model() -> None:
    assert {fields["model_type"] for fields in _PACKAGED.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", RUNS)
def test_the_cost_of_a_run_is_what_its_prefill_executes(name: str) -> None:
    """From the records of the run alone: its configuration, the tensors of its images, and its prompts."""
    words = ["runtime.batch_size=2", "runtime.prompt_tokens=8", "runtime.num_new_tokens=2", "runtime.attn_implementation=eager"]
    session = open_session(compose([f"model={name}", "hardware=cpu", "model.dtype=fp32", *words]).config)
    assert isinstance(session.runner, PyTorchRunner)
    session.runner.begin()
    with FlopCounterMode(display=False) as counter:
        session.runner.prefill(session.batch)
    timings = clean_timings([iteration(steps_ns=(MS,))], model=session.runner.facts, workload=session.workload)
    request = request_cost(timings)
    assert not isinstance(request, Missing)
    # The counter does not see grouped products, in which the experts run.
    unseen = sum(part.flops for part in request.prefill.components if part.name == "experts")
    assert request.prefill.flops_full_attention - unseen - counter.get_total_flops() == 0
    assert request.architecture.params == session.runner.facts.parameters
