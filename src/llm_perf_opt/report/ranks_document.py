"""The page of several ranks: their budgets, collectives, stragglers, steps and clocks."""

from collections.abc import Sequence

from llm_perf_opt.analysis.ranks.document import (
    CauseLine,
    CollectiveKindLine,
    CollectiveLine,
    HostLine,
    RankLine,
    RanksAnalysis,
    RankStepLine,
    listed_ranks,
)
from llm_perf_opt.analysis.ranks.problems import named_ranks
from llm_perf_opt.core.records import Maybe, Missing
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
    cell,
    count_cell,
    name_cell,
    numbers,
)
from llm_perf_opt.report.text import bytes_per_s, duration, memory_size, percent

TOP = 15
_MOST_RANKS = 64
_WORTH_NAMING = 0.01
"""The least share of its time by which a rank must fall behind to be named in the summary."""
_NO_TRACE = Missing("the trace is incomplete")
_NO_CLOCK = Missing("the collectives do not show the offset of its clock")
_UNKNOWN = Missing("the waiting is known for none of the collectives")
_TIED = Missing("the last two ranks enter it closer together than the clocks can tell")
_NO_STRAGGLER = Missing("the last rank is known for none of its collectives")
_NOT_COMPARED = Missing("no other rank does the same work in the same order")
_ABOVE_PEAK = Missing(
    "above the link's peak: data moved before the last rank entered, or the switch reduced it (NVLink SHARP), which the factor "
    "of the bus bandwidth does not know"
)
_NOT_SHOWN = "the traces do not show why, so that its delay does not include it"
_NOT_STATED = Missing("the trace does not state it")
BUDGET = (
    "Computing + waiting + transfer + unsplit + idle = span. Waiting, transfer and unsplit are exposed communication, in "
    "which a collective ran and nothing else computed: waiting until the last rank entered the collective, transfer after that, "
    "unsplit where the entry of the last rank is unknown. Overlap is communication during computing. Times last is the number "
    "of collectives that the rank was the last to enter. Delay is what the job would save if the rank took no longer than "
    "the others for the same work."
)
KINDS = (
    "Transfer is the time from the entry of the last rank until all have left. Waiting is summed over the ranks that entered "
    "earlier. Both cover only collectives where they are known; count shows how many. Bus is the bus bandwidth of the median "
    "transfer, counted as in nccl-tests."
)
LATE = (
    "Late: how long the second-to-last rank waited for this one, summed. The cause is what took longest, compared with the mean "
    "of the other ranks, since the previous collective; it explains at least half. (no operator) is Python and everything else "
    "that is not recorded. (already behind): the rank was late in the previous collective and has not caught up, or its trace "
    "began later."
)


def ranks_document(found: RanksAnalysis, top: int = TOP) -> Document:
    """Return the page, with `top` rows of each long table."""
    world = f" of {found.world_size:,}" if found.world_size and found.world_size > len(found.ranks) else ""
    hosts = f", {len(found.hosts)} hosts" if len(found.hosts) > 1 else ""
    subtitle = f"{len(found.ranks)} ranks{world}{hosts}, {len(found.collectives):,} collectives."
    notice = "" if found.complete else "Some traces are incomplete and contribute nothing."
    problems = [
        Item("fatal:" if problem.fatal else "note:", problem.what + (f" → {problem.remedy}" if problem.remedy else ""))
        for problem in found.problems
    ]
    sections = [
        Section("health", "", [Items(problems)] if problems else []),
        Section("summary", "", _summary(found)),
        Section("ranks", "Ranks", [_budgets(found.ranks)]),
        Section("collectives", "Collectives", _collectives(found, top)),
        Section("stragglers", "Who was late", _late(found, top)),
        Section("clocks", "", _clocks(found.hosts)),
    ]
    return Document(found.source, subtitle, notice, [section for section in sections if section.blocks])


