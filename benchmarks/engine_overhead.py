"""Whether `llm-perf run runtime=vllm` measures the engine that users run: its unprofiled TPOT against a bare script.

    python benchmarks/engine_overhead.py --model llama3_8b|qwen2_5_1_5b|tiny [--rounds 1] [OVERRIDES…]

The bare script opens `vllm.LLM` with its defaults and calls `generate` on new random prompts, for one token and for all. Its TPOT
is the difference of the two medians over the further tokens. Each side has a process of its own. Weights are random. Prints JSON
and fails if the ratio of the TPOTs is beyond the limit: 3 % on a GPU, 25 % on a CPU, whose cores the engine's processes share.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMITS = {"cuda": 0.03, "cpu": 0.25}
WARMUP = 10
REPEATS = 30
"""Of each length of request. Opening the engine takes a minute, a request a tenth of a second."""
BARE = "@bare "
"""Marks the line with the figures of the bare script among those of the engine."""
OWN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Removed from the environment: users do not set it, and the engine core has a process of its own by default."""


def bare(asked: dict[str, Any]) -> dict[str, Any]:
    """Time `LLM.generate`, as one would by hand."""
    import vllm
    from vllm import LLM, SamplingParams

    begun = time.perf_counter()
    engine = LLM(**asked["arguments"])
    opened = time.perf_counter() - begun
    chance = random.Random(0)

    def request(tokens: int) -> float:
        prompts: Any = [
            {"prompt_token_ids": [chance.randrange(asked["vocabulary"]) for _ in range(asked["prompt_tokens"])]}
            for _ in range(asked["batch"])
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        done = engine.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - started
        if any(len(each.outputs[0].token_ids) != tokens for each in done):
            raise SystemExit("the engine returned another number of tokens than requested")
        return took

    for _ in range(WARMUP):
        request(asked["new_tokens"])
        request(1)
    pairs = [(request(1), request(asked["new_tokens"])) for _ in range(REPEATS)]
    first, whole = (statistics.median(side) for side in zip(*pairs, strict=True))
    each = [(later - earlier) / (asked["new_tokens"] - 1) * 1e3 for earlier, later in pairs]
    config = engine.llm_engine.vllm_config
    return {
        "vllm": vllm.__version__,
        "tpot_ms": (whole - first) / (asked["new_tokens"] - 1) * 1e3,
        "tpot_quartiles_ms": statistics.quantiles(each, n=4),
        "ttft_ms": first * 1e3,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "core_in_own_process": not hasattr(engine.llm_engine.engine_core, "engine_core"),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_model_len": config.model_config.max_model_len,
        "start_s": opened,
    }


def by_llm_perf(words: list[str], folder: Path) -> dict[str, Any]:
    """Run the unprofiled pass alone and return its figures."""
    alone = ["profiling=none", "profiling.ceilings=false", "profiling.nvml.enable=false"]
    _child([sys.executable, "-m", "llm_perf_opt", "run", "--json", "-q", *words, *alone, f"hydra.run.dir={folder}"])
    timings = json.loads((folder / "raw/clean/timings.json").read_text())
    repeats = timings["iterations"]
    each = [sum(one["steps_ns"]) / len(one["steps_ns"]) / 1e6 for one in repeats]
    return {
        "tpot_ms": statistics.median(each),
        "tpot_quartiles_ms": statistics.quantiles(each, n=4),
        "ttft_ms": statistics.median(one["prefill_ns"] for one in repeats) / 1e6,
        "repeats": len(repeats),
        "stopped": timings["stopped"],
        "inseparable": timings["runtime"]["inseparable"],
        "settings": {one["name"]: one["value"] for one in timings["runtime"]["settings"]},
        "start_s": timings["load_s"],
    }


def _child(argv: list[str], given: str = "") -> str:
    environment = {name: value for name, value in os.environ.items() if name != OWN_PROCESS}
    done = subprocess.run(argv, input=given, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv[:6])} … failed:\n{done.stderr[-4000:]}\n{done.stdout[-4000:]}")
    return done.stdout


def asked_of(words: list[str], folder: Path) -> dict[str, Any]:
    """Return what the bare script needs: the model as a folder without weights, and the shape of the request."""
    from llm_perf_opt.config.composition import compose
    from llm_perf_opt.runners import models
    from llm_perf_opt.runners.engines import write_model_folder

    config = compose(["runtime=vllm", *words]).config
    architecture, device = models.load_config(config.model), models.choose_device(config.hardware)
    arguments: dict[str, Any] = {
        "model": str(write_model_folder(architecture, folder)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(models.choose_dtype(config.model.dtype, device)).removeprefix("torch."),
        **config.runtime.engine,
    }
    if device.type == "cpu":  # the default takes most of the machine's memory
        arguments |= {"kv_cache_memory_bytes": 256 * 2**20, "max_model_len": -1}
    return {
        "arguments": arguments,
        "device": device.type,
        "batch": config.runtime.batch_size,
        "prompt_tokens": config.runtime.prompt_tokens,
        "new_tokens": config.runtime.num_new_tokens,
        "vocabulary": int(architecture.get_text_config(decoder=True).vocab_size),
    }


def compared(words: list[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Return both sides, alternating, and the ratio of their TPOTs."""
    asked = asked_of(words, folder / "model")
    ours, theirs = [], []
    for number in range(rounds):
        out = _child([sys.executable, str(Path(__file__).resolve()), "--bare"], json.dumps(asked))
        theirs.append(json.loads(next(line for line in out.splitlines() if line.startswith(BARE)).removeprefix(BARE)))
        ours.append(by_llm_perf(["runtime=vllm", *words], folder / f"run{number}"))
    tpots = [statistics.median(each["tpot_ms"] for each in side) for side in (ours, theirs)]
    return {
        "words": words,
        "device": asked["device"],
        "llm_perf_tpot_ms": tpots[0],
        "bare_tpot_ms": tpots[1],
        "ratio": tpots[0] / tpots[1],
        "ttft_ratio": statistics.median(each["ttft_ms"] for each in ours) / statistics.median(each["ttft_ms"] for each in theirs),
        "limit": LIMITS[asked["device"]],
        "llm_perf": ours,
        "bare": theirs,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.bare:
        print(BARE + json.dumps(bare(json.load(sys.stdin))), flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="engine-overhead-") as folder:
        found = compared([f"model={arguments.model}", *arguments.overrides], arguments.rounds, Path(folder))
    print(json.dumps(found, indent=1))
    sys.exit(abs(found["ratio"] - 1) > found["limit"])


if __name__ == "__main__":
    main()
