"""Measure the peaks of this machine, or read them from the cache. A separate process, because it imports torch:

`python -m llm_perf_opt.runners.measure.ceilings --device auto|cpu|cuda --device-index N --out FILE [--model FILE] [--refresh]`
"""

import argparse
import hashlib
import json
import math
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ParseError
from llm_perf_opt.core.file_lock import locked
from llm_perf_opt.core.host import (
    cache_bytes,
    cpu_name,
    last_level_cache_bytes,
    one_cpu_per_core,
    usable_cpus,
    user_cache_folder,
)
from llm_perf_opt.core.machine_records import CacheLevel, CeilingRow, Ceilings, FoundCeilings, ModelLinears, read_ceilings
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import read_record, write_record
from llm_perf_opt.runners.child import die_with_parent, framework_error, report_errors, send
from llm_perf_opt.runners.cpus import prepare_threads, set_threads
from llm_perf_opt.runners.measure.ceiling_timing import Conditions, Measured, Quantity
from llm_perf_opt.runners.measure.device import DeviceRequest, pick_device
from llm_perf_opt.runners.measure.gpu import handle_of, nvml, read, text_of
from llm_perf_opt.runners.measure.host_load import wait_policy

if TYPE_CHECKING:
    import torch


BUDGET_S = {"cuda": 9.0, "cpu": 3.0}
"""Default measuring time, without loading the framework and filling memory."""
_BUSY_CPUS = re.compile(r"(?<=other processes used )\d+\.\d+(?= CPUs)")
_PATIENCE_S = 45.0
"""How long another process may take to measure; after that, this one measures at the same time."""
MODEL_SHARE = 0.4
"""Measuring time of a model's own shapes, relative to that of the device."""
METHOD = 4
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
    cpus: tuple[int, ...] = ()
    """Processors that the process may use; empty if the system does not say."""
    wait_policy: str = "default"
    """How OpenMP threads wait for work."""
    model: ModelLinears | None = None
    """The model whose shapes are measured; None for the peaks of the device itself."""
    node: str = ""
    """The machine: a shared home folder holds the peaks of many, and not all of one kind are equally fast."""
    peers: tuple[str, ...] = ()
    """The other GPUs that the process sees, which copies and collectives go to."""

    @property
    def digest(self) -> str:
        """A hash that names the cache file."""
        # Threads do not affect a GPU, and a CPU has no peers.
        around: list[Any] = [self.threads, self.cpus, self.wait_policy] if self.kind == "cpu" else [*self.peers]
        parts: list[Any] = [METHOD, self.kind, self.name, self.device_id, str(self.driver), self.torch_version, self.node, around]
        parts += [asdict(self.model)] if self.model else []
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def load_or_measure(
    device: "torch.device",
    refresh: bool,
    *,
    budget_s: float | None = None,
    progress: Progress = lambda done, total, label: None,
    model: ModelLinears | None = None,
) -> FoundCeilings:
    """Return the peaks of this device and, on a CPU, the times of a model's shapes; cached ones if available.

    Peaks are measured if none are cached for this device, driver and torch with at least this budget.
    """
    identity = identify(device)
    budget_s = BUDGET_S[identity.kind] if budget_s is None else budget_s
    found = _load_or_measure(device, identity, refresh, budget_s, progress)
    if model is None or device.type != "cpu":
        return found
    try:
        return _joined(found, _load_or_measure(device, replace(identity, model=model), refresh, MODEL_SHARE * budget_s, progress))
    except CaptureError as error:  # the peaks of the device are still useful
        return replace(found, notes=(*found.notes, f"The shapes of {model.name} were not measured: {error.fact}"))


def _joined(device: FoundCeilings, model: FoundCeilings) -> FoundCeilings:
    """Return the peaks of a device together with the rows of a model."""
    first, second = device.ceilings, model.ceilings
    ceilings = replace(
        first,
        rows=(*first.rows, *second.rows),
        seconds=round(first.seconds + second.seconds, 3),
        conditions=tuple(dict.fromkeys((*first.conditions, *second.conditions))),
        model=second.model,
    )
    notes, doubts = (_distinct(both) for both in ((*device.notes, *model.notes), (*device.doubts, *model.doubts)))
    return FoundCeilings(ceilings, device.cached and model.cached, device.cache_file, notes, doubts)


def _distinct(texts: Sequence[str]) -> tuple[str, ...]:
    """Return each text once; those that differ only in the load by other processes become one, with the range."""
    found: dict[str, list[float]] = {}
    for text in texts:
        found.setdefault(_BUSY_CPUS.sub("\0", text), []).extend(float(number) for number in _BUSY_CPUS.findall(text))
    return tuple(text.replace("\0", _between(loads)) if loads else text for text, loads in found.items())


def _between(loads: Sequence[float]) -> str:
    low, high = f"{min(loads):.2f}", f"{max(loads):.2f}"
    return low if low == high else f"{low} to {high}"


def _load_or_measure(
    device: "torch.device", identity: Identity, refresh: bool, budget_s: float, progress: Progress
) -> FoundCeilings:
    folder = cache_folder()
    if isinstance(folder, Missing):
        ceilings, doubts = measure(device, identity, budget_s, progress)
        return FoundCeilings(ceilings, False, folder, (f"The peaks are not cached: {folder.why}.",), tuple(doubts))
    file = folder / f"{identity.digest}.json"
    # Another process that measures the same device would disturb this one: it is waited for, and its peaks are used.
    with locked(folder, file.with_suffix(".lock"), _PATIENCE_S):
        notes: list[str] = []
        cached = None if refresh else _cached(file, identity, notes)
        if cached is not None and cached.budget_s >= budget_s:
            return FoundCeilings(cached, True, str(file), tuple(notes))
        ceilings, doubts = measure(device, identity, budget_s, progress)
        found = FoundCeilings(ceilings, False, str(file), tuple(notes))
        if doubts:
            reasons = [f"Not cached: {doubt}." for doubt in doubts]
            return replace(found, cache_file=Missing("not cached"), notes=(*notes, *reasons), doubts=tuple(doubts))
        try:
            write_record(folder, file, replace(found, notes=()))
        except LlmPerfError as error:
            return replace(found, cache_file=Missing("not cached"), notes=(*notes, f"The peaks are not cached: {error.fact}"))
        return found