def rank_blocks(found: RanksAnalysis, top: int = TOP) -> list[Block]:
    """Return the same without problems, as blocks of one section."""
    return [
        *_summary(found), _budgets(found.ranks), *_collectives(found, top), *_late(found, top), *_clocks(found.hosts)
    ]  # fmt: skip


def _summary(found: RanksAnalysis) -> list[Block]:
    """Return one paragraph: how much of the time is exposed communication, and who makes the others wait."""
    spans = [line.span_ns or 0 for line in found.ranks]
    exposed = sum(line.exposed_comm_ns or 0 for line in found.ranks)
    if not sum(spans):
        return []
    words = f"Exposed communication is {percent(exposed / sum(spans))} of the time of all ranks"
    parts = [
        f"{percent(sum(known) / sum(spans))} {what}"
        for what, times in (
            ("waiting for others", [line.wait_ns for line in found.ranks]),
            ("transfer", [line.transfer_ns for line in found.ranks]),
            ("unsplit", [line.undivided_ns or None for line in found.ranks]),
        )
        if (known := [ns for ns, line in zip(times, found.ranks, strict=True) if ns is not None and line.collectives])
    ]
    words += f": {', '.join(parts)}." if parts else "."
    worst = max(found.ranks, key=lambda line: line.newly_late_ns or 0)
    if (worst.newly_late_ns or 0) >= _WORTH_NAMING * (worst.span_ns or 0):
        count = sum(worst.rank in line.ranks and line.wait_ns is not None for line in found.collectives)
        last = f" was the last to enter {worst.last:,} of its {count:,} collectives and" if worst.last else ""
        words += f" Rank {worst.rank}{last} delays the job by {duration(worst.newly_late_ns or 0)}."
    last_to_begin = max(found.ranks, key=lambda line: line.late_start_ns)
    if last_to_begin.late_start_ns > _WORTH_NAMING * (last_to_begin.span_ns or 0):
        cost = duration(last_to_begin.late_start_ns)
        words += f" That the recorded work of rank {last_to_begin.rank} begins late costs {cost}: {_NOT_SHOWN}."
    return [Paragraph(words)]


def _time(ns: int | None, why: Missing = _NO_TRACE) -> Cell | Missing:
    return why if ns is None else cell(ns, duration)


def _budgets(ranks: Sequence[RankLine]) -> Table:
    names = ("span", "computing", "waiting", "transfer", "unsplit", "idle", "exposed", "overlap", "times last", "delay")
    caption = "Budget of each rank (under the profiler)"
    table = Table("ranks", caption, [Column("rank"), *numbers(*names)], tools=True, foot=BUDGET)
    for line in ranks[:_MOST_RANKS]:
        nothing = Missing(line.why) if line.why else _NO_TRACE
        waits = nothing if line.span_ns is None else _UNKNOWN
        table.add(
            Cell(str(line.rank), line.rank),
            _time(line.span_ns, nothing),
            _time(line.compute_ns, nothing),
            _time(line.wait_ns, waits),
            _time(line.transfer_ns, waits),
            _time(line.undivided_ns, nothing),
            _time(line.idle_ns, nothing),
            cell(line.exposed_comm_ns / line.span_ns, percent) if line.exposed_comm_ns is not None and line.span_ns else nothing,
            _time(None if line.comm_ns is None else line.comm_ns - (line.exposed_comm_ns or 0), nothing),
            waits if line.last is None else count_cell(line.last),
            _delay(line, Missing(line.delay_why) if line.delay_why else waits),
        )
    table.foot += "".join(f" ≥: {words}." for words in _not_included(ranks))
    if len(ranks) > _MOST_RANKS:
        table.foot += f" {len(ranks) - _MOST_RANKS:,} more ranks are in --json."
    return table


