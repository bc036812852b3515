"""This machine's ceilings, measured once and kept. A process of its own, because torch is imported only there:

`python -m llm_perf_opt.runners.measure.ceilings --device auto|cpu|cuda --device-index N --out FILE [--refresh]`
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llm_perf_opt.analysis.telemetry import NEIGHBOUR_GPU_PCT, throttle_names
from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ParseError
from llm_perf_opt.core.host import cpu_name, last_level_cache_bytes, user_cache_folder
from llm_perf_opt.core.machine_records import CeilingRow, Ceilings, FoundCeilings, GpuSample, read_ceilings
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import write_record
from llm_perf_opt.runners.child import die_with_parent, framework_error, report_errors, send
from llm_perf_opt.runners.measure.ceiling_kernels import Room
from llm_perf_opt.runners.measure.ceiling_timing import Conditions, Quantity
from llm_perf_opt.runners.measure.device import DeviceRequest, pick_device
from llm_perf_opt.runners.measure.gpu import handle_of, nvml, read, sample

if TYPE_CHECKING:
    import torch


BUDGET_S = 9.0
"""Measuring time by default; loading the framework and filling memory come on top."""
METHOD = 1
"""Raised when the way of measuring changes, so that older results are not found."""

Progress = Callable[[int, int, str], None]
"""Told the number of quantities done, their total and the next one's label."""


@dataclass(frozen=True)
class Identity:
    """What ceilings belong to: they are measured anew when any of it changes."""

    kind: Literal["cpu", "cuda"]
    name: str
    device_id: str
    driver: Maybe[str]
    torch_version: str
    threads: int

    @property
    def digest(self) -> str:
        """A short name for it."""
        threads = self.threads if self.kind == "cpu" else 0  # the host's threads do not change a GPU
        parts = [METHOD, self.kind, self.name, self.device_id, str(self.driver), self.torch_version, threads]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def load_or_measure(
    device: "torch.device",
    refresh: bool,
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda done, total, label: None,
) -> FoundCeilings:
    """The ceilings kept for this device, driver and torch, or new ones where there are none as thorough as `budget_s`."""
    identity = identify(device)
    folder = cache_folder()
    file: Maybe[Path] = folder if isinstance(folder, Missing) else folder / f"{identity.digest}.json"
    notes: list[str] = [] if isinstance(file, Path) else [f"The ceilings are not kept: {file.why}."]
    if isinstance(file, Path) and not refresh:
        kept = _kept(file, identity, notes)
        if kept is not None and kept.budget_s >= budget_s:
            return FoundCeilings(kept, True, str(file), tuple(notes))
    ceilings, doubts = measure(device, identity, budget_s, progress)
    found = FoundCeilings(ceilings, False, str(file) if isinstance(file, Path) else file, tuple(notes))
    if doubts:
        said = [f"Not kept: {doubt}." for doubt in doubts]
        return replace(found, cache_file=Missing("not kept"), notes=(*notes, *said), doubts=tuple(doubts))
    if isinstance(file, Path):
        try:
            write_record(file, replace(found, notes=()))
        except LlmPerfError as error:
            return replace(found, cache_file=Missing("not kept"), notes=(*notes, f"The ceilings are not kept: {error.fact}"))
    return found


def measure(device: "torch.device", identity: Identity, budget_s: float, progress: Progress) -> tuple[Ceilings, tuple[str, ...]]:
    """Measure everything in about `budget_s`; returns also why they should not be kept, if so."""
    import torch

    begun = time.monotonic()
    taken = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with torch.inference_mode(), _planned(device) as (quantities, conditions):
        rows, failed = _rows(quantities, budget_s, progress)
        met = conditions()
    if all(isinstance(row.value, Missing) for row in rows):
        raise CaptureError(f"None of the {len(rows)} ceilings could be measured: {rows[0].value}.", "See the log.")
    ceilings = Ceilings(
        device_kind=identity.kind,
        device_name=identity.name,
        device_id=identity.device_id,
        driver=identity.driver,
        torch_version=identity.torch_version,
        threads=identity.threads,
        taken=taken,
        budget_s=budget_s,
        seconds=round(time.monotonic() - begun, 3),
        conditions=met.said,
        rows=rows,
    )
    doubts = [met.doubt] if met.doubt else []
    return ceilings, (*doubts, *(f"{label} failed, which may work another time" for label in failed))


