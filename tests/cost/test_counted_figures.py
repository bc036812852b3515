"""Counted operators against the frozen figures of the formulas, to the last digit."""

from typing import Any

import pytest

from freeze_cost import differences, read, text_figures
from llm_perf_opt.analysis.cost_model.counted_work import CountedArchitecture
from llm_perf_opt.cost.counted import CountedModel
from llm_perf_opt.cost.models import count_config

MODELS = read()["models"]
TEXT = [name for name, case in MODELS.items() if "plans" in case["figures"] and not case["decoder_only"]]
QUICK = {"gpt2_inner", "llama_biases_mqa_head_dim", "gemma3_layer_types", "qwen2_moe_mixed", "deepseek_v2_biases"}


def counted(name: str) -> CountedModel:
    from transformers import AutoConfig

    fields = dict(MODELS[name]["config"])
    return count_config(AutoConfig.for_model(fields.pop("model_type"), **fields))


def weighed(figures: dict[str, Any]) -> dict[str, Any]:
    """Replace the products with weights by their FLOPs: the formulas list matrices apart that some models store as one."""
    layers = figures.pop("linear_layers")
    for stage in ("prefill", "decode"):
        figures[f"{stage} products"] = sum(
            row["in_features"] * row["out_features"] * row["count"] * row[f"{stage}_rows"] for row in layers
        )
    return figures


def without_empty(figures: Any) -> Any:
    """Leave out components that neither compute nor move anything: the norms of OLMo have no weights."""
    if not isinstance(figures, dict):
        return figures
    empty = {"flops": 0, "flops_full_attention": 0, "bytes": 0}
    kept = {key: without_empty(value) for key, value in figures.items()}
    return {
        key: value
        for key, value in kept.items()
        if not (isinstance(value, dict) and "within" in value and value.items() >= empty.items() and key == "norms")
    }


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TEXT])
def test_counted_operators_give_the_figures_of_the_formulas(name: str) -> None:
    frozen = {key: value for key, value in MODELS[name]["figures"].items() if key != "plans"}
    found = text_figures(CountedArchitecture.of(counted(name)))
    assert list(differences(without_empty(weighed(frozen)), without_empty(weighed(found)))) == []


def test_a_counted_model_goes_through_json_unchanged() -> None:
    model = counted("qwen2_moe_mixed")
    assert CountedModel.from_json(model.to_json()) == model
