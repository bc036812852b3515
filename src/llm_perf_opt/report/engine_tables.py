"""Tables of a run on an engine: settings that llm-perf chose, what changes of profiled passes cost, reserved memory."""

from llm_perf_opt.analysis.overhead import AddedTime, PassOverhead
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.records import CleanTimings, Maybe
from llm_perf_opt.report.document import Column, Table, cell, count_cell, numbers
from llm_perf_opt.report.text import count, duration, known, memory_size, percent, signed, then

_ABOUT_SETTINGS = (
    "Neither the engine's defaults nor settings of the user. Everything else is the engine's default, or set with runtime.engine."
)
_ABOUT_COST = (
    "All changes of a pass are measured together, in its process before its profiler records; Nsight tools are attached "
    "meanwhile, which may add to it. In parentheses: least and most, by the 95 % intervals of both medians. Reported times, "
    "budgets and savings are those of the unprofiled pass."
)
_UNKNOWN_SPREAD = " Spread unknown: the run did not record single repeats, so a difference counts as it is, even if it is noise."
_ABOUT_MEMORY = (
    "An engine reserves memory in advance for as many requests as fit. Its use of the device does not show what the model needs."
)


def engine_tables(analysis: RunAnalysis) -> list[Table]:
    """Return the settings that differ from the engine's defaults, and the cost of those of profiled passes."""
    timings = known(analysis.timings, None)
    if timings is None or timings.runtime is None:
        return []
    changed = [entry for entry in analysis.overheads if entry.changes is not None]
    columns = [Column("setting"), Column("value"), Column("passes"), Column("reason")]
    table = Table("engine-settings", "Engine settings chosen by llm-perf", columns)
    for setting in timings.runtime.settings:
        table.add(setting.name, setting.value, "all", setting.why)
    for name, value, why, passes in _changes(changed):
        table.add(name, value, ", ".join(passes), why)
    table.foot = _ABOUT_SETTINGS
    return [*([table] if table.rows else []), *([_cost_table(changed)] if changed else [])]


def _changes(changed: list[PassOverhead]) -> list[tuple[str, str, str, list[str]]]:
    """Return each change once, with the passes that made it."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for entry in changed:
        for setting in entry.changes.settings if entry.changes else ():
            found.setdefault((setting.name, setting.value, setting.why), []).append(entry.name)
    return [(*key, passes) for key, passes in found.items()]


def _cost_table(changed: list[PassOverhead]) -> Table:
    names = ("prefill, unprofiled pass", "prefill, changed", "added", "token, unprofiled pass", "token, changed", "added", "n")
    table = Table("engine-changes", "What the changes for profiled passes cost", [Column("pass"), *numbers(*names)])
    for entry in changed:
        cost = entry.changes
        if cost is not None:
            table.add(
                entry.name,
                *[cell(value, duration) for value in (cost.clean_prefill_ns, cost.prefill_ns)],
                cell(cost.added_prefill, _added),
                *[cell(value, duration) for value in (cost.clean_step_ns, cost.step_ns)],
                cell(cost.added_step, _added),
                count_cell(cost.repeats),
            )
    costs = [cost for entry in changed if entry.changes for cost in (entry.changes.added_prefill, entry.changes.added_step)]
    unknown = any(known(then(cost, lambda time: not time.has_spread), False) for cost in costs)
    table.foot = _ABOUT_COST + (_UNKNOWN_SPREAD if unknown else "")
    return table


def _added(time: AddedTime) -> str:
    spread = known(then(time.ends_ns, lambda ends: " to ".join(map(signed, ends))), "spread unknown")
    return f"{signed(time.ns)} ({spread})" if time.distinguishable else f"not distinguishable ({spread})"


def engine_memory_tables(timings: CleanTimings) -> list[Table]:
    """Return what the engine reserves and what this run needs of it; nothing if the engine does not report it."""
    memory = timings.runtime.memory if timings.runtime else None
    if memory is None:
        return []
    weights: Maybe[int] = timings.model.weight_bytes if memory.weights_bytes is None else memory.weights_bytes
    both = then(weights, lambda size: then(memory.needed_bytes, lambda needed: size + needed))
    table = Table(
        "engine-memory", "Memory: reserved by the engine, and needed", [Column("memory"), *numbers("size"), Column("what")]
    )
    share = known(then(memory.share, lambda value: f"the engine may use {percent(value, 0)} of the device's memory"), "")
    if share:
        table.add(
            "Reserved: in use on the device", cell(timings.memory.device_used_bytes, memory_size), f"all processes; {share}"
        )
    held = then(memory.cache_tokens, lambda tokens: f"room for {count(tokens)} tokens")
    table.add("Reserved: cache", cell(memory.cache_bytes, memory_size), cell(held))
    table.add("Needed: weights", cell(weights, memory_size), f"{count(timings.model.parameters)} parameters")
    table.add("Needed: cache of the request", cell(memory.needed_bytes, memory_size), f"{memory.needed_tokens:,} tokens")
    table.add("Needed: both", cell(both, memory_size), "without activations, CUDA graphs and libraries")
    table.foot = _ABOUT_MEMORY
    return [table]
