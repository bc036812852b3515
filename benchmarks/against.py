"""Compare the CPU time of commands with that of another revision of this repository, in turn in one run.

    python benchmarks/against.py REVISION [--rounds 5] [--events 1000000]

Both revisions get the same input: a generated torch trace and a run folder with that trace. Each command runs in a process of
its own, and the revisions alternate, so that a busy machine affects both. Prints the median CPU seconds of each, imports and
child processes included, and their ratio. Fails if a command takes more than 1.1 times the CPU time that it took before.
"""

import argparse
import io
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from report_speed import TESTS, make_run

ROOT = Path(__file__).parent.parent
MOST = 1.1
"""Above this ratio a command has become slower."""


def commands(folder: Path) -> dict[str, list[str]]:
    """Return what is run, by the name of its row."""
    trace, run = str(folder / "trace.json"), str(folder / "run")
    return {
        "--version": ["--version"],
        "cost model=llama3_8b": ["cost", "model=llama3_8b"],
        "run, tiny, unprofiled": ["run", "-q", "profiling=none", "runtime.max_repeats=10", f"hydra.run.dir={folder / 'new'}"],
        "analyze, cold": ["analyze", trace],
        "analyze, warm": ["analyze", trace],
        "report, cold": ["report", run],
        "report, warm": ["report", run],
        "sql on a run": ["sql", run, "select stage, sum(dur_ns) from kernels group by all"],
    }


def cpu_seconds(source: Path, words: list[str], cache: Path) -> float:
    """Return the CPU time of one command, run with the code at `source`."""
    variables = {"PYTHONPATH": str(source), "XDG_CACHE_HOME": str(cache), "LLM_PERF_CHROMIUM": "none", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = [sys.executable, "-m", "llm_perf_opt", *words]
    subprocess.run(argv, check=True, capture_output=True, env={**os.environ, **variables})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def one_round(source: Path, folder: Path) -> dict[str, float]:
    """Run every command once. Cold: no tables of the trace are there yet."""
    cache = folder / "cache"
    for leftover in (cache, folder / "run" / "tables", folder / "new"):
        shutil.rmtree(leftover, ignore_errors=True)
    return {name: cpu_seconds(source, words, cache) for name, words in commands(folder).items()}


def main() -> None:
    """Parse the command line, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--events", type=int, default=1_000_000, help="in the trace")
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from synthetic_traces import sized, write_trace

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        packed = subprocess.run(["git", "archive", arguments.revision, "src"], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(folder / "before", filter="data")
        write_trace(folder / "trace.json", sized(arguments.events))
        make_run(folder / "run", arguments.events)
        before, after = folder / "before" / "src", ROOT / "src"
        one_round(after, folder)  # compiles the modules
        rounds = [(one_round(before, folder), one_round(after, folder)) for _ in range(arguments.rounds)]
    print(f"| command | {arguments.revision}, CPU-s | now, CPU-s | ratio |\n|---|---:|---:|---:|")
    slower = []
    for name in rounds[0][0]:
        then, now = (statistics.median(pair[side][name] for pair in rounds) for side in (0, 1))
        print(f"| {name} | {then:.2f} | {now:.2f} | {now / then:.2f} |")
        slower += [name] if now > MOST * then else []
    for name in slower:
        print(f"MISSED  {name}: more than {MOST:g} times the CPU time of {arguments.revision}")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
