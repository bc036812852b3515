"""Measured peaks of a GPU: with a stand-in, and on a real GPU if there is one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_perf_opt.analysis.limits.peaks import bandwidth, peak_flops
from llm_perf_opt.core.machine_records import GpuSample
from llm_perf_opt.core.records import Missing
from llm_perf_opt.runners.measure import ceiling_gpu, ceiling_transfers, ceilings
from llm_perf_opt.runners.measure.ceiling_gpu import Watch, gpu_conditions
from llm_perf_opt.runners.measure.ceiling_kernels import Room
from llm_perf_opt.runners.measure.ceiling_timing import Measured, Quantity
from llm_perf_opt.runners.measure.clock import HostClock

CPU = torch.device("cpu")
ROOM = Room(3200 * 2**20, 50 * 2**20)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class EagerGraph:
    """A graph that does nothing when it is replayed."""

    def replay(self) -> None:
        pass


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A card made of the CPU: small shapes, a small cache, and the capability that a test sets."""
    card: dict[str, Any] = {"capability": (9, 0)}

    @contextmanager
    def graph(_: EagerGraph) -> Iterator[None]:
        yield

    properties = SimpleNamespace(name="stand-in", uuid="GPU-0", L2_cache_size=2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card["capability"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", EagerGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(ceiling_gpu, "CudaEventClock", lambda _: HostClock())
    monkeypatch.setattr(ceiling_gpu, "_SHAPES", ((32, 32, 32), (64, 64, 64)))
    monkeypatch.setattr(ceiling_gpu, "_LEAST_CHUNK_BYTES", 2**22)
    monkeypatch.setattr(ceiling_gpu, "_CHUNK_CACHES", 4)
    monkeypatch.setattr(ceiling_gpu, "_READ_COLUMNS", 512)
    monkeypatch.setattr(ceiling_gpu, "_GEMV_COLUMNS", (256, 512))
    monkeypatch.setattr(ceiling_transfers, "_CHUNK_BYTES", 2**16)
    monkeypatch.setattr(ceiling_transfers, "host_buffer", lambda pinned: torch.ones((4, 2**16), dtype=torch.uint8))
    return card


def quantities() -> dict[str, Quantity]:
    return {
        quantity.key: quantity for quantity in ceiling_gpu.gpu_quantities(CPU, ceiling_gpu.gpu_room(CPU), lambda: "SM 1980 MHz")
    }


@pytest.mark.slow
def test_every_quantity_of_a_gpu_can_be_measured(stand_in: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling_gpu, "_scaled", lambda _: lambda left, right: left.float() @ right.float().t())
    for key, quantity in quantities().items():
        measured = quantity.measure(0.01)
        if key in ("peer_copy", "all_reduce"):
            assert (measured, quantity.weight) == (Missing("it needs two GPUs, and this process sees one"), 0.0)
            continue
        assert isinstance(measured, Measured), (key, measured)
        assert measured.value.median > 0
        assert measured.how
        assert measured.conditions == ("SM 1980 MHz" if quantity.unit != "ns" else "")


@pytest.mark.parametrize(
    ("capability", "absent"),
    [
        ((7, 5), {"gemm_bf16", "gemm_tf32", "gemm_fp8"}),
        ((8, 0), {"gemm_fp8"}),
        ((8, 9), set()),
        ((12, 0), set()),
    ],
)
def test_a_format_that_the_generation_lacks_is_missing(
    stand_in: dict[str, Any], capability: tuple[int, int], absent: set[str]
) -> None:
    stand_in["capability"] = capability
    products = {key: quantity for key, quantity in quantities().items() if key.startswith("gemm_")}
    assert {key for key, quantity in products.items() if quantity.weight == 0} == absent
    for key in absent:
        why = products[key].measure(0.01)
        assert isinstance(why, Missing)
        assert f"this GPU has {capability[0]}.{capability[1]}" in why.why


@pytest.mark.parametrize("tf32", [True, False])
def test_the_precision_of_fp32_products_is_restored(tf32: bool) -> None:
    settings: Any = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(settings, "fp32_precision") else "allow_tf32"
    before = getattr(settings, name)
    wanted: dict[str, object] = {"fp32_precision": "tf32" if tf32 else "ieee", "allow_tf32": tf32}
    seen: list[object] = []

    def fail() -> None:
        with ceiling_gpu.fp32_products(tf32):
            seen.append(getattr(settings, name))
            raise RuntimeError("a product failed")

    with pytest.raises(RuntimeError, match="a product failed"):
        fail()
    assert seen == [wanted[name]]
    assert getattr(settings, name) == before


class FakeLibrary:
    """NVML that tells what it is given."""

    NVMLError = ValueError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *readings: tuple[int, int, int, int]) -> None:
        self._readings = list(readings)
        self._now = self._readings[0]

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:  # noqa: N802 - NVML's name
        self._now = self._readings.pop(0)
        return self._now[0]

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:  # noqa: N802 - NVML's name
        return self._now[1]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: object) -> int:  # noqa: N802 - NVML's name
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: object, kind: int) -> int:  # noqa: N802 - NVML's name
        return self._now[2]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object) -> int:  # noqa: N802 - NVML's name
        if self._now[3] < 0:
            raise ValueError("not supported")
        return self._now[3]


