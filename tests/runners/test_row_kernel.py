"""The kernel for products of one row. Triton interprets it here; what only a GPU can show is in test_on_gpu.py."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from builders import default_config
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.pytorch_runner import open_pytorch
from llm_perf_opt.workspace.data.prompts import synthetic_prompts

INTERPRETED = """
import json
import torch
from llm_perf_opt.runners.row_kernel import CHOICES, RowLinear, row_product

torch.manual_seed(0)
found = []
for outputs, inputs in ((4, 256), (6, 896), (7, 2100)):
    for kind in (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        weight, row = (torch.randn(outputs, inputs) * 20).to(kind), torch.randn(1, inputs)
        for scales in (torch.rand(outputs), None):
            exact = row.double() @ weight.double().t() * (1 if scales is None else scales)
            for blocks in CHOICES:
                product = row_product(row, weight, scales, *blocks)
                found.append(float((product - exact).norm() / exact.norm()))
numbers = torch.arange(-128, 128, dtype=torch.int8)[:, None].repeat(1, 16)
bytes_ = row_product(torch.eye(16)[:1], numbers, None, *CHOICES[1])[0].tolist()
layer = torch.nn.Linear(256, 6)
inputs = torch.randn(1, 1, 256)
expected = layer(inputs)
layer.__class__, layer.blocks = RowLinear, CHOICES[0]
operators = []
def capture(graph, _):
    operators.append([str(node.target) for node in graph.graph.nodes])
    return graph.forward
compiled = torch.compile(layer, backend=capture, fullgraph=True)
with torch.inference_mode():
    alone = float((compiled(inputs) - expected).abs().max())
    several = float((compiled(inputs.repeat(1, 3, 1)) - expected).abs().max())

steps = list(operators)
class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, torch.nn.Linear(256, 4))
        self.o_proj = torch.nn.Linear(12, 16, bias=False)
    def forward(self, inputs):
        return self.o_proj(torch.cat([self.q_proj(inputs), self.k_proj(inputs), self.v_proj(inputs)], -1))

from llm_perf_opt.runners import fused_projections, quantized_layers, row_kernel
def seconds(layers, dtype, product):
    blocks = getattr(product, "args", ())
    slow = layers[0].weight.shape == (16, 12)  # the library is faster for this shape
    return 2.0 if not blocks else 3.0 if slow else 1.0 + (blocks[0] != CHOICES[2])
row_kernel._seconds = seconds
whole = {}
for kind in ("none", "int8", "fp8"):
    model = Attention()
    expected = model(inputs)
    fused_projections.fuse_projections(model)
    if kind == "none":
        note = row_kernel.use_row_kernel(model)
    else:
        for name in ("q_proj.whole", "o_proj"):
            plain = model.get_submodule(name)
            model.set_submodule(name, quantized_layers.quantized_layer(kind, plain.weight, plain.bias, compiled=True))
        fused_projections.share_fused(model)
        quantized_layers.choose_row_blocks([model.q_proj.whole, model.o_proj], torch.float32)
        note = model.q_proj.whole.kernel
    operators.clear()
    with torch.inference_mode():
        product = torch.compile(model, backend=capture, fullgraph=True)(inputs)
    used = sum("row_product" in name for name in operators[0])
    layer = model.q_proj.whole
    whole[kind] = [float((product - expected).norm() / expected.norm()), used, tuple(layer.blocks) == CHOICES[2], note]
print(json.dumps({"whole": whole, "errors": found, "bytes": bytes_, "alone": alone, "several": several, "operators": steps}))
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_the_interpreted_kernel_multiplies(vllm_python: Path) -> None:
    """In the environment of vLLM, which has Triton."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([vllm_python, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["errors"]) == 3 * 4 * 2 * 5
    assert max(found["errors"]) < 1e-5
    assert found["bytes"] == list(range(-128, 128)), "every byte is converted exactly"
    assert max(found["alone"], found["several"]) < 1e-5
    assert [any("row_product" in name for name in names) for names in found["operators"]] == [True, False]
    whole = found["whole"]
    assert [whole[kind][0] < most for kind, most in (("none", 1e-5), ("int8", 0.02), ("fp8", 0.05))] == [True] * 3
    assert {kind: used for kind, (_, used, _, _) in whole.items()} == {"none": 1, "int8": 2, "fp8": 2}, "one for the group"
    assert all(fastest for _, _, fastest, _ in whole.values())
    assert "1 of 2 linear layers" in whole["none"][3], "the library is faster for the other"


def test_it_is_refused_on_a_cpu() -> None:
    config = default_config()
    fields: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    runtime = replace(config.runtime, compile="reduce-overhead", cache="static", row_kernel=True)
    config = replace(config, model=replace(config.model, architecture=fields), runtime=runtime)
    asked = RunnerRequest(
        config, AutoConfig.for_model(**fields), synthetic_prompts(1, 8, 64, seed=3), torch.device("cpu"), torch.float32, None
    )
    with pytest.raises(ConfigError, match="NVIDIA GPU"):
        open_pytorch(asked)
