"""AIPerf as load generator: its command line."""

from llm_perf_opt.config.serving import Generator, LoadRequest

FILE = "profile_export.jsonl"
"""Its records, one request per line."""


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


GENERATOR = Generator(
    name="aiperf",
    label="AIPerf",
    program="aiperf",
    launch=("-m", "aiperf"),
    package="aiperf",
    folders=(".venv-aiperf",),
    install="python3 -m venv .venv-aiperf && .venv-aiperf/bin/pip install aiperf==0.13.0",
    arguments=arguments,
    file=FILE,
    variables={"HF_HUB_OFFLINE": None, "TRANSFORMERS_OFFLINE": None, "HF_HUB_DISABLE_TELEMETRY": "1"},
)
"""With HF_HUB_OFFLINE set, AIPerf 0.13 does not read a tokenizer from a local folder."""
