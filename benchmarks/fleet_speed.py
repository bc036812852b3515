"""How long `llm-perf runs` takes over many runs: first without an index, then with one. It writes the runs itself.

    python benchmarks/fleet_speed.py [RUNS]

Prints the CPU and wall time of each command, each in a process of its own, and the size of index and page. The runs are small
(ten repeats, no traces): 20 series of 100 commits, and as many runs of each as are needed.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fleets import Made, made_run

COMMITS = 100
MODELS = ("small", "medium", "large", "huge", "tiny")
BATCHES = (1, 8)
HARDWARE = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")


def write_runs(folder: Path, number: int) -> None:
    """Write runs in the order in which a continuous benchmark makes them: all series of a commit, then the next commit."""
    series = [(model, batch, device) for model in MODELS for batch in BATCHES for device in HARDWARE]
    each = max(1, number // (COMMITS * len(series)))
    for place in range(number):
        model, batch, device = series[place // each % len(series)]
        commit = min(COMMITS - 1, place // (each * len(series)))
        slower = 1.05 if commit == COMMITS - 1 and model == "huge" else 1.0
        made = Made(
            minute=place, commit=f"{commit:040x}", tpot_ms=slower * (8 + batch / 4 + place % 7 / 100), model=model, batch=batch,
            hardware=device,
        )  # fmt: skip
        made_run(folder / "nightly" / model / f"{place:06d}", made)


def timed(*words: str, cache: Path) -> tuple[float, float]:
    """Return the CPU and wall seconds of a command."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPYCACHEPREFIX": str(cache / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "llm_perf_opt", "runs", *words],
        check=True, stdout=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    """Print the times."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as scratch:
        runs, cache = Path(scratch) / "runs", Path(scratch) / "cache"
        write_runs(runs, number)
        print(f"{number:,} runs")
        for name, words in (
            ("list, filtered, no index", ("--hardware", "h200")),
            ("list, filtered, with index", ("--hardware", "h200")),
            ("--best, with index", ("--best",)),
            ("--trend --json, with index", ("--trend", "--json")),
            ("--regressions, first comparison", ("--regressions",)),
            ("--regressions, with index", ("--regressions",)),
            ("--html, with index", ("--html",)),
            ("list, not filtered (no index used)", ()),
        ):
            cpu, wall = timed(str(runs), *words, cache=cache)
            print(f"{name:36} {cpu:7.2f} s CPU {wall:7.2f} s")
        for file in (*cache.rglob("*.msgpack"), runs / "index.html"):
            print(f"{file.name[-12:]:36} {file.stat().st_size / 1e6:7.1f} MB")


if __name__ == "__main__":
    main()
