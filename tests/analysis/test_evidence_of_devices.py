"""Evidence of a stage that several devices shared."""

from llm_perf_opt.analysis.accounting import account
from llm_perf_opt.analysis.evidence import RunFacts, gather
from llm_perf_opt.analysis.trace_stages import find_stages
from traces import Builder


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
