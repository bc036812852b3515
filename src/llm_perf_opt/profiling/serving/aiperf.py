"""AIPerf as load generator: its command line."""

from collections.abc import Mapping
from pathlib import Path

from llm_perf_opt.config.serving import Generator, LoadRequest
from llm_perf_opt.core.inside import make_folder
from llm_perf_opt.core.processes import RUN_MODULE

FILE = "profile_export.jsonl"
"""Its records, one request per line."""
_LONGEST_NAME = 255
"""Bytes in the name of a folder."""


def arguments(load: LoadRequest) -> list[str]:
    """Return the arguments of `aiperf`."""
    shape = ["--request-rate", f"{load.asked:g}", "--arrival-pattern", "poisson"]
    if load.kind == "concurrency":
        shape = ["--concurrency", str(int(load.asked))]
    return [
        "profile",
        *("--model", load.model, "--tokenizer", load.tokenizer, "--url", load.url),
        *("--endpoint-type", "completions", "--streaming", "--use-server-token-count"),
        *shape,
        *("--request-count", str(load.requests), "--warmup-request-count", str(load.warmup)),
        *(("--prompt-corpus", "random") if load.random_ids else ()),
        *("--isl", str(load.prompt_tokens), "--osl", str(load.new_tokens)),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
        *("--random-seed", str(load.seed), "--request-timeout-seconds", f"{load.request_s:g}"),
        *("--artifact-dir", str(load.folder), "--ui", "none"),
        *("--no-server-metrics", "--no-gpu-telemetry"),
    ]


def prepare(load: LoadRequest, folder: Path) -> Mapping[str, str]:
    """Return a cache of the Hugging Face hub in which the tokenizer's folder seems to be.

    AIPerf loads every tokenizer that is not in the cache twice: first for the cache, in a process that imports transformers for
    that alone, although a folder is never cached. This takes a quarter of its CPU time until the first request.
    """
    name = f"models--{load.tokenizer.replace('/', '--')}"
    if len(name.encode()) > _LONGEST_NAME:
        return {}
    make_folder(folder, folder / name / "snapshots" / "main")
    return {"HF_HUB_CACHE": str(folder)}


GENERATOR = Generator(
    name="aiperf",
    label="AIPerf",
    program="aiperf",
    launch=("-c", RUN_MODULE, "aiperf"),
    package="aiperf",
    folders=(".venv-aiperf",),
    install="python3 -m venv .venv-aiperf && .venv-aiperf/bin/pip install aiperf==0.13.0",
    arguments=arguments,
    file=FILE,
    prepare=prepare,
    variables={"HF_HUB_OFFLINE": None, "TRANSFORMERS_OFFLINE": None, "HF_HUB_DISABLE_TELEMETRY": "1"},
)
"""With HF_HUB_OFFLINE set, AIPerf 0.13 does not read a tokenizer from a local folder."""
