"""NVTX regions: the work launched in each path of ranges, per process and device or together; totals add up to the trace."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.regions.counters import CountedStage, Variants, region_counters
from llm_perf_opt.analysis.regions.records import (
    ALL,
    FreeRange,
    KernelTime,
    Reconciliation,
    Region,
    RegionGroup,
    RegionReport,
    Rest,
    Selection,
)
from llm_perf_opt.analysis.trace.intervals import sums, union_ns
from llm_perf_opt.traces.events import Int64, RangeKind, Trace, WorkKind, different
from llm_perf_opt.traces.nesting import depths
from llm_perf_opt.traces.projection import NONE, Bool, Projection, nearest_marked, project, through

MOST_REGIONS = 1_000
"""Some frameworks number their ranges, so that each name is unique: only the largest are shown."""
DEEPEST = 64
RECONCILES_WITHIN = 0.01


@dataclass(frozen=True)
class RegionOptions:
    """What the report shows."""

    aggregate: bool = False
    """One table over all processes and devices."""
    kernels: Selection = ALL
    """Filter on the kernel's full name."""
    regions: Selection = ALL
    """Filter on the region's name or slash-separated path, with or without domains. The work of a region that is left out counts
    in the region around it."""
    top: int = 5
    """Kernels listed per region."""
    counters: tuple[str, ...] = ()
    """Counters to show; empty for all."""


def regions(
    trace: Trace,
    options: RegionOptions | None = None,
    counters: Sequence[CountedStage] = (),
    projection: Projection | None = None,
) -> RegionReport:
    """Return the report. A kernel has the counters of its own stage; a region with several stages combines them. For an
    incomplete trace, the report lists its problems and has no sums."""
    options = options or RegionOptions()
    projection = projection or project(trace)
    tree = _Tree.of(trace, projection, options.regions)
    table = _Table(trace, projection, tree, options, Variants.of(trace, counters, options.counters))
    return RegionReport(
        complete=trace.complete,
        aggregate=options.aggregate,
        kernel_filter=options.kernels,
        region_filter=options.regions,
        folded=tree.folded,
        groups=tuple(table.groups()) if trace.complete else (),
        free=tuple(_free_ranges(trace, projection)) if trace.complete else (),
        problems=trace.problems,
    )


@dataclass(frozen=True)
class _Tree:
    """The paths to show."""

    shown: Int64
    """Per path: itself if shown, otherwise the nearest shown path around it, or -1."""
    above: Int64
    """Per shown path: the shown path around it."""
    names: dict[int, tuple[str, ...]]
    """Shown path → its labels; a path has a larger number than the paths around it."""
    folded: int

    @classmethod
    def of(cls, trace: Trace, projection: Projection, selection: Selection) -> "_Tree":
        parent = projection.path_parent.astype(np.int64)
        shallow = np.flatnonzero(depths(parent) < DEEPEST).tolist()
        names = {path: projection.path_names(path) for path in shallow}
        nested = np.zeros(len(parent), np.bool_)
        nested[projection.path[trace.ranges.kind == RangeKind.PUSH_POP]] = True
        wanted = [path for path in shallow if nested[path] and selection.takes(*_spellings(names[path]))]
        kept = _largest(trace, projection, wanted)
        marked = np.zeros(len(parent), np.bool_)
        marked[kept] = True
        shown = nearest_marked(parent, marked)
        above = np.where(marked, through(parent, shown), NONE)
        too_deep = int(np.count_nonzero(nested)) - sum(bool(nested[path]) for path in shallow)
        return cls(shown, above, {path: names[path] for path in kept}, len(wanted) - len(kept) + too_deep)


