"""Datasheet peaks of NVIDIA GPUs: dense rates with their accumulation type, memory bandwidth, memory size.

All figures are from a datasheet or an architecture whitepaper. Peaks are dense: if the source gives a rate with 2:4
sparsity, the table has half of it. A device that is not listed has no peak, not that of a similar device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llm_perf_opt.analysis.stats import positive_number
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing


def devices_of(timings: Maybe[CleanTimings]) -> int:
    """Return how many devices share the work of the timed run."""
    if isinstance(timings, Missing) or timings.runtime is None:
        return 1
    return max(timings.runtime.devices, 1)


def other_devices(seen: int, expected: int) -> Missing | None:
    """Return why sums over the devices in a trace cannot be compared with the peaks of `expected` devices, or None."""
    if seen == expected:
        return None
    of = "one" if expected == 1 else f"{expected} together"
    return Missing(f"the stage's kernels ran on {seen} {'device' if seen == 1 else 'devices'}, but the peaks are those of {of}")


def more_devices(seen: int, expected: int) -> Missing | None:
    """Return the same for a roofline time, which also holds if only some of the devices that share the work are in the trace."""
    return other_devices(seen, expected) if seen > expected else None


def shared_words(devices: int) -> str:
    """Return the note on what is assumed if several devices share the work."""
    return (
        f"The model runs on {devices} devices, assumed to be identical: peaks are those of all {devices} together, and the "
        "roofline time is that of the whole model divided among them, as in ideal tensor parallelism without communication."
    )


RATES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
"""Formats that can have a peak."""

MEMORY_SHARE = 0.9
"""Share of the memory for weights and cache; the rest is for activations, CUDA and graphs. docs/cost.md has its source."""
HOW_TO_GIVE = "Pass hardware.peak_tflops= (dense) and hardware.bandwidth_gbs= from its datasheet."
"""What to do in a run."""


@dataclass(frozen=True)
class Peak:
    """The peak dense rate of matrix products in one format."""

    flops_per_s: float
    accumulate: str
    """The accumulation format."""


@dataclass(frozen=True)
class Hardware:
    """One product's datasheet entry."""

    key: str
    """Short name for the command line."""
    name: str
    nvml_names: tuple[str, ...]
    """Names that the driver reports for it."""
    peaks: Mapping[str, Peak]
    bandwidth_bytes_per_s: float
    memory_bytes: Maybe[int]
    """Nominal; slightly less is available to a process."""
    source: str

    def usable_bytes(self, share: float = MEMORY_SHARE) -> Maybe[int]:
        """Return the memory for weights and cache."""
        return self.memory_bytes if isinstance(self.memory_bytes, Missing) else int(self.memory_bytes * share)

    def peak(self, dtype: str) -> Maybe[Peak]:
        """Return the peak of a format, or why it is missing."""
        found = self.peaks.get(dtype)
        if found is None:
            given = ", ".join(self.peaks)
            return Missing(f"no {dtype} peak for {self.name} in {self.source} (given: {given})")
        return found

    def ridge_flops_per_byte(self, dtype: str) -> Maybe[float]:
        """Return the arithmetic intensity at which compute and memory take equally long."""
        peak = self.peak(dtype)
        return peak if isinstance(peak, Missing) else peak.flops_per_s / self.bandwidth_bytes_per_s


def hardware_named(key: str) -> Hardware:
    """Return the product with this key (`h100_sxm`) or driver name; raise a ConfigError if there is none."""
    found = HARDWARE.get(key.strip().lower().replace("-", "_")) or _BY_DEVICE_NAME.get(_plain(key))
    if found is not None:
        return found
    raise ConfigError(f"Unknown hardware '{key}'.{nearest(key.lower(), HARDWARE)}", f"Name a product: {', '.join(HARDWARE)}.")


def hardware_of_device(name: str) -> Maybe[Hardware]:
    """Return the product whose full NVML name this is: a MIG slice or a laptop GPU is a different product."""
    found = _BY_DEVICE_NAME.get(_plain(name))
    if found is None:
        return Missing(f"no datasheet peak for '{name}': it is not in the hardware table. {HOW_TO_GIVE}")
    return found


