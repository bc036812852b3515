"""How fast `llm-perf tune` makes a model, next to vLLM with its defaults on the same machine.

    python benchmarks/tuned_speed.py --out FOLDER --model qwen2_5_1_5b|tiny [--budget 20m] [--lossy-budget 10m] [OVERRIDES…]

1. `lossless`: a search from the default settings (eager) that keeps the tokens.
2. `lossy`: a search from the result of the first that may also change the precision; with `--max-logit-diff`, within that limit.
3. `final`: both results and vLLM again, unprofiled and right after each other, `--rounds` times in turn.

Each result is a file in FOLDER, and a part that has one is not repeated, so the parts may be run one at a time (`--only NAME`).
Weights are random. Prints every step with its predicted and its measured time, and the final times as JSON. Fails if the lossless
result takes as long as vLLM or longer.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_overhead import by_llm_perf

PARTS = ("lossless", "lossy", "final")


def search(words: list[str], options: list[str], folder: Path) -> dict[str, Any]:
    """Run a search and return its result; its runs stay in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "llm_perf_opt", "tune", *words, *options, "--json"]
    done = subprocess.run(argv, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv[1:])} failed with exit code {done.returncode}.")
    result: dict[str, Any] = json.loads(done.stdout)
    result["best"] = str((folder / result["best"]).resolve())
    return result


def final(given: argparse.Namespace, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Measure the results of the searches and vLLM in turn."""
    words = [word for word in shape_of(given) if not word.startswith("profiling")]  # these runs are not profiled
    lossless = [*words, *results["lossless"]["overrides"]]
    sides = {"lossless": lossless, "lossy": [*lossless, *results["lossy"]["overrides"]], "vllm": ["runtime=vllm", *words]}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(given.rounds):
        for name, settings in sides.items():
            rounds[name].append(by_llm_perf(settings, given.out / "final" / f"{name}{number}"))
    tpots = {name: statistics.median(each["tpot_ms"] for each in found) for name, found in rounds.items()}
    ratios = {name: tpots[name] / tpots["vllm"] for name in ("lossless", "lossy")}
    return {"tpot_ms": tpots, "ratio_to_vllm": ratios, "settings": sides, "rounds": rounds}


def shape_of(given: argparse.Namespace) -> list[str]:
    """Return the settings that all sides share."""
    return [f"model={given.model}", *given.overrides]


def steps_of(result: dict[str, Any]) -> list[str]:
    """Return a line for each change that was tried."""
    lines = []
    for step in result["steps"]:
        figures = [f"{step[name] / 1e6:.3f}" if step[name] else "n/a" for name in ("before_ns", "predicted_ns", "measured_ns")]
        lines.append(f"{'kept' if step['kept'] else 'undone':<7}{' → '.join(figures):<27}{step['change']}: {step['why']}")
    confirmed = {True: "confirmed", False: "not confirmed", None: "not checked by fresh runs"}
    return [*lines, f"{confirmed[result['confirmed']]}: {result['confirmed_why']}; {result['ending']}; {result['spent_s']:.0f} s"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--budget", default="20m")
    parser.add_argument("--lossy-budget", default="10m")
    parser.add_argument("--max-logit-diff", type=float)
    parser.add_argument("--runs", type=int, help="runs per side of a decision")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    given.out = given.out.resolve()
    runs = ["--runs", str(given.runs)] if given.runs else []
    lossy = ["--allow-lossy"] if given.max_logit_diff is None else ["--max-logit-diff", str(given.max_logit_diff)]
    results: dict[str, dict[str, Any]] = {}
    make: dict[str, Callable[[], dict[str, Any]]] = {
        "lossless": lambda: search(
            [*shape_of(given), "profiling=minimal"], [*runs, "--budget", given.budget], given.out / "lossless"
        ),
        "lossy": lambda: search(
            [results["lossless"]["best"]], [*runs, *lossy, "--budget", given.lossy_budget], given.out / "lossy"
        ),
        "final": lambda: final(given, results),
    }
    for name in PARTS:
        file = given.out / f"{name}.json"
        if not file.exists():
            results[name] = make[name]()
            file.write_text(json.dumps(results[name], indent=1))
        results[name] = json.loads(file.read_text())
        if name != "final":
            print(f"\n{name}: before → predicted → measured, ms per token", *steps_of(results[name]), sep="\n", flush=True)
        if name == given.only:
            return
    print(json.dumps({"model": given.model, **{key: results["final"][key] for key in ("tpot_ms", "ratio_to_vllm")}}, indent=1))
    sys.exit(results["final"]["ratio_to_vllm"]["lossless"] >= 1)


if __name__ == "__main__":
    main()
