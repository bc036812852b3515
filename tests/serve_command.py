"""`llm-perf serve` with a real engine (vLLM on the CPU), as a process of a test, and a server that somebody else has started."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
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


@contextmanager
def running_server(root: Path) -> Iterator[str]:
    """The address of a server that computes nothing; `root` is the folder of its model."""
    spec = spec_from_file_location("fault_server", Path(__file__).parent / "stand_ins" / "fault_server.py")
    assert spec is not None
    assert spec.loader is not None
    fault_server = module_from_spec(spec)
    spec.loader.exec_module(fault_server)
    server = fault_server.FaultServer(fault_server.options_of(["--root", str(root)]))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
