"""What the points of a sweep ran, and on what: points of other hardware than the rest are not ranked with them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing

Hardware = Mapping[str, str]
"""By key, as a comparison knows it. What is not known is not there: it cannot be said to differ."""

_OF_DEVICE = ("device", "device_name", "gpu.")
_MOST_NAMED = 3


@dataclass(frozen=True)
class Ran:
    """One point as it really ran."""

    device: str
    host: str
    model: str
    parameters: int
    dtype: str
    how: str
    """Cache, compilation, attention; what ran it where that is no plain PyTorch."""
    prompt_tokens: str
    new_tokens: int
    software: dict[str, str]
    """Versions inside the measured process, and the driver's."""

    @property
    def workload(self) -> str:
        """The model and the request, in words: figures of different ones are of different work, and none is the better."""
        return f"{self.model} ({self.parameters:,} parameters), {self.prompt_tokens} prompt tokens, {self.new_tokens} new tokens"


def ran(analysis: RunAnalysis) -> Maybe[Ran]:
    """Of a point that was measured."""
    timings = analysis.timings
    if isinstance(timings, Missing):
        return timings
    model, work = timings.model, timings.workload
    lengths = sorted(set(work.prompt_tokens))
    return Ran(
        device=_device(timings),
        host=_host(analysis),
        model=model.name,
        parameters=model.parameters,
        dtype=model.dtype,
        how=f"{model.cache} cache, compile {model.compile}, attention {model.attention}",
        prompt_tokens=f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}",
        new_tokens=work.new_tokens,
        software=_software(analysis, timings),
    )


def _device(timings: CleanTimings) -> str:
    devices = 1 if timings.runtime is None else timings.runtime.devices
    return timings.model.device_name if devices == 1 else f"{devices} × {timings.model.device_name}"


def _host(analysis: RunAnalysis) -> str:
    """The processor beside the device; empty where it is the device, or is not known."""
    cpu = analysis.env.get("cpu")
    name = cpu.get("name") if isinstance(cpu, Mapping) else None
    return name if isinstance(name, str) and not name.startswith("n/a") else ""


def _software(analysis: RunAnalysis, timings: CleanTimings) -> dict[str, str]:
    found = dict(timings.framework)
    if timings.runtime is not None and timings.runtime.type != PYTORCH:
        found[timings.runtime.type] = timings.runtime.version
    driver = analysis.env.get("gpu_driver")
    if isinstance(driver, str) and not driver.startswith("n/a") and timings.model.device.startswith("cuda"):
        found["driver"] = driver
    return {name: version for name, version in found.items() if version}


def elsewhere(points: Sequence[Hardware], swept: Sequence[str]) -> list[str]:
    """For each point what differs from the hardware of most points, in words; empty where nothing does.

    Of two halves the one of the first point is taken for the rest. A device that was swept over may differ.
    """
    device_swept = any(key.rsplit(".", 1)[-1] == "device" for key in swept)
    known = [
        {key: value for key, value in point.items() if not (device_swept and key.startswith(_OF_DEVICE))} for point in points
    ]
    usual = {key: _most_common([point[key] for point in known if key in point]) for point in known for key in point}
    return [differences(usual, point, "most points") for point in known]


def differences(usual: Hardware, here: Hardware, whose: str) -> str:
    """What differs, in words; only what both know."""
    found = [f"{key} is {value} ({whose}: {usual[key]})" for key, value in here.items() if key in usual and usual[key] != value]
    more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return "; ".join(found[:_MOST_NAMED]) + more


def _most_common(values: Sequence[str]) -> str:
    counts = Counter(values)
    return max(values, key=lambda value: counts[value])  # the first of equals


def mixed_software(points: Sequence[Ran]) -> list[str]:
    """What is not of one version in all points: nothing sweeps over it, and it may change a figure."""
    names = dict.fromkeys(name for point in points for name in point.software)
    found = []
    for name in names:
        counts = Counter(point.software[name] for point in points if name in point.software)
        if len(counts) > 1:
            words = [f"{version} ({count} point{'s' if count > 1 else ''})" for version, count in counts.items()]
            found.append(f"{name} {', '.join(words)}")
    return found


def mixed_models(points: Sequence[Ran], swept: Sequence[str]) -> list[str]:
    """The models that ran, where there are several and no swept key says so: of no two of them is a figure alike."""
    if any(key.split(".")[0] == "model" or key.endswith("dtype") for key in swept):
        return []
    found = list(dict.fromkeys(f"{point.model} ({point.parameters:,} parameters, {point.dtype})" for point in points))
    return found if len(found) > 1 else []
