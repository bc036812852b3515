"""Which device is measured, and what can be said of it before torch is loaded."""

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
    """A device as the user asked for it, with the words the request was made in."""

    device: str
    """auto, cpu or cuda."""
    index: int
    device_option: str
    """How the device is named in the request: `hardware.device=cuda`."""
    index_option: str
    cpu_instead: str
    """What to write to get the CPU."""


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch is built for; None: not for that."""

    cuda: str | None
    hip: str | None


@dataclass(frozen=True)
class LoadedTorch:
    """What torch says of itself."""

    version: str
    cuda: str | None
    """The CUDA version it is built for."""
    devices: int
    """CUDA devices that it can use."""


def loaded_torch() -> LoadedTorch | Missing:
    """Load torch and return what it says of itself, or why it cannot be loaded."""
    try:
        import torch
    except ImportError as error:
        return Missing(str(error))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return LoadedTorch(str(torch.__version__), torch.version.cuda, devices)


def pick_device(request: DeviceRequest) -> "torch.device":
    """The device asked for, or a ResourceError that says which are here."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if request.device == "cpu" or (request.device == "auto" and count == 0):
        return torch.device("cpu")
    refuse_absent(request, count, with_cuda=torch.version.cuda is not None)
    return torch.device("cuda", request.index)


def refuse_absent(request: DeviceRequest, count: int, *, with_cuda: bool) -> None:
    """A ResourceError where a CUDA device is asked for that is not among `count`."""
    if count == 0:
        built = "torch finds no CUDA device" if with_cuda else "this torch is built without CUDA"
        raise ResourceError(f"{request.device_option}, but {built}.", f"Use {request.cpu_instead}, or see `llm-perf doctor`.")
    if request.index >= count:
        there = f"there are {count} CUDA devices" if count > 1 else "there is one CUDA device"
        raise ResourceError(f"{request.index_option}, but {there}.", f"Use 0 to {count - 1}." if count > 1 else "Use 0.")


def torch_build() -> TorchBuild | None:
    """Read off the package's own file, without loading it; None where that cannot be."""
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
    """The most CUDA devices such a torch can find here; None where only torch itself can tell."""
    if build is None or build.hip is not None:
        return None
    if build.cuda is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = None if visible is None else [name for name in visible.split(",") if name.strip()]
    if named is not None and (not named or named[0].strip() == "-1"):
        return 0
    count = gpu_count()
    if isinstance(count, Missing):  # NVML may lack where CUDA works; without the driver's own library it cannot
        return None if _driver_is_here() else 0
    return count if named is None else min(count, len(named))


def _driver_is_here() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
