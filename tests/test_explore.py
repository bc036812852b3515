"""New random examples: they are random everywhere, and a failure counts if the same seed shows it again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import explore
from command import HANG_S

PROPERTY = """
from hypothesis import given, strategies as st

@given(st.integers(0, 10**9))
def test_drawn(number):
    print("drawn", number)
"""


@pytest.mark.slow
def test_the_seed_decides_the_examples(tmp_path: Path) -> None:
    """Where CI is set, Hypothesis loads a profile in which the seed has no effect."""
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_property.py").write_text(PROPERTY)

    def drawn(seed: int) -> set[str]:
        argv = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
        environment = {**os.environ, "CI": "true", "LLM_PERF_EXPLORE": "1", "PYTEST_XDIST_WORKER": "gw0"}
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return set(re.findall(r"drawn (\d+)", done.stdout))

    first, again, other = (drawn(seed) for seed in (1, 1, 2))
    assert first == again
    assert len(first & other) < len(first) / 2


@pytest.mark.parametrize(("outcomes", "code"), [([0], 0), ([5], 0), ([1, 0], 0), ([1, 1], 1), ([2, 2], 1)])
def test_a_failure_counts_if_the_same_seed_shows_it_again(
    outcomes: list[int], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[tuple[int, int, list[str]]] = []

    def run(seed: int, mutants: int, more: list[str]) -> int:
        runs.append((seed, mutants, more))
        return outcomes[len(runs) - 1]

    monkeypatch.setattr(explore, "_run", run)
    monkeypatch.setattr(sys, "argv", ["explore.py", "--mutants", "7", "tests/a file.py"])
    assert explore.main() == code
    seed = runs[0][0]
    assert runs == [(seed, 7, ["tests/a file.py"]), (seed, 7, ["--last-failed", "tests/a file.py"])][: len(outcomes)]
    printed = capsys.readouterr().out
    assert f"explore: seed {seed}" in printed
    line = f"Reproduce with: python tests/explore.py --seed={seed} --mutants=7 'tests/a file.py'"
    assert (line in printed) == (code == 1)
