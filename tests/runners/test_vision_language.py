"""Vision-language models: the tokens of transformers' generate with images, sub-stages under prefill, recorded geometry."""

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from command import llm_perf
from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.records import CleanTimings
from llm_perf_opt.core.run_folder import read_record
from llm_perf_opt.runners.llm_profile_runner import run_pass
from llm_perf_opt.runners.pytorch_runner import PyTorchRunner
from llm_perf_opt.runners.session import Session, open_session
from llm_perf_opt.runners.vision_families import FAMILIES
from llm_perf_opt.workspace.data.images import FolderImage, open_folder, read_pixels, resized

MODELS = {
    "deepseek_ocr2": "tiny_deepseek_ocr2",
    "deepseek_vl_hybrid": "tiny_deepseek_vl",
    "gemma3": "tiny_gemma3",
    "got_ocr2": "tiny_got_ocr2",
    "internvl": "tiny_internvl",
    "llava": "tiny_vlm",
    "qwen2_5_vl": "tiny_qwen2_5_vl",
    "qwen3_vl": "tiny_qwen3_vl",
}
NEW = 4
REQUEST = [
    "hardware=cpu", "model.dtype=fp32", "runtime.batch_size=2", "runtime.prompt_tokens=8", f"runtime.num_new_tokens={NEW}",
    "runtime.max_warmup=1", "runtime.min_repeats=2", "runtime.max_repeats=2",
]  # fmt: skip


SAMPLED = [pytest.param(family, marks=[] if family == "llava" else pytest.mark.slow) for family in MODELS]
"""Every family; one of them in `make test`."""


def words(family: str, *more: str) -> list[str]:
    size = ["dataset.image_height=112", "dataset.image_width=168"] if family == "qwen2_5_vl" else []
    size = ["dataset.image_height=128", "dataset.image_width=192"] if family in ("qwen3_vl", "deepseek_ocr2") else size
    return [f"model={MODELS[family]}", *REQUEST, *size, *more]


