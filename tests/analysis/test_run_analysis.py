"""Notes on the inputs of a run."""

from dataclasses import replace
from typing import Any

import pytest

from builders import clean_timings, model_facts, workload
from llm_perf_opt.analysis.run_analysis import InputKind, measured_inputs
from llm_perf_opt.core.records import Missing, TextUse
from llm_perf_opt.core.weight_records import QuantizedWeights, TokenAgreement, WeightFacts

STORED = {"model": {"source": "pretrained"}}
RANDOM = {"model": {"source": "random"}}


def said(config: dict[str, Any] = STORED, dtype: str = "fp32", **facts: Any) -> dict[InputKind, str]:
    weights, texts = facts.get("weights"), facts.get("texts")
    timings = clean_timings(model=model_facts(dtype=dtype, weights=weights), workload=workload(texts=texts))
    found = {note.kind: note.text for note in measured_inputs(timings, config)}
    assert "synthetic ids, seed 0" in found.pop(InputKind.PROMPTS)
    return found


def test_real_weights_are_called_that_with_their_folder() -> None:
    found = said(weights=WeightFacts("stored", {"fp32": 100}, folder="/data/w"), texts=TextUse(2, 0, 10, 16, 0))
    assert set(found) == {InputKind.REAL_WEIGHTS}
    assert "/data/w" in found[InputKind.REAL_WEIGHTS]
    assert measured_inputs(Missing("it failed"), RANDOM) == ()


def test_random_weights_are_called_that_also_in_runs_that_did_not_record_it() -> None:
    assert set(said(weights=WeightFacts("random"))) == {InputKind.RANDOM_WEIGHTS}
    assert set(said(RANDOM)) == {InputKind.RANDOM_WEIGHTS}
    assert set(said()) == {InputKind.REAL_WEIGHTS}
    assert said({"model": "nonsense"}) == {}


@pytest.mark.parametrize(
    ("stored", "dtype", "words"),
    [
        ({"bf16": 100}, "fp32", ["The weights", "stored in bf16", "cast to fp32"]),
        ({"fp32": 25, "bf16": 75}, "bf16", ["25 % of the weights", "stored in fp32", "cast to bf16"]),
        ({"bf16": 50, "fp16": 50}, "fp32", ["The weights", "bf16 and fp16"]),
        ({"bf16": 100}, "bf16", []),
        ({"i32": 90, "fp16": 10}, "fp16", []),  # packed by a quantizer: they stay as they are
        ({"fp8": 90, "bf16": 10}, "fp8", []),
        ({}, "bf16", []),
    ],
)
def test_cast_weights_get_a_note(stored: dict[str, int], dtype: str, words: list[str]) -> None:
    found = said(dtype=dtype, weights=WeightFacts("stored", stored))
    assert set(found) == {InputKind.REAL_WEIGHTS, *([InputKind.CAST_WEIGHTS] if words else [])}
    assert all(word in found[InputKind.CAST_WEIGHTS] for word in words)


def test_texts_that_were_cut_or_left_out_are_counted() -> None:
    found = said(texts=TextUse(used=4, cut=3, longest=5000, limit=128, unused=996))
    assert "3 of 4" in found[InputKind.CUT_PROMPTS]
    assert "128 tokens" in found[InputKind.CUT_PROMPTS]
    assert "5,000" in found[InputKind.CUT_PROMPTS]
    assert "996" in found[InputKind.UNUSED_RECORDS]
    assert "the first 4" in found[InputKind.UNUSED_RECORDS]
    assert "unknown number" in said(texts=TextUse(4, 0, 10, 128, None))[InputKind.UNUSED_RECORDS]


def test_files_and_settings_of_a_project_are_named() -> None:
    project = {"files": {"model": "conf/model/a.yaml"}, "notes": ["x was translated to y."], "contradictions": []}
    found = said({**RANDOM, "project": project})
    assert "model from conf/model/a.yaml" in found[InputKind.OWN_FILES]
    assert found[InputKind.OWN_SETTINGS] == "x was translated to y."
    assert set(said({**RANDOM, "project": {"files": 3, "notes": "x"}})) == {InputKind.RANDOM_WEIGHTS}


def test_quantized_weights_and_what_they_changed() -> None:
    parts = ("mlp", "lm_head")
    quantized = QuantizedWeights("int8", "aten::_weight_int8pack_mm", 25, 1000, 1000, 24, parts, kernel_rows=4)
    weights = WeightFacts("random", quantized=quantized)
    timings = clean_timings(model=model_facts(weights=weights), agreement=TokenAgreement(64, 62, 39))
    found = {note.kind: note.text for note in measured_inputs(timings, {})}
    for word in ("25 linear layers", "int8", "aten::_weight_int8pack_mm", "more than 4 rows"):
        assert word in found[InputKind.QUANTIZED_WEIGHTS]
    assert "62 of 64 tokens" in found[InputKind.QUANTIZED_TOKENS]
    assert "token 40" in found[InputKind.QUANTIZED_TOKENS]
    same = replace(timings, agreement=TokenAgreement(64, 64, None))
    assert "difference at" not in {note.kind: note.text for note in measured_inputs(same, {})}[InputKind.QUANTIZED_TOKENS]
    assert quantized.bits_per_weight == 8.192
