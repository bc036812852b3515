"""How fast the traces of several ranks are analyzed: generated jobs of known truth, each analysis in a process of its own.

    python benchmarks/rank_speed.py [--ranks 8 64] [--events 100000] [--peer PYTHON]

Prints CPU seconds (all processes, imports included), wall time, and memory: the most that the process held, plus three times as
much as the largest child, because up to three run at once. HolisticTraceAnalysis, where PYTHON has it installed, is asked for its
temporal breakdown, the overlap of communication and computation, and idle time by cause; its imports count, too.

Fails if a target is missed: memory ≤ 1 GB, CPU time linear in the number of ranks, and at least 15 times less than the peer's.
"""

import argparse
import compileall
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
PACKAGE = Path(__file__).parent.parent / "src"
MOST_MB, LINEAR, PEER_RATIO, MOST_CHILDREN = 1000, 1.3, 15, 3
EVENTS_PER_OPERATOR, OPERATORS = 3, 33
PEER = """
import os, sys, time
from hta.trace_analysis import TraceAnalysis
wall = time.perf_counter()
analysis = TraceAnalysis(trace_files=dict(enumerate(sys.argv[1:])), trace_dir=os.path.dirname(sys.argv[1]))
analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
analysis.get_idle_time_breakdown(ranks=list(range(len(sys.argv) - 1)), visualize=False)
print(sum(os.times()[:4]), time.perf_counter() - wall)
"""


def _measure(files: list[Path]) -> dict[str, Any]:
    """Analyze the ranks in this process."""
    from llm_perf_opt.workflows.analyze_ranks import analyze_rank_files

    wall = time.perf_counter()
    found = analyze_rank_files(files, "job").document
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {
        "cpu_s": sum(os.times()[:4]),
        "wall_s": time.perf_counter() - wall,
        "own_mb": _own_mb(),
        "child_mb": child,
        "collectives": len(found.collectives),
        "skew_ns": [line.start_skew_ns for line in found.collectives],
        "busy_ns": [line.busy_ns for line in found.ranks],
        "exposed_ns": [line.exposed_comm_ns for line in found.ranks],
    }


def _own_mb() -> float:
    """The most that this process held since it started; ru_maxrss includes what its parent held."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return float(line.split()[1]) / 1024


def _job(folder: Path, ranks: int, events: int) -> Any:
    from rank_traces import Job, write_job

    return write_job(folder, Job(ranks, events // (EVENTS_PER_OPERATOR * OPERATORS + 2), seed=ranks, operators=OPERATORS))


def _one(ranks: int, events: int, peer: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        truth = _job(Path(folder), ranks, events)
        words = [str(file) for file in truth.files]
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        done = subprocess.run(
            [sys.executable, __file__, "--measure", *words], capture_output=True, text=True, check=True, env=environment
        )
        found: dict[str, Any] = json.loads(done.stdout)
        assert found.pop("skew_ns") == [max(row["start"].values()) - min(row["start"].values()) for row in truth.collectives]
        assert found.pop("busy_ns") == truth.busy_ns
        assert found.pop("exposed_ns") == truth.exposed_ns
        if peer:
            told = subprocess.run([peer, "-c", PEER, *words], capture_output=True, text=True, check=False)
            if told.returncode:
                print(f"the peer failed: {told.stderr.strip().splitlines()[-1][:200]}", file=sys.stderr)
            else:
                found["peer_cpu_s"], found["peer_wall_s"] = (float(word) for word in told.stdout.split()[-2:])
        return {"ranks": ranks, "events": events, **found}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--measure", type=Path, nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(_measure(given.measure)))
        return 0
    sys.path.insert(0, str(TESTS))
    compileall.compile_dir(str(PACKAGE), quiet=1)  # as an installed package is, and the peer
    rows = [_one(ranks, given.events, given.peer if number == 0 else None) for number, ranks in enumerate(given.ranks)]
    missed = []
    for row in rows:
        row["memory_mb"] = row["own_mb"] + MOST_CHILDREN * row["child_mb"]
        print(json.dumps({key: round(value, 2) for key, value in row.items()}))
        if row["memory_mb"] > MOST_MB:
            missed.append(f"{row['ranks']} ranks: {row['memory_mb']:.0f} MB")
        if "peer_cpu_s" in row and row["peer_cpu_s"] < PEER_RATIO * row["cpu_s"]:
            missed.append(f"{row['ranks']} ranks: {row['peer_cpu_s'] / row['cpu_s']:.1f} times faster than the peer")
    growth = (rows[-1]["cpu_s"] / rows[0]["cpu_s"]) / (rows[-1]["ranks"] / rows[0]["ranks"])
    if growth > LINEAR:
        missed.append(f"CPU time grows {growth:.2f} times as fast as the number of ranks")
    print("\n".join(missed) or "all targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