def _rows(quantities: Sequence[Quantity], budget_s: float, progress: Progress) -> tuple[tuple[CeilingRow, ...], tuple[str, ...]]:
    weights = sum(quantity.weight for quantity in quantities)
    rows, failed = [], []
    for number, quantity in enumerate(quantities):
        if quantity.weight:
            progress(number, len(quantities), quantity.label)
        try:
            measured = quantity.measure(budget_s * quantity.weight / weights)
        except (RuntimeError, MemoryError, NotImplementedError) as error:  # one operation that fails leaves the others
            measured = Missing(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            failed.append(quantity.label)
        if isinstance(measured, Missing):
            rows.append(CeilingRow(quantity.key, quantity.label, quantity.unit, measured, ""))
        else:
            rows.append(
                CeilingRow(quantity.key, quantity.label, quantity.unit, measured.value, measured.how, measured.conditions)
            )
    return tuple(rows), tuple(failed)


@contextmanager
def _planned(device: "torch.device") -> Iterator[tuple[Sequence[Quantity], Callable[[], Conditions]]]:
    """What is to be measured, and the conditions to be read when it has been."""
    if device.type == "cpu":
        from llm_perf_opt.runners.measure.ceiling_cpu import Neighbours, cpu_quantities, host_conditions, host_room

        room, neighbors = host_room(), Neighbours()
        yield cpu_quantities(device, room), lambda: host_conditions(room, neighbors.processors())
        return
    import torch

    from llm_perf_opt.runners.measure.ceiling_gpu import gpu_quantities, gpu_room, wake
    from llm_perf_opt.runners.measure.ceilings import Watch, gpu_conditions

    with nvml() as library, torch.cuda.device(device):
        watch = Watch(library, library if isinstance(library, Missing) else handle_of(library, device.index or 0))
        before = watch.before()
        wake(device)
        room = gpu_room(device)
        yield gpu_quantities(device, room, watch), lambda: gpu_conditions(room, before, watch.during())


# --- the cache --------------------------------------------------------------------------------------------------------


def identify(device: "torch.device") -> Identity:
    """The device with everything that decides what its ceilings are."""
    import torch

    version, threads = str(torch.__version__), torch.get_num_threads()
    if device.type == "cpu":
        cache = last_level_cache_bytes()
        told = "unknown" if isinstance(cache, Missing) else f"{cache / 2**20:.0f} MiB"
        marks = f"{os.cpu_count()} processors, last-level cache {told}"
        return Identity("cpu", cpu_name(), marks, Missing("the run is on the CPU"), version, threads)
    properties = torch.cuda.get_device_properties(device)
    return Identity("cuda", properties.name, str(properties.uuid), _driver(), version, threads)


def _driver() -> Maybe[str]:
    with nvml() as library:
        if isinstance(library, Missing):
            return library
        told = read(library, library.nvmlSystemGetDriverVersion)
        return told.decode() if isinstance(told, bytes) else told


def cache_folder() -> Maybe[Path]:
    """Where ceilings are kept for this user."""
    return user_cache_folder("ceilings")


def _kept(file: Path, identity: Identity, notes: list[str]) -> Ceilings | None:
    """What the cache holds for a device; damage is noted and otherwise as if nothing were there."""
    try:
        if not file.exists():
            return None
        kept = read_ceilings(file).ceilings
        _check(kept, identity, file)
    except (ParseError, OSError) as error:
        said = error.fact if isinstance(error, ParseError) else str(error)
        notes.append(f"The kept ceilings could not be used and were measured anew: {said}")
        return None
    return kept


def _check(kept: Ceilings, identity: Identity, file: Path) -> None:
    owner = (kept.device_kind, kept.device_name, kept.device_id, kept.torch_version)
    if owner != (identity.kind, identity.name, identity.device_id, identity.torch_version):
        raise ParseError(f"{file} holds the ceilings of another device.")
    try:
        taken = datetime.fromisoformat(kept.taken)
    except ValueError as error:
        raise ParseError(f"{file} does not say when it was taken: {error}") from error
    if taken.tzinfo is None:
        raise ParseError(f"{file} does not say when it was taken: {kept.taken} has no time zone.")
    for row in kept.rows:
        if not isinstance(row.value, Missing) and not (0 < row.value.median < math.inf):
            raise ParseError(f"{file}: {row.key} is {row.value.median}.")


# --- command line -----------------------------------------------------------------------------------------------------


def _translated(error: Exception) -> LlmPerfError:
    return framework_error(
        error,
        memory="Free memory on the device: other processes may hold it.",
        disk="Free some space.",
        otherwise="--debug shows the whole error.",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the measuring process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--device-index", type=int, default=0)
    parser.add_argument("--threads", type=int, help="threads of the framework on the host; by default its own choice")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds to spend on measuring")
    parser.add_argument("--refresh", action="store_true", help="measure even where a kept result is there")
    parser.add_argument("--out", type=Path, required=True, help="file for the result, JSON")
    wanted = parser.parse_args(arguments)
    with report_errors(_translated):
        die_with_parent()
        write_record(wanted.out, _found(wanted))
        sys.exit(0)


def _found(wanted: Any) -> FoundCeilings:
    import torch

    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    index = f"--device-index {wanted.device_index}"
    device = pick_device(DeviceRequest(wanted.device, wanted.device_index, f"--device {wanted.device}", index, "--device cpu"))
    send("phase", text=f"device {device}")

    def progress(done: int, total: int, label: str) -> None:
        send("progress", phase="measuring", done=done, at_most=total, text=label)

    return load_or_measure(device, wanted.refresh, budget_s=wanted.budget_s, progress=progress)


if __name__ == "__main__":
    main()


# --- ceiling watch ----------------------------------------------------------------------------------------------------


class Watch:
    """Reads a GPU while it works: few quantities, because a series is over in milliseconds."""

    def __init__(self, library: Maybe[Any], handle: Maybe[Any]) -> None:
        self._library: Any = library
        self._handle: Any = handle
        self.why = next((part for part in (library, handle) if isinstance(part, Missing)), None)
        self.clocks_mhz: list[int] = []
        self.power_w: list[float] = []
        self.temperatures_c: list[int] = []
        self.throttled: dict[str, int] = {}
        self.readings = 0

    def before(self) -> Maybe[GpuSample]:
        """Everything the driver tells, before the device is touched."""
        return self.why or sample(self._library, self._handle, time.monotonic_ns())

    def power_limit_w(self) -> Maybe[float]:
        """Where the driver holds the card back."""
        if self.why:
            return self.why
        library, handle = self._library, self._handle
        return read(library, lambda: int(library.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1e3)

    def __call__(self) -> str:
        """Clock, power and throttling now, remembered and in words."""
        if self.why:
            return ""
        library, handle = self._library, self._handle
        clock = read(library, lambda: int(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)))
        reasons = read(library, lambda: int(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        power = read(library, lambda: int(library.nvmlDeviceGetPowerUsage(handle)))
        warmth = read(library, lambda: int(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)))
        self.readings += 1
        said = []
        if not isinstance(clock, Missing):
            self.clocks_mhz.append(clock)
            said.append(f"SM {clock} MHz")
        if not isinstance(power, Missing):
            self.power_w.append(power / 1e3)
            said.append(f"{power / 1e3:.0f} W")
        if not isinstance(warmth, Missing):
            self.temperatures_c.append(warmth)
        if not isinstance(reasons, Missing):
            names = throttle_names(reasons)
            said += names
            for name in names:
                self.throttled[name] = self.throttled.get(name, 0) + 1
        return ", ".join(said)

    def during(self) -> str:
        """All readings together, in words."""
        if self.why:
            return f"clocks and power could not be read: {self.why.why}"
        said = []
        if self.clocks_mhz:
            said.append(f"SM clock {_span(self.clocks_mhz)} MHz")
        if self.power_w:
            limit = self.power_limit_w()
            allowed = "" if isinstance(limit, Missing) else f" of {limit:.0f}"
            # Cards since Ampere tell the average of the last second, in which most of the time was rest.
            said.append(f"power {_span([round(watts) for watts in self.power_w])}{allowed} W averaged by the driver")
        if self.temperatures_c:
            said.append(f"{_span(self.temperatures_c)} °C")
        slowed = [f"{name} in {count} of {self.readings} readings" for name, count in self.throttled.items()]
        said.append(f"throttled by {', '.join(slowed)}" if slowed else "not throttled")
        return f"while measuring: {', '.join(said)}"


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def gpu_conditions(room: Room, reading: Maybe[GpuSample], during: str) -> Conditions:
    """The card as it was found, and as it was while it worked."""
    memory = f"second-level cache {room.cache_bytes / 2**20:.0f} MiB, {room.bytes / 2**20:.0f} MiB gone through in turn"
    if isinstance(reading, Missing):
        return Conditions((memory, during))
    said = [
        f"{value if scale == 1 else round(value * scale)} {unit}"
        for value, scale, unit in (
            (reading.sm_clock_mhz, 1, "MHz SM"),
            (reading.memory_clock_mhz, 1, "MHz memory"),
            (reading.power_mw, 1e-3, "W"),
            (reading.temperature_c, 1, "°C"),
            (reading.gpu_utilisation_pct, 1, "% busy"),
        )
        if not isinstance(value, Missing)
    ]
    if not isinstance(reading.processes, Missing):
        said.append(f"{reading.processes} processes on it")
    busy = reading.gpu_utilisation_pct
    doubt = ""
    if not isinstance(busy, Missing) and busy > NEIGHBOUR_GPU_PCT:
        doubt = f"the GPU was {busy} % busy with other work before measuring, the figures are too low"
    return Conditions((memory, f"before measuring: {', '.join(said)}", during), doubt)
