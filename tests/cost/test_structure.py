"""Components of models that no preset names, found by what their modules do; products against torch's counter."""

from inspect import signature
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from llm_perf_opt.cost.counted import CountedModel  # noqa: E402
from llm_perf_opt.cost.counting import Program, count_steps, meta_model  # noqa: E402
from llm_perf_opt.cost.structure import model_of  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "falcon": {"num_key_value_heads": 1, "head_dim": None},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 8, "num_experts_per_tok": 2},
    "mamba": {"state_size": 4},
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
                   "layer_types": ["linear_attention", "full_attention"]},
    "glm4": {"partial_rotary_factor": 0.5},
}  # fmt: skip
PLAIN = (
    "apertus", "arcee", "bart", "bloom", "biogpt", "cohere2", "cwm", "doge", "ernie4_5", "exaone4", "glm",
    "gpt_bigcode", "gpt_neox_japanese", "granitemoe", "helium", "lfm2", "mbart", "mpt", "nanochat", "nemotron", "opt",
    "pegasus", "persimmon", "phimoe", "qwen2_moe", "seed_oss", "stablelm", "starcoder2", "trocr", "vaultgemma", "xglm",
    "solar_open", "hyperclovax", "hunyuan_v1_dense", "minimax", "flex_olmo",
)  # fmt: skip
"""With those of `OWN` and cohere, no preset names them."""


def _config(name: str) -> Any:
    options = {key: value for key, value in (SMALL | OWN.get(name, {})).items() if value is not None}
    return transformers.AutoConfig.for_model(name, **options)


def _counted(name: str) -> tuple[CountedModel, Program]:
    program = Program(meta_model(_config(name)))
    return model_of(name, program, count_steps(program)), program


def _components(model: CountedModel) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for operator, _ in model.operators():
        found.setdefault(operator.component, set()).add(operator.module)
    return found


DECODER = {"attention_core", "attention_projections", "kv", "norms", "embedding", "lm_head"}


@pytest.mark.parametrize(
    ("name", "components"),
    [
        ("olmoe", DECODER | {"experts", "router"}),
        ("falcon", DECODER | {"mlp"}),
        ("mamba", {"embedding", "lm_head", "norms", "recurrent", "state"}),
        ("jamba", DECODER | {"experts", "mlp", "recurrent", "router", "state"}),
        ("cohere", DECODER | {"mlp"}),
        ("glm4", DECODER | {"mlp"}),
        ("qwen3_next", DECODER | {"experts", "recurrent", "router", "shared_experts", "state"}),
    ],
)
def test_components_are_found_by_structure(name: str, components: set[str]) -> None:
    assert set(_components(_counted(name)[0])) == components


@pytest.mark.parametrize(
    ("name", "experts", "active"), [("olmoe", 8, 2), ("jetmoe", 4, 2), ("jamba", 4, 2), ("qwen3_next", 4, 2)]
)
def test_experts_are_counted_once_per_choice(name: str, experts: int, active: int) -> None:
    model, _ = _counted(name)

    found = [operator for operator, _ in model.operators() if operator.kind == "experts"]
    assert found
    assert {(operator.experts, operator.active) for operator in found} == {(experts, active)}
    assert all(operator.rows(((5, 0), (1, 9))) == 6 * active for operator in found)
    assert model.active_params < model.params


def _flops(model: CountedModel, new: int) -> int:
    step = ((new, 0),)
    total = 0
    for operator, number in model.operators():
        if operator.kind in ("product", "experts"):
            total += number * 2 * operator.inputs * operator.outputs * operator.rows(step)
        elif operator.kind == "attention":
            total += number * 2 * operator.heads * new * new * (operator.key_dim + operator.value_dim)
        elif operator.kind == "other":
            total += number * operator.flops(step)
    return total


@pytest.mark.parametrize(
    "name", ["falcon", "cohere", "glm4", "olmoe", "jetmoe", *(pytest.param(n, marks=pytest.mark.slow) for n in PLAIN)]
)
def test_full_attention_and_parameters_are_those_of_torch(name: str) -> None:
    config = _config(name)
    config._experts_implementation = "eager"  # torch's counter has no formula for grouped products
    real = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model, _ = _counted(name)
    options = {"logits_to_keep": 1} if "logits_to_keep" in signature(real.forward).parameters else {}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        real(input_ids=torch.full((1, 21), 3), use_cache=False, **options)

    assert model.params == sum(parameter.numel() for parameter in real.parameters())
    assert _flops(model, 21) == counter.get_total_flops() > 0
    assert not model.unknown
