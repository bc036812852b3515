"""The timelines a run holds, best first: what kernels are chosen from and summed up over."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from llm_perf_opt.analysis.trace.stages import stage_columns
from llm_perf_opt.config.passes import known_passes, pass_named
from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.records import Manifest, Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, read_values
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.health import Expected, examined
from llm_perf_opt.traces.trace_cache import cached_trace

CLOCK_SLACK_NS = 5_000_000_000
"""A recording that began this long before its pass is still taken for its own: clocks are set and rounded."""
BETWEEN_PASSES = timedelta(hours=1)
"""More than a run spends outside its passes."""


@dataclass(frozen=True)
class Timeline:
    """One trace that may be believed."""

    source: str
    """Which pass recorded it, in words."""
    trace: Trace


class Refused(Missing):
    """A pass ended well and its trace is there, but it cannot carry numbers."""


@dataclass(frozen=True)
class RecordedTrace:
    """The trace that a pass left, examined for whether it is the run's own and complete."""

    name: str
    source: str
    """Which pass recorded it, in words."""
    trace: Trace
    tables: Maybe[Path]
    """Where its tables lie, or why they could not be kept."""

    @property
    def timeline(self) -> Timeline | Refused:
        """The trace where it can carry numbers, else why it cannot."""
        worst = next((problem for problem in self.trace.problems if problem.fatal), None)
        if worst is not None:
            return Refused(f"the trace of {self.source} is not used: {worst.what}")
        return Timeline(self.source, self.trace)


def read_recorded(folder: RunFolder, manifest: Manifest, config: Mapping[str, Any], name: str) -> Maybe[RecordedTrace]:
    """From the tables of the pass, which are made where they are not there yet: a trace is parsed once."""
    recorded = pass_named(name)
    if recorded is None or not recorded.trace:
        return Missing(f"{name} records no timeline")
    try:
        opened = cached_trace(recorded.trace_file(folder), folder.tables(name), columns=stage_columns)
    except ParseError as error:
        return Missing(f"{name}: {error.fact}")
    trace = examined(opened.trace, expected_of(manifest, config, name))
    return RecordedTrace(name, recorded.tool or recorded.label, trace, opened.tables)


def timelines(folder: RunFolder) -> Iterator[Timeline | Missing]:
    """Every timeline of the run, or why a pass that was run has none."""
    manifest, config = folder.manifest(), read_values(folder.config_file)
    return timelines_of(folder, manifest, lambda name: read_recorded(folder, manifest, config, name))


def timelines_of(
    folder: RunFolder, manifest: Manifest, read: Callable[[str], Maybe[RecordedTrace]]
) -> Iterator[Timeline | Missing]:
    """The same, where `read` gives the trace of a pass; those that were judged when recorded come first."""
    for one in sorted((one for one in known_passes() if one.trace), key=lambda one: not one.judged):
        entry = manifest.pass_named(one.name)
        if (entry is None) if one.judged else (not one.trace_file(folder).exists()):
            continue
        if one.judged and entry is not None and entry.status != "complete":
            yield Missing(f"{one.name} is {entry.status}: {entry.why}")
            continue
        found = read(one.name)
        yield found if isinstance(found, Missing) else found.timeline


def expected_of(manifest: Manifest, config: Mapping[str, Any], name: str) -> Expected:
    """What tells the trace of this run's pass from that of another run: the command it was given, and when the run was made.

    And the stages that it must hold, as they were looked for when it was recorded.
    """
    found = pass_named(name)
    ranges = _ranges_of(config, found.stages) if found and found.judged else ()
    entry = manifest.pass_named(name)
    argv = entry.argv if entry else ()
    command = next((value for option, value in itertools.pairwise(argv) if option == "--config"), "")
    try:
        created = datetime.fromisoformat(manifest.created)
    except ValueError:
        return Expected(ranges=ranges, command=command)
    lasted = timedelta(seconds=sum(one.seconds or 0 for one in manifest.passes))
    first_ns = round(created.timestamp() * 1e9) - CLOCK_SLACK_NS
    last_ns = round((created + lasted + BETWEEN_PASSES).timestamp() * 1e9)
    return Expected(ranges=ranges, command=command, started_after_utc_ns=first_ns, started_before_utc_ns=last_ns)


def marked_ranges(stages: Sequence[Stage], runtime: str, engine: Mapping[str, Any], new_tokens: int) -> tuple[str, ...]:
    """Return which ranges must be in a report of these stages. The range that opened it may be cut off at its start.

    An engine whose work is launched by other processes marks no stages; only of those that do are they expected.
    """
    if not traits_of(runtime).marks_stages(engine):
        return ()
    always = (Stage.PREFILL, Stage.DECODE_STEP) if new_tokens > 1 else (Stage.PREFILL,)
    return tuple(stage.value for stage in always if stage in stages)


def _ranges_of(config: Mapping[str, Any], stages: Sequence[Stage]) -> tuple[str, ...]:
    """By the run's own configuration; none where it has none, as for a program of the user's."""
    runtime = config.get("runtime")
    if not isinstance(runtime, Mapping):
        return ()
    engine, new_tokens = runtime.get("engine"), runtime.get("num_new_tokens")
    return marked_ranges(
        stages,
        str(runtime.get("type", "")),
        engine if isinstance(engine, Mapping) else {},
        new_tokens if isinstance(new_tokens, int) else 1,
    )
