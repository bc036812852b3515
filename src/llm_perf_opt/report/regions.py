"""The NVTX regions report in Markdown."""

from collections.abc import Sequence

from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.regions.records import CounterValue, FreeRange, KernelTime, Region, RegionGroup, RegionReport
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.stages import DOMAIN
from llm_perf_opt.report.text import escape, milliseconds, percent, significant, table

_LONGEST_NAME = 110


def regions_page(report: RegionReport) -> str:
    """The whole page."""
    parts = ["# NVTX regions\n", *_preface(report), *[_group(group) for group in report.groups]]
    if not report.complete:
        return "\n".join([*parts, "n/a: sums over this trace would be wrong, so none are shown.\n"])
    if not report.groups:
        parts.append("The trace holds neither ranges nor device work.\n")
    if report.free:
        parts.append(_free(report.free))
    parts.append(_definitions())
    return "\n".join(parts)


def _preface(report: RegionReport) -> list[str]:
    lines = []
    if not report.complete:
        lines.append("**This trace is incomplete.**\n")
    for problem in report.problems:
        remedy = f" {escape(problem.remedy)}" if problem.remedy else ""
        lines.append(f"- {'**fatal** ' if problem.fatal else ''}{escape(problem.id)}: {escape(problem.what)}.{remedy}")
    lines.append(f"- Kernels: {escape(str(report.kernel_filter))}. Regions: {escape(str(report.region_filter))}.")
    if report.folded:
        lines.append(
            f"- {report.folded:,} more regions are too deep or too many; their work counts as that of the region around them."
        )
    lines += [f"- {escape(note)}" for note in report.notes]
    return [*lines, ""]


def _group(group: RegionGroup) -> str:
    parts = [f"## {_title(group)}\n", _table(group), _check(group)]
    if any(region.top for region in group.regions):
        parts.append(_tops(group.regions))
    if group.excluded:
        parts.append("### Excluded kernels\n\n" + _kernels([("", entry) for entry in group.excluded], with_region=False))
    if any(region.counters for region in group.regions):
        parts.append(_counters(group.regions))
    return "\n".join(parts)


def _title(group: RegionGroup) -> str:
    if group.process is None:
        return "All processes and devices"
    process = f"Process {escape(group.process_name or str(group.process))}"
    if group.device is None:
        return f"{process}, no device work"
    name = f" ({escape(group.device_name)})" if group.device_name else ""
    return f"{process}, device {group.device}{name}"


def _table(group: RegionGroup) -> str:
    whole = group.check.trace_kernel_ns
    rows = [
        [
            _path(region.path),
            f"{region.instances:,}",
            milliseconds(region.wall_ns),
            milliseconds(region.kernel_ns),
            percent(_share(region.kernel_ns, whole)),
            milliseconds(region.self_kernel_ns),
            milliseconds(region.busy_ns),
            f"{region.kernels:,}",
            f"{region.launches:,}",
            f"{region.copies:,} in {milliseconds(region.copy_ns)}" if region.copies else "0",
        ]
        for region in group.regions
    ]
    for name, kernels, ns in (
        ("*outside any region*", group.outside.kernels, group.outside.kernel_ns),
        ("*in regions left out*", group.left_out.kernels, group.left_out.kernel_ns),
        ("*excluded kernels*", sum(entry.calls for entry in group.excluded), sum(entry.total_ns for entry in group.excluded)),
    ):
        if kernels:
            rows.append([name, "", "", milliseconds(ns), percent(_share(ns, whole)), "", "", f"{kernels:,}", "", ""])
    header = [
        "region",
        "instances",
        "host wall",
        "kernel time",
        "share",
        "of it self",
        "GPU busy",
        "kernels",
        "launches, copies too",
        "copies",
    ]
    return table(header, rows, "l" + "r" * 9)


def _check(group: RegionGroup) -> str:
    check = group.check
    verdict = "adds up" if check.reconciles else "**DOES NOT ADD UP**"
    return (
        f"The table {verdict}: outermost regions and the rows below them hold {check.accounted_ns:,} ns, "
        f"the trace {check.trace_kernel_ns:,} ns of kernels (difference {check.difference_ns:,} ns, {percent(check.share, 3)}).\n"
    )


def _tops(regions: Sequence[Region]) -> str:
    rows = [(_path(region.path), entry) for region in regions for entry in region.top]
    return "### Kernels that take the most time\n\n" + _kernels(rows, with_region=True)


def _kernels(rows: Sequence[tuple[str, KernelTime]], with_region: bool) -> str:
    cells = [
        [
            *([region] if with_region else []),
            escape(short_name(entry.name, _LONGEST_NAME)),
            f"{entry.calls:,}",
            milliseconds(entry.total_ns),
            milliseconds(entry.total_ns / entry.calls if entry.calls else Missing("no calls")),
        ]
        for region, entry in rows
    ]
    header = [*(["region"] if with_region else []), "kernel", "calls", "total", "mean"]
    return table(header, cells, "l" * (len(header) - 3) + "rrr")


def _counters(regions: Sequence[Region]) -> str:
    rows = [
        [_path(region.path), escape(_named(value)), _value(value), escape(value.unit), value.how, _covered(value, region)]
        for region in regions
        for value in region.counters
    ]
    header = ["region", "counter", "value", "unit", "over its kernels", "kernel time covered"]
    return "### Counters\n\n" + table(header, rows, "llrllr")


def _named(value: CounterValue) -> str:
    """A duration among the counters is not the trace's, whose kernel time stands in the table above it."""
    own_clock = value.counter.startswith("gpu__time_")
    return f"{value.counter} (by Nsight Compute's clock, each launch alone)" if own_clock else value.counter


def _covered(value: CounterValue, region: Region) -> str:
    share = percent(_share(value.covered_ns, region.kernel_ns))
    by_name = percent(_share(value.by_name_ns, region.kernel_ns))
    return f"{share}, {by_name} by name" if value.by_name_ns else share


def _free(free: Sequence[FreeRange]) -> str:
    rows = [
        [
            escape(entry.label),
            f"{entry.instances:,}",
            milliseconds(entry.wall_ns),
            f"{entry.kernels:,}",
            milliseconds(entry.kernel_ns),
        ]
        for entry in free
    ]
    header = ["start/end range", "instances", "host wall", "kernels launched meanwhile", "kernel time"]
    return "## Ranges that do not nest\n\nThey overlap freely and are in no total.\n\n" + table(header, rows, "lrrrr")


def _definitions() -> str:
    return (
        "A kernel belongs to the regions that were open on its thread when it was launched. Kernel time is the sum of durations "
        "and includes the regions inside; self leaves them out. GPU busy counts overlapping kernels and copies once. Host wall "
        "is inflated by the profiler; kernel durations are not. Counters come from separate launches of the same kernels in the "
        "same stage: what was counted in prefill never stands for decode. Sums are per launch times launches, the rest is "
        "weighed by kernel time; the last column says how much of it they cover, and how much of that by name: from launches "
        "with another grid. A counter without a unit is a plain number.\n"
    )


def _path(path: Sequence[str]) -> str:
    return escape("/".join(label.removeprefix(f"{DOMAIN}@") for label in path))


def _value(value: CounterValue) -> str:
    return escape(str(value.value)) if isinstance(value.value, Missing) else significant(value.value)


def _share(part: int, whole: int) -> float | Missing:
    return part / whole if whole else Missing("no kernels")