def opened(family: str, *more: str) -> Session:
    """Return a session whose weights are so large that what goes in, not the last token alone, decides what comes out."""
    session = open_session(compose(words(family, *more)).config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in session.model.named_parameters():
            if tensor.dim() > 1 and "embed_tokens" not in name:
                tensor.normal_(std=0.2)
            elif not tensor.count_nonzero():
                tensor.fill_(0.1)
    return session


@functools.cache
def usual(family: str) -> Session:
    """Return one such session of the usual request, for tests that do not change it."""
    return opened(family)


def stepped(session: Session) -> list[list[int]]:
    runner = session.runner
    assert isinstance(runner, PyTorchRunner)
    runner.begin()
    tokens = [runner.prefill(session.batch)]
    for _ in range(NEW - 1):
        tokens.append(runner.decode_step(tokens[-1]))
    return runner.to_lists(tokens)


def generated(session: Session) -> list[list[int]]:
    batch = session.batch
    width = batch.input_ids.shape[1]
    mask = torch.ones_like(batch.input_ids) if batch.mask is None else batch.mask[:, :width]
    ends: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        whole = session.model.generate(
            input_ids=batch.input_ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **ends, **batch.images
        )
    found: list[list[int]] = whole[:, width:].tolist()
    return found


@pytest.fixture(scope="module", autouse=True)
def _sessions_are_closed() -> Iterator[None]:
    yield
    usual.cache_clear()


def test_every_family_has_a_small_model() -> None:
    assert MODELS.keys() == FAMILIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_generate(family: str) -> None:
    session = opened(family)
    expected = generated(session)
    least = 1 if family == "gemma3" else NEW  # Gemma's scaled and tied embeddings make it repeat a token
    assert len({token for row in expected for token in row}) > least, "a constant answer would prove nothing"
    assert stepped(session) == expected
    for tensor in session.batch.images.values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.neg_()
    assert stepped(session) != expected, "the images decide the tokens"
    assert stepped(session) == generated(session)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_images_and_texts_of_different_lengths_give_the_tokens_of_generate(family: str) -> None:
    session = opened(family, "dataset=sample_prompts", "dataset.images=2", "runtime.prompt_tokens=300", "runtime.batch_size=3")
    assert len(set(session.workload.prompt_tokens)) > 1
    assert stepped(session) == generated(session)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_gives_the_same_tokens(family: str) -> None:
    assert stepped(opened(family, "runtime.cache=static")) == stepped(usual(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_ocr2", "got_ocr2", "internvl"])
def test_tiles_are_views_of_their_own(family: str) -> None:
    whole, tiled = usual(family), opened(family, "dataset.image_tiles=2")
    assert whole.workload.vision is not None
    assert tiled.workload.vision is not None
    assert tiled.workload.vision.tiles == (2, 2)
    assert tiled.workload.vision.image_tokens > whole.workload.vision.image_tokens
    assert stepped(tiled) == generated(tiled)


@pytest.mark.parametrize("family", SAMPLED)
def test_the_recorded_geometry_is_what_the_model_computes(family: str) -> None:
    """The encoder really sees this many patches, and gives this many tokens: otherwise the forward raises."""
    session = usual(family)
    vision = session.workload.vision
    assert vision is not None
    assert vision.images == 2
    counted = (session.batch.input_ids == session.prompts.images.token_id).sum(-1).tolist()  # type: ignore[union-attr]
    assert list(vision.image_tokens) == counted
    for name, shape in vision.pixel_shapes.items():
        assert session.batch.images[name].shape == shape
    rows = vision.pixel_shapes["pixel_values"]
    patches = rows[0] if len(rows) == 2 else rows[0] * math.prod(vision.grids[0])
    assert vision.patches == patches
    assert session.workload.padded_tokens >= 8 + counted[0]
    stepped(session)


def test_the_sub_stages_of_a_family_are_timed_in_prefill_alone(tmp_path: Path) -> None:
    assert run_pass(compose(words("deepseek_ocr2")).config, "clean", tmp_path)
    timings = read_record(tmp_path / "timings.json", CleanTimings)
    for iteration in timings.iterations:
        names = [(span.name, span.stage) for span in iteration.substages]
        assert names == [(name, "prefill") for name in ("sam", "encoder", "projector", "language")]
        assert sum(span.duration_ns for span in iteration.substages) < iteration.prefill_ns
    assert timings.model.substages == {
        "sam": "model.vision_tower.sam_encoder",
        "encoder": "model.vision_tower.vision_encoder",
        "projector": "model.multi_modal_projector",
        "language": "model.language_model",
    }
    assert timings.workload.vision is not None
    assert timings.workload.vision.pixel_shapes == {"pixel_values": (2, 3, 128, 192)}
    assert timings.workload.vision.grids == ((1, 8, 12), (1, 8, 12))
    assert timings.workload.vision.image_tokens == (145, 145)
    assert timings.workload.prompt_tokens == (153, 153)


@pytest.mark.slow
def test_nested_and_repeated_sub_stages_are_timed(tmp_path: Path) -> None:
    assert run_pass(compose(words("qwen3_vl")).config, "clean", tmp_path)
    spans = read_record(tmp_path / "timings.json", CleanTimings).iterations[0].substages
    by_name = {name: [span for span in spans if span.name == name] for name in ("vision", "deepstack", "projector", "language")}
    assert {name: len(found) for name, found in by_name.items()} == {
        "vision": 1, "deepstack": 2, "projector": 1, "language": 1
    }  # fmt: skip
    outer = by_name["vision"][0]
    for inner in (*by_name["deepstack"], *by_name["projector"]):
        assert outer.start_ns <= inner.start_ns
        assert inner.start_ns + inner.duration_ns <= outer.start_ns + outer.duration_ns


@pytest.mark.slow
def test_a_sub_stage_of_the_same_name_replaces_the_default(tmp_path: Path) -> None:
    chosen = words("llava", "model.substages.language=model.language_model.layers.0", "runtime.num_new_tokens=2")
    assert run_pass(compose(chosen).config, "clean", tmp_path)
    spans = read_record(tmp_path / "timings.json", CleanTimings).iterations[0].substages
    assert [(span.name, span.stage) for span in spans] == [
        ("vision", "prefill"), ("projector", "prefill"), ("language", "prefill"), ("language", "decode_step")
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_on_a_cpu_has_a_full_report_with_the_sub_stages_under_prefill(tmp_path: Path) -> None:
    done = llm_perf(
        "run", "-q", *words("deepseek_ocr2"), "profiling=minimal", "profiling.ceilings=false", f"hydra.run.dir={tmp_path / 'run'}"
    )
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "run" / "report.md").read_text()
    table = report[report.index("Sub-stages of prefill") :]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:6]
    assert rows == ["sam", "encoder", "projector", "language", "the rest"]
    inputs = yaml.safe_load((tmp_path / "run" / "inputs.yaml").read_text())
    assert inputs["images"]["grids"] == [[1, 8, 12]] * 2


def test_without_images_the_model_runs_on_text(tmp_path: Path) -> None:
    assert run_pass(compose(words("llava", "dataset.images=0")).config, "clean", tmp_path)
    timings = read_record(tmp_path / "timings.json", CleanTimings)
    assert timings.workload.vision is None
    assert timings.workload.prompt_tokens == (8, 8)
    assert timings.iterations[0].substages == ()


@pytest.mark.parametrize(
    ("family", "more", "names"),
    [
        ("llava", ["dataset.image_height=64", "dataset.image_width=64"], "112 × 112"),
        ("qwen2_5_vl", ["dataset.image_height=100"], "multiples of 28"),
        ("llava", ["dataset.image_tiles=2"], "tiles"),
        ("llava", ["runtime.prompt_tokens=4090"], "4096 positions"),
        ("llava", ["runtime.quantization=int8"], "quantize the encoders"),
    ],
)
def test_what_a_family_cannot_take_is_refused(family: str, more: list[str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        open_session(compose(words(family, *more)).config)


def test_a_text_model_refuses_settings_of_images() -> None:
    with pytest.raises(ConfigError, match="vision-language"):
        open_session(compose(["model=tiny", *REQUEST, "dataset.image_height=64", "dataset.image_width=64"]).config)


# --- images of a folder -----------------------------------------------------------------------------------------------


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "pages"
    folder.mkdir()
    for number, size in enumerate([(300, 200), (64, 640), (500, 500)]):
        image.effect_noise(size, 90).convert("RGB").save(folder / f"{number}.png")
    return folder


def from_folder(pages: Path, *more: str) -> list[str]:
    return ["dataset=image_folder", f"dataset.path={pages}", *more]


@pytest.mark.parametrize("family", SAMPLED)
def test_images_of_a_folder_are_resized_for_random_weights(family: str, pages: Path) -> None:
    session = open_session(compose(words(family, *from_folder(pages, "dataset.seed=3"))).config)
    vision = session.workload.vision
    assert vision is not None
    assert len(set(vision.files)) == 2
    assert set(vision.files) < {"0.png", "1.png", "2.png"}
    assert set(vision.sizes) < {(200, 300), (640, 64), (500, 500)}
    plain = usual(family).workload.vision
    assert plain is not None
    assert (vision.pixel_shapes, vision.grids, vision.image_tokens) == (plain.pixel_shapes, plain.grids, plain.image_tokens)
    pixels = session.batch.images["pixel_values"]
    assert pixels.min() >= -1
    assert pixels.max() <= 1
    stepped(session)


def test_images_that_do_not_fit_in_memory_are_refused_after_the_first(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llm_perf_opt.runners import vision_inputs

    read: list[str] = []

    def noted(image: FolderImage) -> Any:
        read.append(image.name)
        return read_pixels(image)

    monkeypatch.setattr(vision_inputs, "available_memory_bytes", lambda: 10 * 2**20)
    monkeypatch.setattr(vision_inputs, "read_pixels", noted)
    with pytest.raises(ResourceError, match="400 images"):
        open_session(compose(words("llava", *from_folder(pages, "runtime.batch_size=400"))).config)
    assert len(read) == 1


@pytest.mark.slow
def test_patches_of_an_image_are_in_the_order_of_the_image_processor(pages: Path) -> None:
    """The same as the processor of transformers makes of an image that it need not resize, up to its normalization."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = compose(words("qwen2_5_vl", *from_folder(pages), "runtime.batch_size=1")).config
    session = open_session(config)
    assert session.workload.vision is not None
    chosen = next(one for one in open_folder(config.dataset).images if one.name == session.workload.vision.files[0])
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    made = Qwen2VLImageProcessorPil(**half)(images=[resized(read_pixels(chosen), (112, 168))], return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [list(grid) for grid in session.workload.vision.grids]
    torch.testing.assert_close(session.batch.images["pixel_values"], made["pixel_values"], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_the_pixels_and_the_prompt_identify_the_input(pages: Path, tmp_path: Path) -> None:
    wanted = from_folder(pages, "dataset.prompt=Free OCR.", "dataset.image_count=1", "dataset.images=2")
    assert run_pass(compose(words("llava", *wanted)).config, "clean", tmp_path / "one")
    inputs = json.loads((tmp_path / "one" / "inputs.json").read_text())
    assert len(set(inputs["images"]["files"])) == 1
    assert inputs["images"]["images"] == 4
    assert inputs["images"]["image_tokens"] == [128, 128]
    assert inputs["lengths"] == [128 + 8] * 2  # nine bytes, cut to runtime.prompt_tokens
    name = inputs["images"]["files"][0]
    (pages / name).write_bytes((pages / ("1.png" if name != "1.png" else "2.png")).read_bytes())
    assert run_pass(compose(words("llava", *wanted)).config, "clean", tmp_path / "two")
    assert json.loads((tmp_path / "two" / "inputs.json").read_text())["sha256"] != inputs["sha256"]


PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_ocr2": ("deepseek_ocr2.image_processing_pil_deepseek_ocr2:DeepseekOcr2ImageProcessorPil", {"size": 512}),
    "deepseek_vl_hybrid": (
        "deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid:DeepseekVLHybridImageProcessorPil",
        {"size": 128, "high_res_size": 512},
    ),
    "gemma3": ("gemma3.image_processing_pil_gemma3:Gemma3ImageProcessorPil", {"size": 224}),
    "got_ocr2": ("got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil", {"size": 512}),
    "internvl": ("got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil", {"size": 224}),
    "llava": ("clip.image_processing_pil_clip:CLIPImageProcessorPil", {"size": 112, "crop_size": 112}),
    "qwen2_5_vl": ("qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil", {}),
    "qwen3_vl": ("qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil", {"patch_size": 16}),
}
TILED = {"deepseek_ocr2", "internvl"}
"""Families whose processor cuts large images into tiles by default."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_local_folder_is_run_with_its_image_processor(family: str, pages: Path, tmp_path: Path) -> None:
    from pkgutil import resolve_name

    image = pytest.importorskip("PIL.Image")
    image.effect_noise((900, 500), 90).convert("RGB").save(pages / "3.png")
    usual(family).model.save_pretrained(tmp_path / "model")
    kind, options = PROCESSORS[family]
    sizes = {name: {"height": side, "width": side} for name, side in options.items() if "size" in name and name != "patch_size"}
    resolve_name(f"transformers.models.{kind}")(**{**options, **sizes}).save_pretrained(tmp_path / "model")
    request = ["model=hf", f"model.path={tmp_path / 'model'}", *REQUEST, *from_folder(pages, "runtime.batch_size=4")]
    session = open_session(compose(request).config)
    vision = session.workload.vision
    assert vision is not None
    assert set(vision.files) == {"0.png", "1.png", "2.png", "3.png"}
    assert {(500, 900), (200, 300)} < set(vision.sizes)
    assert "image processor" in vision.source
    assert bool(vision.tiles) == (family in TILED)
    assert stepped(session) == generated(session)
