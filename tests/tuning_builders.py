"""A machine whose settings have known effects: runs of a search without a process, a clock or noise of the real machine.

The runtime is a plug-in with levers, found through the entry point. Its runs are small files, so that another process can go on
with a search.
"""

import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from builders import MS, clean_timings, iteration, manifest, model_facts, run_analysis
from llm_perf_opt.analysis.metrics import metrics
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.tuning.tokens import Tried
from llm_perf_opt.config.composition import compose, with_overrides
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError
from llm_perf_opt.core.logit_records import LogitFacts, Logits
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.run_folder import RunFolder
from plugins import bring, installed
from writing import write_whole

RUNNER = """
from llm_perf_opt.config.runtimes import Lever, Runtime

LEVERS = (
    Lever("fast path", (("runtime.engine.fast=1",), ("runtime.engine.fast=2",))),
    Lever("slow path", (("runtime.engine.slow=1",),)),
    Lever("other tokens", (("runtime.engine.wrong=1",),)),
    Lever("helps the fast path", (("runtime.engine.helper=1",),)),
    Lever("broken", (("runtime.engine.broken=1",),)),
    Lever("greedy for memory", (("runtime.engine.memory=1",),)),
    Lever("precision", (("runtime.engine.bits=4",),), lossy=True),
)
RUNTIME = Runtime("fake", "fake_runner:open_fake", steppable=False, levers=lambda machine: LEVERS)


def open_fake(request):
    raise AssertionError("not opened")
"""


def step_ms(engine: Mapping[str, Any]) -> float:
    """The known effects. The best lossless configuration: fast=2 and helper=1, 10 ms × 0.6 × 0.9 = 5.4 ms."""
    step = 10.0
    step *= {1: 0.8, 2: 0.6}.get(engine.get("fast", 0), 1.0)
    step *= 1.3 if engine.get("slow") else 1.0
    step *= 0.5 if engine.get("wrong") else 1.0
    step *= 0.9 if engine.get("helper") and engine.get("fast") else 1.0
    step *= 0.7 if engine.get("memory") else 1.0
    return step * (0.5 if engine.get("bits") else 1.0)


_any_run = functools.cache(run_analysis)


@functools.cache
def _configured(values: str, overrides: tuple[str, ...]) -> RunConfig:
    return with_overrides(json.loads(values), overrides)


