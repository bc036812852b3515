"""How often `llm-perf compare` calls two sides of the same thing different, and how often it finds a slowdown.

    python benchmarks/false_verdicts.py [--pairs 300] [--deviation 2.4] [--seed 7] [--against REVISION]

Pairs are drawn from machines with known noise (tests/machine_noise.py says exactly how) and compared as on an accelerator. With
--against the same pairs are also compared by the code of another revision of this repository. A second table sets what is found
by five runs of ten repeats a side next to what the best possible test would find (verdict_limits.py). Fails when a kind of noise
gets more than 5 % of false verdicts, or when five runs a side find less than 90 % of slowdowns of 5 % though a test could.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
MOST_FALSE, LEAST_FOUND = 0.05, 0.90
SLOWDOWNS = (0.05, 0.10)
GATE = 0.03
"""Tolerance of the gate that is held against the same pairs."""


def cases(deviation: float) -> "dict[str, tuple[str, object]]":
    """What is drawn, by the name of its row: the kind of noise and the plan."""
    from machine_noise import KINDS, MOVING, STATIONARY, Plan

    one, three = Plan(deviation=deviation), Plan(runs=3, repeats=10, deviation=deviation)
    blocks = Plan(runs=3, repeats=10, deviation=deviation, in_turn=False)
    far = Plan(deviation=deviation, gap=one.repeats)
    rows: dict[str, tuple[str, object]] = {f"1 × 30, {kind}": (kind, one) for kind in KINDS}
    rows |= {f"1 × 30, {kind}, a run's length between the runs": (kind, far) for kind in ("one switch", "switches")}
    for inside in (0, 1, 2, 3, 5, 10):
        place = f"one switch, {inside} repeats before the end of base" if inside else "one switch, between the runs"
        rows[f"1 × 30, {place}"] = "one switch", Plan(deviation=deviation, switch_at=one.repeats - inside)
    rows |= {f"3 × 10 in turn, {kind}": (kind, three) for kind in KINDS}
    rows |= {f"3 × 10, base first, {kind}": (kind, blocks) for kind in MOVING}
    for kind in KINDS:
        for slowdown in (0.0, *SLOWDOWNS):
            rows[several(5, kind, slowdown)] = kind, Plan(runs=5, repeats=10, deviation=deviation, slowdown=slowdown)
        rows[several(3, kind, SLOWDOWNS[0])] = kind, Plan(runs=3, repeats=10, deviation=deviation, slowdown=SLOWDOWNS[0])
    for slowdown in SLOWDOWNS:
        for kind in STATIONARY:
            slower = Plan(deviation=deviation, slowdown=slowdown)
            rows[f"1 × 30, {kind}, {slowdown:.0%} slower"] = kind, slower
    return rows


def several(runs: int, kind: str, slowdown: float = 0.0) -> str:
    """The name of a row with several runs of ten repeats a side."""
    return f"{runs} × 10 in turn, {kind}" + (f", {slowdown:.0%} slower" if slowdown else "")


def measured(pairs: int, deviation: float, seed: int) -> dict[str, tuple[float, float]]:
    """By row the share of pairs that get a verdict, and of those that a gate would fail."""
    from machine_noise import Plan
    from machine_noise import pairs as drawn

    # Older revisions define some of the names that are used here in this module, which later ones import into it.
    statistics = import_module("llm_perf_opt.analysis.comparison.statistics")
    effect, Effect, Interval = statistics.effect, statistics.Effect, statistics.Interval  # noqa: N806
    found = {}
    for row, (kind, plan) in cases(deviation).items():
        assert isinstance(plan, Plan)
        judgement = statistics.Judgement(process_spread=statistics.ACCELERATOR_SPREAD)
        if not plan.in_turn and hasattr(judgement, "order"):
            judgement = replace(judgement, order="base first")
        effects = [effect(base, new, judgement=judgement) for base, new in drawn(kind, plan, pairs, seed)]
        called = sum(isinstance(one, Effect) and one.verdict in ("faster", "slower") for one in effects)
        gated = sum(isinstance(one, Effect) and isinstance(one.interval, Interval) and one.interval.low > GATE for one in effects)
        found[row] = called / pairs, gated / pairs
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def measured_by(revision: str, asked: list[str]) -> dict[str, tuple[float, float]]:
    """The same by the code of another revision."""
    packed = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(folder, filter="data")
        argv = [sys.executable, __file__, *asked, "--json"]
        environment = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
        said = subprocess.run(argv, check=True, stdout=subprocess.PIPE, env=environment).stdout
    return {row: (called, gated) for row, (called, gated) in json.loads(said).items()}


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="of each kind; 200 do not tell 4 %% from 6 %%")
    parser.add_argument("--deviation", type=float, default=2.4, help="of the repeats inside a run, in percent")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--against", metavar="REVISION", help="a revision of this repository to set beside it")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    asked = ["--pairs", str(arguments.pairs), "--deviation", str(arguments.deviation), "--seed", str(arguments.seed)]
    now = measured(arguments.pairs, arguments.deviation / 100, arguments.seed)
    if arguments.json:
        print(json.dumps(now))
        return
    from machine_noise import KINDS

    before = measured_by(arguments.against, asked) if arguments.against else {}
    print(f"{'share of pairs with a verdict (beyond a gate of 3 %)':<62} {'before':>14} {'now':>14}")
    for row, shares in now.items():
        print(f"{row:<62} {_shown(before.get(row)):>14} {_shown(shares):>14}")
    limits = best(arguments.pairs, arguments.deviation / 100)
    print()
    heads = ["false verdicts", *(f"{slowdown:.0%} found" for slowdown in SLOWDOWNS), "limit at 5%"]
    print(f"{'5 × 10 in turn (95 % interval of the simulation)':<50}" + "".join(f"{head:>24}" for head in heads))
    for kind in KINDS:
        found = [now[several(5, kind, slowdown)][0] for slowdown in (0.0, *SLOWDOWNS)]
        cells = [*(_within(share, arguments.pairs) for share in found), f"{limits[kind]:.1%}"]
        print(f"{kind:<50}" + "".join(f"{text:>24}" for text in cells))
    plans = [*(f"1 × 30, {kind}" for kind in KINDS), *(several(runs, kind) for runs in (3, 5) for kind in KINDS)]
    wrong = [f"{row}: {now[row][0]:.1%} of false verdicts" for row in plans if now[row][0] > MOST_FALSE]
    wrong += [
        f"{kind}: {now[several(5, kind, SLOWDOWNS[0])][0]:.1%} found, a test could find {limits[kind]:.1%}"
        for kind in KINDS
        if now[several(5, kind, SLOWDOWNS[0])][0] < LEAST_FOUND <= limits[kind]
    ]
    if wrong:
        sys.exit("\n".join(wrong))


def best(pairs: int, deviation: float) -> dict[str, float]:
    """By kind of noise the share of slowdowns of 5 % that the best possible test finds with five runs of ten repeats a side."""
    from machine_noise import KINDS, Plan
    from verdict_limits import limit

    plan = Plan(runs=5, repeats=10, deviation=deviation, slowdown=SLOWDOWNS[0])
    return {kind: limit(kind, plan, pairs) for kind in KINDS}


def _within(share: float, count: int) -> str:
    """The share with its 95 % interval (Wilson's)."""
    middle, half = share + 1.96**2 / 2 / count, 1.96 * (share * (1 - share) / count + (1.96 / 2 / count) ** 2) ** 0.5
    low, high = ((middle + side * half) / (1 + 1.96**2 / count) for side in (-1, 1))
    return f"{share:.1%} ({max(low, 0):.1%}–{high:.1%})"


def _shown(shares: tuple[float, float] | None) -> str:
    return "" if shares is None else f"{shares[0]:.1%} ({shares[1]:.1%})"


if __name__ == "__main__":
    main()
