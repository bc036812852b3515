"""Evidence of a stage that several devices shared."""

import pytest

from builders import clean_timings, default_config, model_facts
from llm_perf_opt.analysis.evidence import RunFacts, gather
from llm_perf_opt.analysis.limits.efficiency import efficiency
from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.trace.accounting import account
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing, RuntimeFacts
from trace_builders import Builder


def two_devices(second_ns: int) -> Builder:
    """Two steps; in each, each of two devices runs three kernels side by side."""
    made = Builder()
    made.range(0, 2000, "decode")
    number = 0
    for step in range(2):
        made.range(1000 * step, 1000 * step + 900, "decode_step")
        for kernel in range(3):
            for device, length in ((0, 40), (1, second_ns)):
                number += 1
                at = 1000 * step + 100 * kernel + device
                made.call(at, at + 5, "cudaLaunchKernel", correlation=number)
                made.kernel(at + 20, at + 20 + length, "gemm", correlation=number, device=device)
    return made


def test_kernel_time_that_a_change_could_save_is_that_of_the_busiest_device() -> None:
    trace = two_devices(second_ns=60).trace()
    stages = find_stages(trace)
    (decode,) = gather(trace, stages, account(trace, stages), RunFacts()).stages
    assert decode.time.kernel_ns == 6 * 40 + 6 * 60
    assert (decode.kernel_ns, decode.fusion.kept_kernels, decode.fusion.kept_ns) == (6 * 60, 6, 6 * 60)
    assert sum(row.ns for row in decode.budget.rows) == decode.budget.wall_ns


def floor_of(timings: CleanTimings, devices_seen: int) -> Maybe[int]:
    """Return the roofline time in the budget of a decode that the trace shows on this many devices."""
    trace = (two_devices(second_ns=60) if devices_seen == 2 else one_device()).trace()
    stages = find_stages(trace)
    limits = efficiency(timings, Missing("no torch pass"), hardware_named("h200"), Missing("no ceilings"))
    facts = RunFacts(timings=timings, efficiency=limits)
    (decode,) = gather(trace, stages, account(trace, stages), facts).stages
    found = next((row.ns for row in decode.budget.rows if row.key.value == "floor"), None)
    return Missing(" ".join(decode.budget.notes)) if found is None else found


def one_device() -> Builder:
    made = Builder()
    made.range(0, 2000, "decode")
    for step in range(2):
        made.range(1000 * step, 1000 * step + 900, "decode_step")
        made.launch(1000 * step + 10, 1000 * step + 20, 1000 * step + 60, "gemm")
    return made


def spread_over(devices: int) -> CleanTimings:

    facts = model_facts(
        dtype="bf16", device="cuda:0", device_name="NVIDIA H200", architecture=default_config().model.architecture
    )
    return clean_timings(model=facts, runtime=RuntimeFacts("vllm", "1", "by arrival", devices=devices))


def test_devices_share_the_roofline_time_which_is_missing_if_the_run_does_not_know_them() -> None:
    alone, shared = floor_of(spread_over(1), 1), floor_of(spread_over(2), 2)
    assert isinstance(alone, int)
    assert shared == pytest.approx(alone / 2, abs=1)
    assert floor_of(spread_over(2), 1) == shared  # the trace of one worker: it has its share to do
    unknown = floor_of(spread_over(1), 2)
    assert isinstance(unknown, Missing)
    assert "ran on 2 devices, but the peaks are those of one" in unknown.why
