"""Find the collectives of one rank in its trace: kernels on the device or, without any, labels on the host."""

import re
from dataclasses import dataclass

import msgspec
import numpy as np

from llm_perf_opt.analysis.kernels.classes import CLASSES, KernelClass, class_of_work
from llm_perf_opt.analysis.ranks.kinds import OTHER, kind_of, moved_bytes
from llm_perf_opt.analysis.ranks.rank_trace import RankGroup
from llm_perf_opt.traces.events import NO_NAME, Bool, Columns, Int64, Trace, WorkKind
from llm_perf_opt.traces.nesting import NONE, lanes_of, nest
from llm_perf_opt.traces.projection import through

_ON_HOST = re.compile(r"(gloo|mpi|ucc):\w+")
"""Labels that enclose the whole collective, not only its launch."""
_LABEL = re.compile(r"\w+:\w+")
_LEVELS = 3
"""Rows that state something about one launch: a label inside an operator, or inside another label."""
_LONGEST_LIST = 100_000


@dataclass(frozen=True)
class FoundCollectives:
    """The collectives of a trace, sorted by start."""

    start_ns: Int64
    end_ns: Int64
    kinds: list[str]
    groups: list[RankGroup]
    size_bytes: Int64
    sequence: Int64
    work: Int64
    """Row of the kernel in the device work; empty for labels on the host."""
    call: Int64
    """Row of the call that launched each kernel, or -1; empty for labels on the host."""


def communication(trace: Trace) -> Bool:
    """Return which rows of device work are kernels of collectives."""
    found: Bool = (class_of_work(trace) == CLASSES.index(KernelClass.COLLECTIVE)) & (trace.work.kind == WorkKind.KERNEL)
    return found


def find_collectives(trace: Trace, on_device: Bool, call_of_work: Int64) -> FoundCollectives:
    """Return the collectives of a trace; `on_device` marks its kernels of collectives."""
    known = _Groups(trace)
    work = np.flatnonzero(on_device)
    if len(work):
        return _kernels(trace, work, call_of_work[work], known)
    stated = trace.collectives
    rows = np.flatnonzero(stated.on_device == 0)
    labels = {index: _ON_HOST.fullmatch(trace.name_of(index)) for index in set(stated.name[rows].tolist())}
    rows = rows[np.array([labels[index] is not None for index in stated.name[rows].tolist()], np.bool_)]
    return _found(trace, known, stated.start_ns[rows], stated.end_ns[rows], _Stated(trace, rows[:, None]), None)


def _kernels(trace: Trace, work: Int64, calls: Int64, known: "_Groups") -> FoundCollectives:
    """Return kernels with what they state themselves or, if nothing, what the host states around their launch."""
    table, stated = trace.work, trace.collectives
    rows = np.full((len(work), 1 + _LEVELS), NONE, np.int64)
    own = np.flatnonzero(stated.on_device == 1)
    places = {key: row for row, key in zip(own.tolist(), _keys(stated, own, "thread"), strict=True)}
    rows[:, 0] = [places.get(key, NONE) for key in _keys(table, work, "stream")]
    host = np.flatnonzero(stated.on_device == 0)
    launched = np.flatnonzero(calls != NONE)
    if len(host) and len(launched):
        call = calls[launched]
        lane, call_lane = lanes_of(
            (stated.process[host], stated.thread[host]), (trace.calls.process[call], trace.calls.thread[call])
        )
        nesting = nest(stated.start_ns[host], stated.end_ns[host], lane)
        inner = nesting.innermost(trace.calls.start_ns[call], call_lane)
        for level in range(_LEVELS):
            rows[launched, 1 + level] = through(inner, host)
            inner = through(inner, nesting.parent)
    return _found(trace, known, table.start_ns[work], table.end_ns[work], _Stated(trace, rows), (work, calls))


def _keys(table: Columns, rows: Int64, where: str) -> list[tuple[int, int, int]]:
    columns = table.columns()
    return list(zip(*(columns[name][rows].tolist() for name in ("start_ns", "end_ns", where)), strict=True))