def given_hardware(
    *, dtype: str, peak_tflops: object, bandwidth_gbs: object, memory_gb: object = None, name: str = "given"
) -> Hardware:
    """Return hardware that the user describes."""
    if dtype not in RATES:
        raise ConfigError(f"hardware dtype '{dtype}' has no rate.{nearest(dtype, RATES)}", f"Known: {', '.join(RATES)}.")
    peak = Peak(positive_number("hardware.peak_tflops", peak_tflops) * 1e12, "not stated")
    memory: Maybe[int] = Missing("the memory size was not given")
    if memory_gb is not None:
        memory = round(positive_number("hardware.memory_gb", memory_gb) * 2**30)
    bandwidth = positive_number("hardware.bandwidth_gbs", bandwidth_gbs) * 1e9
    return Hardware(name, name, (), MappingProxyType({dtype: peak}), bandwidth, memory, "the configuration")


def _plain(name: str) -> str:
    # Drivers before 2021 omit the vendor's name.
    return " ".join(name.split()).casefold().removeprefix("nvidia ")


def _row(key: str, nvml_names: tuple[str, ...], gbs: float, gib: int, tflops: Mapping[str, float], source: str) -> Hardware:
    peaks = {dtype: Peak(tflops[dtype] * 1e12, "int32" if dtype == "int8" else "fp32") for dtype in RATES if dtype in tflops}
    # A nominal GB of device memory is 2^30 bytes.
    return Hardware(key, nvml_names[0], nvml_names, MappingProxyType(peaks), gbs * 1e9, gib * 2**30, source)


