"""Tab completion: overrides of `run` and `cost`, runs, hardware. Loads nothing heavy."""

import os
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

from llm_perf_opt.core.run_status import LISTED_STATUSES
from llm_perf_opt.core.terminal import one_line

RUNS = Path("runs")
_SWEEP_FILES = "*/sweeps/*/sweep.json"
_RUN_FILES = ("*/*/*/run.json", "*/*/*-tune*/*/run.json", _SWEEP_FILES, "*/sweeps/*/*/run.json")
"""runs/EXPERIMENT/MODEL/TIME, runs/exec/PROGRAM/TIME; trials of a search; sweeps and their points."""


def complete_override(incomplete: str) -> list[str]:
    """Complete GROUP=OPTION and KEY=VALUE, one level at a time. A single key comes with values, so the shell adds no space."""
    before, typed = _whole_word(incomplete)
    return _plain(found.removeprefix(before) for found in _overrides(typed))


def complete_run(incomplete: str) -> list[str]:
    """Complete the folders of runs and sweeps; if none matches, the shell offers files."""
    found = {str(file.parent) for pattern in _RUN_FILES for file in RUNS.glob(pattern)}
    return _plain(sorted((path for path in found if path.startswith(incomplete)), reverse=True))


def complete_sweep(incomplete: str) -> list[str]:
    """Complete the folders of sweeps; if none matches, the shell offers files."""
    found = {str(file.parent) for file in RUNS.glob(_SWEEP_FILES)}
    return _plain(sorted((path for path in found if path.startswith(incomplete)), reverse=True))


def complete_side(incomplete: str) -> list[str]:
    """Complete a side of a comparison: a baseline or a run."""
    from llm_perf_opt.core.errors import LlmPerfError
    from llm_perf_opt.workflows.compare import Baselines

    try:
        names = sorted(Baselines(RUNS).read())
    except LlmPerfError:  # a damaged file; the verb reports it
        names = []
    return [*_plain(name for name in names if name.startswith(incomplete)), *complete_run(incomplete)]


def complete_tuned(incomplete: str) -> list[str]:
    """Complete what a search starts from: a run, or the settings of one."""
    return [*complete_run(incomplete), *complete_override(incomplete)]


def complete_objective(incomplete: str) -> list[str]:
    """Complete what a search improves."""
    from llm_perf_opt.analysis.tuning.goals import OBJECTIVES

    return [name for name in OBJECTIVES if name.startswith(incomplete)]


def complete_token_rule(incomplete: str) -> list[str]:
    """Complete how tokens are compared."""
    return [name for name in ("same", "exact", "any") if name.startswith(incomplete)]


def complete_goal(incomplete: str) -> list[str]:
    """Complete the metric of a constraint, with the side that it may be limited from."""
    from llm_perf_opt.analysis.tuning.goals import GOALS

    signs = [f"{name}{'>' if goal.higher_is_better else '<'}" for name, goal in GOALS.items()]
    return [text for text in signs if text.startswith(incomplete)]


def complete_hardware(incomplete: str) -> list[str]:
    """Complete the devices with a datasheet."""
    from llm_perf_opt.analysis.limits.hardware import HARDWARE

    return [name for name in HARDWARE if name.startswith(incomplete)]


def complete_metric(incomplete: str) -> list[str]:
    """Complete the metrics of a run."""
    from llm_perf_opt.analysis.metrics import METRICS

    return [metric.key for metric in METRICS if metric.key.startswith(incomplete)]


def complete_runtime(incomplete: str) -> list[str]:
    """Complete the runtimes."""
    from llm_perf_opt.config.choices import group_options
    from llm_perf_opt.core.errors import LlmPerfError

    try:
        names = group_options().get("runtime", ())
    except LlmPerfError:  # two packages with the same runtime; the verb reports it
        names = ()
    return _plain(name for name in names if name.startswith(incomplete))


def complete_status(incomplete: str) -> list[str]:
    """Complete the status of a run or a sweep. Bash inserts it as it is, so a space needs a backslash there."""
    found = [name for name in LISTED_STATUSES if name.startswith(incomplete)]
    return [name.replace(" ", "\\ ") for name in found] if "COMP_WORDS" in os.environ else found


def _plain(candidates: Iterable[str]) -> list[str]:
    """Drop candidates that contain line breaks or control characters."""
    return [word for word in candidates if word == one_line(word)]


def _whole_word(incomplete: str) -> tuple[str, str]:
    """Return the text before what the shell replaces, and the whole word: bash splits `model=ti` into three words."""
    words = os.environ.get("COMP_WORDS", "").split("\n")
    at = os.environ.get("COMP_CWORD", "")
    current = int(at) if at.isdigit() else 0
    for equals in (current, current - 1):
        if 2 <= equals < len(words) and words[equals] == "=" and "=" not in incomplete:
            before = f"{words[equals - 1]}="
            return before, before + incomplete
    return "", incomplete


def _overrides(typed: str) -> list[str]:
    key, equals, _ = typed.partition("=")
    if equals and key.endswith(".path"):
        return []  # a file: the shell completes it
    if equals:
        return [found for found in _assigned(key) if found.startswith(typed)]
    found = sorted(set(_next_level(_keys(), typed)))
    while len(found) == 1:  # the shell would treat it as complete
        if found[0].endswith("="):
            return list(_assigned(found[0][:-1]))
        found = sorted(set(_next_level(_keys(), found[0])))
    return found


def _keys() -> list[str]:
    """Return every group and key as typed."""
    from llm_perf_opt.config.choices import GROUPS, all_keys

    return [f"{name}=" for name in (*GROUPS[1:], *all_keys(), "hydra.run.dir")]


def _next_level(keys: Iterable[str], typed: str) -> Iterator[str]:
    """Yield the keys with this prefix, each up to its next dot."""
    for key in keys:
        if key.startswith(typed):
            rest, dot, _ = key[len(typed) :].partition(".")
            yield typed + rest + dot


def _assigned(key: str) -> Iterator[str]:
    from llm_perf_opt.config.choices import group_options
    from llm_perf_opt.core.errors import LlmPerfError

    try:
        options = group_options()
    except LlmPerfError:  # two packages with the same runtime; the verb reports it
        options = {}
    values = options[key] if key in options else _values(key)
    yield from (f"{key}={value}" for value in values)


def _values(key: str) -> tuple[str, ...]:
    """Return the values that a key takes; for a number or text, the empty value and its default."""
    from llm_perf_opt.config.choices import all_keys, default_of

    kind = all_keys().get(key)
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    if kind is bool:
        return "true", "false"
    default = default_of(key)
    return ("",) if default is None else ("", default)
