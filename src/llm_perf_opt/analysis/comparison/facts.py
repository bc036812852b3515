"""What a run actually ran: hardware, model and workload as recorded, not as configured."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import CleanTimings, Missing

Kind = Literal["hardware", "model", "workload"]
KINDS: tuple[Kind, ...] = ("hardware", "model", "workload")
Facts = dict[Kind, dict[str, str]]
"""By kind, a value by dotted key. Unknown facts are left out and do not count as different."""

PROMPTS, WEIGHTS = "prompts", "weights"
"""Keys of the prompts' checksum and of the source of the weights; older runs may not have recorded them."""
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
"""Limits and modes, not momentary readings of clocks or temperature."""
_GPU_MEMORY = "gpu.memory_bytes"
_NOT_ARCHITECTURE = ("transformers_version", "dtype", "torch_dtype", "architectures")
"""Fields of a model's configuration that do not describe its shape."""


def is_unavailable(value: str) -> bool:
    """Return whether a fact of the machine is n/a. Its reason is text and is not compared."""
    return value.startswith("n/a")


def flatten(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Return nested settings by dotted key; a list is one value."""
    found: dict[str, str] = {}
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            found.update(flatten(value, f"{key}."))
        else:
            found[key] = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
    return found


def facts_of(run: RunAnalysis) -> Facts:
    """Return the facts of one run; without times, only those of the hardware."""
    if isinstance(run.timings, Missing):
        return {"hardware": _machine(run.env, on_gpu=True), "model": {}, "workload": {}}
    model, timings = run.timings.model, run.timings
    device = {"device": model.device.split(":")[0], "device_name": model.device_name, "threads": timings.threads}
    if timings.host is not None and not isinstance(timings.host.cpus, Missing):
        device["cpus"] = timings.host.cpus
    return {
        "hardware": {**flatten(device), **_machine(run.env, on_gpu=device["device"] == "cuda")},
        "model": flatten(_model(timings)),
        "workload": {**flatten(_workload(timings)), **_prompts(run)},
    }


def facts_of_side(name: str, runs: Sequence[RunAnalysis]) -> Facts:
    """Return the facts that the runs of a side record, or raise a ConfigError if two of them differ."""
    known: Facts = {kind: {} for kind in KINDS}
    source: dict[tuple[Kind, str], str] = {}
    for run in runs:
        for kind, values in facts_of(run).items():
            for key, value in values.items():
                if known[kind].setdefault(key, value) != value:
                    raise ConfigError(
                        f"The runs of {name} are not repeats of each other. They differ in their {kind}: {key} is "
                        f"{known[kind][key]} in {source[kind, key]} and {value} in {run.run}.",
                        "Name runs of the same configuration on the same hardware.",
                    )
                source.setdefault((kind, key), run.run)
    return known


def _machine(env: Mapping[str, Any], on_gpu: bool) -> dict[str, str]:
    """Return what limits the speed of the machine, without a card that the run did not use."""
    known = {key: value for key, value in flatten(env).items() if not is_unavailable(value)}
    found = {key: known[key] for key in (*_OF_HOST, *(_OF_GPU if on_gpu else ())) if key in known}
    if on_gpu and known.get(_GPU_MEMORY, "").isdecimal():
        # Drivers reserve some megabytes, and different versions different amounts.
        found["gpu.memory"] = f"{round(int(known[_GPU_MEMORY]) / 2**30)} GiB"
    return found


def _model(timings: CleanTimings) -> dict[str, Any]:
    model = timings.model
    return {
        "name": model.name,
        **({} if model.weights is None else {WEIGHTS: model.weights.kind}),
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
    """Return the prompts' checksum; their file name does not identify them."""
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
    """Return cautions if the runs were made on several machines or cards of one kind, which may differ in speed."""
    hosts = distinct(runs, "host")
    cards = distinct([run for run in runs if facts_of(run)["hardware"].get("device") == "cuda"], "gpu.uuid")
    advice = "Machines of one kind may differ in speed: run both sides on each of them, alternating."
    found = []
    if len(hosts) > 1:
        found.append(f"The runs were made on {len(hosts)} machines or containers, by host name: {', '.join(hosts)}. {advice}")
    if len(cards) > 1:
        found.append(f"The runs were made on {len(cards)} cards, by GPU id: {', '.join(cards)}. {advice}")
    return tuple(found)


def distinct(runs: Sequence[RunAnalysis], key: str) -> list[str]:
    """Return the distinct known values under this key of the runs' environments."""
    values = [flatten(run.env).get(key, "n/a") for run in runs]
    return list(dict.fromkeys(value for value in values if not is_unavailable(value)))