class _Stated:
    """What up to four rows of the trace state about each collective; the first that knows a value decides."""

    def __init__(self, trace: Trace, rows: Int64) -> None:
        self._rows = rows
        self._table = trace.collectives

    def __len__(self) -> int:
        return len(self._rows)

    def first_label(self, trace: Trace) -> Int64:
        """Return the name of the first row that is a label of a collective, or NO_NAME."""
        names = self._table.name.astype(np.int64)
        labels = {index for index in set(names.tolist()) if _LABEL.fullmatch(trace.name_of(index))}
        return self._first(np.where(np.isin(names, sorted(labels)), names, NO_NAME), NO_NAME)

    def first(self, column: str, unknown: int) -> Int64:
        """Return the first known value of a column."""
        return self._first(self._table.columns()[column].astype(np.int64), unknown)

    def _first(self, values: Int64, unknown: int) -> Int64:
        found = np.full(len(self._rows), unknown, np.int64)
        for level in reversed(range(self._rows.shape[1])):
            at = self._rows[:, level]
            value = values[at] if len(values) else found
            found = np.where((at != NONE) & (value != unknown), value, found)
        return found


def _found(
    trace: Trace, known: "_Groups", start_ns: Int64, end_ns: Int64, stated: _Stated, launched: tuple[Int64, Int64] | None
) -> FoundCollectives:
    names = [stated.first(column, NO_NAME).tolist() for column in ("collective", "process_group", "group_ranks")]
    labels = stated.first_label(trace).tolist()
    kernels = [NO_NAME] * len(stated) if launched is None else trace.work.name[launched[0]].tolist()
    groups = [known.group(*row) for row in zip(names[1], names[2], stated.first("group_size", 0).tolist(), strict=True)]
    named = list(zip(names[0], labels, kernels, strict=True))
    kind_by_names = {row: _kind(trace, *row) for row in set(named)}
    kinds = [kind_by_names[row] for row in named]
    sizes = zip(kinds, stated.first("in_bytes", -1).tolist(), stated.first("out_bytes", -1).tolist(), groups, strict=True)
    empty = np.empty(0, np.int64)
    return FoundCollectives(
        start_ns=start_ns,
        end_ns=end_ns,
        kinds=kinds,
        groups=groups,
        size_bytes=np.array([moved_bytes(kind, given, out, group.size) for kind, given, out, group in sizes], np.int64),
        sequence=stated.first("sequence", -1),
        work=empty if launched is None else launched[0],
        call=empty if launched is None else launched[1],
    )


def _kind(trace: Trace, collective: int, label: int, kernel: int) -> str:
    """Return the kind by the first name that tells it: the stated one, that of a label around the launch, that of the kernel."""
    names = (trace.name_of(collective), trace.name_of(label).partition(":")[2], trace.name_of(kernel))
    return next((kind for kind in map(kind_of, names) if kind != OTHER), OTHER)


class _Groups:
    """The process groups of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._listed = _listed_groups(trace.facts.get("distributed_groups", ""))
        members = set(self._listed.values())
        several = len(members) > 1
        only = () if several or not members else members.pop()
        self._unnamed = RankGroup("", only, len(only), several)
        self._known: dict[tuple[int, int, int], RankGroup] = {}

    def group(self, name: int, ranks: int, size: int) -> RankGroup:
        """Return a group by what an event states about it."""
        if name == NO_NAME and not size:
            return self._unnamed
        key = (name, ranks, size)
        if key not in self._known:
            text = self._trace.name_of(name)
            members = self._listed.get(text) or _ranks_in(self._trace.name_of(ranks), size)
            self._known[key] = RankGroup(text, members, size or len(members))
        return self._known[key]


def _listed_groups(text: str) -> dict[str, tuple[int, ...]]:
    try:
        found = msgspec.json.decode(text.encode(), type=list[tuple[str, list[int]]]) if text else []
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return {}
    return {name: tuple(ranks) for name, ranks in found}


def _ranks_in(text: str, size: int) -> tuple[int, ...]:
    """Return the ranks that a trace spells; none if the list is shortened or damaged."""
    if len(text) > _LONGEST_LIST or not re.fullmatch(r"\[\d{1,9}(, ?\d{1,9})*\]", text):
        return ()
    ranks = tuple(int(rank) for rank in text.strip("[]").split(","))
    return ranks if not size or len(ranks) == size else ()
