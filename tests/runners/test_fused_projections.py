"""Projections that are multiplied at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.fused_projections import Part, fuse_projections, share_fused
from llm_perf_opt.runners.quantized_model import quantize_linear_layers


class Attention(nn.Module):
    def __init__(self, *, bias: bool = True, other: int = 16) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 24, bias=bias)
        self.k_proj = nn.Linear(other, 8, bias=bias)
        self.v_proj = nn.Linear(other, 8, bias=bias)

    def forward(self, inputs: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        seen = inputs if memory is None else memory
        return torch.cat([self.q_proj(inputs), self.k_proj(seen), self.v_proj(seen)], dim=-1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.gate_proj, self.up_proj = nn.Linear(40, 32, bias=False), nn.Linear(40, 32, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.attention(inputs)
        gated: torch.Tensor = torch.sigmoid(self.gate_proj(found)) * self.up_proj(found)
        return gated


def made(kind: Callable[..., nn.Module], **fields: object) -> nn.Module:
    torch.manual_seed(0)
    return kind(**fields).eval()


def products(model: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The result of the model, and how many products of whole matrices it took."""
    wholes = {id(part.whole): part.whole for part in model.modules() if isinstance(part, Part)}
    calls: list[int] = []
    hooks = [whole.register_forward_hook(lambda *_: calls.append(1)) for whole in wholes.values()]
    with torch.inference_mode():
        found = model(*inputs)
    for hook in hooks:
        hook.remove()
    return found, len(calls)


def test_the_result_is_the_same_with_one_product_per_input() -> None:
    model, inputs = made(Gated), torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before = model(inputs)
    size = sum(tensor.numel() for tensor in model.parameters())
    words = fuse_projections(model)
    assert {"q_proj, k_proj and v_proj in 1 layer" in words, "gate_proj and up_proj in 1 layer" in words} == {True}
    for _ in range(2):  # nothing is left of the first call
        after, calls = products(model, inputs)
        assert calls == 2
        torch.testing.assert_close(after, before)
    assert sum(tensor.numel() for tensor in model.parameters()) == size


def test_a_compiled_product_has_no_bias() -> None:
    """Inductor generates a product of one row, but leaves one with a bias to the library."""
    model, inputs = made(Attention), torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before = model(inputs)
    fuse_projections(model)
    called: list[tuple[Any, int]] = []

    def capture(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        called.extend((node.target, len(node.args)) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.inference_mode():
        after = torch.compile(model, backend=capture, fullgraph=True)(inputs)
    assert [arguments for target, arguments in called if target is torch.nn.functional.linear] == [2]
    torch.testing.assert_close(after, before)


def test_inputs_that_differ_are_multiplied_by_themselves() -> None:
    """As in attention to another sequence."""
    model, generator = made(Attention), torch.Generator().manual_seed(1)
    inputs, memory = (torch.randn(1, 4, 16, generator=generator) for _ in range(2))
    with torch.inference_mode():
        before = model(inputs, memory)
    fuse_projections(model)
    after, calls = products(model, inputs, memory)
    assert calls == 2
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("model", [made(Attention, other=12), nn.Sequential(nn.Linear(4, 4))], ids=["other inputs", "none"])
def test_a_model_without_such_projections_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="has no projections that can be fused"):
        fuse_projections(model)


def test_quantized_weights_are_shared_too() -> None:
    model, inputs = made(Attention), torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before = model(inputs)
    fuse_projections(model)
    record = quantize_linear_layers(model)
    share_fused(model)
    after, calls = products(model, inputs)
    assert (record.layers, record.weights, calls) == (1, 16 * 40, 1)
    assert float((after - before).norm() / before.norm()) < 0.02