def _delay(line: RankLine, why: Missing) -> Cell | Missing:
    """Return the delay, marked if there may be more."""
    if line.newly_late_ns is None or not (line.delay_why or line.late_start_ns):
        return _time(line.newly_late_ns, why)
    return Cell(f"≥ {duration(line.newly_late_ns)}", line.newly_late_ns)


def _not_included(ranks: Sequence[RankLine]) -> list[str]:
    """Return what delays do not include, in words."""
    known = [line for line in ranks if line.newly_late_ns is not None]
    reasons = sorted({line.delay_why for line in known if line.delay_why})
    found = [f"{named_ranks([line.rank for line in known if line.delay_why == why])}, {why}" for why in reasons]
    started = [line for line in known if line.late_start_ns]
    costs = ", ".join(duration(line.late_start_ns) for line in started)
    who = named_ranks([line.rank for line in started])
    words = f"{who}, recorded work that begins later than that of the others costs {costs}: {_NOT_SHOWN}"
    return [*found, words] if started else found


def _collectives(found: RanksAnalysis, top: int) -> list[Block]:
    kinds, skewed = found.collective_kinds, [line for line in found.collectives if line.start_skew_ns]
    blocks: list[Block] = [_kinds(kinds[:top], len(kinds))] if kinds else []
    if skewed:
        worst = sorted(skewed, key=lambda line: (-(line.start_skew_ns or 0), line.index))[:top]
        blocks.append(_worst(worst, len(found.collectives)))
    lost = [line for line in found.collectives if line.missing or line.mismatched]
    return [*blocks, _lost(lost[:top], len(lost))] if lost else blocks


def _kinds(lines: Sequence[CollectiveKindLine], count: int) -> Table:
    names = ("size", "ranks", "count", "transfer", "median", "bus", "of peak", "waiting", "median skew")
    caption = f"By kind, size and group: {len(lines)} of {count}"
    table = Table("collective-kinds", caption, [Column("kind"), Column("group"), *numbers(*names)], tools=True, foot=KINDS)
    peaks = sorted({line.link_bytes_per_s for line in lines if line.link_bytes_per_s is not None})
    if peaks:
        table.foot += f" The link's peak is that of the datasheet in one direction: {', '.join(map(bytes_per_s, peaks))}."
    for line in lines:
        why = Missing(line.why) if line.why else _UNKNOWN
        bus = _known(line.bus_bytes_per_s, line.bus_why)
        table.add(
            line.kind,
            name_cell(line.group or "–"),
            _size(line.bytes),
            _NOT_STATED if line.group_size is None else count_cell(line.group_size),
            _count(line.count, line.transfers),
            _time(line.transfer_ns, why),
            _time(line.median_transfer_ns, why),
            cell(bus, bytes_per_s),
            cell(_of_peak(line), percent),
            _time(line.wait_ns, why),
            _time(line.median_skew_ns, why),
        )
    return table


def _count(count: int, known: int) -> Cell:
    return count_cell(count) if known == count else Cell(f"{known:,} of {count:,}", count)


def _known(value: float | None, why: str) -> Maybe[float]:
    return Missing(why) if value is None else value


def _of_peak(line: CollectiveKindLine) -> Maybe[float]:
    if line.bus_bytes_per_s is None or line.link_bytes_per_s is None:
        return Missing(line.bus_why or line.link_why)
    return line.bus_bytes_per_s / line.link_bytes_per_s if line.bus_bytes_per_s <= line.link_bytes_per_s else _ABOVE_PEAK


def _size(size: int | None) -> Cell | Missing:
    return _NOT_STATED if size is None else cell(size, memory_size)


