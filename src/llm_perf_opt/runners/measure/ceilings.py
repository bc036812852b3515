"""Measure the peaks of this machine, or read them from the cache. A separate process, because it imports torch:

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

from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ParseError
from llm_perf_opt.core.host import cpu_name, last_level_cache_bytes, user_cache_folder
from llm_perf_opt.core.machine_records import CeilingRow, Ceilings, FoundCeilings, read_ceilings
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import write_record
from llm_perf_opt.runners.child import die_with_parent, framework_error, report_errors, send
from llm_perf_opt.runners.measure.ceiling_timing import Conditions, Quantity
from llm_perf_opt.runners.measure.device import DeviceRequest, pick_device
from llm_perf_opt.runners.measure.gpu import handle_of, nvml, read, text_of

if TYPE_CHECKING:
    import torch


BUDGET_S = 9.0
"""Default measuring time, without loading the framework and filling memory."""
METHOD = 1
"""Increased when the method of measurement changes, so that older results are not found."""

Progress = Callable[[int, int, str], None]
"""Called with the number of quantities done, their total and the label of the next one."""


@dataclass(frozen=True)
class Identity:
    """What measured peaks depend on: they are measured again when any of it changes."""

    kind: Literal["cpu", "cuda"]
    name: str
    device_id: str
    driver: Maybe[str]
    torch_version: str
    threads: int

    @property
    def digest(self) -> str:
        """A hash that names the cache file."""
        threads = self.threads if self.kind == "cpu" else 0  # host threads do not affect a GPU
        parts = [METHOD, self.kind, self.name, self.device_id, str(self.driver), self.torch_version, threads]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def load_or_measure(
    device: "torch.device",
    refresh: bool,
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda done, total, label: None,
) -> FoundCeilings:
    """Return the cached peaks of this device, driver and torch; measure them if none took at least `budget_s`."""
    identity = identify(device)
    folder = cache_folder()
    file: Maybe[Path] = folder if isinstance(folder, Missing) else folder / f"{identity.digest}.json"
    notes: list[str] = [] if isinstance(file, Path) else [f"The peaks are not cached: {file.why}."]
    if isinstance(file, Path) and not refresh:
        cached = _cached(file, identity, notes)
        if cached is not None and cached.budget_s >= budget_s:
            return FoundCeilings(cached, True, str(file), tuple(notes))
    ceilings, doubts = measure(device, identity, budget_s, progress)
    found = FoundCeilings(ceilings, False, str(file) if isinstance(file, Path) else file, tuple(notes))
    if doubts:
        reasons = [f"Not cached: {doubt}." for doubt in doubts]
        return replace(found, cache_file=Missing("not cached"), notes=(*notes, *reasons), doubts=tuple(doubts))
    if isinstance(file, Path):
        try:
            write_record(file, replace(found, notes=()))
        except LlmPerfError as error:
            return replace(found, cache_file=Missing("not cached"), notes=(*notes, f"The peaks are not cached: {error.fact}"))
    return found


def measure(device: "torch.device", identity: Identity, budget_s: float, progress: Progress) -> tuple[Ceilings, tuple[str, ...]]:
    """Measure all peaks in about `budget_s`; return them and the reasons not to cache them."""
    import torch

    begun = time.monotonic()
    taken = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with torch.inference_mode(), _planned(device) as (quantities, conditions):
        rows, failed = _rows(quantities, budget_s, progress)
        surroundings = conditions()
    if all(isinstance(row.value, Missing) for row in rows):
        raise CaptureError(f"None of the {len(rows)} peaks could be measured: {rows[0].value}.", "See the log.")
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
        conditions=surroundings.notes,
        rows=rows,
    )
    doubts = [surroundings.doubt] if surroundings.doubt else []
    return ceilings, (*doubts, *(f"{label} failed and may work next time" for label in failed))


def _rows(quantities: Sequence[Quantity], budget_s: float, progress: Progress) -> tuple[tuple[CeilingRow, ...], tuple[str, ...]]:
    weights = sum(quantity.weight for quantity in quantities)
    rows, failed = [], []
    for number, quantity in enumerate(quantities):
        if quantity.weight:
            progress(number, len(quantities), quantity.label)
        try:
            measured = quantity.measure(budget_s * quantity.weight / weights)
        except (RuntimeError, MemoryError, NotImplementedError) as error:  # the other operations may still work
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
    """Yield the quantities to measure, and a function that returns the conditions afterwards."""
    if device.type == "cpu":
        from llm_perf_opt.runners.measure.ceiling_cpu import OtherProcesses, cpu_quantities, host_conditions, host_room

        room, others = host_room(), OtherProcesses()
        yield cpu_quantities(device, room), lambda: host_conditions(room, others.cpus())
        return
    import torch

    from llm_perf_opt.runners.measure.ceiling_gpu import Watch, gpu_conditions, gpu_quantities, gpu_room, wake

    with nvml() as library, torch.cuda.device(device):
        watch = Watch(library, library if isinstance(library, Missing) else handle_of(library, device.index or 0))
        before = watch.before()
        wake(device)
        room = gpu_room(device)
        yield gpu_quantities(device, room, watch), lambda: gpu_conditions(room, before, watch.during())


# --- cache ------------------------------------------------------------------------------------------------------------


def identify(device: "torch.device") -> Identity:
    """Return the device with everything that its peaks depend on."""
    import torch

    version, threads = str(torch.__version__), torch.get_num_threads()
    if device.type == "cpu":
        cache = last_level_cache_bytes()
        size = "unknown" if isinstance(cache, Missing) else f"{cache / 2**20:.0f} MiB"
        device_id = f"{os.cpu_count()} processors, last-level cache {size}"
        return Identity("cpu", cpu_name(), device_id, Missing("the run is on the CPU"), version, threads)
    properties = torch.cuda.get_device_properties(device)
    return Identity("cuda", properties.name, str(properties.uuid), _driver(), version, threads)


def _driver() -> Maybe[str]:
    with nvml() as library:
        if isinstance(library, Missing):
            return library
        return read(library, lambda: text_of(library.nvmlSystemGetDriverVersion()))


def cache_folder() -> Maybe[Path]:
    """Return the user's cache folder of measured peaks."""
    return user_cache_folder("ceilings")


