"""How fast a torch trace is read: generated traces of known truth, each reading in a process of its own, peers beside it.

    python benchmarks/trace_speed.py [--events 100000 1000000 3000000] [--peer PYTHON]

Cold: parse, write the tables, and the whole analysis with its findings. Warm: the same from what is kept. Both as wall time,
which is what one waits for, and as CPU seconds of all threads and child processes; after imports, which stand apart. Memory is
the most that the process held, plus the most that a child did. All are medians over processes, of six readings and of three by
the peer, in turn.

HolisticTraceAnalysis, where PYTHON (this one by default) has it installed (`pip install traceinsight`), is asked twice. For
*breakdowns*: loading, time and kernels broken down, idle time by cause, launch delays; what it tells soonest. For *the same*:
also which operators the kernels belong to, as the analysis here tells; that takes it so long that it is asked at 10⁵ events
only, unless --same-events says more.

Fails when a target is missed: at 10⁶ events cold ≤ 3 CPU-seconds and ≤ 1 GB, warm ≤ 0.2 s; growth linear; 15 times faster than
the peer's breakdowns at 10⁶ events, and 15 times faster than it for the same; each by the clock and in CPU seconds.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
COLD_S, COLD_MB, WARM_S, PEER_RATIO, TARGET_EVENTS = 3.0, 1000, 0.2, 15, 1_000_000
COLD_TRIES, WARM_TRIES, PEER_TRIES = 2, 5, 3
PEER = """
import os, resource, sys, time
from hta.trace_analysis import TraceAnalysis
begun, wall = os.times(), time.perf_counter()
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=os.path.dirname(sys.argv[1]))
analysis.get_temporal_breakdown(visualize=False)
analysis.get_gpu_kernel_breakdown(visualize=False)
analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
analysis.get_cuda_kernel_launch_stats(ranks=[0], visualize=False)
if sys.argv[2] == "same":
    analysis.get_aten_op_kernels_and_delay(ranks=[0])