def _worst(lines: Sequence[CollectiveLine], count: int) -> Table:
    columns = [
        Column("index", number=True), Column("kind"), Column("step"), *numbers("skew", "transfer", "last rank", "late"),
        Column("cause"), *numbers("longer by"),
    ]  # fmt: skip
    table = Table("skewed-collectives", f"Largest skew: {len(lines)} of {count:,} collectives", columns, tools=True)
    for line in lines:
        why = Missing(line.why) if line.why else _TIED
        table.add(
            count_cell(line.index),
            line.kind,
            line.step or "–",
            _time(line.start_skew_ns, why),
            _time(line.transfer_ns, why),
            why if line.last_rank is None else count_cell(line.last_rank),
            _time(line.late_ns, why),
            why if line.late_ns is None else _cause(line.cause, line.cause_on),
            _time(line.cause_ns, why if line.late_ns is None else _NO_CAUSE),
        )
    return table


_NO_CAUSE = Missing(
    "nothing that took longer than on the other ranks explains half of it, or it is unknown when each rank was ready"
)


def _cause(cause: str, where: str) -> Cell | Missing:
    return name_cell(f"{cause}, {where}" if where == "host" and not cause.startswith("(") else cause) if cause else _NO_CAUSE


def _lost(lines: Sequence[CollectiveLine], count: int) -> Table:
    columns = [Column("index", number=True), Column("kind"), *numbers("size"), Column("problem")]
    table = Table("unmatched", f"Missing or mismatched: {len(lines)} of {count:,}", columns)
    for line in lines:
        words = [f"missing on rank {listed_ranks(line.missing)}"] if line.missing else []
        words += ["ranks disagree on kind or size"] if line.mismatched else []
        table.add(count_cell(line.index), line.kind, _size(line.bytes), ", ".join(words))
    return table


def _late(found: RanksAnalysis, top: int) -> list[Block]:
    blocks: list[Block] = [_causes(found.causes[:top], len(found.causes))] if found.causes else []
    return [*blocks, _steps(found.steps, top)] if found.steps else blocks


def _causes(lines: Sequence[CauseLine], count: int) -> Table:
    columns = [Column("rank", number=True), Column("cause"), *numbers("collectives", "longer by", "late")]
    table = Table("causes", f"Causes: {len(lines)} of {count:,}", columns, tools=True, foot=LATE)
    for line in lines:
        late = (cell(line.cause_ns, duration), cell(line.late_ns, duration))
        table.add(count_cell(line.rank), _cause(line.cause, line.cause_on), count_cell(line.collectives), *late)
    return table


def _steps(lines: Sequence[RankStepLine], top: int) -> Table:
    shown = sorted(lines, key=lambda line: -(line.wait_ns or 0))[:top]
    names = ("collectives", "wall, fastest", "wall, slowest", "waiting", "straggler", "delay")
    caption = f"Steps with the most waiting: {len(shown)} of {len(lines):,}"
    table = Table("rank-steps", caption, [Column("step"), *numbers(*names), Column("cause")], tools=True)
    for line in shown:
        walls = (line.fastest_wall_ns, line.slowest_wall_ns)
        table.add(
            line.step,
            count_cell(line.collectives),
            *[cell(ns, duration) for ns in walls],
            _time(line.wait_ns, _UNKNOWN),
            _NO_STRAGGLER if line.straggler is None else count_cell(line.straggler),
            _time(line.newly_late_ns, _NO_STRAGGLER if line.straggler is None else _NOT_COMPARED),
            _NO_STRAGGLER if line.straggler is None else _cause(line.cause, ""),
        )
    return table


def _clocks(hosts: Sequence[HostLine]) -> list[Block]:
    if len(hosts) < 2:
        return []
    columns = [Column("host"), Column("ranks"), *numbers("clock ahead", "residual", "collectives")]
    foot = "Offsets are those of the ends of common collectives. Skew below the residual is n/a."
    table = Table("clocks", "Clocks", columns, foot=foot)
    for line in hosts:
        table.add(
            name_cell(line.host or "not stated"),
            listed_ranks(line.ranks),
            _time(line.offset_ns, _NO_CLOCK),
            _time(line.residual_ns, _NO_CLOCK),
            count_cell(line.pairs),
        )
    return [table]