class _Table:
    """Sums per shown path, for one group at a time."""

    def __init__(self, trace: Trace, projection: Projection, tree: _Tree, options: RegionOptions, variants: Variants) -> None:
        self._trace, self._tree, self._options, self._variants = trace, tree, options, variants
        work = trace.work
        self._duration = work.end_ns - work.start_ns
        self._kernel: Bool = work.kind == WorkKind.KERNEL
        taken = np.array([options.kernels.takes(name) for name in trace.names] + [True], np.bool_)
        self._excluded = self._kernel & ~taken[work.name]
        self._range = projection.range_of_work
        self._path = through(through(projection.range_of_work, projection.path), tree.shown)
        self._range_path = projection.path.astype(np.int64)
        self._call = projection.call_of_work
        self._call_path = through(through(projection.range_of_call, projection.path), tree.shown)

    def groups(self) -> Iterator[RegionGroup]:
        work, ranges = self._trace.work, self._trace.ranges
        nested = ranges.kind == RangeKind.PUSH_POP
        if self._options.aggregate:
            yield self._group(None, None, np.ones(len(work), np.bool_), nested)
            return
        for process in different(np.concatenate([work.process, ranges.process[nested]])).tolist():
            mine = work.process == process
            devices: list[int | None] = [*different(work.device[mine]).tolist()] or [None]
            for device in devices:
                yield self._group(process, device, mine & (work.device == device), nested & (ranges.process == process))

    def _group(self, process: int | None, device: int | None, work: Bool, ranges: Bool) -> RegionGroup:
        facts = self._trace.facts
        kernels = work & self._kernel
        excluded = work & self._excluded
        kept = kernels & ~excluded
        found = tuple(self._regions(kept, work & ~self._kernel, ranges))
        outside = self._rest(kept & (self._range == NONE))
        left_out = self._rest(kept & (self._range != NONE) & (self._path == NONE))
        names = tuple(self._names(excluded))
        return RegionGroup(
            process=process,
            process_name=facts.get(f"pid.{process}", ""),
            device=device,
            device_name=facts.get(f"device.{device}", ""),
            regions=found,
            outside=outside,
            left_out=left_out,
            excluded=names,
            check=_reconciled(
                found,
                (outside.kernel_ns, left_out.kernel_ns, *[name.total_ns for name in names]),
                int(self._duration[kernels].sum()),
            ),
        )

    def _regions(self, kernels: Bool, copies: Bool, ranges: Bool) -> Iterator[Region]:
        paths = len(self._tree.shown)
        own_count, own_ns = self._sums(kernels)
        count, total_ns = self._upward(own_count), self._upward(own_ns)
        copy_count, copy_ns = (self._upward(column) for column in self._sums(copies))
        launching = different(self._call[(kernels | copies) & (self._call != NONE)])
        launch_path = self._call_path[launching]
        launches = self._upward(np.bincount(launch_path[launch_path != NONE], minlength=paths))
        instances = np.bincount(self._range_path[ranges], minlength=paths)
        wall = sums(self._range_path[ranges], (self._trace.ranges.end_ns - self._trace.ranges.start_ns)[ranges], paths)
        busy = self._busy(kernels | copies)
        tops = self._variants.by_path(self._ancestors(kernels), self._duration)
        for path in _preorder(self._tree):
            if not instances[path] and not count[path]:
                continue  # the path is of another process
            seen = tops.get(path, {})
            yield Region(
                path=self._tree.names[path],
                instances=int(instances[path]),
                wall_ns=int(wall[path]),
                kernels=int(count[path]),
                kernel_ns=int(total_ns[path]),
                self_kernels=int(own_count[path]),
                self_kernel_ns=int(own_ns[path]),
                busy_ns=busy.get(path, 0),
                copies=int(copy_count[path]),
                copy_ns=int(copy_ns[path]),
                launches=int(launches[path]),
                top=self._variants.top(seen, self._options.top),
                counters=region_counters(self._variants, seen),
            )

    def _sums(self, rows: Bool) -> tuple[Int64, Int64]:
        """Return rows and nanoseconds launched directly in each path."""
        chosen = np.flatnonzero(rows & (self._path != NONE))
        path, paths = self._path[chosen], len(self._tree.shown)
        return np.bincount(path, minlength=paths), sums(path, self._duration[chosen], paths)

    def _upward(self, own: Int64) -> Int64:
        """Return the sum of each path and all paths inside it."""
        total: Int64 = own.copy()
        for path in sorted(self._tree.names, reverse=True):
            if self._tree.above[path] != NONE:
                total[self._tree.above[path]] += total[path]
        return total

    def _ancestors(self, rows: Bool) -> Iterator[tuple[Int64, Int64]]:
        """Yield rows of work and the shown path around each, per level of nesting."""
        chosen = np.flatnonzero(rows & (self._path != NONE))
        path: Int64 = self._path[chosen]
        while len(chosen):
            yield chosen, path
            path = self._tree.above[path]
            chosen, path = chosen[path != NONE], path[path != NONE]

    def _busy(self, rows: Bool) -> dict[int, int]:
        """Return the union of each path's work per device, including inner paths. Work is already sorted by start."""
        work = self._trace.work
        pieces: dict[int, list[Int64]] = {}
        for chosen, path in self._ancestors(rows):
            order = np.argsort(path, kind="stable")
            bounds = np.flatnonzero(np.diff(path[order])) + 1
            for piece in np.split(order, bounds):
                pieces.setdefault(int(path[piece[0]]), []).append(chosen[piece])
        busy = {}
        for path_number, parts in pieces.items():
            mine = np.sort(np.concatenate(parts))
            devices = different(work.device[mine]).tolist()
            busy[path_number] = sum(
                union_ns(work.start_ns[part], work.end_ns[part])
                for part in (mine[work.device[mine] == device] for device in devices)
            )
        return busy

    def _rest(self, rows: Bool) -> Rest:
        return Rest(int(np.count_nonzero(rows)), int(self._duration[rows].sum()))

    def _names(self, rows: Bool) -> Iterator[KernelTime]:
        """Yield kernel names with their time, longest first."""
        names, which = np.unique(self._trace.work.name[rows], return_inverse=True)
        total = sums(which.reshape(-1), self._duration[rows], len(names))
        calls = np.bincount(which.reshape(-1), minlength=len(names))
        for place in np.argsort(-total, kind="stable").tolist():
            yield KernelTime(self._trace.name_of(int(names[place])), int(calls[place]), int(total[place]))