ended = os.times()
print(sum(ended[:4]) - sum(begun[:4]), time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def _cpu() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _most_mb() -> float:
    return sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024


def measure(path: Path) -> dict[str, Any]:
    """Analyse one trace in this process."""
    import duckdb  # noqa: F401 - imports are not what is measured here

    import llm_perf_opt.analysis.trace_analysis  # noqa: F401
    from llm_perf_opt.traces.torch_json.trace import read_torch_trace  # noqa: F401
    from llm_perf_opt.traces.trace_mark import fresh_tables
    from llm_perf_opt.workflows.analyze_trace import analyze_source

    imported = _cpu()
    wall = time.perf_counter()
    parsed = fresh_tables(path) is None
    found = analyze_source(path).document
    return {
        "imports_s": imported,
        "cpu_s": _cpu() - imported,
        "wall_s": time.perf_counter() - wall,
        "rss_mb": _most_mb(),
        "parsed": parsed,
        "kernels": found.gpu.kernels,
        "kernel_ns": found.gpu.kernel_ns,
        "idle_ns": found.gpu.idle_ns,
    }


def _child(path: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--measure", str(path)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _peer(python: str, path: Path, asked: str) -> dict[str, float] | None:
    if subprocess.run([python, "-c", "import hta"], capture_output=True, check=False).returncode:
        return None
    done = subprocess.run([python, "-c", PEER, str(path), asked], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"the peer failed: {done.stderr.strip().splitlines()[-1][:200]}", file=sys.stderr)
        return None
    cpu, wall, rss = done.stdout.split()[-3:]
    return {"cpu_s": float(cpu), "wall_s": float(wall), "rss_mb": float(rss) / 1024}


def _one(events: int, peer: str | None, same: bool) -> dict[str, Any]:
    from synthetic_traces import sized, write_trace

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # of the children, too
        path = Path(folder) / "trace.json"
        truth = write_trace(path, sized(events))
        time.sleep(0.2)  # a file so young is fingerprinted anew each time
        asked = ["breakdowns", *(["same"] if same else [])] if peer else []
        colds: list[dict[str, Any]] = []
        beside: dict[str, list[dict[str, Any]]] = {kind: [] for kind in asked}
        for _ in range(PEER_TRIES):  # in turn: whatever the machine does meanwhile, it does to both
            colds += [_cold(path) for _ in range(COLD_TRIES)]
            for kind in asked:
                beside[kind] += [found] if peer and (found := _peer(peer, path, kind)) else []
        warm = [_child(path) for _ in range(WARM_TRIES)]
        for found in (*colds, *warm):
            said = (found["kernels"], found["kernel_ns"], found["idle_ns"])
            assert said == (truth.kernels, truth.kernel_ns, truth.idle_ns), "the trace was not read exactly"
        assert all(found["parsed"] for found in colds)
        assert not any(found["parsed"] for found in warm)
        size = path.stat().st_size / 1e6
        peers = {kind: _median(runs) for kind, runs in beside.items() if runs}
        return {"events": truth.events, "megabytes": size, "cold": _median(colds), "warm": _median(warm), "peers": peers}


def _is_about(events: int, target: int) -> bool:
    return abs(events - target) <= target / 100


def _cold(path: Path) -> dict[str, Any]:
    from llm_perf_opt.traces.trace_mark import tables_of

    for tables in tables_of(path):
        shutil.rmtree(tables)
    return _child(path)


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run whose wall time is the median."""
    return sorted(runs, key=lambda found: found["wall_s"])[len(runs) // 2]


def _print(rows: list[dict[str, Any]]) -> None:
    print("| events | file | cold, wall | cold, CPU | cold, memory | warm, wall | imports, CPU |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        cold, warm = row["cold"], row["warm"]
        print(
            f"| {row['events']:,} | {row['megabytes']:.0f} MB | {cold['wall_s']:.2f} s | {cold['cpu_s']:.2f} s "
            f"| {cold['rss_mb']:.0f} MB | {warm['wall_s']:.2f} s | {warm['imports_s']:.2f} s |"
        )
    print("\n| events | HolisticTraceAnalysis | wall | CPU | memory | ratio, wall | ratio, CPU |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for row in rows:
        for kind, peer in row["peers"].items():
            ratios = " | ".join(f"× {_ratio(row, kind, of):.1f}" for of in ("wall_s", "cpu_s"))
            figures = f"{peer['wall_s']:.1f} s | {peer['cpu_s']:.1f} s | {peer['rss_mb']:,.0f} MB"
            print(f"| {row['events']:,} | {kind} | {figures} | {ratios} |")


def _ratio(row: dict[str, Any], kind: str, of: str) -> float:
    return float(row["peers"][kind][of] / row["cold"][of])


def _verdicts(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    found = []
    for row in rows:
        cold, warm = row["cold"], row["warm"]
        if _is_about(row["events"], TARGET_EVENTS):
            found.append((f"cold ≤ {COLD_S} CPU-s", cold["cpu_s"] <= COLD_S))
            found.append((f"cold ≤ {COLD_MB} MB", cold["rss_mb"] <= COLD_MB))
            found.append((f"warm ≤ {WARM_S} s", max(warm["cpu_s"], warm["wall_s"]) <= WARM_S))
        for kind in row["peers"]:
            if kind == "same" or _is_about(row["events"], TARGET_EVENTS):
                for of, words in (("wall_s", "by the clock"), ("cpu_s", "in CPU-s")):
                    what = f"≥ {PEER_RATIO} times faster than the peer ({kind}, {row['events']:,} events) {words}"
                    found.append((what, _ratio(row, kind, of) >= PEER_RATIO))
    if len(rows) > 1:
        rates = [row["cold"]["cpu_s"] / row["events"] for row in rows]
        found.append(
            (
                "growth is linear: the largest costs at most 1.5 times as much per event as the one before",
                rates[-1] <= 1.5 * rates[-2],
            )
        )
    return found


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[100_000, 1_000_000, 3_000_000])
    parser.add_argument("--peer", default=sys.executable, help="a Python that has traceinsight installed")
    parser.add_argument("--peer-events", type=int, default=TARGET_EVENTS, help="the largest trace that the peer is given")
    parser.add_argument("--same-events", type=int, default=100_000, help="the largest trace for which it is asked the same")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    sys.path.insert(0, str(TESTS))
    rows = [
        _one(events, arguments.peer if events <= arguments.peer_events else None, events <= arguments.same_events)
        for events in sorted(arguments.events)
    ]
    _print(rows)
    verdicts = _verdicts(rows)
    for what, holds in verdicts:
        print(f"{'holds ' if holds else 'MISSED'}  {what}")
    sys.exit(0 if all(holds for _, holds in verdicts) else 1)


if __name__ == "__main__":
    main()