def test_clocks_and_power_are_told_per_row_and_together() -> None:
    watch = Watch(FakeLibrary((1980, 92_230, 38, 0), (1515, 405_860, 52, 0x4), (1965, 466_000, 44, 0x4)), object())
    assert [watch(), watch(), watch()] == [
        "SM 1980 MHz, 92 W",
        "SM 1515 MHz, 406 W, power cap",
        "SM 1965 MHz, 466 W, power cap",
    ]
    assert watch.during() == (
        "while measuring: SM clock 1515 to 1980 MHz, power 92 to 466 of 700 W averaged by the driver, "
        "38 to 52 °C, throttled by power cap in 2 of 3 readings"
    )


def test_what_the_driver_does_not_tell_is_left_out() -> None:
    watch = Watch(FakeLibrary((1980, 92_230, 38, -1)), object())
    assert watch() == "SM 1980 MHz, 92 W"
    silent = Watch(Missing("NVML: not found"), Missing("NVML: not found"))
    assert silent() == ""
    assert silent.before() == Missing("NVML: not found")
    assert silent.during() == "clocks and power could not be read: NVML: not found"


def reading(busy_pct: int) -> GpuSample:
    none = Missing("not asked")
    return GpuSample(0, 92_230, 1980, 3201, 38, busy_pct, none, none, none, none, 0)


def test_a_card_that_others_use_is_doubted() -> None:
    calm = gpu_conditions(ROOM, reading(0), "while measuring: …")
    assert calm.notes[1] == "before measuring: 1980 MHz SM, 3201 MHz memory, 92 W, 38 °C, 0 % busy, 0 processes on it"
    assert calm.notes[0] == "L2 cache 50 MiB, 3200 MiB used in turn"
    assert calm.doubt == ""
    assert "40 % busy" in gpu_conditions(ROOM, reading(40), "").doubt


# --- links ------------------------------------------------------------------------------------------------------------


def test_copies_to_and_from_the_host_use_pinned_and_pageable_memory(
    stand_in: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def buffer(pinned: bool) -> torch.Tensor:
        asked.append(pinned)
        return torch.ones((4, 2**16), dtype=torch.uint8)

    monkeypatch.setattr(ceiling_transfers, "host_buffer", buffer)
    for key in ("h2d_pinned", "d2h_pinned", "h2d_pageable", "d2h_pageable"):
        measured = quantities()[key].measure(0.001)
        assert isinstance(measured, Measured)
        assert key.split("_")[1] in measured.how
        assert ("from" if key.startswith("h2d") else "to") in measured.how.split()
    assert asked == [True, True, False, False]


def test_two_gpus_are_measured_together_and_busy_ones_left_alone(
    stand_in: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    monkeypatch.setattr(torch, "device", lambda *_: CPU)
    monkeypatch.setattr(torch.cuda.nccl, "is_available", lambda _: True)
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", lambda tensors: reduced.append(len(tensors)))
    monkeypatch.setattr(ceiling_transfers, "nvml", no_nvml)
    found = quantities()
    peer, together = found["peer_copy"].measure(0.001), found["all_reduce"].measure(0.001)
    assert isinstance(peer, Measured)
    assert "through the host" in peer.how
    assert isinstance(together, Measured)
    assert "over 2 GPUs" in together.how
    assert (peer.gpus, together.gpus) == (2, 2)
    assert set(reduced) == {2}
    assert found["all_reduce"].weight > 0
    monkeypatch.setattr(ceiling_transfers, "nvml", busy_nvml)
    assert quantities()["all_reduce"].measure(0.001) == Missing("GPU 1 is in use")


@contextmanager
def no_nvml() -> Iterator[Missing]:
    yield Missing("no NVML here")


@contextmanager
def busy_nvml() -> Iterator[Any]:
    library = FakeLibrary((0, 0, 0, 0))
    library.nvmlDeviceGetHandleByIndex = lambda number: number  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceiling_transfers, "sample", lambda *_: reading(40))
        yield library


# --- on a card --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
def test_a_real_card_is_measured_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda", 0)
    found = ceilings.load_or_measure(device, True)
    assert found.ceilings.seconds < 15
    values = {row.key: row.value for row in found.ceilings.rows}
    copies = ("h2d_pinned", "d2h_pinned", "h2d_pageable", "d2h_pageable")
    launches = ("launch_eager", "launch_graph", "dispatch", "sync", "item")
    for key in ("gemm_fp16", "gemm_fp32", "read", "copy", "gemv", *copies, *launches):
        assert not isinstance(values[key], Missing), (key, values[key])
    half, single = peak_flops(found.ceilings, "fp16"), peak_flops(found.ceilings, "fp32")
    assert not isinstance(half, Missing)
    assert not isinstance(single, Missing)
    assert half > single
    assert not isinstance(bandwidth(found.ceilings), Missing)
    assert ceilings.load_or_measure(device, False).cached or found.notes


@pytest.mark.gpu
@needs_gpu
def test_tf32_and_fp32_products_differ_on_a_card_that_has_both() -> None:
    if torch.cuda.get_device_capability(0) < (8, 0):
        pytest.skip("the card has no tf32")
    left, right = (torch.randn((512, 512), device="cuda") for _ in range(2))
    exact = left.double() @ right.double()
    errors = []
    for tf32 in (False, True):
        with ceiling_gpu.fp32_products(tf32):
            errors.append(float((left @ right - exact).abs().max()))
    assert errors[1] > 10 * errors[0]
