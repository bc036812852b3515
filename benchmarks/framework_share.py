"""The share of framework and Python in a decode step on a CPU: the budget of a run against two estimates without a profiler.

    python benchmarks/framework_share.py RUN

Measures the decode step of the run's model in this process: as it is, then each operator of the step alone with
torch.utils.benchmark, then the step under torch.compile with a static cache. The share of framework and Python is what the
operators that compute or move data do not take. The compiled step fuses operators as well, and keeps some of the overhead.
Fails if the budget differs from the operators alone by more than 15 percentage points.
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

from llm_perf_opt.analysis.trace.operator_classes import HostRow, row_of
from llm_perf_opt.config.composition import with_overrides
from llm_perf_opt.core.records import Missing
from llm_perf_opt.runners.measure.annotations import unmarked
from llm_perf_opt.runners.session import Session, open_session
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.run_reader import RunReader

LIMIT = 0.15
OVERHEAD = (HostRow.FRAMEWORK.value, HostRow.PYTHON.value)
COMPILED = ("runtime.compile=default", "runtime.cache=static")


class Recorder(TorchDispatchMode):
    """Collects every operator with its arguments, one per distinct operator and shapes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.examples: dict[str, tuple[Any, Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and remember how it was called."""
        shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in args]
        key = f"{func} {shapes}"
        self.calls[key] += 1
        self.examples.setdefault(key, (func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def operators_ns(session: Session) -> float:
    """Return the time of a step's operators that compute or move data, each timed alone, without the cost of a call."""
    runner: Any = session.runner
    runner.begin()
    token = runner.prefill(session.batch)
    with Recorder() as found:
        runner.decode_step(token)
    one = torch.ones(1)
    call_s = _alone(torch.ops.aten.add_.Tensor, (one, one), {})
    total = 0.0
    for key, (func, args, options) in found.examples.items():
        if row_of(str(func.name()), calls_others=False) is not HostRow.FRAMEWORK:
            total += found.calls[key] * max(_alone(func, args, options) - call_s, 0.0) * 1e9
    return total


def _alone(func: Any, args: Any, options: Any) -> float:
    timer = Timer(
        "func(*args, **options)", globals={"func": func, "args": args, "options": options}, num_threads=torch.get_num_threads()
    )
    return float(timer.blocked_autorange(min_run_time=0.02).median)


def step_ns(session: Session) -> float:
    """Return the median time of a decode step, unprofiled."""
    meter = session.meter(session.config.runtime.num_new_tokens, unmarked)
    for _ in range(3):
        meter.iterate()
    steps = [statistics.mean(meter.iterate().steps_ns) for _ in range(7)]
    return statistics.median(steps)


def budget_share(run: RunReader) -> tuple[float, float, float]:
    """Return the share of framework and Python in the run's budget of decode, and its bounds."""
    trace = analyze(run).trace
    if isinstance(trace, Missing):
        sys.exit(f"{run.folder.path} has no trace: {trace.why}.")
    table = next(table for table in trace.budgets if table.stage == "decode")
    rows = [row for row in table.rows if row.key in OVERHEAD]
    bounds = [
        [row.ns, row.ns if row.low_ns is None else row.low_ns, row.ns if row.high_ns is None else row.high_ns] for row in rows
    ]
    share, low, high = (sum(each) / table.wall_ns for each in zip(*bounds, strict=True))
    return share, low, high


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the estimates and return 1 if they disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = RunReader.open(parser.parse_args(arguments).run)
    share, low, high = budget_share(run)
    with torch.inference_mode():
        session = open_session(with_overrides(run.settings, ()))
        wall = step_ns(session)
        alone = operators_ns(session)
        print(f"budget: {share:.1%} of decode ({low:.1%} to {high:.1%}) is framework and Python")
        print(
            print(f"operators alone: {alone / 1e6:.3f} of {wall / 1e6:.3f} ms, so {1 - alone / wall:.1%} is framework and Python")
        )
        compiled = step_ns(open_session(with_overrides(run.settings, COMPILED)))
        print(f"compiled step: {compiled / 1e6:.3f} ms, which saves {1 - compiled / wall:.1%}")
    apart = abs(share - (1 - alone / wall))
    print(f"budget and operators alone: {100 * apart:.1f} percentage points apart")
    return 0 if apart <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
