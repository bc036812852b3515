"""The timelines of a run, best first: kernels are selected from them and totaled over them."""

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
"""Tolerance for a recording that appears to start before its pass, because clocks are adjusted and rounded."""
BETWEEN_PASSES = timedelta(hours=1)
"""More time than a run spends outside its passes."""


@dataclass(frozen=True)
class Timeline:
    """A complete trace of the run."""

    source: str
    """The pass that recorded it, as shown in reports."""
    trace: Trace


class Refused(Missing):
    """The trace of a successful pass that cannot be used."""


@dataclass(frozen=True)
class RecordedTrace:
    """The trace of a pass, checked for completeness and for belonging to this run."""

    name: str
    source: str
    """The pass that recorded it, as shown in reports."""
    trace: Trace
    tables: Maybe[Path]
    """Its cached tables, or why they could not be cached."""

    @property
    def timeline(self) -> Timeline | Refused:
        """The trace, or why it cannot be used."""
        worst = next((problem for problem in self.trace.problems if problem.fatal), None)
        if worst is not None:
            return Refused(f"the trace of {self.source} is not used: {worst.what}")
        return Timeline(self.source, self.trace)


def read_recorded(folder: RunFolder, manifest: Manifest, config: Mapping[str, Any], name: str) -> Maybe[RecordedTrace]:
    """Return the trace of a pass from its tables; they are created on first use, so that a trace is parsed once."""
    recorded = pass_named(name)
    if recorded is None or not recorded.trace:
        return Missing(f"{name} records no timeline")
    try:
        opened = cached_trace(recorded.trace_file(folder), folder.tables(name), root=folder.path, columns=stage_columns)
    except ParseError as error:
        return Missing(f"{name}: {error.fact}")
    trace = examined(opened.trace, expected_of(manifest, config, name))
    return RecordedTrace(name, recorded.tool or recorded.label, trace, opened.tables)


def timelines(folder: RunFolder) -> Iterator[Timeline | Missing]:
    """Yield every timeline of the run, or why a pass has none."""
    manifest, config = folder.manifest(), read_values(folder.config_file)
    return timelines_of(folder, manifest, lambda name: read_recorded(folder, manifest, config, name))


def timelines_of(
    folder: RunFolder, manifest: Manifest, read: Callable[[str], Maybe[RecordedTrace]]
) -> Iterator[Timeline | Missing]:
    """Yield the same with `read` as the reader of a trace; those checked when recorded come first."""
    for item in sorted((item for item in known_passes() if item.trace), key=lambda item: not item.checked):
        entry = manifest.pass_named(item.name)
        if (entry is None) if item.checked else (not item.trace_file(folder).exists()):
            continue
        if item.checked and entry is not None and entry.status != "complete":
            yield Missing(f"{item.name} {entry.outcome}: {entry.why}")
            continue
        found = read(item.name)
        yield found if isinstance(found, Missing) else found.timeline


def expected_of(manifest: Manifest, config: Mapping[str, Any], name: str) -> Expected:
    """Return what the trace of this run's pass must contain: its command, its time and the ranges of its stages.

    Command and time distinguish it from the trace of another run.
    """
    found = pass_named(name)
    ranges = _ranges_of(config, found.stages) if found and found.checked else ()
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
    """Return the ranges that a report of these stages must contain; the range that started the capture may be cut off.

    Empty for an engine whose work is launched by other processes, because it marks no stages.
    """
    if not traits_of(runtime).marks_stages(engine):
        return ()
    always = (Stage.PREFILL, Stage.DECODE_STEP) if new_tokens > 1 else (Stage.PREFILL,)
    return tuple(stage.value for stage in always if stage in stages)


def _ranges_of(config: Mapping[str, Any], stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return the ranges according to the run's configuration; none for a user's program."""
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
