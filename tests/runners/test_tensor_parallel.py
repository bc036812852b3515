"""How a model is split, as far as one process can show it; `test_ranks.py` has the ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from llm_perf_opt.runners import tensor_parallel


def test_the_plan_is_set_on_the_model_because_transformers_5_17_takes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.distributed import device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import tensor_parallel as theirs

    with torch.device("meta"):
        sizes: dict[str, Any] = {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 10,
        }
        model = LlamaForCausalLM(LlamaConfig(**sizes))
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


def test_ranks_that_share_a_gpu_cut_stored_weights_themselves() -> None:
    import torch

    assert not tensor_parallel.loads_shards(torch.device("cuda"), "gloo")