def measure(device: "torch.device", identity: Identity, budget_s: float, progress: Progress) -> tuple[Ceilings, tuple[str, ...]]:
    """Measure all peaks in about `budget_s`; return them and the reasons not to cache them."""
    import torch

    begun = time.monotonic()
    taken = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with warnings.catch_warnings(), torch.inference_mode(), _planned(device, identity.model) as (quantities, conditions):
        warnings.simplefilter("ignore", UserWarning)  # torch warns when it falls back to a slow kernel, which is measured here
        rows, failed = _rows(quantities, budget_s, progress)
        surroundings = conditions()
    if all(isinstance(row.value, Missing) for row in rows):
        raise CaptureError(f"None of the {len(rows)} peaks could be measured: {rows[0].value}.", "See the log.")
    levels = cache_bytes() if identity.kind == "cpu" else {}
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
        caches=() if isinstance(levels, Missing) else tuple(CacheLevel(*entry) for entry in levels.items()),
        processors=usable_cpus(),
        core_cpus=() if isinstance(cores := one_cpu_per_core(), Missing) else cores,
        model=identity.model,
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
            with _mkldnn_kept():
                measured = quantity.measure(budget_s * quantity.weight / weights)
        except (RuntimeError, MemoryError, NotImplementedError) as error:  # the other operations may still work
            measured = Missing(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            failed.append(quantity.label)
        rows.append(_row(quantity, measured))
    return tuple(rows), tuple(failed)


@contextmanager
def _mkldnn_kept() -> Iterator[None]:
    """Restore the use of oneDNN: torch turns it off for good when one product fails, which would change later ones."""
    import torch

    settings: Any = torch.backends.mkldnn
    before = settings.enabled
    try:
        yield
    finally:
        settings.enabled = before


def _row(quantity: Quantity, measured: Maybe[Measured]) -> CeilingRow:
    return CeilingRow(
        key=quantity.key,
        label=quantity.label,
        unit=quantity.unit,
        value=measured if isinstance(measured, Missing) else measured.value,
        how="" if isinstance(measured, Missing) else measured.how,
        conditions="" if isinstance(measured, Missing) else measured.conditions,
        instructions=quantity.instructions,
        native=quantity.native,
        work=quantity.work,
        gpus=1 if isinstance(measured, Missing) else measured.gpus,
    )


@contextmanager
def _planned(device: "torch.device", model: ModelLinears | None) -> Iterator[tuple[Sequence[Quantity], Callable[[], Conditions]]]:
    """Yield the quantities to measure, and a function that returns the conditions afterwards."""
    if device.type == "cpu":
        from llm_perf_opt.runners.measure.ceiling_cpu import cpu_quantities, host_conditions, host_room
        from llm_perf_opt.runners.measure.ceiling_model import model_quantities
        from llm_perf_opt.runners.measure.host_load import OtherProcesses

        room, others = host_room(), OtherProcesses()
        quantities = cpu_quantities(device, room) if model is None else model_quantities(model, device, room)
        yield quantities, lambda: host_conditions(room, others.cpus())
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
        cpus = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
        driver = Missing("the run is on the CPU")
        node = platform.node()
        return Identity("cpu", cpu_name(), device_id, driver, version, threads, cpus, wait_policy(), node=node)
    properties = torch.cuda.get_device_properties(device)
    numbers = range(torch.cuda.device_count())
    peers = tuple(str(torch.cuda.get_device_properties(number).uuid) for number in numbers if number != (device.index or 0))
    return Identity("cuda", properties.name, str(properties.uuid), _driver(), version, threads, node=platform.node(), peers=peers)


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
    if cached.model != identity.model:
        raise ParseError(f"{file} contains the shapes of another model.")
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
    parser.add_argument("--cpus", help="CPUs to run on, such as 0-3,8; default: all that are allowed")
    parser.add_argument("--budget-s", type=float, help="seconds to spend on measuring; default: 9 on a GPU, 3 on a CPU")
    parser.add_argument("--model", type=Path, help="weight matrices of a model that are measured too: ModelLinears, JSON")
    parser.add_argument("--refresh", action="store_true", help="measure even if a cached result exists")
    parser.add_argument("--out", type=Path, required=True, help="output file, JSON")
    wanted = parser.parse_args(arguments)
    with report_errors(_translate):
        die_with_parent()
        prepare_threads(wanted.cpus, wanted.threads)
        write_record(wanted.out.parent, wanted.out, _found(wanted))
        sys.exit(0)


def _found(wanted: Any) -> FoundCeilings:
    set_threads(wanted.cpus, wanted.threads)
    index = f"--device-index {wanted.device_index}"
    device = pick_device(DeviceRequest(wanted.device, wanted.device_index, f"--device {wanted.device}", index, "--device cpu"))
    send("phase", text=f"device {device}")

    def progress(done: int, total: int, label: str) -> None:
        send("progress", phase="measuring", done=done, at_most=total, text=label)

    model = read_record(wanted.model, ModelLinears) if wanted.model else None
    return load_or_measure(device, wanted.refresh, budget_s=wanted.budget_s, progress=progress, model=model)


if __name__ == "__main__":
    main()