def _reconciled(found: tuple[Region, ...], others: tuple[int, ...], trace_ns: int) -> Reconciliation:
    """Add up the rows of the table and compare them with the trace."""
    paths = {region.path: region for region in found}
    children: dict[tuple[str, ...], int] = {}
    outermost = 0
    for region in found:
        around = next((region.path[:end] for end in range(len(region.path) - 1, 0, -1) if region.path[:end] in paths), None)
        if around is None:
            outermost += region.kernel_ns
        else:
            children[around] = children.get(around, 0) + region.kernel_ns
    sound = all(region.self_kernel_ns + children.get(region.path, 0) == region.kernel_ns for region in found)
    accounted = outermost + sum(others)
    difference = accounted - trace_ns
    share = abs(difference) / trace_ns if trace_ns else float(difference != 0)
    return Reconciliation(trace_ns, accounted, difference, share, sound and share <= RECONCILES_WITHIN)


def _free_ranges(trace: Trace, projection: Projection) -> Iterator[FreeRange]:
    """Yield start/end ranges by label, with what their process launched between start and end."""
    free = np.flatnonzero(trace.ranges.kind == RangeKind.START_END)
    if not len(free):
        return
    joined = np.flatnonzero((projection.call_of_work != NONE) & (trace.work.kind == WorkKind.KERNEL))
    at = trace.calls.start_ns[projection.call_of_work[joined]]
    duration = trace.work.end_ns[joined] - trace.work.start_ns[joined]
    count, total = np.zeros(len(free), np.int64), np.zeros(len(free), np.int64)
    for process in different(trace.ranges.process[free]).tolist():
        mine = np.flatnonzero(trace.work.process[joined] == process)
        mine = mine[np.argsort(at[mine], kind="stable")]
        passed = np.concatenate([[0], np.cumsum(duration[mine])])
        rows = np.flatnonzero(trace.ranges.process[free] == process)
        first = np.searchsorted(at[mine], trace.ranges.start_ns[free[rows]])
        last = np.searchsorted(at[mine], trace.ranges.end_ns[free[rows]])
        count[rows], total[rows] = last - first, passed[last] - passed[first]
    wall = trace.ranges.end_ns[free] - trace.ranges.start_ns[free]
    for path in different(projection.path[free]).tolist()[:MOST_REGIONS]:
        same = projection.path[free] == path
        label = projection.path_label[path]
        yield FreeRange(label, int(same.sum()), int(wall[same].sum()), int(count[same].sum()), int(total[same].sum()))


def _spellings(path: tuple[str, ...]) -> tuple[str, ...]:
    names = [label.split("@", 1)[-1] for label in path]
    return (path[-1], names[-1], "/".join(path), "/".join(names))


def _largest(trace: Trace, projection: Projection, paths: list[int]) -> list[int]:
    """Return at most MOST_REGIONS paths: those with the most host time."""
    if len(paths) <= MOST_REGIONS:
        return paths
    wall = sums(projection.path.astype(np.int64), trace.ranges.end_ns - trace.ranges.start_ns, len(projection.path_parent))
    return sorted(sorted(paths, key=lambda path: -int(wall[path]))[:MOST_REGIONS])


def _preorder(tree: _Tree) -> Iterator[int]:
    """Yield each path after the one around it, siblings in the order of their first occurrence."""
    children: dict[int, list[int]] = {}
    for path in sorted(tree.names):
        children.setdefault(int(tree.above[path]), []).append(path)
    waiting = list(reversed(children.get(NONE, [])))
    while waiting:
        path = waiting.pop()
        yield path
        waiting += reversed(children.get(path, []))
