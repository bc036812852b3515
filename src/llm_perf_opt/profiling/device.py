"""Which device is measured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_perf_opt.errors import ResourceError

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


def pick_device(request: DeviceRequest) -> "torch.device":
    """The device asked for, or a ResourceError that says which are here."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if request.device == "cpu" or (request.device == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise ResourceError(f"{request.device_option}, but {built}.", f"Use {request.cpu_instead}, or see `llm-perf doctor`.")
    if request.index >= count:
        there = f"there are {count} CUDA devices" if count > 1 else "there is one CUDA device"
        raise ResourceError(f"{request.index_option}, but {there}.", f"Use 0 to {count - 1}." if count > 1 else "Use 0.")
    return torch.device("cuda", request.index)
