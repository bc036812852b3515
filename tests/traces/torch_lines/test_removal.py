"""The fast reader saves time and changes nothing: without it, a trace has the same rows and the same problems.

To remove it, delete its folder, its line in `FAST_READERS` and this folder of tests.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llm_perf_opt
from command import HANG_S
from llm_perf_opt.traces.torch_json import array_reader
from llm_perf_opt.traces.torch_json.columns import PartialRead
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from llm_perf_opt.traces.torch_lines.lines import TorchLines
from synthetic_traces import Recipe, write_trace
from traces_equal import said

TESTS = Path(__file__).parents[2]
PACKAGE = Path(llm_perf_opt.__file__).parent
RECORDED = [
    TESTS / "fixtures" / name
    for name in ("h200/torch_trace.json.gz", "ranks/nccl_excerpt.json.gz", "ranks/two_ranks_rank0.json.gz")
]
DAMAGE = [(b'"ts": ', b'"ts"; '), (b'"name": "', b'"name": "a "quoted" '), (b"\n  },", b"\n  ];"), (b'"dur": ', b'"dur": -')]
PRINT_FINGERPRINTS = """
import hashlib, sys
from pathlib import Path
import llm_perf_opt
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from traces_equal import said
print(Path(llm_perf_opt.__file__).parent)
for path in sys.argv[1:]:
    print(hashlib.sha256(repr(said(read_torch_trace(Path(path)))).encode()).hexdigest())
"""


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """Recorded traces, and generated ones in both layouts of torch: whole, damaged and truncated."""
    found = list(RECORDED)
    for newer in (False, True):
        whole = tmp_path / f"whole_{newer}.json"
        write_trace(whole, Recipe(steps=6, kernels_per_step=12, copies=True, line_a_value=newer))
        content = whole.read_bytes()
        variants = [content[: 2 * len(content) // 3]]
        for good, bad in DAMAGE:
            middle = content.index(good, len(content) // 2)
            variants.append(content[:middle] + bad + content[middle + len(good) :])
        found.append(whole)
        for number, variant in enumerate(variants):
            found.append(tmp_path / f"damaged_{newer}_{number}.json")
            found[-1].write_bytes(variant)
    return found


@pytest.mark.slow
def test_without_the_fast_reader_rows_and_problems_are_the_same(traces: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read, events = TorchLines.read, 0

    def count(lines: TorchLines, array: bytes | memoryview) -> PartialRead | None:
        nonlocal events
        found = read(lines, array)
        events += found.events if found else 0
        return found

    monkeypatch.setattr(TorchLines, "read", count)
    fast = [said(read_torch_trace(path)) for path in traces]
    read_fast = events
    monkeypatch.setattr(array_reader, "FAST_READERS", [])
    assert [said(read_torch_trace(path)) for path in traces] == fast
    assert events == read_fast > 1000


@pytest.mark.slow
def test_to_remove_it_delete_a_folder_and_one_line(traces: list[Path], tmp_path: Path) -> None:
    package = tmp_path / "src" / "llm_perf_opt"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "torch_lines"))
    naming = [path for path in package.rglob("*.py") if "torch_lines" in path.read_text()]
    assert naming == [package / "traces" / "torch_json" / "array_reader.py"]
    lines = naming[0].read_text().splitlines(keepends=True)
    kept = [line for line in lines if "torch_lines" not in line]
    assert len(lines) - len(kept) == 1
    naming[0].write_text("".join(kept))

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), str(TESTS)])}
    argv = [sys.executable, "-c", PRINT_FINGERPRINTS, *map(str, traces)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    used, *fingerprints = done.stdout.split()
    assert Path(used) == package
    assert fingerprints == [hashlib.sha256(repr(said(read_torch_trace(path))).encode()).hexdigest() for path in traces]