# Tensor-core rates with fp32 accumulation, dense TFLOP/s; "fp32" is the rate outside the tensor cores.
_V100_SXM2 = {"fp32": 15.7, "fp16": 125}
_V100_PCIE = {"fp32": 14, "fp16": 112}
_V100S = {"fp32": 16.4, "fp16": 130}
_T4 = {"fp32": 8.1, "fp16": 65, "int8": 130}
_A100 = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312, "int8": 624}
_A30 = {"fp32": 10.3, "tf32": 82, "bf16": 165, "fp16": 165, "int8": 330}
_A40 = {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7, "int8": 299.3}
_A10 = {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125, "int8": 250}
_RTX_A6000 = {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}
_L4 = {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5, "int8": 242.5}
_L40S = {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733, "int8": 733}
_RTX_6000_ADA = {"fp32": 91.1, "tf32": 182.1, "bf16": 364.2, "fp16": 364.2, "fp8": 728.5}
_H100_SXM = {"fp32": 67, "tf32": 494.5, "bf16": 989, "fp16": 989, "fp8": 1979, "int8": 1979}
_H100_PCIE = {"fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513, "int8": 1513}
_H100_NVL = {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5, "int8": 1670.5}
_B200 = {"tf32": 1100, "bf16": 2250, "fp16": 2250, "fp8": 4500, "int8": 4500, "fp4": 9000}
_GB200 = {"tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "int8": 5000, "fp4": 10000}
# GeForce tensor cores run at half rate with fp32 accumulation, which torch uses: these are not the higher fp16 figures.
_RTX_3090 = {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}
_RTX_4090 = {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}
_RTX_5090 = {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419}

_HALF = "half the figure with sparsity"

_TABLE = (
    _row("b200", ("NVIDIA B200",), 8000, 180, _B200, f"NVIDIA HGX B200 datasheet, {_HALF}"),
    _row("gb200", ("NVIDIA GB200",), 8000, 186, _GB200, f"NVIDIA GB200 NVL72 datasheet, {_HALF}"),
    _row("h200", ("NVIDIA H200",), 4800, 141, _H100_SXM, f"NVIDIA H200 datasheet (SXM), {_HALF}"),
    _row("h200_nvl", ("NVIDIA H200 NVL",), 4800, 141, _H100_NVL, f"NVIDIA H200 datasheet (NVL), {_HALF}"),
    _row("gh200", ("NVIDIA GH200 480GB",), 4000, 96, _H100_SXM, f"NVIDIA GH200 datasheet (HBM3), {_HALF}"),
    _row("h100_sxm", ("NVIDIA H100 80GB HBM3",), 3350, 80, _H100_SXM, f"NVIDIA H100 datasheet (SXM), {_HALF}"),
    _row("h100_nvl", ("NVIDIA H100 NVL",), 3900, 94, _H100_NVL, f"NVIDIA H100 datasheet (NVL), {_HALF}"),
    _row("h100_pcie", ("NVIDIA H100 PCIe",), 2000, 80, _H100_PCIE, f"NVIDIA H100 datasheet (PCIe), {_HALF}"),
    _row("a100_sxm_80gb", ("NVIDIA A100-SXM4-80GB",), 2039, 80, _A100, "NVIDIA A100 datasheet, dense"),
    _row("a100_sxm_40gb", ("NVIDIA A100-SXM4-40GB",), 1555, 40, _A100, "NVIDIA A100 datasheet, dense"),
    _row("a100_pcie_80gb", ("NVIDIA A100 80GB PCIe",), 1935, 80, _A100, "NVIDIA A100 datasheet, dense"),
    _row("a100_pcie_40gb", ("NVIDIA A100-PCIE-40GB",), 1555, 40, _A100, "NVIDIA A100 datasheet, dense"),
    _row("a30", ("NVIDIA A30",), 933, 24, _A30, "NVIDIA A30 datasheet, dense"),
    _row("a40", ("NVIDIA A40",), 696, 48, _A40, "NVIDIA A40 datasheet, dense"),
    _row("a10", ("NVIDIA A10",), 600, 24, _A10, "NVIDIA A10 datasheet, dense"),
    _row("rtx_a6000", ("NVIDIA RTX A6000",), 768, 48, _RTX_A6000, "NVIDIA Ampere GA102 whitepaper, dense"),
    _row("l4", ("NVIDIA L4",), 300, 24, _L4, f"NVIDIA L4 datasheet, {_HALF}"),
    _row("l40s", ("NVIDIA L40S",), 864, 48, _L40S, "NVIDIA L40S datasheet, dense"),
    _row("rtx_6000_ada", ("NVIDIA RTX 6000 Ada Generation",), 960, 48, _RTX_6000_ADA, "NVIDIA Ada whitepaper, dense"),
    _row("rtx_3090", ("NVIDIA GeForce RTX 3090",), 936, 24, _RTX_3090, "NVIDIA Ampere GA102 whitepaper, dense"),
    _row("rtx_4090", ("NVIDIA GeForce RTX 4090",), 1008, 24, _RTX_4090, "NVIDIA Ada whitepaper, dense"),
    _row("rtx_5090", ("NVIDIA GeForce RTX 5090",), 1792, 32, _RTX_5090, "NVIDIA RTX Blackwell whitepaper, dense"),
    _row("v100_sxm2_16gb", ("Tesla V100-SXM2-16GB",), 900, 16, _V100_SXM2, "NVIDIA V100 datasheet"),
    _row("v100_sxm2_32gb", ("Tesla V100-SXM2-32GB",), 900, 32, _V100_SXM2, "NVIDIA V100 datasheet"),
    _row("v100_pcie_16gb", ("Tesla V100-PCIE-16GB",), 900, 16, _V100_PCIE, "NVIDIA V100 datasheet"),
    _row("v100_pcie_32gb", ("Tesla V100-PCIE-32GB",), 900, 32, _V100_PCIE, "NVIDIA V100 datasheet"),
    _row("v100s_pcie_32gb", ("Tesla V100S-PCIE-32GB",), 1134, 32, _V100S, "NVIDIA V100 datasheet"),
    _row("t4", ("Tesla T4", "NVIDIA T4"), 320, 16, _T4, "NVIDIA T4 product brief"),
)

HARDWARE: Mapping[str, Hardware] = MappingProxyType({row.key: row for row in _TABLE})
"""Every product with a datasheet entry, by its short key."""

_BY_DEVICE_NAME = {_plain(name): row for row in _TABLE for name in row.nvml_names}
