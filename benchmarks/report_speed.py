"""How long the report of a run with a large trace takes, and how large its page is.

    python benchmarks/report_speed.py [--events 1000000]

A run folder is made with a generated torch trace. The first report parses the trace and writes its tables; the second is made
from the tables, as every later one is. CPU seconds of the whole command, imports included, so that a busy machine
does not matter; beside them the time of reading the tables alone, for the ratio. Fails when a target is missed:
from tables ≤ 5 s, page ≤ 8 MB.
"""

import argparse
import gzip
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
MOST_S, MOST_MB = 5.0, 8.0
TABLES = """
import sys
from pathlib import Path
from llm_perf_opt.analysis.trace.stages import stage_columns
from llm_perf_opt.traces.trace_cache import cached_trace
from llm_perf_opt.core.run_folder import RunFolder
folder = RunFolder.open(Path(sys.argv[1]))
assert not cached_trace(folder.torch_trace_file, folder.tables("torch"), columns=stage_columns).parsed
"""


def make_run(path: Path, events: int) -> int:
    """A run folder whose torch pass left a trace of about as many events."""
    from builders import clean_timings, manifest, torch_pass
    from llm_perf_opt.core.run_folder import RunFolder
    from synthetic_traces import sized, write_trace

    folder = RunFolder.create(path)
    folder.write_manifest(manifest())
    folder.write_record(folder.clean_file, clean_timings())
    folder.write_record(folder.torch_file, torch_pass())
    plain = path / "trace.json"
    truth = write_trace(plain, sized(events))
    folder.torch_trace_file.write_bytes(gzip.compress(plain.read_bytes(), 1))
    plain.unlink()
    time.sleep(0.2)  # a file so young is fingerprinted anew each time
    return truth.events


def cpu_seconds(argv: list[str]) -> float:
    """Of a command and all it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "LLM_PERF_CHROMIUM": "none"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        events = make_run(run, arguments.events)
        report = [sys.executable, "-m", "llm_perf_opt", "report", str(run)]
        cold = cpu_seconds(report)
        warm = min(cpu_seconds(report) for _ in range(3))
        tables = cpu_seconds([sys.executable, "-c", TABLES, str(run)])
        megabytes = (run / "report.html").stat().st_size / 1e6
    print("| events | first report, CPU | from tables, CPU | reading the tables alone | ratio | page |")
    print("|---:|---:|---:|---:|---:|---:|")
    print(f"| {events:,} | {cold:.1f} s | {warm:.1f} s | {tables:.1f} s | × {warm / tables:.1f} | {megabytes:.1f} MB |")
    verdicts = [(f"from tables ≤ {MOST_S:g} s", warm <= MOST_S), (f"page ≤ {MOST_MB:g} MB", megabytes <= MOST_MB)]
    for what, holds in verdicts:
        print(f"{'holds ' if holds else 'MISSED'}  {what}")
    sys.exit(0 if all(holds for _, holds in verdicts) else 1)


if __name__ == "__main__":
    main()
