"""Every figure of the cost model is, to the last digit, the one in tests/fixtures/cost/figures.json.gz."""

import copy

import pytest

from freeze_cost import CACHES, FORMATS, PLANS, STEPS, differences, figures, presets, read
from llm_perf_opt.analysis.cost_model.families import known_model_types
from llm_perf_opt.analysis.cost_model.vision_families import FAMILIES

FROZEN = read()
MODELS = FROZEN["models"]


@pytest.mark.parametrize("name", MODELS)
def test_figures_are_the_frozen_ones(name: str) -> None:
    changed = list(differences(MODELS[name]["figures"], figures(MODELS[name])))
    assert not changed, "\n".join([f"{len(changed):,} differ", *changed[:20]])


def test_the_grid_is_the_frozen_one() -> None:
    grid = {"formats": FORMATS, "steps": STEPS, "caches": CACHES, "plans": PLANS}
    assert {name: FROZEN[name] for name in grid} == grid


def test_every_preset_and_model_type_is_frozen() -> None:
    assert {name: MODELS[name]["config"] for name in presets()} == presets()
    configs = [model["config"] for model in MODELS.values()]
    assert {config["model_type"] for config in configs} == {*known_model_types(), *FAMILIES}


def test_every_plan_and_exchange_is_frozen_of_some_model() -> None:
    planned = [plans for model in MODELS.values() if (plans := model["figures"].get("plans"))]
    assert {name for plans in planned for name, stages in plans.items() if stages} == set(PLANS)


def test_one_more_or_one_missing_is_found() -> None:
    frozen = MODELS["qwen2_5_0_5b"]["figures"]
    found = copy.deepcopy(frozen)
    part = found["formats"]["bf16"]["steps"]["b7 n33 c0 all"]["mlp"]
    part["bytes"] += 1
    del part["flops"]
    found["linear_layers"].pop()
    paths = [line.partition(":")[0] for line in differences(frozen, found)]
    inside = "/formats/bf16/steps/b7 n33 c0 all/mlp"
    assert paths == [f"{inside}/bytes", f"{inside}/flops", "/linear_layers"]
