"""Image encoders, projector and text decoder as sub-stages of prefill, against the roofline."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from builders import MS, clean_timings, iteration, model_facts, run_analysis, workload
from llm_perf_opt.analysis.cost_model.vision_inputs import ImageRequest
from llm_perf_opt.analysis.cost_model.vision_models import vision_of
from llm_perf_opt.analysis.limits.compared import compare_substage
from llm_perf_opt.analysis.limits.efficiency import Efficiency, efficiency, request_cost
from llm_perf_opt.analysis.limits.hardware import given_hardware
from llm_perf_opt.analysis.limits.peaks import Peaks
from llm_perf_opt.analysis.metrics import stage_timings
from llm_perf_opt.core.records import CleanTimings, Missing, SubstageSpan
from llm_perf_opt.core.vision_records import VisionInput
from llm_perf_opt.profiling.ceilings import model_linears
from llm_perf_opt.report.efficiency import substage_limits_tables
from rendered import stakeholder_summary

NONE = Missing("not here")
LLAVA: dict[str, Any] = yaml.safe_load("""
model_type: llava
vision_config:
  {model_type: clip_vision_model, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
   image_size: 4, patch_size: 2}
text_config:
  {model_type: llama, vocab_size: 10, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
""")
# 4 patches and a class token: patches 2·4·(3·2·2)·16, layer 2·5·(4·16² + 2·16·32) + 4·16·5²; projector 2·4·(16·8 + 8²).
TOWER = 2 * 4 * 12 * 16 + 2 * 5 * (4 * 256 + 1024) + 4 * 16 * 25
PROJECTOR = 2 * 4 * (16 * 8 + 8 * 8)
PATHS = {
    "vision": "model.vision_tower",
    "projector": "model.multi_modal_projector",
    "language": "model.language_model",
    "embeddings": "model.vision_tower.embeddings",
}


def images() -> VisionInput:
    vision = vision_of(LLAVA)
    assert vision is not None
    return vision.input(ImageRequest(1), 1)


def timed(*spans: SubstageSpan, vision: VisionInput | None = None, **changes: Any) -> CleanTimings:
    """Ten repeats: 100 ms of prefill, three steps of 10 ms."""
    model = model_facts(architecture=LLAVA, model_type="llava", substages=PATHS, device="cuda:0", **changes)
    repeats = [iteration(steps_ns=(10 * MS,) * 3, substages=spans) for _ in range(10)]
    work = workload(batch_size=1, prompt_tokens=(9,), padded_tokens=9, new_tokens=4, vision=vision)
    return clean_timings(repeats, model=model, workload=work)


def span(name: str, start_ms: int, length_ms: int, stage: str = "prefill") -> SubstageSpan:
    return SubstageSpan(name, stage, -1, start_ms * MS, length_ms * MS)


def against(timings: CleanTimings, tflops: float = 1e-3) -> Efficiency:
    hardware = given_hardware(dtype="fp32", peak_tflops=tflops, bandwidth_gbs=1.0)
    found = efficiency(timings, NONE, hardware, NONE)
    assert not isinstance(found, Missing)
    return found


SPANS = (span("vision", 1, 20), span("projector", 22, 2), span("projector", 25, 3), span("language", 30, 40))


def test_flops_and_mfu_of_each_sub_stage() -> None:
    found = {entry.name: entry for entry in against(timed(*SPANS, vision=images())).substages}
    assert list(found) == ["vision", "projector", "language"]
    flops = {name: entry.cost.flops for name, entry in found.items() if not isinstance(entry.cost, Missing)}
    assert (flops["vision"], flops["projector"]) == (TOWER, PROJECTOR)
    assert found["projector"].forwards == 2
    assert found["projector"].time_ns.median == 5 * MS
    assert found["vision"].against[0].mfu == pytest.approx(TOWER / (0.020 * 1e9))


def test_the_stage_is_the_sum_of_its_sub_stages_embedding_and_head() -> None:
    request = request_cost(timed(*SPANS, vision=images()))
    assert not isinstance(request, Missing)
    parts = [request.submodule(path) for path in (*list(PATHS.values())[:3], "lm_head")]
    total = sum(part.flops for part in parts if not isinstance(part, Missing))
    assert total == request.prefill.flops
    body, head = request.submodule("model"), request.submodule("lm_head")
    assert not isinstance(body, Missing)
    assert not isinstance(head, Missing)
    assert body.flops + head.flops == request.prefill.flops
    assert isinstance(request.submodule("model.language_model.layers.0"), Missing)


def test_a_sub_stage_that_is_not_counted_has_a_reason() -> None:
    spans = (*SPANS, span("embeddings", 2, 1), span("other", 80, 1))
    (table,) = substage_limits_tables(against(timed(*spans, vision=images())))
    names = [row[0].text for row in table.rows]
    assert [names.count(name) for name in ("vision", "embeddings", "other")] == [2, 1, 1]
    marks = {row[0].text: {cell.note for cell in row[4:]} for row in table.rows}
    for name, words in (("embeddings", "does not count this submodule"), ("other", "did not record which submodule")):
        (mark,) = marks[name]
        assert words in dict(table.marked_reasons)[mark]


def test_more_than_the_peak_is_missing_for_a_sub_stage() -> None:
    found = against(timed(*SPANS, vision=images()), tflops=1e-6)
    vision = next(entry for entry in found.substages if entry.name == "vision")
    assert isinstance(vision.against[0].mfu, Missing)
    assert isinstance(vision.against[0].times_roofline, Missing)


def test_the_summary_lists_the_outer_sub_stages() -> None:
    """One inside another would count its time twice."""
    timings = timed(span("projector", 5, 2), span("vision", 1, 20), span("language", 30, 40), vision=images())
    found = run_analysis(timings=timings, stages=stage_timings(timings, NONE), efficiency=against(timings))
    (line,) = [line for line in stakeholder_summary(found).splitlines() if "Sub-stages of prefill" in line]
    assert "vision 20.00 ms" in line
    assert "language 40.00 ms" in line
    assert "projector" not in line


def test_the_limit_of_a_sub_stage_is_that_of_a_stage() -> None:
    """The peak of a datasheet cannot be exceeded; a measured one may be, by its margin."""
    request = request_cost(timed(*SPANS, vision=images()))
    assert not isinstance(request, Missing)
    cost = request.submodule(PATHS["vision"])
    assert not isinstance(cost, Missing)
    shares = {}
    for name in ("datasheet", "measured"):
        shares[name] = compare_substage(cost, 1.0, Peaks(name, "", cost.flops / 1.02, cost.bytes * 2.0)).mfu
    assert isinstance(shares["datasheet"], Missing)
    assert shares["measured"] == pytest.approx(1.02)


def test_a_text_request_of_the_same_model_has_no_image_work() -> None:
    found = against(timed(span("language", 30, 40)))
    (language,) = found.substages
    assert not isinstance(language.cost, Missing)
    assert found.model_type == "llama"
    assert not any(part.name.startswith("vision") for part in found.stages[0].cost.components)


def test_images_of_an_unknown_family_have_no_cost() -> None:
    timings = timed(*SPANS, vision=images())
    other = replace(timings, model=replace(timings.model, architecture={**LLAVA, "model_type": "some_vlm"}))
    found = request_cost(other)
    assert isinstance(found, Missing)
    assert "some_vlm" in found.why


def test_images_whose_tensors_were_not_recorded_have_no_cost() -> None:
    found = request_cost(timed(*SPANS, vision=replace(images(), pixel_shapes={})))
    assert isinstance(found, Missing)
    assert "pixel_values" in found.why


def test_products_of_the_encoder_are_measured_with_those_of_the_decoder() -> None:
    linears = model_linears(timed(*SPANS, vision=images()))
    assert not isinstance(linears, Missing)
    shapes = {(layer.in_features, layer.out_features, layer.prefill_rows, layer.decode_rows) for layer in linears.layers}
    assert {(12, 16, 4, 0), (16, 32, 5, 0), (16, 8, 4, 0)} <= shapes
