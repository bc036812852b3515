"""Run a Python program under torch.profiler, in the interpreter that the program uses.

`python program_profiler.py FOLDER PRESET SETTINGS (SCRIPT | -m MODULE | -c CODE) [ARGUMENTS]` writes trace.json.gz and
program.json to FOLDER. The file is run by its path and imports nothing of this package, which that interpreter may not have.
"""

import gzip
import json
import os
import runpy
import sys
import time
from typing import Any, Dict, List  # noqa: UP035 - the interpreter may be older than that of llm-perf

_OPERATORS = (b'"cpu_op"', b'"Operator"')
"""Categories of operators in a trace, now and before torch 1.13."""
_PIECE_BYTES = 1 << 20


def main() -> None:
    """Run the program; write what was recorded even if it fails, and end as it does."""
    folder, preset, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    program = sys.argv[4:]
    _take_place(program)
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    process, begun = os.getpid(), time.monotonic()
    profiler = profile(activities=activities, **settings)
    profiler.start()
    try:
        _run(program)
    finally:
        if os.getpid() == process:  # not in a process that the program forked
            lasted = time.monotonic() - begun
            profiler.stop()
            worked = _write_trace(profiler, folder)
            facts = {"torch_version": torch.__version__, "cuda": cuda, "profiled_s": lasted, "preset": preset, "worked": worked}
            _write_facts(folder, {**facts, "settings": settings, **_totals(profiler, settings)})


def _take_place(program: List[str]) -> None:  # noqa: UP006
    """Set the arguments and the first folder of the search path as if the program had been started itself."""
    script = program[0] not in ("-m", "-c")
    sys.argv = program if script else [program[0], *program[2:]]
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = os.path.dirname(os.path.realpath(program[0])) if script else ""  # noqa: PTH120 - as Python does


def _run(program: List[str]) -> None:  # noqa: UP006
    if program[0] == "-m":
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program[0] == "-c":
        code = compile(program[1], "<string>", "exec")
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102 - the user's own program
    else:
        runpy.run_path(program[0], run_name="__main__")


def _totals(profiler: Any, settings: Dict[str, Any]) -> Dict[str, Any]:  # noqa: UP006
    """Return FLOPs and memory by operator, which a trace does not contain, or why torch cannot tell them."""
    if not (settings.get("with_flops") or settings.get("profile_memory")):
        return {}
    try:
        rows = profiler.key_averages()
    except UnicodeDecodeError as error:  # with stacks, torch loses the name of a function or module that is freed meanwhile
        return {"operators_why": "torch cannot read the names in its stacks (%s)" % error.reason}  # noqa: UP031 - for old Python
    return {"operators": _sizes(rows)}


def _sizes(rows: Any) -> Dict[str, Dict[str, int]]:  # noqa: UP006
    return {
        row.key: {
            "flops": int(row.flops),
            "cpu_memory_bytes": int(row.self_cpu_memory_usage),
            "device_memory_bytes": int(getattr(row, "self_device_memory_usage", 0)),
        }
        for row in rows
    }


def _write_trace(profiler: Any, folder: str) -> bool:
    """Write the trace, renamed when it is complete, and return whether it contains an operator."""
    plain, packed = os.path.join(folder, ".trace.json"), os.path.join(folder, ".trace.json.gz")  # noqa: PTH118
    profiler.export_chrome_trace(plain)
    worked = _pack(plain, packed)
    os.remove(plain)  # noqa: PTH107
    os.replace(packed, os.path.join(folder, "trace.json.gz"))  # noqa: PTH105, PTH118
    return worked


def _write_facts(folder: str, facts: Dict[str, Any]) -> None:  # noqa: UP006
    """Write what the trace does not contain; renamed when it is complete."""
    partial = os.path.join(folder, ".program.json")  # noqa: PTH118
    with open(partial, "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(facts, file)
    os.replace(partial, os.path.join(folder, "program.json"))  # noqa: PTH105, PTH118


def _pack(plain: str, packed: str) -> bool:
    """Compress a trace and return whether it contains an operator."""
    worked, end = False, b""
    with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:  # noqa: PTH123
        for piece in iter(lambda: source.read(_PIECE_BYTES), b""):
            seen = end + piece  # a word may be cut by the end of a piece
            worked = worked or any(mark in seen for mark in _OPERATORS)
            end = seen[-max(map(len, _OPERATORS)) :]
            target.write(piece)
    return worked


if __name__ == "__main__":
    main()
