"""regions.md: kernel time by NVTX region."""

from collections.abc import Sequence

from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.regions.records import CounterValue, FreeRange, KernelTime, Region, RegionGroup, RegionReport
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.stages import DOMAIN
from llm_perf_opt.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Item,
    Items,
    Paragraph,
    Section,
    Table,
    Unavailable,
    cell,
    count_cell,
    name_cell,
    numbers,
)
from llm_perf_opt.report.text import duration, percent, significant, words

_LONGEST_NAME = 110
_DEFINITIONS = (
    "A kernel belongs to the regions that were open on its thread when it was launched. Kernel time is the sum of durations "
    "and includes inner regions; self excludes them. GPU busy counts overlapping kernels and copies once. Host wall is "
    "inflated by the profiler; kernel durations are not. Counters come from separate launches of the same kernels in the same "
    "stage: counters of prefill are never used for decode. Sums are the value per launch times the launches; other counters "
    "are weighted by kernel time. The last column shows how much of the kernel time they cover, and how much of that by name, "
    "from launches with another grid. A counter without a unit is a plain number."
)


def regions_document(report: RegionReport) -> Document:
    """Return kernel time, kernels and counters of each region."""
    notice = "" if report.complete else "This trace is incomplete."
    sections = [Section("about", "", [Items(_preface(report))])]
    sections += [_group(number, group) for number, group in enumerate(report.groups)]
    if not report.complete:
        why = "sums over an incomplete trace would be wrong"
        return Document("NVTX regions", "", notice, [*sections, Section("none", "", [Unavailable("Regions:", why)])])
    if not report.groups:
        sections.append(Section("none", "", [Paragraph("The trace has neither ranges nor device work.")]))
    if report.free:
        sections.append(Section("free", "Ranges that do not nest", [_free(report.free)]))
    return Document("NVTX regions", "", notice, [*sections, Section("definitions", "Definitions", [Paragraph(_DEFINITIONS)])])


def _preface(report: RegionReport) -> list[Item]:
    items = [
        Item(f"{'fatal ' if problem.fatal else ''}{problem.id}:", f"{problem.what}. {problem.remedy or ''}".strip())
        for problem in report.problems
    ]
    items.append(Item("", f"Kernels: {report.kernel_filter}. Regions: {report.region_filter}."))
    if report.folded:
        deep = (
            "more regions are not listed, because they are nested too deeply or there are too many; their work counts as that of "
            "the enclosing region."
        )
        items.append(Item("", f"{report.folded:,} {deep}"))
    return [*items, *[Item("", note) for note in report.notes]]


def _group(number: int, group: RegionGroup) -> Section:
    blocks: list[Block] = [_table(number, group), Paragraph(_check(group))]
    tops = [(_path(region.path), entry) for region in group.regions for entry in region.top]
    if tops:
        blocks.append(_kernels(f"top-{number}", "Kernels that take the most time", tops))
    if group.excluded:
        blocks.append(_kernels(f"excluded-{number}", "Excluded kernels", [("", entry) for entry in group.excluded]))
    if any(region.counters for region in group.regions):
        blocks.append(_counters(number, group.regions))
    return Section(f"group-{number}", _title(group), blocks)


def _title(group: RegionGroup) -> str:
    if group.process is None:
        return "All processes and devices"
    process = f"Process {group.process_name or group.process}"
    if group.device is None:
        return f"{process}, no device work"
    return f"{process}, device {group.device}{f' ({group.device_name})' if group.device_name else ''}"


