"""Products at a model's own shapes: what is summed, what is scaled, and what a wrong kernel leaves."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from llm_perf_opt.core.machine_records import LinearLayer, ModelLinears
from llm_perf_opt.core.records import Missing
from llm_perf_opt.runners import quantization
from llm_perf_opt.runners.measure import ceiling_cpu, ceiling_model
from llm_perf_opt.runners.measure.ceiling_kernels import Room
from llm_perf_opt.runners.measure.ceiling_model import Product, model_quantities
from llm_perf_opt.runners.measure.ceiling_timing import Measured, Quantity
from llm_perf_opt.runners.quantization import Int8Linear, Kernel

MODEL = ModelLinears("m", "fp32", 100_000, (LinearLayer(64, 512, 1, 1, 1), LinearLayer(64, 32, 6, 40, 1)))
ROOM = Room(2**20, 2**16)


def quantities(model: ModelLinears = MODEL) -> dict[str, Quantity]:
    return {entry.key: entry for entry in model_quantities(model, torch.device("cpu"), ROOM)}


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Each output element of a product takes 1 ns per row; holds the shapes of the activations."""
    seen: list[tuple[int, ...]] = []

    def samples(products: list[Product], activations: torch.Tensor, _: float) -> list[float]:
        seen.append(tuple(activations.shape))
        result = products[0](activations)
        assert isinstance(result, torch.Tensor)
        assert len(products) > 1
        return [float(result.numel())] * 5

    monkeypatch.setattr(ceiling_model, "_samples", samples)
    return seen


def test_every_format_has_a_row_per_stage_with_its_work() -> None:
    found = quantities()
    assert {key for key in found if key.startswith("model_")} == {
        f"model_{stage}_{dtype}" for stage in ("gemv", "gemm") for dtype in ("fp32", "bf16", "fp16", "int8")
    }
    weights = 64 * 512 + 6 * 64 * 32
    assert found["model_gemv_fp32"].work == 4 * weights
    assert found["model_gemv_int8"].work == weights
    assert found["model_gemm_bf16"].work == 2 * (64 * 512 + 40 * 6 * 64 * 32)
    assert "threads_1_model_gemv" in found


def test_the_time_is_the_sum_over_all_layers(fixed: list[tuple[int, ...]]) -> None:
    decode = quantities()["model_gemv_fp32"].measure(10.0)
    prefill = quantities()["model_gemm_fp32"].measure(10.0)
    assert isinstance(decode, Measured)
    assert isinstance(prefill, Measured)
    assert (decode.value.median, decode.value.n) == (512 + 6 * 32, 5)
    assert prefill.value.median == 512 + 40 * 6 * 32
    assert sorted(fixed) == [(1, 64), (1, 64), (1, 64), (40, 64)]


def test_a_matrix_beyond_half_of_the_room_is_cut_and_scaled(fixed: list[tuple[int, ...]]) -> None:
    large = ModelLinears("m", "fp32", 10**9, (LinearLayer(64, 10_000, 1, 0, 1),))
    found = quantities(large)
    decode = found["model_gemv_fp32"].measure(10.0)
    assert isinstance(decode, Measured)
    assert decode.value.median == pytest.approx(10_000)
    assert "model_gemm_fp32" not in found  # prefill does not use it


def test_without_time_the_rest_is_estimated_at_the_same_rate(fixed: list[tuple[int, ...]]) -> None:
    decode = quantities()["model_gemv_fp32"].measure(0.0)
    assert isinstance(decode, Measured)
    assert len(fixed) == 1
    assert decode.value.median == pytest.approx(512 * (512 + 6 * 32) / 512)
    assert "the largest 1 measured" in decode.how


def test_a_missing_int8_kernel_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> object:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(quantization, "choose_kernels", missing)
    found = quantities()["model_gemv_int8"].measure(0.01)
    assert isinstance(found, Missing)
    assert "no such kernel" in found.why


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", [1, 40])
def test_int8_is_measured_with_the_kernels_of_a_run(
    compiled: bool, rows: int, fixed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bench asks the function that sets up a run, with samples of the same shapes."""
    asked: list[tuple[Any, int, bool]] = []
    used: list[str] = []

    def choose(samples: dict[quantization.Shape, Int8Linear], decode_rows: int, compiled: bool) -> Any:
        asked.append(({shape: tuple(layer.weight.shape) for shape, layer in samples.items()}, decode_rows, compiled))
        return dict.fromkeys(samples, Kernel(None, 16))

    def product(self: Int8Linear, inputs: torch.Tensor) -> torch.Tensor:
        used.append("dequantized" if len(inputs) > 16 else "packed")
        return torch.zeros(len(inputs), self.out_features)

    monkeypatch.setattr(quantization, "choose_kernels", choose)
    monkeypatch.setattr(Int8Linear, "packed", product)
    monkeypatch.setattr(Int8Linear, "dequantized", product)
    layers = (LinearLayer(64, 512, 1, rows, 1), LinearLayer(64, 32, 6, rows, 1))
    stage = "gemv" if rows == 1 else "gemm"
    found = quantities(replace(MODEL, layers=layers, compiled=compiled))[f"model_{stage}_int8"].measure(10.0)
    assert isinstance(found, Measured)
    assert asked == [({(512, 64): (512, 64), (32, 64): (32, 64)}, 1, compiled)]
    assert set(used) == {"packed" if rows == 1 else "dequantized"}
    assert quantization.PACKED in found.how


def test_experts_have_no_time_in_int8() -> None:
    found = quantities(replace(MODEL, experts=True))
    for stage in ("gemv", "gemm"):
        missing = found[f"model_{stage}_int8"].measure(0.01)
        assert isinstance(missing, Missing)
        assert "experts" in missing.why


@pytest.mark.parametrize(
    ("machine", "dtype", "in_onednn", "same"),
    [
        ("x86_64", "bf16", True, True),
        ("aarch64", "fp32", True, True),
        ("aarch64", "bf16", True, False),
        ("aarch64", "fp16", True, False),
        ("aarch64", "bf16", False, True),
        ("aarch64", "int8", False, False),
    ],
)
def test_thread_counts_are_not_compared_with_another_kernel(
    machine: str, dtype: str, in_onednn: bool, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: in_onednn)
    assert (ceiling_cpu.other_kernel(dtype) == "") is same
    if not same:
        found = quantities(replace(MODEL, dtype=dtype))["threads_1_model_gemv"].measure(0.01)
        assert found == Missing(ceiling_cpu.other_kernel(dtype))


def test_int8_products_have_run_once_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that rearranges its weights at the first call does so before the time starts, for the rows that are timed."""
    calls: dict[Product, list[int]] = {}

    def dynamic(self: Int8Linear, engine: str) -> Product:
        def product(inputs: torch.Tensor) -> torch.Tensor:
            calls[product].append(len(inputs))
            return torch.zeros(len(inputs), self.out_features)

        calls[product] = []
        return product

    def samples(products: list[Product], activations: torch.Tensor, _: float) -> list[float]:
        assert len(products) >= 2
        assert all(calls[product] == [len(activations)] for product in products)
        return [1.0] * 5

    monkeypatch.setattr(quantization, "choose_kernels", lambda samples, *_: dict.fromkeys(samples, Kernel("onednn")))
    monkeypatch.setattr(Int8Linear, "dynamic", dynamic)
    monkeypatch.setattr(ceiling_model, "_samples", samples)
    for stage in ("gemv", "gemm"):
        assert isinstance(quantities()[f"model_{stage}_int8"].measure(10.0), Measured)
