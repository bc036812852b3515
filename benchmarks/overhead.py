"""What measuring costs: the clean pass against a bare hand-written loop over the same model, interleaved in one run.

    python benchmarks/overhead.py [--pairs 30] [--telemetry] [OVERRIDES…]

Prints the median ratio of the per-token times. The loops alternate, each going first in turn, so that whatever the machine does
meanwhile falls on both. Fails above the limit: 1 % on a GPU, 3 % on a CPU. With `--telemetry` the clean pass has its sampler
beside it, as in profiling=minimal, and the limit is 5 %.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from llm_perf_opt.config.composition import compose
from llm_perf_opt.profiling.vendor.launch import Companion
from llm_perf_opt.runners.measure import nvml
from llm_perf_opt.runners.measure.annotations import unmarked
from llm_perf_opt.runners.session import Session, open_session

LIMITS = {"cuda": 1.01, "cpu": 1.03}
LIMIT_WITH_TELEMETRY = 1.05
WARMUP = 5


class BareLoop:
    """What one would write by hand: forward, argmax, next; one clock reading at the end of decode."""

    def __init__(self, session: Session) -> None:
        runtime = session.config.runtime
        self._model: Any = session.model
        self._ids = session.batch.input_ids
        self._steps = session.workload.decode_steps
        self._cuda = session.cuda
        self._static = runtime.cache == "static"
        self._graphs = self._cuda and runtime.compile in ("reduce-overhead", "max-autotune")
        self._longest = self._ids.shape[1] + session.workload.new_tokens
        self._cache: Any = None
        mode = None if runtime.compile == "default" else runtime.compile
        self._step = self._next if runtime.compile == "none" else torch.compile(self._next, mode=mode)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _next(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)

    @torch.inference_mode()
    def per_token_ns(self) -> float:
        """Mean time of a decode step in one request."""
        config = self._model.config
        if self._static and self._cache is not None:
            self._cache.reset()
        else:
            self._cache = StaticCache(config=config, max_cache_len=self._longest) if self._static else DynamicCache(config=config)
        token = self._next(self._ids)
        self._wait()
        begun = time.perf_counter_ns()
        for _ in range(self._steps):
            if self._graphs:
                torch.compiler.cudagraph_mark_step_begin()
                token = self._step(token).clone()
            else:
                token = self._step(token)
        self._wait()
        return (time.perf_counter_ns() - begun) / self._steps


@contextmanager
def sampler(session: Session, wanted: bool) -> Iterator[None]:
    """The telemetry sampler, with the interval the configuration gives it."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "samples.jsonl"
        argv = [
            sys.executable,
            "-m",
            nvml.__name__,
            "--out",
            str(out),
            "--interval",
            str(session.config.profiling.nvml.interval_s),
        ]
        argv += ["--gpu", str(session.config.hardware.device_index) if session.cuda else "none"]
        beside = Companion(argv, Path(folder) / "log.txt", nvml.READY)
        beside.tell(str(os.getpid()))
        try:
            yield
        finally:
            beside.stop()


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--telemetry", action="store_true", help="with the sampler beside the clean pass")
    arguments = parser.parse_args()
    session = open_session(compose(arguments.overrides).config)
    meter = session.meter(session.workload.new_tokens, unmarked)
    bare_loop = BareLoop(session)

    @torch.inference_mode()  # as the measured process holds it, around the whole pass
    def measured() -> float:
        with sampler(session, arguments.telemetry):
            iteration = meter.iterate()
        return iteration.decode_ns / len(iteration.steps_ns)

    for _ in range(WARMUP):
        measured()
        bare_loop.per_token_ns()
    pairs = []
    for number in range(arguments.pairs):
        if number % 2:
            ours, bare = measured(), bare_loop.per_token_ns()
        else:
            bare, ours = bare_loop.per_token_ns(), measured()
        pairs.append((ours, bare))
    ratios = [ours / bare for ours, bare in pairs]
    ratio = statistics.median(ratios)
    draw = random.Random(0)
    resampled = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(500))
    limit = LIMIT_WITH_TELEMETRY if arguments.telemetry else LIMITS[session.device.type]
    result = {
        "device": session.runner.facts.device_name,
        "pairs": len(pairs),
        "clean_pass_per_token_ms": statistics.median(ours for ours, _ in pairs) / 1e6,
        "bare_loop_per_token_ms": statistics.median(bare for _, bare in pairs) / 1e6,
        "ratio": ratio,
        "ratio_95": [resampled[12], resampled[487]],
        "limit": limit,
    }
    print(json.dumps(result, indent=1))
    sys.exit(0 if ratio <= limit else f"the clean pass is {ratio:.3f} times the bare loop; the limit is {limit}")


if __name__ == "__main__":
    main()
