"""Rules on what a step asks of the host and the driver: waiting, allocating, copying across the bus."""

from llm_perf_opt.analysis.budget import BudgetKey
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.findings.finding import Grounds, ToTry, finding, gap_saving_of, milliseconds, saving_of
from llm_perf_opt.analysis.findings.launching import place_of
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE
from llm_perf_opt.core.stages import MIXED_STEP, STEP

EVERY_STEP = 0.5
"""Calls per step from which on something happens in every step, not now and then."""
NOTEWORTHY = 0.01
"""Share of the stage's time from which on what a call costs is worth a claim."""
_LOOPS = (DECODE, STEP, MIXED_STEP)


def syncs_per_step(evidence: Evidence) -> Finding | None:
    """The host waits for the device in every step."""
    stage = _loop(evidence)
    if stage is None or stage.calls.syncs < EVERY_STEP * stage.units:
        return None
    calls, lost = stage.calls, stage.budget.ns(BudgetKey.SYNC)
    if lost < NOTEWORTHY * stage.budget.wall_ns:
        return None  # the device had enough queued, or other work to do
    per_step = calls.syncs / stage.units
    items = f", {calls.items / stage.units:,.2g} of them to read a value (.item())" if calls.items else ""
    return finding(
        "syncs_per_step",
        place_of(evidence, stage),
        (
            f"The host waits for the device {per_step:,.2g} times per {stage.unit}{items}; the device then has nothing queued "
            f"for {milliseconds(stage.per_unit(lost))}.",
        ),
        Grounds(
            (
                f"{calls.syncs:,} synchronizing calls, {milliseconds(calls.sync_ns)} below the profiler",
                f"budget of {stage.name}: sync {milliseconds(lost)} of {milliseconds(stage.budget.wall_ns)}",
            ),
            "medium",
            "without the wait the host still has to launch; the middle is shown",
        ),
        gap_saving_of(stage, 0, lost / 2, lost),
        ToTry(
            change="Keep sampled tokens on the device, test for the end of a sequence every few steps, and avoid .item(), "
            ".cpu() and printing tensors inside the loop."
        ),
    )


def allocations_in_the_loop(evidence: Evidence) -> Finding | None:
    """The driver is asked for memory while decoding."""
    stage = _loop(evidence)
    if stage is None or stage.calls.allocations < EVERY_STEP * stage.units:
        return None
    calls = stage.calls
    idle_ns = max(stage.budget.idle_ns, 0)  # a host that is held up while the device works loses nothing
    scale = min(idle_ns / stage.time.idle_ns, 1.0) if stage.time.idle_ns else 0.0
    most = min(calls.allocation_ns * scale, idle_ns)
    if most < NOTEWORTHY * stage.budget.wall_ns:
        return None
    return finding(
        "allocations_in_the_loop",
        place_of(evidence, stage),
        (
            f"The driver allocates or frees memory {calls.allocations / stage.units:,.2g} times per {stage.unit}, "
            f"{milliseconds(stage.per_unit(calls.allocation_ns))} below the profiler: the framework's cache of memory is too "
            "small or off.",
        ),
        Grounds(
            (f"{calls.allocations:,} calls such as cudaMalloc and cudaFree, {milliseconds(calls.allocation_ns)}",),
            "medium",
            "the calls' time is the profiler's, scaled as the idle time is; the middle is shown",
        ),
        gap_saving_of(stage, 0, most / 2, most),
        ToTry(
            ("runtime.cache=static",) if evidence.facts.setting("runtime.cache") == "dynamic" else (),
            "Allocate before the loop; with a growing cache set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        ),
    )


def copies_from_the_host(evidence: Evidence) -> Finding | None:
    """Every step copies something to the device."""
    stage = _loop(evidence)
    if stage is None or stage.calls.to_device < EVERY_STEP * stage.units:
        return None
    calls, lost = stage.calls, max(stage.budget.ns(BudgetKey.EXPOSED) - stage.collective_ns, 0)
    if lost < NOTEWORTHY * stage.budget.wall_ns:
        return None
    size = f", {calls.copied_bytes / stage.units:,.4g} bytes" if calls.copied_bytes else ""
    return finding(
        "copies_from_the_host",
        place_of(evidence, stage),
        (
            f"Each {stage.unit} copies from the host {calls.to_device / stage.units:,.2g} times{size}; copies that no kernel "
            "hides take "
            f"{milliseconds(stage.per_unit(lost))}.",
        ),
        Grounds(
            (
                f"{calls.to_device:,} copies to the device, {calls.to_host:,} back",
                f"budget of {stage.name}: exposed copies {milliseconds(lost)} of {milliseconds(stage.budget.wall_ns)}",
            ),
            "medium",
            "a part of it may be copies that are needed; the middle is shown",
        ),
        saving_of(stage, 0, lost / 2, lost),
        ToTry(
            change="Keep token ids, positions and masks on the device; copy what must come from the host from pinned memory "
            "with non_blocking=True, a step ahead."
        ),
    )


def _loop(evidence: Evidence) -> StageEvidence | None:
    return next((found for name in _LOOPS if (found := evidence.stage(name)) is not None), None)
