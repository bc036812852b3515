"""Folders of many runs, as `llm-perf run` leaves them, with the facts that a list of them shows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from builders import MS, clean_timings, default_config, iteration, model_facts, workload
from llm_perf_opt.config.composition import config_to_yaml
from llm_perf_opt.core.engine_records import RuntimeFacts
from llm_perf_opt.core.records import SCHEMA, CleanTimings, Manifest, PassRecord, RunStatus
from llm_perf_opt.core.run_folder import RunFolder, encoded
from llm_perf_opt.core.weight_records import WeightFacts

ENVIRONMENT: dict[str, Any] = {
    "host": "node1",
    "system": "Linux 6.1",
    "cpu": {"name": "a processor", "usable": 2, "logical": 4},
    "gpu": {"name": "NVIDIA H200", "memory_bytes": 140 * 2**30, "power_limit_w": 700.0, "uuid": "GPU-1"},
    "gpu_count": 8,
    "gpu_driver": "580",
    "packages": {"torch": "2.13.0"},
}
NOISE = (0.0, 0.004, -0.003, 0.002, -0.001, 0.003, -0.004, 0.001, -0.002, 0.0005)
"""Deviations of the repeats of a run, as shares."""


@dataclass(frozen=True)
class Made:
    """What distinguishes a run from the usual one."""

    minute: int = 0
    """When it was made; times of the machine's clock follow, so no two runs are copies."""
    commit: str = "a" * 40
    dirty: bool | None = False
    tpot_ms: float = 10.0
    model: str = "tiny"
    weights: str = "random"
    hardware: str = "NVIDIA H200"
    devices: int = 1
    batch: int = 1
    prompt_tokens: int = 128
    runtime: str = "pytorch"
    status: RunStatus = "complete"
    why: str = ""
    noise: Sequence[float] = NOISE
    settings: dict[str, str] = field(default_factory=dict)
    """Lines of config.yaml to replace."""
    env: dict[str, Any] = field(default_factory=dict)


def made_run(path: Path, made: Made | None = None) -> RunFolder:
    """Write a run whose decode step takes `tpot_ms`, and whose prefill takes ten times that."""
    made = made or Made()
    path.mkdir(parents=True)
    (path / "raw" / "clean").mkdir(parents=True)
    folder = RunFolder(path)
    created = f"2026-01-{1 + made.minute // 1440:02d}T{made.minute // 60 % 24:02d}:{made.minute % 60:02d}:00+00:00"
    passes = (PassRecord("clean", "complete", ("python",), 0, 1.0),)
    folder.manifest_file.write_bytes(
        encoded(Manifest(SCHEMA, "0.1.0", made.status, created, ("llm-perf", "run"), passes, made.why))
    )
    folder.config_file.write_text(_config(made), encoding="utf-8")
    commit = {"commit": made.commit, "dirty": made.dirty} if made.commit else {}
    folder.env_file.write_text(json.dumps({**ENVIRONMENT, "working_folder": commit, **made.env}))
    (path / "raw" / "clean" / "timings.json").write_bytes(encoded(timings_of(made)))
    (path / "raw" / "clean" / "inputs.json").write_text(json.dumps({"sha256": "a" * 64}))
    return folder


def timings_of(made: Made) -> CleanTimings:
    """The times of the run."""
    start = made.minute * 60_000 * MS
    repeats = []
    for deviation in made.noise:
        step = round(made.tpot_ms * MS * (1 + deviation))
        repeats.append(iteration(10 * step, (step,) * 7, started_ns=start))
        start += 17 * step
    facts = model_facts(
        name=made.model, device="cuda:0", device_name=made.hardware, dtype="bf16",
        architecture=default_config().model.architecture,
        weights=WeightFacts("random" if made.weights == "random" else "stored"),
    )  # fmt: skip
    lengths = (made.prompt_tokens,) * made.batch
    work = workload(batch_size=made.batch, prompt_tokens=lengths, padded_tokens=made.prompt_tokens, new_tokens=8)
    runtime = RuntimeFacts(made.runtime, "1.0", "events", devices=made.devices)
    return replace(clean_timings(repeats, model=facts, workload=work, warmup=()), clock="cuda events", runtime=runtime)


@cache
def _default_config() -> str:
    return config_to_yaml(default_config())


def _config(made: Made) -> str:
    text = _default_config()
    source = "random" if made.weights == "random" else "pretrained"
    changes = {
        "  name: tiny\n": f"  name: {made.model}\n",
        "  source: random\n": f"  source: {source}\n",
        "  type: pytorch\n": f"  type: {made.runtime}\n",
        **made.settings,
    }
    for old, new in changes.items():
        if old not in text:
            raise ValueError(f"config.yaml has no line {old!r}")
        text = text.replace(old, new, 1)
    return text
