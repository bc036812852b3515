"""NVIDIA GPUs through NVML: find the one in use and read it, or return why it cannot be read."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from llm_perf_opt.core.machine_records import GpuSample
from llm_perf_opt.core.records import Maybe, Missing

T = TypeVar("T")


@contextmanager
def nvml() -> Iterator[Maybe[Any]]:
    """Yield the initialized NVML module, or why there is none."""
    try:
        import pynvml
    except ImportError:
        yield Missing("the package nvidia-ml-py is not installed")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Missing(f"NVML: {error}")
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpu_count() -> Maybe[int]:
    """Return the number of NVIDIA GPUs that the driver lists."""
    with nvml() as library:
        if isinstance(library, Missing):
            return library
        return int(library.nvmlDeviceGetCount())


def gpu_name(device_index: int = 0) -> Maybe[str]:
    """Return the driver's name of cuda:`device_index`, or why it is unknown."""
    return _of_gpu(device_index, lambda library, handle: text_of(library.nvmlDeviceGetName(handle)))


@dataclass(frozen=True)
class GpuSize:
    """The properties that decide what fits on a GPU."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    driver_cuda: int
    """Major CUDA version that the driver supports."""


def gpu_size(device_index: int = 0) -> Maybe[GpuSize]:
    """Return the size of cuda:`device_index`, or why it is unknown."""

    def question(library: Any, handle: Any) -> GpuSize:
        major, minor = library.nvmlDeviceGetCudaComputeCapability(handle)
        return GpuSize(
            text_of(library.nvmlDeviceGetName(handle)),
            int(library.nvmlDeviceGetMemoryInfo(handle).total),
            (int(major), int(minor)),
            int(library.nvmlSystemGetCudaDriverVersion()) // 1000,
        )

    return _of_gpu(device_index, question)


def _of_gpu(device_index: int, question: Callable[[Any, Any], T]) -> Maybe[T]:
    """Return the answer to a question about cuda:`device_index`, given the NVML module and the handle."""
    with nvml() as library:
        if isinstance(library, Missing):
            return library
        handle = handle_of(library, device_index)
        return handle if isinstance(handle, Missing) else read(library, lambda: question(library, handle))


def text_of(value: Any) -> str:
    """Return a text of NVML, which older versions return as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def handle_of(library: Any, device_index: int) -> Maybe[Any]:
    """Return the NVML handle of torch's cuda:`device_index`, honoring CUDA_VISIBLE_DEVICES.

    Measured processes run with CUDA_DEVICE_ORDER=PCI_BUS_ID, so that torch and NVML use the same order.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if visible is None:
            return library.nvmlDeviceGetHandleByIndex(device_index)
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if device_index >= len(names):
            return Missing(f"CUDA_VISIBLE_DEVICES={visible!r} hides device {device_index}")
        name = names[device_index]
        if name.isdigit():
            return library.nvmlDeviceGetHandleByIndex(int(name))
        return library.nvmlDeviceGetHandleByUUID(name)
    except library.NVMLError as error:
        return Missing(f"NVML: {error}")


def read(library: Any, question: Callable[[], T]) -> Maybe[T]:
    """Return an NVML value, or NVML's error as Missing."""
    try:
        return question()
    except library.NVMLError as error:
        return Missing(f"NVML: {error}")


def sample(library: Any, handle: Any, at_ns: int, ours: Collection[int] = ()) -> GpuSample:
    """Return one reading of everything that the sampler records. `ours`: processes that count as one, the measured one."""
    clocks = library.NVML_CLOCK_SM, library.NVML_CLOCK_MEM
    rates = read(library, lambda: library.nvmlDeviceGetUtilizationRates(handle))
    memory = read(library, lambda: int(library.nvmlDeviceGetMemoryInfo(handle).used))
    processes = read(library, lambda: _distinct(library.nvmlDeviceGetComputeRunningProcesses(handle), ours))
    return GpuSample(
        at_ns=at_ns,
        power_mw=read(library, lambda: int(library.nvmlDeviceGetPowerUsage(handle))),
        sm_clock_mhz=read(library, lambda: int(library.nvmlDeviceGetClockInfo(handle, clocks[0]))),
        memory_clock_mhz=read(library, lambda: int(library.nvmlDeviceGetClockInfo(handle, clocks[1]))),
        temperature_c=read(library, lambda: int(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))),
        gpu_utilisation_pct=rates if isinstance(rates, Missing) else int(rates.gpu),
        memory_utilisation_pct=rates if isinstance(rates, Missing) else int(rates.memory),
        memory_used_bytes=memory,
        throttle_bits=read(library, lambda: int(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle))),
        energy_mj=read(library, lambda: int(library.nvmlDeviceGetTotalEnergyConsumption(handle))),
        processes=processes,
    )


def _distinct(processes: Sequence[Any], ours: Collection[int]) -> int:
    measured = sum(process.pid in ours for process in processes)
    return len(processes) - max(measured - 1, 0)


def describe(library: Any, handle: Any) -> dict[str, Any]:
    """Return the facts of one GPU for env.json; an unavailable fact is its reason."""

    def fact(question: Callable[[], Any]) -> Any:
        answer = read(library, question)
        if isinstance(answer, Missing):
            return str(answer)
        return answer.decode() if isinstance(answer, bytes) else answer

    sm, memory = library.NVML_CLOCK_SM, library.NVML_CLOCK_MEM
    return {
        "name": fact(lambda: library.nvmlDeviceGetName(handle)),
        "uuid": fact(lambda: library.nvmlDeviceGetUUID(handle)),
        "memory_bytes": fact(lambda: int(library.nvmlDeviceGetMemoryInfo(handle).total)),
        "compute_capability": fact(lambda: ".".join(map(str, library.nvmlDeviceGetCudaComputeCapability(handle)))),
        "power_limit_w": fact(lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        "sm_clock_mhz": fact(lambda: int(library.nvmlDeviceGetClockInfo(handle, sm))),
        "sm_clock_max_mhz": fact(lambda: int(library.nvmlDeviceGetMaxClockInfo(handle, sm))),
        "memory_clock_mhz": fact(lambda: int(library.nvmlDeviceGetClockInfo(handle, memory))),
        "memory_clock_max_mhz": fact(lambda: int(library.nvmlDeviceGetMaxClockInfo(handle, memory))),
        "application_sm_clock_mhz": fact(lambda: int(library.nvmlDeviceGetApplicationsClock(handle, sm))),
        "ecc": fact(lambda: bool(library.nvmlDeviceGetEccMode(handle)[0])),
        "mig": fact(lambda: bool(library.nvmlDeviceGetMigMode(handle)[0])),
    }
