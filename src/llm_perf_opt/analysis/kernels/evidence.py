"""Everything a run's traces and counters say of its kernels, in one record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llm_perf_opt.analysis.kernels.counter_selftest import SelfTest
from llm_perf_opt.analysis.kernels.hfu import StageHfu, stage_hfu
from llm_perf_opt.analysis.kernels.selection import Launch
from llm_perf_opt.analysis.kernels.table import StageKernels
from llm_perf_opt.analysis.limits.device_limits import devices_of, other_devices
from llm_perf_opt.analysis.limits.efficiency import Efficiency, request_cost, stage_seconds
from llm_perf_opt.kernel_records import KernelUse
from llm_perf_opt.records import CleanTimings, Maybe, Missing
from llm_perf_opt.stages import Stage

STAGES: dict[str, Stage] = {"prefill": Stage.PREFILL, "decode": Stage.DECODE_STEP}
"""A table's stage → the range whose kernels are in it."""
PROGRAM = "program"
"""The one stage of a program that has none."""


@dataclass(frozen=True)
class KernelEvidence:
    """Kernels by stage, with the counters read of them."""

    sources: Mapping[str, str]
    """Stage → the timeline its kernels are from."""
    decode_steps: int
    """In the timeline of decode."""
    stages: tuple[StageKernels, ...]
    hfus: tuple[StageHfu, ...]
    selftest: Maybe[SelfTest]
    notes: tuple[str, ...] = ()
    """What was chosen and left out, and what could not be read."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """Stage → on how many devices its kernels ran."""
    sharing: int = 1
    """Devices that the limits are of."""
    warnings: tuple[str, ...] = ()
    """What a reader of any figure from counters must know first."""

    def on_others(self, stage: str) -> Missing | None:
        """Why a stage's work may not be held against the limits, where they are of more or fewer devices."""
        return other_devices(self.devices.get(stage, 1), self.sharing)


def uses_of(stage: str, launches: Sequence[Launch]) -> list[KernelUse]:
    """Launches of a stage, one row per kernel and launch size."""
    totals: dict[tuple[str, int, int], list[int]] = {}
    for launch in launches:
        total = totals.setdefault(launch.variant, [0, 0])
        total[0] += 1
        total[1] += launch.duration_ns
    return [KernelUse(stage, name, grid, block, calls, ns) for (name, grid, block), (calls, ns) in totals.items()]


def hfus_of(
    stages: Sequence[StageKernels],
    decode_steps: int,
    timings: CleanTimings | None,
    efficiency: Maybe[Efficiency],
    devices: Mapping[str, int],
) -> tuple[StageHfu, ...]:
    """HFU of every stage that has kernels, over the unprofiled time of as many steps as the timeline holds."""
    if timings is None or isinstance(efficiency, Missing):
        return ()
    cost = request_cost(timings)
    found = []
    for stage in stages:
        which = STAGES.get(stage.stage)
        if which is None:
            continue
        needed = cost if isinstance(cost, Missing) else cost.stage(which, decode_steps)
        flops: Maybe[float] = needed if isinstance(needed, Missing) else float(needed.flops)
        seconds = other_devices(devices.get(stage.stage, 1), devices_of(timings)) or stage_seconds(timings, which, decode_steps)
        found.append(stage_hfu(stage, efficiency.roofs, seconds, flops))
    return tuple(found)
