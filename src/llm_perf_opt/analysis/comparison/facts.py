"""What a run really ran: hardware, model and workload, as they were found and not as they were asked for."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import CleanTimings, Missing

Kind = Literal["hardware", "model", "workload"]
KINDS: tuple[Kind, ...] = ("hardware", "model", "workload")
Facts = dict[Kind, dict[str, str]]
"""By kind, a value by dotted key. What is not known is not there: it cannot be said to differ."""

PROMPTS = "prompts"
"""What was fed, by its checksum."""
_OF_HOST = ("cpu.name", "cpu.usable", "cpu.frequency_max_mhz", "cpu.governor")
_OF_GPU = (
    "gpu.name",
    "gpu.power_limit_w",
    "gpu.sm_clock_max_mhz",
    "gpu.memory_clock_max_mhz",
    "gpu.application_sm_clock_mhz",
    "gpu.ecc",
    "gpu.mig",
)
"""Limits and modes; what a clock or a thermometer reads at a moment is none."""
_GPU_MEMORY = "gpu.memory_bytes"
_NOT_ARCHITECTURE = ("transformers_version", "dtype", "torch_dtype", "architectures")
"""Fields of a model's configuration that say nothing of its shape."""


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested settings by dotted key; a list is one value."""
    found: dict[str, str] = {}
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            found.update(flatten(value, f"{key}."))
        else:
            found[key] = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
    return found


def facts_of(run: RunAnalysis) -> Facts:
    """Of one run; without times there are none of model and workload."""
    if isinstance(run.timings, Missing):
        return {"hardware": _machine(run.env, on_gpu=True), "model": {}, "workload": {}}
    model, timings = run.timings.model, run.timings
    device = {"device": model.device.split(":")[0], "device_name": model.device_name, "threads": timings.threads}
    return {
        "hardware": {**flatten(device), **_machine(run.env, on_gpu=device["device"] == "cuda")},
        "model": flatten(_model(timings)),
        "workload": {**flatten(_workload(timings)), **_prompts(run)},
    }


def facts_of_side(name: str, runs: Sequence[RunAnalysis]) -> Facts:
    """Of runs that must be repeats of each other: what any of them knows. A ConfigError names the first that differs."""
    known: Facts = {kind: {} for kind in KINDS}
    said_by: dict[tuple[Kind, str], str] = {}
    for run in runs:
        for kind, values in facts_of(run).items():
            for key, value in values.items():
                if known[kind].setdefault(key, value) != value:
                    raise ConfigError(
                        f"The runs of {name} are not repeats of each other, they differ in their {kind}: {key} is "
                        f"{known[kind][key]} in {said_by[kind, key]} and {value} in {run.run}.",
                        "Give runs that differ in nothing but their time.",
                    )
                said_by.setdefault((kind, key), run.run)
    return known


def _machine(env: Mapping[str, Any], on_gpu: bool) -> dict[str, str]:
    """What limits the speed of a machine. A card that a run did not use is none of its facts."""
    told = {key: value for key, value in flatten(env).items() if not value.startswith("n/a")}
    found = {key: told[key] for key in (*_OF_HOST, *(_OF_GPU if on_gpu else ())) if key in told}
    if on_gpu and told.get(_GPU_MEMORY, "").isdecimal():
        # Drivers keep some megabytes for themselves, each its own number of them.
        found["gpu.memory"] = f"{round(int(told[_GPU_MEMORY]) / 2**30)} GiB"
    return found


def _model(timings: CleanTimings) -> dict[str, Any]:
    model = timings.model
    return {
        "name": model.name,
        "class": model.model_class,
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes,
        "dtype": model.dtype,
        "architecture": {
            name: value
            for name, value in model.architecture.items()
            if not name.startswith("_") and name not in _NOT_ARCHITECTURE
        },
    }


def _prompts(run: RunAnalysis) -> dict[str, str]:
    """What identifies them: a file may have changed behind its name."""
    return {} if isinstance(run.prompts_sha256, Missing) else {PROMPTS: f"sha256 {run.prompts_sha256[:12]}"}


def _workload(timings: CleanTimings) -> dict[str, Any]:
    work = timings.workload
    return {
        "batch_size": work.batch_size,
        "prompt_tokens": sorted(set(work.prompt_tokens)) if len(set(work.prompt_tokens)) == 1 else list(work.prompt_tokens),
        "new_tokens": work.new_tokens,
        "source": work.source,
    }


def machine_cautions(runs: Sequence[RunAnalysis]) -> tuple[str, ...]:
    """Where the runs are of several machines, or cards, of one kind: they need not be equally fast."""
    hosts = distinct(runs, "host")
    cards = distinct([run for run in runs if facts_of(run)["hardware"].get("device") == "cuda"], "gpu.uuid")
    advice = "Machines of one kind need not be equally fast: run both sides on each of them, in turn."
    found = []
    if len(hosts) > 1:
        found.append(f"{_count(hosts)} machines, or containers of one, by their host names: {', '.join(hosts)}. {advice}")
    if len(cards) > 1:
        found.append(f"{_count(cards)} machines, or cards of one, by the ids of their GPUs: {', '.join(cards)}. {advice}")
    return tuple(found)


def distinct(runs: Sequence[RunAnalysis], key: str) -> list[str]:
    """What the runs' environments say under this key, each answer once; one that is not known is none."""
    said = [flatten(run.env).get(key, "n/a") for run in runs]
    return list(dict.fromkeys(value for value in said if not value.startswith("n/a")))


def _count(found: Sequence[str]) -> str:
    return "Two" if len(found) == 2 else str(len(found))
