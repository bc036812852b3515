"""The hardware table: lookup by driver name, unknown names, and dense figures."""

import subprocess
import sys

import pytest

from llm_perf_opt.analysis.limits.hardware import (
    HARDWARE,
    RATES,
    Hardware,
    given_hardware,
    hardware_named,
    hardware_of_device,
)
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200_nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("A100-SXM4-40GB", "a100_sxm_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40gb"),
        ("NVIDIA GeForce RTX 3090", "rtx_3090"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("GeForce RTX 3090", "rtx_3090"),
        ("NVIDIA GeForce RTX 5090", "rtx_5090"),
        ("NVIDIA RTX A6000", "rtx_a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx_6000_ada"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A30", "a30"),
        ("NVIDIA A40", "a40"),
        ("Tesla V100-SXM2-16GB", "v100_sxm2_16gb"),
        ("Tesla V100-SXM2-32GB", "v100_sxm2_32gb"),
        ("Tesla V100-PCIE-16GB", "v100_pcie_16gb"),
        ("Tesla V100S-PCIE-32GB", "v100s_pcie_32gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("  nvidia  h200 ", "h200"),
    ],
)
def test_the_drivers_names_are_known(name: str, key: str) -> None:
    found = hardware_of_device(name)
    assert not isinstance(found, Missing)
    assert found.key == key
    assert hardware_named(name) is hardware_named(key) is found


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA L40",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_a_stranger_has_no_peak(name: str) -> None:
    found = hardware_of_device(name)
    assert isinstance(found, Missing)
    assert f"'{name}'" in found.why
    assert "hardware.peak_tflops=" in found.why


def test_an_unknown_key_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        hardware_named("h100_sx")
    assert "Did you mean 'h100_sxm'?" in caught.value.fact
    assert "rtx_4090" in caught.value.remedy
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError) as caught:
        hardware_named("H100")
    assert all(f"'{name}'" in caught.value.fact for name in ("h100_sxm", "h100_nvl", "h100_pcie"))


@pytest.mark.parametrize(
    ("key", "bf16_tflops", "tbs"),
    [
        ("a100_sxm_80gb", 312, 2.04),
        ("h100_sxm", 989, 3.35),
        ("h100_pcie", 756, 2.0),
        ("h200", 989, 4.8),
        ("l40s", 362, 0.864),
        ("rtx_4090", 165, 1.008),
        ("rtx_5090", 209, 1.79),
        ("b200", 2250, 8.0),
    ],
)
def test_the_figures_are_the_dense_ones(key: str, bf16_tflops: float, tbs: float) -> None:
    hardware = hardware_named(key)
    assert hardware.peaks["bf16"].flops_per_s / 1e12 == pytest.approx(bf16_tflops, rel=0.003)
    assert hardware.peaks["bf16"].accumulate == "fp32"
    assert hardware.bandwidth_bytes_per_s / 1e12 == pytest.approx(tbs, rel=0.002)


@pytest.mark.parametrize("row", HARDWARE.values(), ids=HARDWARE)
def test_each_row_is_consistent(row: Hardware) -> None:
    assert hardware_named(row.key) is row
    rates = {dtype: peak.flops_per_s for dtype, peak in row.peaks.items()}
    assert set(rates) <= set(RATES)
    assert row.source.startswith("NVIDIA")
    assert "fp16" in rates
    assert rates.get("bf16", rates["fp16"]) == rates["fp16"]
    if "tf32" in rates:
        assert rates["tf32"] == pytest.approx(rates["fp16"] / 2, rel=0.03)
    if "fp8" in rates:
        assert rates["fp8"] == pytest.approx(2 * rates["fp16"], rel=0.02)
    if "fp32" in rates:
        assert rates["fp32"] < rates["fp16"]
    assert 3e11 <= row.bandwidth_bytes_per_s <= 8e12
    assert isinstance(row.memory_bytes, int)
    assert row.memory_bytes % 2**30 == 0


def test_no_two_rows_share_a_name() -> None:
    names = [name.casefold() for row in HARDWARE.values() for name in row.nvml_names]
    assert len(names) == len(set(names))


def test_a_format_without_a_peak_is_missing_with_a_reason() -> None:
    missing = hardware_named("a100_sxm_80gb").peak("fp8")
    assert isinstance(missing, Missing)
    assert "no fp8 peak for NVIDIA A100-SXM4-80GB" in missing.why
    assert isinstance(hardware_named("t4").ridge_flops_per_byte("bf16"), Missing)


def test_hardware_can_be_described() -> None:
    own = given_hardware(dtype="bf16", peak_tflops=100, bandwidth_gbs=500.0, memory_gb=16, name="mine")
    assert own.peaks["bf16"].flops_per_s == 1e14
    assert own.ridge_flops_per_byte("bf16") == 200
    assert own.memory_bytes == 16 * 2**30
    assert own.source == "the configuration"


@pytest.mark.parametrize("value", [0, -1, "fast", True, float("nan"), None])
@pytest.mark.parametrize("field", ["peak_tflops", "bandwidth_gbs"])
def test_a_described_figure_must_be_a_number(field: str, value: object) -> None:
    figures: dict[str, object] = {"peak_tflops": 1.0, "bandwidth_gbs": 1.0} | {field: value}
    with pytest.raises(ConfigError, match=f"hardware.{field}"):
        given_hardware(dtype="bf16", peak_tflops=figures["peak_tflops"], bandwidth_gbs=figures["bandwidth_gbs"])


def test_a_described_format_must_have_a_rate() -> None:
    with pytest.raises(ConfigError, match="bf61"):
        given_hardware(dtype="bf61", peak_tflops=1, bandwidth_gbs=1)


def test_costing_needs_no_framework() -> None:
    imports = "import sys; from llm_perf_opt.analysis.cost_model import cost, families"
    imports += "; from llm_perf_opt.analysis.limits import hardware, roofline"
    code = f"{imports}; print({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
