"""Try the property tests and the damaged files with new random choices; print the seed, and the line that reproduces a failure.

A failure that the same seed does not show again is printed and does not count: it has no reproduction.
"""

import argparse
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SELECTED = "hypothesis or fuzz"


def main() -> int:
    """Return 0 when nothing failed twice with one seed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="Repeat an earlier exploration.")
    parser.add_argument("--mutants", type=int, default=500, help="Damaged files per kind of file.")
    parser.add_argument("tests", nargs="*", help="Tests to run; all of them by default.")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    print(f"explore: seed {seed}", flush=True)
    first = _run(seed, given.mutants, given.tests)
    if first in (0, 5):  # 5: the tests that were named have nothing to explore
        return 0
    print(f"explore: running what failed once more with seed {seed}", flush=True)
    again = _run(seed, given.mutants, ["--last-failed", *given.tests])
    if again == 0:
        print("explore: it did not fail again with the same seed, so it is not counted as a failure. Please report it.")
        return 0
    words = ["python", "tests/explore.py", f"--seed={seed}", f"--mutants={given.mutants}", *given.tests]
    print(f"explore: failed twice. Reproduce with: {shlex.join(words)}")
    return 1


def _run(seed: int, mutants: int, more: list[str]) -> int:
    environment = {**os.environ, "LLM_PERF_EXPLORE": str(seed), "LLM_PERF_FUZZ": str(mutants)}
    workers = ["-n", "logical", "--maxprocesses=8", "--dist=loadgroup"]
    argv = [sys.executable, "-m", "pytest", "-q", *workers, "-m", SELECTED, f"--hypothesis-seed={seed}"]
    return subprocess.run([*argv, *more], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