@dataclass
class FakeClock:
    """Seconds that pass only when a run is made."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeRuns:
    """Measures configurations of the fake runtime in `seconds` each."""

    folder: Path
    values: Mapping[str, Any]
    clock: FakeClock = field(default_factory=FakeClock)
    seconds: float = 10.0
    noise: float = 0.002
    device: str = "cuda:0"
    speed: Callable[[Mapping[str, Any]], float] = step_ms
    stop_at: str = ""
    """The name of a run that is interrupted."""
    change: Callable[[Tried, Mapping[str, Any]], Tried] = lambda tried, engine: tried
    findings: Callable[[Mapping[str, Any]], Sequence[Finding]] | None = None
    """The findings of a profiled run, by its settings; None: nothing is traced."""
    made: list[tuple[str, tuple[str, ...], bool]] = field(default_factory=list)

    def measure(
        self, overrides: tuple[str, ...], name: str, *, profiled: bool, limit_s: float
    ) -> tuple[Path | None, LlmPerfError | None]:
        if name == self.stop_at:
            return None, Interrupted("Interrupted.")
        self.clock.now += self.seconds
        self.made.append((name, overrides, profiled))
        engine = _configured(json.dumps(self.values), overrides).runtime.engine
        if engine.get("broken"):
            return None, CaptureError("the engine does not start")
        folder = self.folder / name
        write_whole(folder / "fake.json", json.dumps({"overrides": overrides, "at": self.clock.now}).encode())
        return folder, None

    def read(self, path: Path, *, profiled: bool) -> Tried:
        record = json.loads((path / "fake.json").read_text())
        config = _configured(json.dumps(self.values), tuple(record["overrides"]))
        tried = self.run(path, config, record["at"])
        if profiled and self.findings is not None:
            trace: Any = SimpleNamespace(complete=True, why="", budgets=(), findings=self.findings(config.runtime.engine))
            tried = replace(tried, analysis=replace(tried.analysis, trace=trace))
        return self.change(tried, config.runtime.engine)

    def run(self, path: Path, config: Any, at: float) -> Tried:
        """A run of ten repeats with a little noise, the same whenever it is read."""
        engine, draw = config.runtime.engine, random.Random(f"{path.name} {at}")
        level = self.speed(engine) * (1 + draw.gauss(0, self.noise))
        repeats = []
        for number in range(10):
            steps = [round(level * MS * (1 + draw.gauss(0, self.noise))) for _ in range(4)]
            repeats.append(iteration(50 * MS, steps, started_ns=round(at * 1e9) + number * 10**8))
        bits = engine.get("bits")
        model = model_facts(device=self.device, device_name="a fake", weight_bytes=20_000_000 // (2 if bits else 1))
        timings = clean_timings(repeats, model=model, tokens_sha256=("1" if engine.get("wrong") or bits else "0") * 64)
        memory = replace(timings.memory, reserved_bytes=(20 if engine.get("memory") else 10) * 10**9)
        timings = replace(timings, memory=memory)
        created = datetime(2026, 1, 2, tzinfo=timezone.utc) + timedelta(seconds=at)
        tokens = [[7, 7, 7, 7, 8 if bits or engine.get("wrong") else 7]] * 2
        analysis = replace(
            _any_run(),
            run=path.name, timings=timings, metrics=metrics(timings), config=asdict(config), trace=Missing("not traced"),
            manifest=manifest(created=created.isoformat()), efficiency=Missing("not computed"), telemetry=Missing("not sampled"),
        )  # fmt: skip
        return Tried(str(path), analysis, tokens)


@contextmanager
def fake_runtime(site: Path) -> Iterator[None]:
    """The fake runtime, installed."""
    with installed(bring(site, "fake", "fake_runner:RUNTIME", RUNNER)):
        yield


def fake_settings() -> dict[str, Any]:
    """The settings of a run to start from."""
    return asdict(compose(["runtime=fake", "profiling=none"]).config)


def fake_base(path: Path, values: dict[str, Any], at: float = 900.0) -> dict[str, Any]:
    """Make a run to start from; return its settings."""
    folder = RunFolder(path)
    folder.write_manifest(manifest())
    write_whole(folder.config_file, yaml.safe_dump(values).encode())
    write_whole(path / "fake.json", json.dumps({"overrides": [], "at": at}).encode())
    return values


def names(made: Sequence[tuple[str, tuple[str, ...], bool]]) -> list[str]:
    """The names of the runs."""
    return [name for name, _, _ in made]


def fake_finding(id: str, override: str, saving_ms: float, **changes: Any) -> Finding:
    """A finding of decode that saves so much per token, give or take half a millisecond."""
    saving, half = round(saving_ms * MS), MS // 2
    values: dict[str, Any] = {
        "id": id, "headline": "It is slow.", "claim": "It is slow.", "saving_ns": saving, "evidence": [], "to_try": override,
        "kind": "latency", "stage": "decode", "saving_low_ns": saving - half, "saving_high_ns": saving + half,
        "saving_per": "token", "saving_why": "", "units": 4, "confidence": "high", "because": "it was measured",
        "overrides": [override], "change": "Change it.",
    }  # fmt: skip
    return Finding(**{**values, **changes})


def recorded_logits(chosen: Sequence[Sequence[int]], values: Any, *, fp32: Any = None, fed: Any = None) -> Logits:
    """Logits of every id of a vocabulary. `fp32`: those of a reference, which was fed its own tokens."""
    tokens, array = np.array(chosen), np.array(values, np.float32)
    sequences, positions, vocabulary = array.shape
    why = "" if fp32 is not None else "only a reference has logits in fp32"
    facts = LogitFacts(
        sequences=sequences, batch_size=sequences, positions=positions, vocabulary=vocabulary, dtype="bf16", fp32_why=why
    )
    return Logits(
        facts,
        fed=tokens if fed is None else np.array(fed), chosen=tokens,
        top=np.zeros((sequences, positions, 0), np.int32), common=np.arange(vocabulary, dtype=np.int32),
        values=array, fp32=Missing(why) if fp32 is None else np.array(fp32, np.float32),
    )  # fmt: skip


def fake_logits(engine: Mapping[str, Any], margin: float = 0.005, error: float = 0.01) -> Logits:
    """Logits of the fake runtime: token 8 is `margin` behind token 7 at the last position, and `wrong` chooses it.

    Every logit is off by 0.01 in the base and by `error` after a change.
    """
    exact = np.zeros((2, 5, 16), np.float32)
    exact[:, :, 7], exact[:, :, 8] = 5.0, 3.0
    exact[:, -1, 8] = 5.0 - margin
    signs = np.where(np.arange(16) % 2, 1.0, -1.0)
    fed = [[7] * 5] * 2
    if not engine:
        return recorded_logits(fed, exact + 0.01 * signs, fp32=exact)
    other = engine.get("wrong") or engine.get("bits")
    return recorded_logits([[7, 7, 7, 7, 8 if other else 7]] * 2, exact + error * -signs, fed=fed)
