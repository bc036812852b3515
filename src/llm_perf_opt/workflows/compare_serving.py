"""`llm-perf compare` for runs under load."""

from collections.abc import Sequence
from pathlib import Path

from llm_perf_opt.analysis.comparison.effects import Judgement
from llm_perf_opt.analysis.comparison.gates import Gate
from llm_perf_opt.analysis.comparison.serving import ServingComparison, ServingRun, compare_serving
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.serving import analyze_serving


def are_under_load(sides: Sequence[Sequence[Path]]) -> bool:
    """Return whether all runs put load on a server. Raise a ConfigError if only some did."""
    paths = [path for side in sides for path in side]
    under_load = {path: RunReader.open(path).manifest.kind == "serving" for path in paths}
    if len(set(under_load.values())) < 2:
        return any(under_load.values())
    one, other = (next(path for path, found in under_load.items() if found is wanted) for wanted in (True, False))
    raise ConfigError(
        f"{one} is a run under load, {other} is not.",
        "Compare runs of one kind: requests that wait for each other and a single request have different latencies.",
    )


def compare_serving_runs(
    sides: Sequence[Sequence[Path]], gates: Sequence[Gate], allow: Sequence[str], judgement: Judgement
) -> ServingComparison:
    """Compare two sides of runs under load."""
    base, new = ([read_run(path) for path in side] for side in sides)
    return compare_serving(base, new, gates, allow, judgement)


def read_run(path: Path) -> ServingRun:
    """Return a run under load. Raise a ConfigError if it has no requests."""
    run = RunReader.open(path)
    found = analyze_serving(run)
    if not found.curve:
        why = next((point.unusable.why for point in found.points if point.unusable), "no load was measured")
        raise ConfigError(f"{path} has no requests to compare: {why}", "Compare runs whose loads are complete.")
    env = {} if isinstance(run.env, Missing) else run.env
    started_here = not isinstance(run.server, Missing) and bool(run.server.argv)  # otherwise env.json is not the server's machine
    return ServingRun(found, tuple(run.loads), started_here and bool(env.get("gpus")))
