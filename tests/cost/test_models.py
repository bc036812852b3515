"""Configurations that are counted, and those that are rejected."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from builders import model_facts
from llm_perf_opt.analysis.cost_model.cost import kv_bytes_per_token, kv_cache_bytes, step_cost
from llm_perf_opt.analysis.cost_model.models import architecture_described, architecture_that_ran
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.cli.app import app
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.cost.models import count_config, count_model

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
OLMOE: dict[str, Any] = {"model_type": "olmoe", **SMALL, "num_experts": 6, "num_experts_per_tok": 2}
MAMBA: dict[str, Any] = {"model_type": "mamba", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llm-perf-opt" / "counted"


def test_a_mixture_of_experts_without_formulas() -> None:
    """By hand: 4 matrices of attention, a router, gate_up and down of two experts per token, and the head."""
    model = architecture_described(OLMOE)
    stage = step_cost(model, Step(2, 5, 0))
    parts = {part.name: part.flops_full_attention for part in stage.components}
    assert parts["attention_projections"] == 3 * 2 * 10 * 4 * 32 * 32
    assert parts["attention_core"] == 3 * 2 * 4 * 5 * 5 * 4 * 8
    assert parts["router"] == 3 * 2 * 10 * 32 * 6
    assert parts["experts"] == 3 * 2 * 10 * 2 * 3 * 32 * 48
    assert parts["lm_head"] == 2 * 2 * 32 * 96
    assert model.params - model.active_params == 3 * 4 * 3 * 32 * 48
    assert kv_bytes_per_token(model) == 3 * 2 * 32 * 2


def test_a_state_does_not_grow_with_the_context() -> None:
    model = architecture_described(MAMBA)
    assert kv_bytes_per_token(model) == 0
    assert kv_cache_bytes(model, 2, 10) == kv_cache_bytes(model, 2, 100_000) > 0
    near, far = (step_cost(model, Step(1, 1, cached)) for cached in (10, 100_000))
    assert near == far
    assert {part.name for part in near.components} >= {"recurrent", "state", "lm_head"}


def test_what_is_assumed_is_said() -> None:
    own = {"model_type": "falcon", **SMALL, "num_kv_heads": 2, "alibi": True}
    assert any("causal" in caveat for caveat in architecture_described(own).caveats)
    assert architecture_described(OLMOE).caveats == ()
    guessed = replace(count_model(OLMOE), guessed=("nonzero",), unknown={"aten::lstm": 2})
    first, second = guessed.caveats()
    assert "aten::lstm" in first
    assert "nonzero" in second


def test_layers_that_only_look_equal_are_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layers of Llama skip their MLP here, which no module or setting shows."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(**{**SMALL, "num_hidden_layers": 6})
    whole = count_config(config)
    forward = LlamaMLP.forward

    def skipping(self: Any, hidden: Any) -> Any:
        return forward(self, hidden) if self.layer_depth < 4 else hidden

    made = LlamaMLP.__init__

    def numbered(self: Any, config: Any) -> None:
        made(self, config)
        self.layer_depth = numbered.made  # type: ignore[attr-defined]
        numbered.made += 1  # type: ignore[attr-defined]

    numbered.made = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(LlamaMLP, "__init__", numbered)
    monkeypatch.setattr(LlamaMLP, "forward", skipping)
    found = count_config(config)
    assert [len(found.kinds[kind]) for kind in found.layers] == [len(whole.kinds[0])] * 4 + [len(whole.kinds[0]) - 3] * 2


def test_inference_mode_changes_nothing() -> None:
    import torch
    from transformers import AutoConfig

    fields = dict(OLMOE)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.inference_mode():
        assert count_config(config) == count_model(OLMOE)


def test_a_second_call_reads_what_the_first_one_counted(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = count_model(OLMOE)
    monkeypatch.setattr("llm_perf_opt.cost.models.count_config", lambda config: pytest.fail("counted again"))
    assert count_model(OLMOE) == first
    (file,) = own_cache.iterdir()
    file.write_text("{")  # interrupted
    with pytest.raises(pytest.fail.Exception):
        count_model(OLMOE)


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"model_type": "olmo3e"}, "unknown to transformers"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "is not run"),
        ({"model_type": 3}, "unknown to transformers"),
        ({**OLMOE, "num_attention_heads": "four"}, "olmoe"),
        ({**OLMOE, "num_attention_heads": 0}, "olmoe"),
        ({"model_type": "t5"}, "encoder"),
    ],
)
def test_configurations_that_cannot_be_counted(fields: dict[str, Any], fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        count_model(fields)
    assert fact in caught.value.fact
    assert "\n" not in caught.value.fact


def test_the_command_counts(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(OLMOE))
    done = CliRunner().invoke(app, ["cost", "--model-config", str(file), "--hardware", "h200", "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["params"] == count_model(OLMOE).params
    assert found["assumptions"]["model_type"] == "olmoe"
    with pytest.raises(ConfigError, match="--tp"):
        CliRunner().invoke(app, ["cost", "--model-config", str(file), "--hardware", "h200", "--tp", "2"], catch_exceptions=False)


def test_a_run_keeps_its_operators_or_why_they_are_missing() -> None:
    counted = count_model(OLMOE)
    assert architecture_that_ran(model_facts(counted=counted.to_json())) == architecture_described(OLMOE)
    with pytest.raises(ConfigError, match="no cache"):
        architecture_that_ran(model_facts(counted="the model has no cache"))


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [7]},
        {"layers": ["0"]},
        {"kinds": 3},
        {"params": None},
        {"outside": [{"kind": "unheard of", "module": "", "component": "mlp"}]},
        {"outside": [{"kind": "read", "module": "", "component": "mlp", "params": -1}]},
        {"outside": [{"kind": "product", "module": "", "component": "mlp", "rows": {"new": "1e999999999"}}]},
        {"outside": [{"kind": "product", "module": "", "component": "mlp", "rows": {"new": "1/0"}}]},
        {"outside": [{"kind": "product", "module": "", "component": "mlp", "rows": 3}]},
    ],
)
def test_edited_operators_are_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="counted operators"):
        architecture_that_ran(model_facts(counted={**count_model(OLMOE).to_json(), **change}))
