"""A program under torch.profiler behaves as it does alone, and leaves its record."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from command import HANG_S
from llm_perf_opt.profiling.python_program import PythonProgram, profiled_argv
from llm_perf_opt.runners.measure import program_profiler
from llm_perf_opt.runners.measure.torch_profiler import PRESETS

SCRIPT = """
import sys
from pathlib import Path
import helper
import torch
if __name__ == "__main__":
    torch.mm(torch.ones(4, 8), torch.ones(8, 16))
    print(sys.argv[1:], Path(sys.path[0]).name, helper.NAME, __file__)
    sys.exit(3)
"""


@pytest.mark.slow
def test_a_script_keeps_its_arguments_path_and_exit_code(tmp_path: Path) -> None:
    place, out = tmp_path / "place", tmp_path / "out"
    place.mkdir()
    out.mkdir()
    (place / "script.py").write_text(SCRIPT)
    (place / "helper.py").write_text("NAME = 'helper'")
    argv = profiled_argv(PythonProgram((sys.executable,), ("place/script.py", "-m", "a b")), out, "full")
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[-1] == "['-m', 'a b'] place helper place/script.py"
    found = json.loads((out / "program.json").read_text())
    assert (found["preset"], found["settings"]) == ("full", PRESETS["full"])
    assert found["operators"]["aten::mm"]["flops"] == 2 * 4 * 8 * 16
    assert found["profiled_s"] > 0
    assert found["worked"]
    events = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}
    assert sorted(path.name for path in out.iterdir()) == ["program.json", "trace.json.gz"]


@pytest.mark.parametrize(
    ("content", "worked"),
    [(b"", False), (b'"cat": "user_annotation"', False), (b'"cat": "cpu_op", "ph": "X"', True), (b'"cat": "Operator"', True)],
)
@pytest.mark.parametrize("piece_bytes", [1 << 20, 8, 11])
def test_a_trace_is_packed_and_searched_for_an_operator(
    content: bytes, worked: bool, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_profiler, "_PIECE_BYTES", piece_bytes)
    (tmp_path / "plain").write_bytes(content)
    assert program_profiler._pack(str(tmp_path / "plain"), str(tmp_path / "packed")) is worked
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == content
