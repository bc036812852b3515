"""`llm-perf serve` with a real engine (vLLM on the CPU), as a process of a test."""

import os
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
NEW_TOKENS = 8
MODEL = ("model=tiny", "runtime=vllm", "hardware=cpu", "runtime.prompt_tokens=32", f"runtime.num_new_tokens={NEW_TOKENS}")
ENGINE = ("runtime.engine.enforce_eager=true", "runtime.engine.max_model_len=256")


def serve_argv(vllm_python: Path, aiperf_python: Path, out: Path, *words: str) -> list[str]:
    """Return the command."""
    places = ("--generator-python", str(aiperf_python), "--out", str(out))
    return [str(vllm_python), "-m", "llm_perf_opt", "serve", *MODEL, *ENGINE, *places, *words]


def environment() -> dict[str, str]:
    """Return its environment."""
    return {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