def _cached(file: Path, identity: Identity, notes: list[str]) -> Ceilings | None:
    """Return the cached peaks of a device, or None; a damaged file is noted."""
    try:
        if not file.exists():
            return None
        cached = read_ceilings(file).ceilings
        _check(cached, identity, file)
    except (ParseError, OSError) as error:
        reason = error.fact if isinstance(error, ParseError) else str(error)
        notes.append(f"The cached peaks could not be used and were measured again: {reason}")
        return None
    return cached


def _check(cached: Ceilings, identity: Identity, file: Path) -> None:
    owner = (cached.device_kind, cached.device_name, cached.device_id, cached.torch_version)
    if owner != (identity.kind, identity.name, identity.device_id, identity.torch_version):
        raise ParseError(f"{file} contains the peaks of another device.")
    try:
        taken = datetime.fromisoformat(cached.taken)
    except ValueError as error:
        raise ParseError(f"{file} has no valid time: {error}") from error
    if taken.tzinfo is None:
        raise ParseError(f"{file} has no valid time: {cached.taken} has no time zone.")
    for row in cached.rows:
        if not isinstance(row.value, Missing) and not (0 < row.value.median < math.inf):
            raise ParseError(f"{file}: {row.key} is {row.value.median}.")


# --- command line -----------------------------------------------------------------------------------------------------


def _translate(error: Exception) -> LlmPerfError:
    return framework_error(
        error,
        memory="Free memory on the device; other processes may be using it.",
        disk="Free some space.",
        otherwise="--debug shows the full error.",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the measuring process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--device-index", type=int, default=0)
    parser.add_argument("--threads", type=int, help="host threads of the framework; default: its own choice")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds to spend on measuring")
    parser.add_argument("--refresh", action="store_true", help="measure even if a cached result exists")
    parser.add_argument("--out", type=Path, required=True, help="output file, JSON")
    wanted = parser.parse_args(arguments)
    with report_errors(_translate):
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