def _table(number: int, group: RegionGroup) -> Table:
    names = ("instances", "host wall", "kernel time", "share", "self", "GPU busy", "kernels", "launches, with copies")
    table = Table(f"regions-{number}", "", [Column("region"), *numbers(*names, "copies")])
    whole = group.check.trace_kernel_ns
    for region in group.regions:
        spent = [cell(ns, duration) for ns in (region.wall_ns, region.kernel_ns, region.self_kernel_ns, region.busy_ns)]
        copies = Cell(f"{region.copies:,} in {duration(region.copy_ns)}" if region.copies else "0", region.copies)
        counts = (count_cell(region.kernels), count_cell(region.launches))
        share = cell(_share(region.kernel_ns, whole), percent)
        table.add(name_cell(_path(region.path)), count_cell(region.instances), *spent[:2], share, *spent[2:], *counts, copies)
    for name, kernels, ns in (
        ("outside any region", group.outside.kernels, group.outside.kernel_ns),
        ("in excluded regions", group.left_out.kernels, group.left_out.kernel_ns),
        ("excluded kernels", sum(entry.calls for entry in group.excluded), sum(entry.total_ns for entry in group.excluded)),
    ):
        if kernels:
            share = cell(_share(ns, whole), percent)
            table.add(f"({name})", "", "", cell(ns, duration), share, "", "", count_cell(kernels), "", "")
    return table


def _check(group: RegionGroup) -> str:
    check = group.check
    return (
        f"The table {'adds up' if check.reconciles else 'DOES NOT ADD UP'}: outermost regions and the rows below them have "
        f"{check.accounted_ns:,} ns of kernel time, the trace has {check.trace_kernel_ns:,} ns (difference "
        f"{check.difference_ns:,} ns, "
        f"{words(check.share, lambda share: percent(share, 3))})."
    )


def _kernels(name: str, title: str, rows: Sequence[tuple[str, KernelTime]]) -> Table:
    within = any(region for region, _ in rows)
    columns = [*([Column("region")] if within else []), Column("kernel"), *numbers("calls", "total", "mean")]
    table = Table(name, title, columns)
    for region, entry in rows:
        mean: Maybe[float] = entry.total_ns / entry.calls if entry.calls else Missing("no calls")
        spent = (cell(entry.total_ns, duration), cell(mean, duration))
        kernel = name_cell(entry.name, short_name(entry.name, _LONGEST_NAME))
        table.add(*([name_cell(region)] if within else []), kernel, count_cell(entry.calls), *spent)
    return table


def _counters(number: int, regions: Sequence[Region]) -> Table:
    columns = [Column("region"), Column("counter"), *numbers("value"), Column("unit"), Column("aggregated by")]
    table = Table(f"counters-{number}", "Counters", [*columns, *numbers("kernel time covered")])
    for region in regions:
        for value in region.counters:
            shown = (cell(value.value, significant), value.unit, value.how, _covered(value, region))
            table.add(name_cell(_path(region.path)), _named(value), *shown)
    return table


def _named(value: CounterValue) -> str:
    """Return the name of a counter; a duration is marked, because it differs from the kernel time of the trace."""
    own_clock = value.counter.startswith("gpu__time_")
    return f"{value.counter} (by Nsight Compute's clock, each launch alone)" if own_clock else value.counter


def _covered(value: CounterValue, region: Region) -> Cell | Missing:
    by_name = words(_share(value.by_name_ns, region.kernel_ns), percent)
    return cell(_share(value.covered_ns, region.kernel_ns), percent, f", {by_name} by name" if value.by_name_ns else "")


def _free(free: Sequence[FreeRange]) -> Table:
    columns = [Column("start/end range"), *numbers("instances", "host wall", "kernels launched meanwhile", "kernel time")]
    table = Table("free-ranges", "", columns, foot="These ranges may overlap and are not in any total.")
    for entry in free:
        counts = (count_cell(entry.instances), cell(entry.wall_ns, duration), count_cell(entry.kernels))
        table.add(name_cell(entry.label), *counts, cell(entry.kernel_ns, duration))
    return table


def _path(path: Sequence[str]) -> str:
    return "/".join(label.removeprefix(f"{DOMAIN}@") for label in path)


def _share(part: int, whole: int) -> Maybe[float]:
    return part / whole if whole else Missing("no kernels")
