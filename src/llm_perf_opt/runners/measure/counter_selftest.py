"""Work of known size, to check counters against. A separate process, run under Nsight Compute:

`python -m llm_perf_opt.runners.measure.counter_selftest --device-index N`

After a warm-up, the counted work runs once inside the NVTX range `LLM@selftest/`.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from llm_perf_opt.analysis.kernels.counter_selftest import KnownCopy, KnownGemm, KnownWork
from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.core.stages import DOMAIN
from llm_perf_opt.runners.child import die_with_parent, framework_error, report_errors, send
from llm_perf_opt.runners.measure.annotations import marked
from llm_perf_opt.runners.measure.device import DeviceRequest, pick_device

SELFTEST = "selftest"
"""The range around the counted work."""
SELFTEST_RANGE = f"{DOMAIN}@{SELFTEST}/"
"""Its `ncu --nvtx-include` argument."""
EVENT = "selftest"
"""The message that reports the work."""

# Multiples of 128, so that common tiles divide them; mostly unequal, so that a wrong dimension shows.
_SHAPES = ((4096, 4096, 4096), (4096, 4096, 2048), (4096, 2048, 1024))
WORK = KnownWork(
    gemms=tuple(KnownGemm(f"gemm_{m}x{n}x{k}", m, n, k) for m, n, k in _SHAPES),
    copy=KnownCopy("copy", 1 << 30),  # several times larger than any cache
)


def run_work(device_index: int, work: KnownWork = WORK) -> None:
    """Run the known work on a GPU, each operation in its own range, and wait for it."""
    import torch

    index = f"--device-index {device_index}"
    device = pick_device(
        DeviceRequest("cuda", device_index, "The counter self-test needs a GPU", index, "a run without counters")
    )
    generator = torch.Generator(device).manual_seed(1)

    def matrix(rows: int, columns: int) -> "torch.Tensor":
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16, generator=generator)

    with torch.inference_mode(), torch.cuda.device(device):
        pairs = [(gemm, matrix(gemm.m, gemm.k), matrix(gemm.k, gemm.n), matrix(gemm.m, gemm.n)) for gemm in work.gemms]
        source = torch.ones(work.copy.size_bytes // 4, device=device, dtype=torch.float32)
        target = torch.empty_like(source)
        for _, left, right, out in pairs:
            torch.mm(left, right, out=out)
        torch.mul(source, 2.0, out=target)  # a plain copy would run on the copy engine, which kernel counters do not see
        torch.cuda.synchronize()
        with marked(SELFTEST):
            for gemm, left, right, out in pairs:
                with marked(gemm.range):
                    torch.mm(left, right, out=out)
            with marked(work.copy.range):
                torch.mul(source, 2.0, out=target)
            torch.cuda.synchronize()


def _translate(error: Exception) -> LlmPerfError:
    return framework_error(
        error,
        memory="The counter self-test needs about 3 GB of free GPU memory.",
        disk="Free some space.",
        otherwise="See the log of the counter self-test.",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the counted process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-index", type=int, default=0)
    wanted = parser.parse_args(arguments)
    with report_errors(_translate):
        die_with_parent()
        run_work(wanted.device_index)
        send(EVENT, **asdict(WORK))
        sys.exit(0)


if __name__ == "__main__":
    main()
