"""Runs of `llm-perf` in the environment of an engine, and a small model whose tokens no rounding decides.

As a program: opens each request of its argument, runs it twice and prints what it found as JSON. One process for several
requests, because importing an engine takes longer than running one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MODEL = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SHAPE = ["runtime.prompt_tokens=12", "runtime.num_new_tokens=6", "model.dtype=fp32", "hardware=cpu"]
SHORT = ["runtime.max_warmup=4", "runtime.min_repeats=6", "runtime.max_repeats=6", "profiling.ceilings=false"]
QUIET = ["profiling.nvml.enable=false"]


def llm_perf(python: Path | str, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, run by an interpreter with this checkout's code."""
    from command import HANG_S

    root = Path(__file__).parents[1] / "src"
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **variables}
    argv = [str(python), "-m", "llm_perf_opt", *words]
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)


def run(python: Path | str, folder: Path, *words: str, **variables: str) -> Path:
    """A complete run."""
    words = (*words, *SHORT, *QUIET, f"hydra.run.dir={folder}")
    done = llm_perf(python, "run", "--json", "-q", *words, cwd=folder.parent, **variables)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "complete"
    return folder


def timings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "raw/clean/timings.json").read_text())
    return found


def save_model(folder: Path, model_type: str = "qwen2", **fields: Any) -> Path:
    """A Hugging Face folder whose weights are far enough apart that the order of additions decides no token."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**MODEL, **fields}), dtype=torch.float32)
    for tensor in made.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    made.save_pretrained(folder)
    return folder


def requests(python: Path | str, *steps: list[str] | dict[str, Any], **variables: str) -> list[dict[str, Any]]:
    """What an engine does with each configuration: its facts, tokens and times, or its error. One process for all.

    A step is the words of a configuration, `{"words": …, "traces": FOLDER}` for one whose third request is recorded by the
    engine's own profiler, `{"command": WORDS, "cwd": FOLDER}` for a command of `llm-perf` whose passes run in that process, or
    `{"code": …, "given": …}` for code that leaves a `found`.
    """
    from command import HANG_S

    root = Path(__file__).parents[1] / "src"
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **variables}
    argv = [str(python), __file__, json.dumps(steps)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=HANG_S * len(steps), check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def request(words: list[str], traces: str = "") -> dict[str, Any]:
    """What this process does with a configuration."""
    import msgspec

    from llm_perf_opt.config.composition import compose
    from llm_perf_opt.core.errors import LlmPerfError
    from llm_perf_opt.runners.measure.annotations import unmarked
    from llm_perf_opt.runners.session import open_session

    try:
        config = compose(words).config
        session = open_session(config, Path(traces) if traces else None, profiled=bool(traces))
        meter = session.meter(config.runtime.num_new_tokens, unmarked)
        iterations = [meter.iterate() for _ in range(2)]
    except LlmPerfError as error:
        return {"error": f"{type(error).__name__}: {error.fact}", "remedy": error.remedy}
    runner = session.runner
    values = {"tokens": meter.tokens(), "iterations": iterations, "runtime": runner.runtime, "model": runner.facts}
    values |= {name: getattr(meter, name, None) for name in ("inseparable", "unstepped", "held_back")}
    if traces:
        profiler: Any = getattr(runner, "profiler", None)
        profiler.start()
        meter.iterate()
        values["trace"] = str(profiler.stop())
    found: dict[str, Any] = msgspec.to_builtins({**values, "load_s": session.load_s, "prompts": session.prompts.lengths})
    return found


def step(wanted: list[str] | dict[str, Any]) -> dict[str, Any]:
    """What this process does with a step of `requests`."""
    if isinstance(wanted, list):
        return request(wanted)
    if "words" in wanted:
        return request(**wanted)
    if "command" in wanted:
        from command import llm_perf as run_here

        done = run_here(*wanted["command"], cwd=Path(wanted["cwd"]))
        return {"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    names = {"given": wanted.get("given")}
    exec(wanted["code"], names)
    return {"found": names["found"]}


if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # the folder of this file: its modules shadow none
    print(json.dumps([step(wanted) for wanted in json.loads(sys.argv[1])]))
