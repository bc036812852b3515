"""Choose the measured device, and find out about it before torch is loaded."""

import ctypes
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.runners.measure.gpu import gpu_count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceRequest:
    """The device that the user requested, and how messages refer to the request."""

    device: str
    """auto, cpu or cuda."""
    index: int
    device_option: str
    """The option that set it: `hardware.device=cuda`."""
    index_option: str
    cpu_instead: str
    """The option that selects the CPU."""


@dataclass(frozen=True)
class TorchBuild:
    """The CUDA and HIP versions that the installed torch is built for; None: built without."""

    cuda: str | None
    hip: str | None


@dataclass(frozen=True)
class LoadedTorch:
    """Facts about the loaded torch."""

    version: str
    cuda: str | None
    """The CUDA version that it is built for."""
    devices: int
    """Number of usable CUDA devices."""


def loaded_torch() -> LoadedTorch | Missing:
    """Load torch and return facts about it, or why it cannot be loaded."""
    try:
        import torch
    except ImportError as error:
        return Missing(str(error))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return LoadedTorch(str(torch.__version__), torch.version.cuda, devices)


def pick_device(request: DeviceRequest) -> "torch.device":
    """Return the requested device, or raise a ResourceError that lists those available."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if request.device == "cpu" or (request.device == "auto" and count == 0):
        return torch.device("cpu")
    check_available(request, count, with_cuda=torch.version.cuda is not None)
    return torch.device("cuda", request.index)


def check_available(request: DeviceRequest, count: int, *, with_cuda: bool) -> None:
    """Raise a ResourceError if the requested CUDA device is not among `count`."""
    if count == 0:
        reason = "torch finds no CUDA device" if with_cuda else "the installed torch is built without CUDA"
        raise ResourceError(f"{request.device_option}, but {reason}.", f"Use {request.cpu_instead}, or see `llm-perf doctor`.")
    if request.index >= count:
        available = f"there are {count} CUDA devices" if count > 1 else "there is one CUDA device"
        raise ResourceError(f"{request.index_option}, but {available}.", f"Use 0 to {count - 1}." if count > 1 else "Use 0.")


def torch_build() -> TorchBuild | None:
    """Return what the installed torch is built for, read without loading it; None if unknown."""
    spec = find_spec("torch")
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
    except OSError:
        return None
    found = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *(\S+)", text, re.MULTILINE))
    if "cuda" not in found:
        return None
    versions = {name: None if value == "None" else value.strip("'\"") for name, value in found.items()}
    return TorchBuild(versions["cuda"], versions.get("hip"))


def most_cuda_devices(build: TorchBuild | None) -> int | None:
    """Return the maximum number of CUDA devices that such a torch can find here; None if only torch itself knows."""
    if build is None or build.hip is not None:
        return None
    if build.cuda is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = None if visible is None else [name for name in visible.split(",") if name.strip()]
    if named is not None and (not named or named[0].strip() == "-1"):
        return 0
    count = gpu_count()
    if isinstance(count, Missing):  # CUDA can work without NVML, but not without the driver's library
        return None if _driver_is_installed() else 0
    return count if named is None else min(count, len(named))


def _driver_is_installed() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
