"""How a model is split, as far as one process can show it; `test_ranks.py` has the ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from llm_perf_opt.runners import tensor_parallel

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 10,
}


def test_the_plan_is_set_on_the_model_because_transformers_5_17_takes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.distributed import device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import tensor_parallel as theirs

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    plans: list[dict[str, str]] = []

    def apply(model: Any, mesh: Any) -> Any:
        plans.append(dict(model.tp_plan))
        return model

    monkeypatch.setattr(theirs, "apply_tensor_parallelism", apply)
    monkeypatch.setattr(device_mesh, "DeviceMesh", lambda *_, **__: None)
    group: Any = SimpleNamespace(backend="gloo", size=2)
    assert tensor_parallel._cut(model, torch.device("meta"), group) is model
    assert plans[0]["lm_head"] == "colwise", "its output is gathered here, not by DTensor"
    assert plans[0]["model.layers.*.self_attn.o_proj"] == "rowwise"


def test_since_transformers_5_23_the_plan_is_by_name_and_tied_weights_are_cut_each(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.distributed import device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import tensor_parallel as theirs

    sizes = {**SIZES, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    plans: list[dict[str, str]] = []

    def apply(model: Any, mesh: Any, tp_plan: dict[str, str]) -> Any:
        plans.append(tp_plan)
        head, table = model.lm_head.weight, model.model.embed_tokens.weight
        assert head is not table
        assert head.data_ptr() == table.data_ptr(), "no copy"
        assert all(name in dict(model.named_parameters()) or model.get_submodule(name) for name in tp_plan)
        return model

    monkeypatch.setattr(theirs, "apply_tensor_parallelism", apply)
    monkeypatch.setattr(device_mesh, "DeviceMesh", lambda *_, **__: None)
    group: Any = SimpleNamespace(backend="gloo", size=2)
    tensor_parallel._cut(model, torch.device("cpu"), group)
    found = plans[0]
    assert found["lm_head.weight"] == "colwise"
    for name in ("o_proj", "o_proj.weight", "o_proj.bias"):
        assert {found[f"model.layers.{layer}.self_attn.{name}"] for layer in (0, 1)} == {"rowwise"}
    assert list(found).index("lm_head.weight") < list(found).index("lm_head"), "a module is hooked after its weights are cut"
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied again"


def test_parameters_of_experts_have_styles_of_their_own() -> None:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2))
    plan = {"model.layers.*.mlp.experts": "moe_tp_experts", "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"}
    experts = "model.layers.0.mlp.experts"
    assert tensor_parallel._by_name(model, plan) == {
        f"{experts}.gate_up_proj": "packed_colwise",
        f"{experts}.down_proj": "moe_tp_experts",
        experts: "moe_tp_experts",
    }


def test_the_bytes_of_a_rank_count_every_style_that_divides_a_weight() -> None:
    import torch
    from transformers import Phi3Config, Phi3ForCausalLM

    with torch.device("meta"):
        model = Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0))
    plan = tensor_parallel.plan_of(model)
    assert plan["model.layers.*.self_attn.o_proj"] == "rowwise_split_input"
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    cut = [
        name for name, _ in model.named_parameters() if name.endswith(("_proj.weight", "lm_head.weight", "embed_tokens.weight"))
    ]
    assert len(cut) == 6
    assert tensor_parallel.split_bytes(model, 2) == whole - sum(model.get_parameter(name).nbytes for name in cut) // 2


def test_ranks_that_share_a_gpu_cut_stored_weights_themselves() -> None:
    import torch

    assert not tensor_parallel.loads_shards(torch.device("cuda"), "gloo")
